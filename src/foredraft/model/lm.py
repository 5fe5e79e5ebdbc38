"""Adapter around a `transformers` causal language model, used for targets and for draft models."""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal, overload

import torch
from transformers import PreTrainedModel

from foredraft.config.engine import Guarantee, guaranteed
from foredraft.errors import ShapeError
from foredraft.machine import return_free_memory
from foredraft.model import verdicts
from foredraft.model.cache.ragged import KVCache
from foredraft.model.dtypes import kv_dtype
from foredraft.model.execution.attention import NotPassedOnError
from foredraft.model.execution.compiled_layers import detach
from foredraft.model.execution.execution import Execution, apply_execution, chosen_for, compute_dtype
from foredraft.model.execution.rounding import quantize_weights, round_activations
from foredraft.model.independence import check_rows_independent, unchanged_attributes
from foredraft.model.layouts import lay_out
from foredraft.model.masks import SLIDING, Masks
from foredraft.model.nodes import NOTHING, FlatNodes, Logits, Nodes, Output, Wanted
from foredraft.model.prober import Probe, Prober
from foredraft.model.recorder import Recorder
from foredraft.model.reduced import runs_own_attention, shadow, trial
from foredraft.model.rope import fix_ropes
from foredraft.model.state import ModelState
from foredraft.model.support import (
    beyond_context,
    check_autocast,
    check_supported,
    compute_all_nodes,
    exact_context_length,
    fit_vocabulary,
    layer_types,
    longrope_border,
    model_name,
    shares_keys,
)

__all__ = ["CausalLM", "Nodes", "Output", "Wanted", "check_supported", "fit_vocabulary", "layer_types"]

logger = logging.getLogger("foredraft")

MAX_PROBES = 16
"""Number of model structures whose probe result is kept per model."""


def _nobody() -> None:
    """Stand-in for a weak reference, used where the model has no other owner."""


class CausalLM:
    """Runs nodes through an unmodified model over a `KVCache`.

    The adapter never changes the user's modules. The adapter runs a *shadow*: private modules and configs that share
    the tensors of the user's model. ``forward``, ``forward_with`` and ``chains`` run the model.

    Args:
      model: any `transformers` causal LM whose state can be rolled back.
      execution: "auto", "eager", "packed" or "compiled".
      release_originals: replace the original weights by the packed ones, to save memory. Set it only for a model that
        no other code uses.
      probe: test the model when it is constructed, by comparing a tree and ragged chains with plain forward passes.
      earlier: execution of another adapter of the same model, whose packed weights are reused; see `apply_execution`.
      quantization: "int8" or "int4": run the model with its linear layers rounded to 8 or 4 bits. None for no rounding.
      kv_cache_dtype: "auto", "bfloat16" or "int8": dtype to which keys and values are rounded when they are written.
      activations: "int8": round the inputs of integer weights to 8 bits. None: to 16 bits.
      weights: identity of the values of the weights (`foredraft.loading.identity`). The result of the test is then kept
        on disk, and the result of an earlier start replaces the test (`foredraft.model.verdicts`). None: always test.
      name: name in messages; by default the path or hub id that the model was loaded from.

    Attributes:
      vocab_size: V, the number of tokens that have a logit.
      num_embeddings: number of tokens that have an input embedding; larger than V in some models (image tokens).
      layer_types: attention type of every layer.
      window: width of the sliding windows; None without any.
      context_length: maximum number of tokens of a sequence whose positions start at 0.
      long_context: maximum number of tokens of a sequence whose prompt is longer than the longrope limit; None for
        other models.
      shares_keys: True if some layers attend to the keys and values of an earlier layer.
      quantization, kv_dtype: rounding of the linear layers, and of keys and values; None for no rounding.
      activations: "int8" if the inputs of integer weights are rounded to 8 bits, else None.

    Raises:
      UnsupportedModelError, UnsupportedStateError: the model cannot be decoded exactly; the message says why.
      ProbeError: chains through the adapter differ from the model's own logits.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        execution: str = "auto",
        release_originals: bool = False,
        probe: bool = True,
        earlier: Execution | None = None,
        quantization: str | None = None,
        kv_cache_dtype: str = "auto",
        activations: str | None = None,
        weights: str | None = None,
        name: str | None = None,
    ) -> None:
        model = check_supported(model)
        asked = {"execution": execution, "quantization": quantization, "kv_cache_dtype": kv_cache_dtype}
        self._asked: dict[str, Any] = {**asked, "activations": activations}
        self.quantization, self.activations = quantization, activations
        # released weights cannot be read again, and no other code uses the model
        self._owner = _nobody if release_originals else weakref.ref(model)
        self._state = ModelState.of(model)
        self._probes: dict[Any, Probe] = {}  # by structure of the model
        self.num_changes = 0
        self.config = model.config.get_text_config(decoder=True)
        self.name = name or model_name(model)
        self.num_layers: int = self.config.num_hidden_layers
        self.vocab_size: int = self.config.vocab_size
        self.num_embeddings: int = model.get_input_embeddings().weight.shape[0]
        self.context_length: int | None = exact_context_length(self.config)
        self.device: torch.device = model.get_input_embeddings().weight.device
        self.dtype: torch.dtype = compute_dtype(model)
        self.kv_dtype = kv_dtype(kv_cache_dtype, self.dtype)
        self.num_forwards = 0
        check_autocast(self.device)
        self.layer_types = layer_types(self.config)
        slides = SLIDING in self.layer_types
        self.window: int | None = getattr(self.config, "sliding_window", None) if slides else None
        self._of: CausalLM | None = None  # the adapter that this one is a variant of
        self._shadow = shadow(model).eval()
        compute_all_nodes(self._shadow)
        self.shares_keys = shares_keys(self.config)
        self.long_context = self._fix_ropes()
        quantize_weights(self._shadow, quantization, release_originals=release_originals, earlier=earlier)
        round_activations(self._shadow, activations)
        self._recorder = Recorder(self._shadow, self.num_layers)
        self.rounds_inputs = ""
        if probe:
            with nullcontext() if release_originals else unchanged_attributes(self._shadow, self.name):
                self.rounds_inputs = check_rows_independent(self._shadow, self.name, self.dtype, self.device)
        way: dict[str, Any] = {"release_originals": release_originals, "earlier": earlier}
        chosen = chosen_for(self._shadow, execution, **way)
        options = {**self._asked, "chosen": chosen, "release_originals": release_originals}
        key = verdicts.key_of(model, weights, options) if probe and weights is not None else None
        found, has_program = verdicts.known(key) or (None, False)
        prober = Prober(self, is_packed=chosen != "eager") if probe and found is None else None
        if prober is not None:
            prober.before()
        self.run_by(apply_execution(self._shadow, execution, chosen=chosen, **way))
        self._not_native = self.rounds_inputs or self.execution.why_not_native() or runs_own_attention(self)
        self._record(is_checked=has_program)
        self._judge(found if prober is None else prober.after())
        if self.probe is not None:
            self._probes[self._state.structure] = self.probe
            if found is None and not self.rounds_inputs:
                verdicts.keep(key, self.probe, has_program=self.execution.program is not None)
        return_free_memory()

    def run_by(self, execution: Execution) -> None:
        """Set the execution that later forward passes use."""
        self.execution = execution
        is_eager = self._shadow.config._attn_implementation == "eager"
        # grouped attention accepts both kinds of mask, and would convert a bool mask in every layer
        is_additive = is_eager or execution.uses_grouped_attention
        self._masks = Masks(self.layer_types, self.window, self.dtype, self.device, is_additive, is_eager)
        # our grouped attention can run a flat list of nodes, and its kernels and compiled layers need one;
        # on an accelerator one padded call for all rows is faster than several calls without padding
        self._takes_lists = execution.uses_grouped_attention and self.device.type == "cpu"
        self._lists_all = execution.kernels is not None or execution.num_compiled > 0

    @torch.inference_mode()
    def _record(self, *, is_checked: bool) -> None:
        """Record the program for forward passes over few nodes, and compile the layers.

        Args:
          is_checked: the same program was compared with the modules before.
        """
        run, forward = self.execution, partial(trial, self)
        self._lists_all = self._lists_all or run.compiled is not None
        if self._lists_all:
            run.record(self.layers, self._masks.windows, forward, self._num_positions, is_checked=is_checked)
        run.compile(self.name, self.layers if run.compiled is not None else (), forward)

    def _fix_ropes(self) -> int | None:
        """Fix rotary frequencies that change with length; return the context above the longrope limit, if any."""
        border, context = longrope_border(self.config), getattr(self.config, "max_position_embeddings", None)
        has_long = fix_ropes(self._shadow, border)
        return context if has_long and border is not None and border < (context or 0) else None

    @property
    def max_context(self) -> int | None:
        """Maximum number of tokens of any sequence; None without a limit."""
        return self.long_context or self.context_length

    @property
    def _num_positions(self) -> int | None:
        """Number of positions of the shadow; positions of sequences above the longrope limit follow all others."""
        return self.context_length and self.context_length + (self.long_context or 0)

    def offset_of(self, prompt_length: int) -> int:
        """Distance between the positions and the cache columns of a sequence.

        The offset is 0, except for a prompt above the longrope limit: its positions follow all others.
        """
        border = self.context_length
        return border if self.long_context is not None and border is not None and prompt_length > border else 0

    @property
    def beyond_context(self) -> str:
        """Advice for error messages about sequences longer than the context; may be empty."""
        return beyond_context(self.config, self.long_context)

    def _judge(self, probe: Probe | None) -> None:
        self.probe = probe
        self.supports_trees = probe is None or probe.supports_trees

    def refresh(self) -> bool:
        """Update the adapter after its owner has changed the model: weights, modules, hooks, configs or module
        attributes.

        Switching a LoRA adapter is an example of such a change. An update makes a new shadow and reads all weights
        once. Weights with new values are packed again, and a structure that has not been probed is probed. Without any
        change a call takes a few milliseconds. Call it once per request, between steps. Writes through ``.data`` alone
        are not detected.

        Returns: True if anything had changed; `num_changes` counts the changes. Existing keys and values, and variants
          of this adapter, then still belong to the old model.
        Raises: the constructor's errors, if the changed model cannot be decoded exactly.
        """
        model = self._owner()
        state = self._state if model is None else ModelState.of(model)
        if model is not None and state.structure != self._state.structure:
            self._follow(model, state)
            has_changed = True
        else:
            has_changed = self.execution.refresh_if_stale() or state != self._state
            self._state = state
        self.num_changes += has_changed
        return has_changed

    def _follow(self, model: PreTrainedModel, state: ModelState) -> None:
        """Turn this object into the adapter of the changed model, so that existing references stay valid."""
        known = self._probes.get(state.structure)
        probe = bool(self._probes) and known is None
        fresh = CausalLM(model, probe=probe, earlier=self.execution, name=self.name, **self._asked)
        if known is not None:
            fresh._judge(known)
        while len(self._probes) >= MAX_PROBES:
            del self._probes[next(iter(self._probes))]
        fresh._probes = {**self._probes, **fresh._probes}
        fresh.num_forwards, fresh.num_changes = self.num_forwards, self.num_changes
        vars(self).update(vars(fresh))

    def new_cache(self, num_rows: int = 0, capacity: int = 256, *, rounds: bool = True) -> KVCache:
        """Return an empty cache for this model, which rounds to `kv_dtype` if ``rounds`` is True."""
        dtype = self.kv_dtype if rounds else None
        return KVCache(self.num_layers, num_rows=num_rows, capacity=capacity, device=self.device, dtype=dtype)

    @torch.inference_mode()
    def variant(self, name: str, edit: Callable[[CausalLM, PreTrainedModel], None]) -> CausalLM:
        """Return an adapter over another shadow with the same tensors, which can use the same caches.

        Args:
          name: short description of the difference, for messages.
          edit: function that changes modules of the new shadow in place. The function may run the new adapter.

        Exactness: neither this adapter nor the user's model is changed.
        """
        copied = shadow(self._shadow)
        other = self.over(copied, self.execution.over(copied))
        other._of = self
        other.name = f"{self.name} ({name})"
        detach(other.layers)
        edit(other, copied)
        other.changed()
        other.num_forwards = 0
        return other

    @torch.inference_mode()
    def changed(self) -> None:
        """Compile and record a variant again after modules of its shadow have changed."""
        if self._of is not None:
            self.execution.compile_as(self._of.execution, self.layers)
            self.execution.record_variant(self.layers, self._of.execution.program, partial(trial, self))

    def over(
        self,
        other_shadow: PreTrainedModel,
        execution: Execution,
        *,
        dtype: torch.dtype | None = None,
        window: int | None = None,
        num_layers: int | None = None,
    ) -> CausalLM:
        """Return an adapter over another shadow of this model, which has no owner.

        Args:
          dtype, window: values for the new adapter, if different from this one's.
          num_layers: number of decoder layers to run; all by default.
        """
        other = copy.copy(self)
        other._owner, other._shadow = _nobody, other_shadow
        other._recorder = Recorder(other_shadow, self.num_layers)
        other.dtype, other.window = dtype or self.dtype, window or self.window
        if num_layers is not None:
            del other._recorder.layers[num_layers:]
            other.num_layers, other.layer_types = num_layers, self.layer_types[:num_layers]
        other.run_by(execution)
        return other

    def guarantee(self, exactness: str) -> Guarantee:
        """Return the exactness guarantee of this model's outputs relative to plain decoding, for any draft.

        Args:
          exactness: the option of that name in `EngineConfig`.
        """
        if self._not_native:
            return guaranteed("up to rounding", self._not_native)
        if exactness == "relaxed":
            return guaranteed("up to rounding", "exactness is relaxed")
        return guaranteed("bit-identical")

    def release_tables(self) -> None:
        """Free masks and position tables that long rows have enlarged, and the features of the last forward pass."""
        self._recorder.release()
        self._masks.release()
        if self.execution.program is not None:
            self.execution.program.release_tables()

    @property
    def nodes_of_last_forward(self) -> FlatNodes | None:
        """Flat node list of the last forward pass through modules; None if it ran over a padded rectangle of rows."""
        return self._recorder.flat

    @property
    def shadow(self) -> PreTrainedModel:
        """The private modules that `forward` runs, over the tensors of the user's model."""
        return self._shadow

    @property
    def layers(self) -> list[torch.nn.Module]:
        """The decoder layers of the shadow, in order."""
        return list(self._recorder.layers)

    @torch.inference_mode()
    def chains(
        self,
        chains: Sequence[Sequence[int]],
        cache: KVCache,
        depths: Sequence[int],
        num_columns: int,
        names: torch.Tensor | None,
        *,
        first_row: int = 0,
    ) -> list[list[int]] | None:
        """Extend several rows greedily in one call: run a chain of tokens per row, then each most likely next token.

        Args:
          chains: at least one token per row. These tokens, and all new ones except the last, are written after the
            committed columns.
          depths: number of new tokens per row.
          num_columns, names: number of logit columns to consider, and the int64 (V,) token id of every column. None
            means that the column numbers are the token ids.
        Returns: the new tokens of every row, fewer where logits are not finite; None if no recorded program can run
          this call.
        Raises: ShapeError for an empty chain.
        """
        if not all(chains):
            raise ShapeError(f"the chain of row {list(map(len, chains)).index(0)} is empty; it needs a token")
        check_autocast(self.device)
        program = self.execution.program
        found = None if program is None else program.chains(chains, cache, depths, num_columns, names, first_row)
        self.num_forwards += 0 if found is None else found[1]
        return None if found is None else found[0]

    @overload
    def forward(self, nodes: Nodes, cache: KVCache, *, listed: Literal[True], **options: Any) -> Logits: ...

    @overload
    def forward(self, nodes: Nodes, cache: KVCache, **options: Any) -> torch.Tensor: ...

    @torch.inference_mode()  # type: ignore[misc]  # the options are those below
    def forward(
        self,
        nodes: Nodes,
        cache: KVCache,
        *,
        first_row: int = 0,
        keep: slice | None = None,
        listed: bool = False,
    ) -> Logits:
        """Return the logits of every node, given the committed part of its row and its own ancestors.

        Nodes are written after the committed columns; call ``cache.commit`` to keep any.

        Args:
          nodes: B rows; row i is row ``first_row + i`` of the cache.
          keep: slice of the N node columns that need logits; all by default, an empty slice for none.
          listed: return the logits as `NodeLogits`, without padding, if the nodes run as a list.
        Returns: (B, kept, V) in the dtype of the model.
        Exactness: equals a fresh forward pass over each root-to-node path, within the rounding of the dtype.
        """
        if torch.is_autocast_enabled(self.device.type):
            check_autocast(self.device)
        self.num_forwards += 1
        kept, run = range(nodes.tokens.shape[1])[keep or slice(None)], self.execution
        if run.program is not None:
            logits = run.program.forward(nodes, cache, first_row, kept, self._recorder, listed)
            if logits is not None:
                return logits
        if not run.takes(nodes.counts):
            run.make_ready()
        while True:
            how = {"takes_lists": self._takes_lists, "lists_all": self._lists_all}
            layout = lay_out(nodes, cache, first_row, self._masks, run.kernels, **how)
            self._recorder.flat = layout.flat
            try:
                with self._recorder.seeing():
                    return run.logits(layout.tokens, layout.positions, layout.mask, cache, kept, layout.flat, listed)
            except NotPassedOnError:  # the model does not pass the node list on to its attention
                self._takes_lists = False

    @torch.inference_mode()
    def forward_with(
        self, wanted: Wanted, nodes: Nodes, cache: KVCache, *, keep: slice | None = None, **options: Any
    ) -> Output:
        """Run `forward` and return features together with the logits. Features cover all nodes, also those without
        logits.

        Args:
          wanted: features to return; if empty, this call equals `forward`.
          nodes, cache, keep, options: arguments of `forward`.
        Raises: UnsupportedModelError for a model whose decoder layers cannot be told apart.
        Exactness: the logits equal those of `forward`.
        """
        if not wanted.last_hidden and not wanted.layer_inputs:
            return Output(self.forward(nodes, cache, keep=keep, **options))
        if wanted.last_hidden and self._recorder.needs_logits is None and not self.execution.takes(nodes.counts):
            count, two = self.num_forwards, Nodes.from_chains([[0, 0]])
            self._recorder.settle(lambda: self.forward(two, self.new_cache(1, capacity=2)))
            self.num_forwards = count
        keeps_all = keep is None or (wanted.last_hidden and bool(self._recorder.needs_logits))
        self._recorder.wanted = wanted
        try:
            logits = self.forward(nodes, cache, keep=None if keeps_all else keep, **options)
        finally:
            self._recorder.wanted = NOTHING
        return self._recorder.output(logits[:, keep] if keep is not None and keeps_all else logits)

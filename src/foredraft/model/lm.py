"""The adapter around a `transformers` causal language model, target and drafter alike."""

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

from foredraft.config.engine import Promise, promised
from foredraft.errors import ShapeError
from foredraft.machine import return_free_memory
from foredraft.model.cache.ragged import KVCache
from foredraft.model.dtypes import kv_dtype
from foredraft.model.execution.attention import NotPassedOnError
from foredraft.model.execution.compiled_layers import detach
from foredraft.model.execution.execution import Execution, apply_execution, choose_execution, compute_dtype
from foredraft.model.execution.rounding import quantize_weights
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
    shares_keys,
)

__all__ = ["CausalLM", "Nodes", "Output", "Wanted", "check_supported", "fit_vocabulary", "layer_types"]

logger = logging.getLogger("foredraft")

MAX_PROBES = 16
"""Structures of one model, of which what the probe found is remembered."""


def _nobody() -> None:
    """Stands in for a reference to a model that has no other owner."""


class CausalLM:
    """Runs nodes through an unmodified model over a `KVCache`.

    The user's module objects are never entered for speed: a *shadow* shares their tensors and carries private
    modules and configs. ``forward`` is the only way in.

    Args:
      model: any `transformers` causal LM whose state can be rolled back.
      execution: "auto", "eager", "packed" or "compiled".
      release_originals: let packed weights replace the originals; only for models that nobody else holds.
      probe: compare a tree and ragged chains with plain forwards before anything else runs.
      earlier: of another adapter of the same model; see `apply_execution`.
      quantization: "int8" or "int4": decode the model with its linear layers rounded to so many bits.
      kv_cache_dtype: "auto", "bfloat16" or "int8": decode it with keys and values rounded when they are written.

    Attributes:
      vocab_size: V, tokens that have a logit.
      num_embeddings: tokens that can be read; some models have more of these, for images say.
      layer_types: kind of attention of every layer.
      window: width of the sliding windows, if there are any.
      context_length: most tokens of a text from position 0 on.
      long_context: most tokens of a text whose prompt is over the border of longrope; None without one.
      shares_keys: whether some layers attend to keys and values of an earlier one.
      quantization, kv_dtype: how linear layers, and keys and values, are rounded, if they are.

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
    ) -> None:
        model = check_supported(model)
        asked = {"execution": execution, "quantization": quantization, "kv_cache_dtype": kv_cache_dtype}
        self._asked: dict[str, Any] = asked
        self.quantization = quantization
        # weights that are released cannot be read again, and nobody else holds the model
        self._owner = _nobody if release_originals else weakref.ref(model)
        self._state = ModelState.of(model)
        self._probes: dict[Any, Probe] = {}  # by the structures that the model had
        self.num_changes = 0
        self.config = model.config.get_text_config(decoder=True)
        self.name = type(model).__name__
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
        self._of: CausalLM | None = None  # whose variant this is
        self._shadow = shadow(model).eval()
        compute_all_nodes(self._shadow)
        self.shares_keys = shares_keys(self.config)
        self.long_context = self._fix_ropes()
        quantize_weights(self._shadow, quantization, release_originals=release_originals, earlier=earlier)
        self._recorder = Recorder(self._shadow, self.num_layers)
        self.rounds_inputs = ""
        if probe:
            with nullcontext() if release_originals else unchanged_attributes(self._shadow, self.name):
                self.rounds_inputs = check_rows_independent(self._shadow, self.name, self.dtype, self.device)
        is_packed = choose_execution(execution, self.device, self.dtype) != "eager"
        prober = Prober(self, is_packed=is_packed) if probe else None
        if prober is not None:
            prober.before()
        self.run_by(apply_execution(self._shadow, execution, release_originals=release_originals, earlier=earlier))
        self._not_native = self.rounds_inputs or self.execution.why_not_native() or runs_own_attention(self)
        self._record()
        self._judge(None if prober is None else prober.after())
        if self.probe is not None:
            self._probes[self._state.structure] = self.probe
        return_free_memory()

    def run_by(self, execution: Execution) -> None:
        """Run forwards this way from now on."""
        self.execution = execution
        is_eager = self._shadow.config._attn_implementation == "eager"
        # grouped attention takes either, and would turn a bool mask into this form in every layer
        is_additive = is_eager or execution.uses_grouped_attention
        self._masks = Masks(self.layer_types, self.window, self.dtype, self.device, is_additive, is_eager)
        # the attention that is ours knows what to do with a list of nodes, if the model lets it; its kernels and
        # compiled layers take nothing else; on an accelerator one call for all rows beats calls without padding
        self._takes_lists = execution.uses_grouped_attention and self.device.type == "cpu"
        self._lists_all = execution.kernels is not None or execution.num_compiled > 0

    @torch.inference_mode()
    def _record(self) -> None:
        """Learn how forwards over few nodes run without modules, and how modules run compiled."""
        run, forward = self.execution, partial(trial, self)
        self._lists_all = self._lists_all or run.compiled is not None
        if self._lists_all:
            run.record(self.layers, self._masks.windows, forward, self._num_positions)
        run.compile(self.name, self.layers if run.compiled is not None else (), forward)

    def _fix_ropes(self) -> int | None:
        """Fix frequencies that would change with the length of what runs; the context of prompts over their border."""
        border, context = longrope_border(self.config), getattr(self.config, "max_position_embeddings", None)
        has_long = fix_ropes(self._shadow, border)
        return context if has_long and border is not None and border < (context or 0) else None

    @property
    def max_context(self) -> int | None:
        """Context of any text; None without a limit."""
        return self.long_context or self.context_length

    @property
    def _num_positions(self) -> int | None:
        """Positions that the shadow knows: those of texts over the border of longrope come behind the others."""
        return self.context_length and self.context_length + (self.long_context or 0)

    def offset_of(self, prompt_length: int) -> int:
        """Distance of the positions of a text from its columns; a prompt over the border counts behind all others."""
        border = self.context_length
        return border if self.long_context is not None and border is not None and prompt_length > border else 0

    @property
    def beyond_context(self) -> str:
        """Advice for texts beyond the context, for messages; may be empty."""
        return beyond_context(self.config, self.long_context)

    def _judge(self, probe: Probe | None) -> None:
        self.probe = probe
        self.supports_trees = probe is None or probe.supports_trees

    def refresh(self) -> bool:
        """Follow the model as its owner has changed it: weights, modules, hooks, configs, attributes of modules.

        A switched adapter is such a change. It costs a new shadow and one reading of the weights; weights with other
        values are packed again, and a structure that the probe has not seen is probed. Without any change a call takes
        a few milliseconds: make it once per request, between steps. Writes through ``.data`` alone stay unseen.

        Returns: whether anything had changed; `num_changes` counts. Keys and values, and variants of this adapter,
          are then those of the model as it was.
        Raises: as the constructor, while the model is one that cannot be decoded exactly.
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
        """Become the adapter of the model as it is now, for all who hold this one."""
        known = self._probes.get(state.structure)
        probe = bool(self._probes) and known is None
        fresh = CausalLM(model, probe=probe, earlier=self.execution, **self._asked)
        if known is not None:
            fresh._judge(known)
        while len(self._probes) >= MAX_PROBES:
            del self._probes[next(iter(self._probes))]
        fresh._probes = {**self._probes, **fresh._probes}
        fresh.num_forwards, fresh.num_changes = self.num_forwards, self.num_changes
        vars(self).update(vars(fresh))

    def new_cache(self, num_rows: int = 0, capacity: int = 256, *, rounds: bool = True) -> KVCache:
        """An empty cache that this model can write into; it rounds to `kv_dtype`, or, where told so, not at all."""
        dtype = self.kv_dtype if rounds else None
        return KVCache(self.num_layers, num_rows=num_rows, capacity=capacity, device=self.device, dtype=dtype)

    @torch.inference_mode()
    def variant(self, name: str, edit: Callable[[CausalLM, PreTrainedModel], None]) -> CausalLM:
        """An adapter over another shadow with the same tensors, which reads and writes the same caches.

        Args:
          name: what is different about it, for messages.
          edit: changes modules of the new shadow in place. It may run the adapter to learn about them.

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
        """Follow changes that were made to modules of the shadow of a variant."""
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
        """An adapter over another shadow of this model, which nobody owns.

        Args:
          dtype, window: where they differ.
          num_layers: of the decoder layers, how many there are to be run; all by default.
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

    def promise(self, exactness: str) -> Promise:
        """What texts of this model keep of plain decoding, whatever is drafted.

        Args:
          exactness: of `EngineConfig`.
        """
        if self._not_native:
            return promised("near-ties", self._not_native)
        return promised("near-ties", "exactness is relaxed") if exactness == "relaxed" else promised("native")

    def release_tables(self) -> None:
        """Give back masks and tables of positions that have grown with long rows, and features of the last forward."""
        self._recorder.release()
        self._masks.release()
        if self.execution.program is not None:
            self.execution.program.release_tables()

    @property
    def nodes_of_last_forward(self) -> FlatNodes | None:
        """The list of nodes that the modules ran over last; None where they ran over a rectangle of rows."""
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
        """Run the next tokens of neighbouring rows of a cache, and behind each its likeliest token, again and again.

        Args:
          chains: one token at least of each row. They, and what is found but the last, lie behind what is committed.
          depths: how many tokens are wanted of every row.
          num_columns, names: columns of logits that count, and their tokens int64 (V,); None for their numbers.
        Returns: the tokens of every row, fewer where logits are no numbers; None where this takes modules.
        Raises: ShapeError for a chain without a token.
        """
        if not all(chains):
            raise ShapeError(f"row {list(map(len, chains)).index(0)} has no token behind which its chain could go on")
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
        """Logits of every node, given the committed part of its row and its own ancestors.

        Nodes are written after the committed columns; call ``cache.commit`` to keep any.

        Args:
          nodes: B rows; row i is row ``first_row + i`` of the cache.
          keep: which of the N node columns need logits; all by default, an empty slice for none.
          listed: where nodes run as a list, return their logits as one, too: `NodeLogits`.
        Returns: (B, kept, V) in the dtype of the model.
        Exactness: equals a fresh forward over each root-to-node path, within the rounding of the dtype.
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
            except NotPassedOnError:  # the model keeps from its attention which node is whose
                self._takes_lists = False

    @torch.inference_mode()
    def forward_with(
        self, wanted: Wanted, nodes: Nodes, cache: KVCache, *, keep: slice | None = None, **options: Any
    ) -> Output:
        """`forward`, with features beside the logits: of all nodes, whether their logits are kept or not.

        Args:
          wanted: which features; without any, this is `forward`.
          nodes, cache, keep, options: as for `forward`.
        Raises: UnsupportedModelError for a model whose decoder layers cannot be told apart.
        Exactness: the logits are those of `forward`.
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

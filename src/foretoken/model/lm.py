"""The adapter around a `transformers` causal language model, target and drafter alike."""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from foretoken.errors import ConfigError
from foretoken.model.cache.ragged import KVCache
from foretoken.model.capture import Output, Recorder, Wanted
from foretoken.model.execution.attention import NotPassedOnError, use_grouped_sdpa
from foretoken.model.execution.execution import Execution, apply_execution, choose_execution, compute_dtype, shadow
from foretoken.model.execution.kernels import Bucket, KernelFacts, measure
from foretoken.model.execution.packing import MIN_ELEMENTS
from foretoken.model.independence import check_rows_independent, unchanged_attributes
from foretoken.model.masks import SLIDING, Masks
from foretoken.model.nodes import FlatNodes, Nodes
from foretoken.model.probe import Probe
from foretoken.model.prober import Prober
from foretoken.model.reduced import reduced
from foretoken.model.state import ModelState
from foretoken.model.support import check_supported, exact_context_length, fit_vocabulary, layer_types
from foretoken.model.wrappers import check_unwrapped

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["CausalLM", "Nodes", "Output", "Wanted", "check_supported", "fit_vocabulary", "layer_types"]

logger = logging.getLogger("foretoken")

MAX_LEARNT = 16
"""Structures of one model, of which what was measured is remembered."""


@dataclass(frozen=True)
class _Learnt:
    """Measurements of one structure of a model."""

    probe: Probe
    facts: dict[tuple[int, int], KernelFacts]


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
      packs_all: pack small layers too. They run slower then, and a row keeps its bits among more numbers of rows.
      earlier: of another adapter of the same model; see `apply_execution`.

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
        packs_all: bool = False,
        earlier: Execution | None = None,
    ) -> None:
        model = check_unwrapped(model)
        check_supported(model)
        self._wanted_execution = execution
        self._packs_all = packs_all
        # weights that are released cannot be read again, and nobody else holds the model
        self._owner = _nobody if release_originals else weakref.ref(model)
        self._state = ModelState.of(model)
        self._learnt: dict[Any, _Learnt] = {}  # by the structures that the model had
        self.num_changes = 0
        self.config = model.config.get_text_config(decoder=True)
        self.name = type(model).__name__
        self.num_layers: int = self.config.num_hidden_layers
        self.vocab_size: int = self.config.vocab_size
        self.context_length: int | None = exact_context_length(self.config)
        self.device: torch.device = model.get_input_embeddings().weight.device
        self.dtype: torch.dtype = compute_dtype(model)
        self.num_forwards = 0
        self._check_autocast()
        self._layer_types = layer_types(self.config)
        self._window: int | None = getattr(self.config, "sliding_window", None)
        self._shadow = shadow(model).eval()
        self._recorder = Recorder(self._shadow, self.num_layers)
        self._facts: dict[tuple[int, int], KernelFacts] = {}  # by nodes and threads
        if probe:
            with nullcontext() if release_originals else unchanged_attributes(self._shadow, self.name):
                check_rows_independent(self._shadow, self.name, self.dtype, self.device)
        is_packed = choose_execution(execution, self.device, self.dtype) != "eager"
        prober = Prober(self, is_packed=is_packed) if probe else None
        if prober is not None:
            prober.before()
        self._run_by(
            apply_execution(
                self._shadow,
                execution,
                release_originals=release_originals,
                min_packed_elements=0 if packs_all else MIN_ELEMENTS,
                earlier=earlier,
            )
        )
        self._judge(None if prober is None else prober.after())
        if self.probe is not None:
            self._learnt[self._state.structure] = _Learnt(self.probe, self._facts)

    def _run_by(self, execution: Execution) -> None:
        self.execution = execution
        is_eager = self._shadow.config._attn_implementation == "eager"
        # grouped attention takes either, and would turn a bool mask into this form in every layer
        is_additive = is_eager or execution.uses_grouped_attention
        self._masks = Masks(self._layer_types, self._window, self.dtype, self.device, is_additive, is_eager)
        # the attention that is ours knows what to do with a list of nodes, if the model lets it
        self._takes_lists = execution.uses_grouped_attention and execution.compiled is None

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
        known = self._learnt.get(state.structure)
        fresh = CausalLM(
            model,
            execution=self._wanted_execution,
            probe=bool(self._learnt) and known is None,
            packs_all=self._packs_all,
            earlier=self.execution,
        )
        if known is not None:
            fresh._facts = known.facts
            fresh._judge(known.probe)
        while len(self._learnt) >= MAX_LEARNT:
            del self._learnt[next(iter(self._learnt))]
        fresh._learnt = {**self._learnt, **fresh._learnt}
        fresh.num_forwards, fresh.num_changes = self.num_forwards, self.num_changes
        vars(self).update(vars(fresh))

    def new_cache(self, num_rows: int = 0, capacity: int = 256) -> KVCache:
        """An empty cache that this model can write into."""
        return KVCache(self.num_layers, num_rows=num_rows, capacity=capacity, device=self.device)

    @torch.inference_mode()
    def variant(self, name: str, edit: Callable[[CausalLM, PreTrainedModel], None]) -> CausalLM:
        """An adapter over another shadow with the same tensors, which reads and writes the same caches.

        Args:
          name: what is different about it, for messages.
          edit: changes modules of the new shadow in place. It may run the adapter to learn about them.

        Exactness: neither this adapter nor the user's model is changed.
        """
        other = copy.copy(self)
        other._owner = _nobody
        other.name = f"{self.name} ({name})"
        other._shadow = shadow(self._shadow)
        other._recorder = Recorder(other._shadow, self.num_layers)
        other.execution = self.execution.over(other._shadow)
        edit(other, other._shadow)
        other.num_forwards = 0
        other._facts = {}
        return other

    def kernel_facts(self, max_nodes: int) -> KernelFacts:
        """At which shapes this model keeps the bits of a row here; measured when first asked, then remembered."""
        key = max_nodes, torch.get_num_threads()  # kernels share their work out by threads
        if key not in self._facts:
            count = self.num_forwards
            self._facts[key] = measure(self, max_nodes)
            self.num_forwards = count
        return self._facts[key]

    @torch.inference_mode()
    def first_layers(self, num_layers: int) -> CausalLM:
        """An adapter over the first layers only, more where a kind of attention comes later. Its text means nothing."""
        kinds = [self._layer_types.index(kind) for kind in set(self._layer_types)]
        count = max(num_layers, *(index + 1 for index in kinds))

        def cut(other: CausalLM, _: PreTrainedModel) -> None:
            del other._recorder.layers[count:]
            other.num_layers, other._layer_types = count, self._layer_types[:count]
            other._masks = replace(self._masks, layer_types=other._layer_types)

        return self if count >= self.num_layers else self.variant("first layers", cut)

    @property
    def shadow(self) -> PreTrainedModel:
        """The private modules that `forward` runs, over the tensors of the user's model."""
        return self._shadow

    @property
    def layers(self) -> list[torch.nn.Module]:
        """The decoder layers of the shadow, in order."""
        return list(self._recorder.layers)

    @torch.inference_mode()
    def forward(
        self,
        nodes: Nodes,
        cache: KVCache,
        *,
        first_row: int = 0,
        keep: slice | None = None,
        view_length: int | None = None,
        bucket: Bucket | None = None,
        rows_per_call: tuple[int, int] | None = None,
    ) -> torch.Tensor:
        """Logits of every node, given the committed part of its row and its own ancestors.

        Nodes are written after the committed columns; call ``cache.commit`` to keep any.

        Args:
          nodes: B rows; row i is row ``first_row + i`` of the cache.
          keep: which of the N node columns need logits; all by default, an empty slice for none.
          view_length: fix the number of cache columns that attention runs over.
          bucket: run at shapes that keep the bits of a row, as measured; the nodes are padded already.
          rows_per_call: how many nodes linear layers are given in one call at least and at most, over all rows.
        Returns: (B, kept, V) in the dtype of the model.
        Exactness: equals a fresh forward over each root-to-node path, within the rounding of the dtype.
        """
        self._check_autocast()
        self.num_forwards += 1
        num_rows, width = nodes.tokens.shape
        trunks = [length - nodes.num_fed for length in cache.row_lengths(first_row, num_rows)]
        has_one_shape = bucket is None and view_length is not None
        if bucket is not None and view_length is None:
            view_length = bucket.view_length(max(trunks) + nodes.num_fed + width)
        flat = self._recorder.flat = None if has_one_shape else self._flat(nodes)
        columns = cache.open(first_row, num_rows, width, view_length, flat)
        starts = torch.tensor(trunks, device=self.device)[:, None]
        positions = starts + nodes.depths.to(self.device)  # (B, S + N)
        kept = range(width)[keep] if keep is not None else range(width)
        num_nodes = num_rows * width if flat is None else len(flat)
        limit = rows_per_call
        if bucket is not None and not bucket.min_rows <= num_nodes <= bucket.max_rows:
            limit = bucket.min_rows, bucket.max_rows
        arguments = {
            "input_ids": nodes.tokens.to(self.device),
            "position_ids": positions[:, nodes.num_fed :],
            "attention_mask": self._masks.of(nodes, starts, positions, columns, view_length is not None),
            "past_key_values": cache,
            "use_cache": True,
        }
        with self.execution.calls_of(limit):
            if flat is None:
                output = self.execution.run(**arguments, logits_to_keep=_logits_to_keep(kept, width, self.device))
                return output.logits[:, : len(kept)]  # type: ignore[no-any-return]
            try:
                return self._run_flat(flat, kept, arguments)
            except NotPassedOnError:  # the model keeps from its attention which node is whose
                self._takes_lists = False
        self.num_forwards -= 1
        return self.forward(
            nodes,
            cache,
            first_row=first_row,
            keep=keep,
            view_length=view_length,
            bucket=bucket,
            rows_per_call=rows_per_call,
        )

    def _flat(self, nodes: Nodes) -> FlatNodes | None:
        """The nodes as a list, where they would be padded otherwise and the model takes one."""
        num_rows, width = nodes.tokens.shape
        is_padded = num_rows > 1 and nodes.num_real < num_rows * width
        return FlatNodes(nodes.counts, width, self.device) if is_padded and self._takes_lists else None

    def _run_flat(self, flat: FlatNodes, kept: range, arguments: dict[str, Any]) -> torch.Tensor:
        """Run the model over a list of nodes; logits (B, kept, V)."""
        for name in ("input_ids", "position_ids"):
            arguments[name] = flat.listed(arguments[name])[None]
        if not len(kept):
            logits: torch.Tensor = self.execution.run(**arguments, flat_nodes=flat, logits_to_keep=1).logits
            return logits.new_empty(flat.shape[0], 0, logits.shape[2])
        numbers, of_kept = flat.kept(kept)
        keep = 0 if len(of_kept) == len(flat) else numbers
        logits = self.execution.run(**arguments, flat_nodes=flat, logits_to_keep=keep).logits
        return of_kept.spread(logits[0])

    @torch.inference_mode()
    def forward_with(
        self, wanted: Wanted, nodes: Nodes, cache: KVCache, *, keep: slice | None = None, **options: Any
    ) -> Output:
        """`forward`, with features beside the logits: of all nodes, whether their logits are kept or not.

        Args:
          wanted: which features; without any, this is `forward`.
          nodes, cache, keep, options: as for `forward`.
        Raises: UnsupportedModelError for a model whose decoder layers cannot be told apart.
        Exactness: the logits are those of `forward`. Compiled execution runs this forward eagerly.
        """
        if not wanted:
            return Output(self.forward(nodes, cache, keep=keep, **options))
        if wanted.last_hidden and self._recorder.needs_logits is None:
            count, one = self.num_forwards, Nodes.from_chains([[0, 0]])
            self._recorder.settle(lambda: self.forward(one, self.new_cache(1, capacity=2)))
            self.num_forwards = count
        if wanted.last_hidden and self._recorder.needs_logits:
            with self._recorder.recording(wanted):
                logits = self.forward(nodes, cache, **options)
            return self._recorder.output(logits if keep is None else logits[:, keep])
        with self._recorder.recording(wanted):
            logits = self.forward(nodes, cache, keep=keep, **options)
        return self._recorder.output(logits)

    def _check_autocast(self) -> None:
        """Raises: ConfigError under autocast, which would round packed and other layers each in its own way."""
        if torch.is_autocast_enabled(self.device.type):
            raise ConfigError(
                "torch.autocast is on, and foretoken computes in the dtype of the model; leave the context, or load "
                "the model in that dtype"
            )

    # -- probe -------------------------------------------------------------------------------------------------

    @property
    def layer_types(self) -> tuple[str, ...]:
        """Attention type of every layer."""
        return self._layer_types

    @property
    def window(self) -> int | None:
        """Width of the sliding windows, if there are any."""
        return self._window if SLIDING in self._layer_types else None

    def reduced(self, layers: Sequence[int], dtype: torch.dtype | None, window: int) -> CausalLM:
        """An adapter over a few of the layers, for the probe; see `foretoken.model.reduced`.

        Args:
          dtype: None for the whole model as it is.
          window: of every sliding layer, if the model has any and theirs is wider.
        """
        other = copy.copy(self)
        other._owner, other._facts = _nobody, {}
        if self.window is not None:
            other._window = min(self.window, window)
        other._shadow = reduced(self._shadow, self.layers, layers, dtype, other.window)
        other._recorder = Recorder(other._shadow, self.num_layers)
        other.dtype = dtype or self.dtype
        other._run_by(Execution(other._shadow, "eager"))
        return other

    def group_attention(self) -> None:
        """Run attention as packed execution does."""
        self.execution.uses_grouped_attention = use_grouped_sdpa(self._shadow)
        self._run_by(self.execution)


def _logits_to_keep(kept: range, width: int, device: torch.device) -> int | torch.Tensor:
    """`transformers`' argument: 0 for all, k for the last k, else column indices; never nothing at all."""
    if len(kept) == width:
        return 0
    if len(kept) == 0:
        return 1
    if kept.stop == width and kept.step == 1:
        return len(kept)
    return torch.tensor(list(kept), device=device)

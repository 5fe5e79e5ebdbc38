"""Drafting with EAGLE, EAGLE-2 and EAGLE-3: a head that is fed its own predictions of the target's features.

A head of generation 1 extrapolates the last hidden state, and a head of generation 3 fuses three layers. The checkpoint
determines the generation. The methods ``eagle`` and ``eagle2`` use a head of generation 1. ``eagle`` drafts a static
tree, and ``eagle2`` a tree that grows where the head is confident. ``eagle3`` grows trees with a head of generation
3."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch

from foredraft.drafters.context import DrafterContext
from foredraft.drafters.heads.loading import load_head, static_tree
from foredraft.drafters.parts.growth import GrowingDraft, Growth
from foredraft.drafters.parts.head_drafter import HeadDrafter
from foredraft.drafters.parts.reduced_output import chosen_vocabulary, output_of
from foredraft.drafters.parts.rows import FedNodes, spans
from foredraft.engine.drafter import DraftCache, DrafterFacts, Features, Needs, StepResult
from foredraft.engine.row import Row
from foredraft.heads.checkpoint import Checkpoint
from foredraft.heads.eagle import EagleHead
from foredraft.heads.eagle_layouts import TargetFacts, check_fits, read_eagle
from foredraft.heads.int8 import MOST_NODES, Int8Head, is_frozen, is_plain, why_not
from foredraft.heads.layers import AttentionContext
from foredraft.heads.vocabulary import DraftVocabulary
from foredraft.methods.heads import Eagle2Options, EagleOptions
from foredraft.model import layouts, masks
from foredraft.model.cache import ragged
from foredraft.model.execution import packing
from foredraft.model.lm import CausalLM
from foredraft.model.nodes import FlatNodes, Nodes
from foredraft.native import library as kernels_of

USUAL_ACCURACIES = [[0.75, 0.11, 0.04, 0.025, 0.015, 0.01]] * 5
"""Probability that the candidate of each rank is right at each depth, for the default tree.

The accuracies of the first ranks are about those of the published heads, which fall little from depth to depth. The
other ranks are assumed.
"""

MAX_DEPTH = 64
"""Largest depth of a static tree. One head can draft to any depth, so this is only a sanity limit."""

MOST_CAP = 60
"""Largest number of levels of a draft that is grown in one call."""

MOST_GROWN = 16
"""Largest number of rows that are grown one by one, each in one call; more are fed together, level by level."""

SMALL_BYTES = 20e6
"""Largest size of a head that stays in the CPU's caches. Larger heads run for all rows together, level by level. With a
head of 10 MB, 8 rows took half as long one after the other as together. With a head of 40 MB, 2 rows took a fifth
longer."""

PUBLISHED: dict[tuple[int, int, int], dict[int, tuple[str, ...]]] = {
    (4096, 32, 32000): {1: ("yuhuili/EAGLE-Vicuna-7B-v1.3", "yuhuili/EAGLE-llama2-chat-7B")},
    (5120, 40, 32000): {
        1: ("yuhuili/EAGLE-Vicuna-13B-v1.3", "yuhuili/EAGLE-llama2-chat-13B"),
        3: ("yuhuili/EAGLE3-Vicuna1.3-13B",),
    },
    (8192, 80, 32000): {1: ("yuhuili/EAGLE-llama2-chat-70B",)},
    (4096, 32, 128256): {
        1: ("yuhuili/EAGLE-LLaMA3-Instruct-8B",),
        3: ("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B"),
    },
    (8192, 80, 128256): {
        1: ("yuhuili/EAGLE-LLaMA3-Instruct-70B",),
        3: ("yuhuili/EAGLE3-LLaMA3.3-Instruct-70B",),
    },
}
"""Hub ids of heads by (hidden size, layers, vocabulary) of the target, then by generation.

Heads for other sizes do not fit. Provenance: the README of SafeAILab/EAGLE (2026-02-19).
"""

MOST_OWED = 32
"""Largest number of committed tokens of a row whose cache entries are deferred to the next draft."""

LEAST_MASS = 0.05
"""Total probability of the nodes of a level below which the level is not expanded. On a CPU a further level takes about
a fiftieth of a step, so it would gain fewer tokens than that time is worth."""


class EagleDrafter(HeadDrafter):
    """Drafter with an EAGLE head, in a static tree or in one whose shape follows the head's confidence.

    Source: EAGLE (Li et al. 2024, arXiv:2401.15077), whose tree is ``speculative_token_tree="eagle"``; EAGLE-2 (Li et
    al. 2024, arXiv:2406.16858) for dynamic trees; EAGLE-3 (Li et al. 2025, arXiv:2503.01840). Deviations: if the
    target samples, siblings share its noise under "match" (see `Growth`), and "standard" draws as published; children,
    frontier and final nodes have separate limits.

    The head has its own cache, which between steps has one entry per committed token of a row. Entry t is computed
    from the target's feature after token t and from token t + 1. Entries from the head's own predictions are never
    kept: drafted nodes are written after the entries while a draft grows, and are then rolled back. If the head runs in
      the
    library's native kernels, the entries of a step are deferred to the next draft. The kernels run calls with few
    nodes, and PyTorch modules run the others. Heads in float32 always use the kernels, because their modules would
    store keys in another dtype.

    Args:
      head: head on the device of the target, in the target's dtype.
      target: target whose features the head reads.
      vocabulary: tokens that may be drafted, for a head without its own output layer; None for all.
      growth: arguments of `Growth`.

    Attributes:
      native: head in the library's native kernels; None if it runs as a PyTorch module.

    Exactness: lossless for any head, except for acceptance="typical".
    Randomness: keyed, see ``acceptance`` of `Growth`; none when greedy.
    Cost: a step runs the head once over the committed tokens and once per further level, for all rows together.
    """

    def __init__(
        self, head: EagleHead, target: CausalLM, *, vocabulary: DraftVocabulary | None = None, **growth: Any
    ) -> None:
        kept, output = output_of(head, target, vocabulary)
        self.growth = Growth(vocabulary=kept, **growth)
        self.growth.takes_trees = target.supports_trees
        uses = {1: "eagle2" if self.growth.tree is None else "eagle", 3: "eagle3"}
        name, validated = uses[head.shape.generation], head.first_token_acceptance
        self.facts = DrafterFacts(name, validated_acceptance={} if validated is None else {name: validated})
        self.head, self._target = head, target
        self._own_output = head.lm_head if head.lm_head is not None else output
        self._names = None if kept is None or kept.is_full else kept.target_ids.contiguous()
        self._masks = masks.Masks((masks.FULL,), None, head.dtype, target.device, is_additive=True)
        self.native = int8_head(head, target, self.output_layer)
        self._is_alone = head.dtype == torch.float32
        self.cache = ragged.KVCache(head.shape.num_layers, device=target.device)
        self._nodes_fed: FedNodes  # while drafts grow
        self._fed: torch.Tensor  # (M, H), outputs of the level that was fed last
        self._number_of: list[dict[int, int]] = []  # per draft, row in _fed by node of this level

    def needs(self, target: CausalLM, cache: ragged.KVCache) -> Needs:
        shape = self.head.shape
        dtype = self.head.dtype if self.native is None else torch.bfloat16
        column_bytes = shape.num_layers * shape.layer.kv_numbers * dtype.itemsize
        return Needs(
            last_hidden=shape.reads_last_hidden,
            layer_inputs=shape.layer_inputs,
            partial_prompts=True,
            caches=(DraftCache(self.cache, lambda: column_bytes, writer=lambda: self.head, lag=1),),
        )

    # -- entries of committed tokens ---------------------------------------------------------------------------

    def observe(self, rows: Sequence[Row], results: Sequence[StepResult]) -> None:
        if self.native is None:
            super().observe(rows, results)
        else:
            for row, result in zip(rows, results, strict=True):
                self._owe(row, self._inputs_of(result.committed, range(len(result.emitted))), len(result.emitted))
            self._end(rows, results)

    def _owe(self, row: Row, stream: torch.Tensor, num_emitted: int) -> None:
        """Defer the cache entries of the newest committed tokens."""
        start, state = len(row.token_ids) - 1 - num_emitted, self.state_of(row)
        if not state.owed:
            state.first = start
        state.owed.append(
            stream.clone() if len(self.head.shape.streams) == 1 else stream
        )  # a single stream is a view of the forward's output
        if start + len(stream) - state.first >= MOST_OWED:
            self.settle([row])

    def _inputs_of(self, features: Features, nodes: Sequence[int]) -> torch.Tensor:
        """Return the target's streams at nodes, side by side: (n, streams * H of the target)."""
        shape = self.head.shape
        parts = [
            features.last_hidden(nodes) if layer == shape.num_layers_of_target else features.layer_input(layer, nodes)
            for layer in shape.streams
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def _take_in(self, rows: Sequence[Row], inputs: Sequence[torch.Tensor], starts: Sequence[int]) -> None:
        """Compute the cache entries of the next committed tokens of rows, with neighbouring rows batched."""
        given = {}
        for row, stream, start in zip(rows, inputs, starts, strict=True):
            self.cache.rollback([start], row.slot)
            given[row.slot] = row, row.token_ids[start + 1 : start + 1 + len(stream)], stream
        for slots in spans(given):
            chains = [given[slot][1] if slot in given else [] for slot in slots]
            streams = [given[slot][2] if slot in given else None for slot in slots]
            if (native := self._kernels_for(sum(map(len, chains)))) is not None:
                for slot, output in self._made(native, slots, chains, streams):
                    self.state_of(given[slot][0]).last = output
                continue
            nodes = Nodes.from_chains(chains)
            width = len(self.head.shape.streams) * self.head.shape.target_size
            wide = torch.zeros(len(slots), nodes.width, width, dtype=self.head.dtype, device=self._target.device)
            for i, states_of_row in enumerate(streams):
                if states_of_row is not None:
                    wide[i, : nodes.counts[i]] = states_of_row
            wide_outputs = self._run(nodes, wide, slots.start, is_true=True)
            self.cache.commit([range(count) for count in nodes.counts], slots.start)
            for i, slot in enumerate(slots):
                if slot in given:
                    self.state_of(given[slot][0]).last = wide_outputs[i, nodes.counts[i] - 1].clone()

    def _made(
        self,
        native: Int8Head,
        slots: range,
        chains: Sequence[Sequence[int]],
        streams: Sequence[torch.Tensor | None],
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Compute and commit cache entries of neighbouring rows with the kernels, as many per call as a call may take.

        Args:
          native: head in the kernels.
          slots: slots of the rows.
          chains: the next tokens of each row; empty for rows between the rows that draft.
          streams: per row with tokens, (n, streams * H of the target).

        Yields: slots, and outputs (H,) of the newest entries.
        """
        longest = max(map(len, chains))
        width = max(1, MOST_NODES // len(slots)) if self._is_alone else longest
        for start in range(0, longest, width):
            parts = [chain[start : start + width] for chain in chains]
            wide = [stream[start : start + width] for stream in streams if stream is not None]
            buffers = self._buffers(slots.start, len(slots), max(map(len, parts)))
            nodes, lengths = Nodes.from_chains(parts), self.cache.row_lengths(slots.start, len(slots))
            outputs = native.feed(
                nodes, lengths, *buffers, wide[0] if len(wide) == 1 else torch.cat(wide), is_true=True
            )
            self.cache.commit([range(len(part)) for part in parts], slots.start)
            for slot, part, end in zip(slots, parts, accumulate(map(len, parts)), strict=True):
                if part:
                    yield slot, outputs[end - 1]

    # -- drafts ------------------------------------------------------------------------------------------------

    def _grow(self, drafts: Sequence[GrowingDraft]) -> None:
        if self._grows_by_rows(len(drafts)) and all(self._grows_at_once(draft) for draft in drafts):
            for draft in drafts:
                self.grow_at_once(draft)
            return
        try:
            self.growth.grow(drafts, self)
        finally:
            self._nodes_fed.close()

    def _grows_by_rows(self, num_rows: int) -> bool:
        """Return whether reading the head once per row takes less time than feeding the rows together."""
        native = self.native
        return num_rows == 1 or (native is not None and native.num_bytes <= SMALL_BYTES and num_rows <= MOST_GROWN)

    def _grows_at_once(self, draft: GrowingDraft) -> bool:
        """Return whether the kernels can grow a draft in one call; this needs a draft that depends on head and noise
        alone.
        """
        has_room = draft.cap <= MOST_CAP and self.growth.is_unconditional
        return self.native is not None and has_room and self.growth.ranks_by_scores(draft.row.sampler)

    def grow_at_once(self, draft: GrowingDraft) -> None:
        """Grow the draft of a row in one call of the kernels, which also computes the deferred cache entries."""
        assert self.native is not None
        row, slot, count = draft.row, draft.row.slot, 0
        state, owed = self.state_of(row), None
        if state.owed and self.cache.lengths[slot] == state.first:
            streams = state.taken()
            state.last = torch.empty(self.head.shape.layer.hidden_size)
            owed, count = (row.token_ids[state.first + 1 : state.first + 1 + len(streams)], streams), len(streams)
        self.settle([row])
        assert state.last is not None
        draft.tokens, draft.parents, draft.scores = self.native.grow(
            self.cache.lengths[slot] + count,
            row.pending,
            state.last if owed is not None else state.last.float(),
            *self._buffers(slot, 1, count + (draft.cap - 1) * draft.beam_width),
            self._names,
            owed=owed,
            depth=draft.cap,
            branches=draft.num_branches,
            beam=draft.beam_width,
            most=draft.max_nodes,
            power=self.growth.sharpness,
            least_mass=self.growth.least_mass,
            least=draft.least,
            sampler=row.sampler,
            position=len(row.token_ids),
        )
        self.cache.commit([range(count)], slot)

    def open(self, drafts: Sequence[GrowingDraft]) -> torch.Tensor:
        """Return logits after the pending tokens, from states that were computed when these tokens became known."""
        return self.logits(self.first(drafts))

    def expand(self, drafts: Sequence[GrowingDraft]) -> torch.Tensor:
        """Feed the frontier of every draft, each node with the output of its parent."""
        return self.logits(self.feed(drafts, are_chains=self.growth.drafts_chains))

    def first(self, drafts: Sequence[GrowingDraft]) -> torch.Tensor:
        """Begin drafts, in the order of their slots; returns the outputs (B, H) of the entries with the pending
        tokens.
        """
        rows = [draft.row for draft in drafts]
        self.settle(rows)
        self._nodes_fed = FedNodes(self.cache, drafts)
        dtype = self.head.dtype if self.native is None else torch.float32
        self._fed = self.last_of(rows).to(dtype)
        self._number_of = [{0: number} for number in range(len(rows))]
        return self._fed

    def feed(self, drafts: Sequence[GrowingDraft], *, are_chains: bool = False) -> torch.Tensor:
        """Run the frontier of every draft, each node with its parent's output; returns (M, H), draft by draft."""
        counts = [len(draft.frontier) for draft in drafts]
        width = max(1, *counts)
        above = [
            [number_of[draft.parents[node]] for node in draft.frontier]
            for draft, number_of in zip(drafts, self._number_of, strict=True)
        ]
        fed = self._nodes_fed
        if (native := self._kernels_for(len(drafts) * width)) is not None:
            buffers = self._buffers(fed.first, fed.num_rows, width)
            nodes = fed.nodes(drafts, are_chains=False)
            features = self._fed[[number for row in above for number in row]]
            lengths = self.cache.row_lengths(fed.first, fed.num_rows)
            self._fed = native.feed(nodes, lengths, *buffers, features, is_true=False)
        else:
            nodes = fed.nodes(drafts, are_chains=are_chains)
            padded = torch.zeros(fed.num_rows, width, dtype=torch.long)
            for draft, numbers in zip(drafts, above, strict=True):
                padded[draft.row.slot - fed.first, : len(numbers)] = torch.tensor(numbers)
            features = self._fed[padded.to(self._fed.device)].to(self.head.dtype)
            self._fed = fed.listed(self._run(nodes, features, fed.first, is_true=False), drafts)
        fed.commit(width)
        starts = accumulate(counts, initial=0)
        self._number_of = [
            {node: start + j for j, node in enumerate(draft.frontier)}
            for draft, start in zip(drafts, starts, strict=False)
        ]
        return self._fed

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return logits (..., V_d) of outputs (..., H)."""
        if (native := self._kernels_for(outputs.shape[:-1].numel())) is not None:
            return native.logits(outputs)
        with torch.inference_mode():
            found: torch.Tensor = self.output_layer(self.head.before_output(outputs.to(self.head.dtype)))
        return found

    @property
    def output_layer(self) -> torch.nn.Module:
        """Layer that turns outputs into logits: the head's own, or the target's."""
        own = self._own_output
        layer: torch.nn.Module = self._target.shadow.get_output_embeddings() if own is None else own
        return layer

    def _kernels_for(self, num_nodes: int) -> Int8Head | None:
        """Return the kernels if they should run a call with this many nodes, else None."""
        return self.native if num_nodes > 0 and (self._is_alone or num_nodes <= MOST_NODES) else None

    def _buffers(self, first_row: int, num_rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of neighbouring rows for the kernels, with room for ``width`` more columns."""
        self.cache.open(first_row, num_rows, max(width, 1))
        (layer,) = self.cache.layers
        if not layer.is_initialized:
            sizes = self.head.shape.layer
            blank = torch.zeros(1, sizes.num_kv_heads, 1, sizes.head_dim, dtype=torch.bfloat16)
            layer.lazy_initialization(blank, blank)
        rows = slice(first_row, first_row + num_rows)
        return layer.keys[rows], layer.values[rows]

    def _run(self, nodes: Nodes, given: torch.Tensor, first_row: int, *, is_true: bool) -> torch.Tensor:
        """Run nodes behind the committed columns of neighbouring rows.

        Args:
          nodes: nodes of the rows.
          given: (B, N, ...), streams of the target if ``is_true``, else features that the head predicted.
          first_row: first of the rows.
          is_true: True for features of the target.

        Returns: (B, N, H); values at padding are undefined.
        """
        with torch.inference_mode():
            return self._outputs(nodes, given, first_row, is_true)

    def _outputs(self, nodes: Nodes, given: torch.Tensor, first_row: int, is_true: bool) -> torch.Tensor:
        num_rows, width = nodes.tokens.shape
        device = self._target.device
        trunks = [length - nodes.num_fed for length in self.cache.row_lengths(first_row, num_rows)]
        nodes, starts, _, own, counts = layouts.placed(nodes, trunks, None, device)
        is_padded = num_rows > 1 and nodes.num_real < num_rows * width
        flat = FlatNodes(nodes.counts, width, device) if is_padded else None
        columns = self.cache.open(first_row, num_rows, width, flat, starts + nodes.num_fed)
        visible = None if nodes.is_one_token else self._masks.visible(nodes, starts, columns, counts)
        mask = None if visible is None else self._masks.formatted(visible)
        tokens = nodes.tokens
        # NaN would stay in the cache behind the committed columns, and a masked sum with it is NaN (0 * NaN)
        given = torch.nan_to_num(given)
        if flat is not None:
            tokens, own, given = (flat.listed(values)[None] for values in (tokens, own, given))
        placed = AttentionContext(*self.head.place(own), mask, self.cache, flat)
        features = self.head.features(given) if is_true else given
        outputs = self.head(self._embedded(tokens), features, placed)
        return outputs if flat is None else flat.spread(outputs[0])

    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        own = self.head.embed_tokens
        if own is None:
            return packing.embedding_rows(self._target.shadow.get_input_embeddings(), tokens)
        return packing.embedding_rows(own, tokens.clamp(max=own.num_embeddings - 1))


def int8_head(head: EagleHead, target: CausalLM, output: torch.nn.Module) -> Int8Head | None:
    """Return the head for the native kernels, or None if it runs as a PyTorch module.

    Heads that were made in memory run as modules, because their weights may still change. Heads of eager targets run as
    modules, too.
    """
    if target.execution.kind == "eager" or not is_frozen(head) or target.device.type != "cpu":
        return None
    own = head.embed_tokens
    table = packing.embedding_weight(target.shadow.get_input_embeddings() if own is None else own)
    kernels = kernels_of.library()
    if kernels is None or why_not(head, table, kernels) is not None or not is_plain(output):
        return None
    return Int8Head(head, table, output, kernels)


def build(options: EagleOptions | Eagle2Options, context: DrafterContext) -> EagleDrafter:
    """Make the drafter with the head that the config names."""
    target = context.target
    if isinstance(options, EagleOptions):
        context.check_trees(options.method)
    head = eagle_head(options, context, 3 if options.method == "eagle3" else 1)
    vocabulary = chosen_vocabulary(options, context)
    if isinstance(options, EagleOptions):
        growth = options.growth(static_tree(options, target, USUAL_ACCURACIES, MAX_DEPTH), target.vocab_size)
    else:
        growth = {**options.growth(target.vocab_size), "least_mass": LEAST_MASS}
    return EagleDrafter(head, target, vocabulary=vocabulary, **growth)


def eagle_head(options: EagleOptions | Eagle2Options, context: DrafterContext, generation: int) -> EagleHead:
    """Return the head of this generation that the config names, checked against the target.

    Raises: ConfigError, CheckpointError; see `load_head`.
    """
    target = context.target
    facts = _facts(context)

    def read(found: Checkpoint) -> tuple[EagleHead, Sequence[str]]:
        return read_eagle(found, facts, generation=generation, rope_theta=options.draft_rope_theta)

    sizes = facts.hidden_size, target.num_layers, target.vocab_size
    known = PUBLISHED.get(sizes, {}).get(generation, ())
    head = load_head(options, context, EagleHead, read, known)
    check_fits(head, facts, generation)
    return head


def _facts(context: DrafterContext) -> TargetFacts:
    """Return the properties of the target that a head must fit."""
    target = context.target
    eos = getattr(context.tokenizer, "eos_token_id", None)
    return TargetFacts(
        name=target.name,
        hidden_size=int(target.config.hidden_size),
        vocab_size=target.vocab_size,
        num_layers=target.num_layers,
        eos_token_ids=() if eos is None else (int(eos),),
        embedding=packing.embedding_weight(target.shadow.get_input_embeddings()),
    )

"""Medusa, Hydra and Hydra++: several heads, each of which guesses one of the next tokens; a static tree of guesses.

Medusa's heads do not see one another. Hydra's are each given the path that they continue, so that every path is of one
piece; those of Hydra++ are deeper, and read what a layer of their own makes of the whole text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from foredraft.drafters.context import DrafterContext
from foredraft.drafters.heads.loading import load_head, static_tree
from foredraft.drafters.parts.growth import GrowingDraft, Growth
from foredraft.drafters.parts.head_drafter import HeadDrafter
from foredraft.drafters.parts.reduced_output import chosen_vocabulary, rows_of_output
from foredraft.drafters.parts.rows import spans
from foredraft.engine.drafter import DraftCache, DrafterFacts, Features, Needs
from foredraft.engine.row import Row
from foredraft.errors import ConfigError
from foredraft.heads.checkpoint import Checkpoint
from foredraft.heads.layers import LayerShape
from foredraft.heads.medusa_hydra import HydraHeads, MedusaHeads, MultiHeads, OutputLayer, PrefixLayer
from foredraft.heads.medusa_hydra_layouts import read_hydra, read_medusa
from foredraft.heads.vocabulary import DraftVocabulary
from foredraft.methods.heads import HydraOptions, MedusaOptions
from foredraft.model.cache import ragged
from foredraft.model.lm import CausalLM

MEDUSA_ACCURACIES = [
    [0.56, 0.11, 0.05, 0.035, 0.025, 0.02, 0.015, 0.012, 0.01, 0.008],
    [0.32, 0.09, 0.05, 0.035, 0.025, 0.02, 0.015, 0.012, 0.01, 0.008],
    [0.20, 0.07, 0.04, 0.03, 0.02, 0.015, 0.012, 0.01, 0.008, 0.007],
    [0.15, 0.06, 0.035, 0.025, 0.02, 0.015, 0.012, 0.01, 0.008, 0.007],
    [0.12, 0.05, 0.03, 0.02, 0.018, 0.015, 0.012, 0.01, 0.008, 0.007],
]
"""How often the candidate of each rank is right, by head. First ranks and the sum of the first five of head 0 are those
of the published training log of Medusa v0.1 (Vicuna-7B); the others are assumed to fall off alike."""

HYDRA_ACCURACIES = [
    [share * scale for share in (0.62, 0.12, 0.06, 0.035, 0.025, 0.02, 0.015, 0.012, 0.01, 0.008)]
    for scale in (1.0, 0.95, 0.9, 0.85, 0.8)
]
"""How often the candidate of each rank is right where what stands before it is, by depth: assumed, since no such table
was published."""

PUBLISHED = {
    "medusa": {
        (4096, 32, 32000): ("FasterDecoding/medusa-vicuna-7b-v1.3",),
        (5120, 40, 32000): ("FasterDecoding/medusa-vicuna-13b-v1.3",),
        (6656, 60, 32000): ("FasterDecoding/medusa-vicuna-33b-v1.3",),
    },
    "hydra++": {
        (4096, 32, 32000): ("ankner/hydra-vicuna-7b-v1.3",),
        (5120, 40, 32000): ("ankner/hydra-vicuna-13b-v1.3",),
        (6656, 60, 32000): ("ankner/hydra-vicuna-33b-v1.3",),
    },
}
"""(hidden size, layers, vocabulary) of targets -> hub ids of heads for one of this size; others do not fit."""


class MultiHeadDrafter(HeadDrafter):
    """A static tree from heads that each guess one of the next tokens.

    Source: Medusa (Cai et al. 2024, arXiv:2401.10774); Hydra (Ankner et al. 2024, arXiv:2402.05109), with its prefix
    layer where the heads have one (Hydra++). Deviations: heads run on the last accepted node alone, not on all nodes of
    the tree; paths are followed from parent to child, without padding; under sampling the candidates are drawn with the
    target's own noise, which keeps the target's distribution and tokens; the prefix layer has a cache of its own.

    Args:
      heads: see `MedusaHeads` and `HydraHeads`; on the device of the target.
      num_target_layers: of the target, for heads that read an earlier hidden state than the last one.
      growth: arguments of `Growth`.

    Exactness: lossless for any heads, but for acceptance="typical".
    Randomness: keyed, see ``acceptance`` of `Growth`; none when greedy.
    Cost: one pass over the heads that the tree is deep, for all rows together: at once (Medusa), or a head per level
    for the nodes of all rows; with a prefix layer, that layer once over all tokens, and its keys and values.
    """

    def __init__(self, heads: MultiHeads, num_target_layers: int, **growth: Any) -> None:
        self.facts = DrafterFacts(heads.kind)
        self.heads = heads
        self.reach = heads.num_heads
        self.growth = Growth(vocabulary=heads.vocabulary, **growth)
        self._layer = num_target_layers - heads.offset if heads.offset else None
        self.cache = ragged.KVCache(1, device=heads.device)  # of the prefix layer; column t holds token t
        self._embed: Any = None
        self._output: OutputLayer | None = None
        self._inputs: torch.Tensor  # (M, (depth + 1) H), of the level that was fed last
        self._number_of: list[dict[int, int]] = []  # by draft, of the nodes of this level

    def along(self, depth: int, states: torch.Tensor, token_ids: torch.Tensor, first: int) -> torch.Tensor:
        """What head ``depth`` says along a text that is known, given the tokens that stand before its guesses.

        Args:
          states: (T, H), what heads read of the target after the tokens.
          token_ids: (T,) of these tokens.
          first: place from which on it is asked.

        Returns: logits (T - 2 - depth - first, V); row i guesses token first + i + 2 + depth.
        """
        contexts, embedded = self.heads.contexts(states)[first:-1], self._embed(token_ids)[first:-1]
        return self.heads.along(depth, contexts, embedded, self._output)

    def needs(self, target: CausalLM, cache: ragged.KVCache) -> Needs:
        self.growth.takes_trees = target.supports_trees
        self._embed = target.shadow.get_input_embeddings()
        self._output = target.shadow.get_output_embeddings()
        if self.heads.needs_output_layer and self.heads.vocabulary is not None:
            self._output = rows_of_output(target.shadow.get_output_embeddings(), self.heads.vocabulary)
        own = []
        if (prefix := self.heads.prefix) is not None:
            column_bytes = prefix.shape.kv_numbers * self.heads.dtype.itemsize
            own.append(DraftCache(self.cache, lambda: column_bytes, writer=lambda: prefix, lag=0))
        return Needs(
            last_hidden=self._layer is None,
            layer_inputs=() if self._layer is None else (self._layer,),
            partial_prompts=True,
            caches=tuple(own),
        )

    # -- states ------------------------------------------------------------------------------------------------

    def _inputs_of(self, features: Features, nodes: Sequence[int]) -> torch.Tensor:
        """Hidden states of the target, the last ones or earlier ones: (n, H)."""
        return features.last_hidden(nodes) if self._layer is None else features.layer_input(self._layer, nodes)

    def _take_in(self, rows: Sequence[Row], inputs: Sequence[torch.Tensor], starts: Sequence[int]) -> None:
        """Keep the last states; with a prefix layer, what it makes of them."""
        prefix = self.heads.prefix
        if prefix is None:
            super()._take_in(rows, inputs, starts)
            return
        given = {}
        for row, hidden, start in zip(rows, inputs, starts, strict=True):
            self.cache.rollback([start], row.slot)
            given[row.slot] = row, hidden
        for slots in spans(given, max_gap=0):
            outputs = self._prefixed(prefix, [given[slot][1] for slot in slots], slots[0])
            for slot, output in zip(slots, outputs, strict=True):
                self.state_of(given[slot][0]).last = output

    def _prefixed(self, prefix: PrefixLayer, states: Sequence[torch.Tensor], first_slot: int) -> list[torch.Tensor]:
        """Feed the next states of neighbouring rows to the prefix layer; the last output (H,) of each."""
        counts = list(map(len, states))
        width = max(counts)
        device = self.cache.device
        hidden = torch.nn.utils.rnn.pad_sequence(list(states), batch_first=True)  # (B, width, H)
        # what is not finite would stay in the cache behind the columns that count, where 0 * NaN is NaN
        hidden = torch.nan_to_num(hidden)
        starts = torch.tensor(self.cache.row_lengths(first_slot, len(states)), device=device)[:, None]
        positions = starts + torch.arange(width, device=device)  # (B, width)
        num_columns = self.cache.open(first_slot, len(states), width)
        mask = torch.arange(num_columns, device=device) <= positions[:, :, None]
        outputs = prefix(hidden, prefix.placed(positions, hidden.dtype, mask[:, None], self.cache))
        self.cache.commit([range(count) for count in counts], first_slot)
        return [output[count - 1].clone() for output, count in zip(outputs, counts, strict=True)]

    # -- drafts ------------------------------------------------------------------------------------------------

    def _grow(self, drafts: Sequence[GrowingDraft]) -> None:
        if self.heads.sees_path:
            self.growth.grow(drafts, self)
            return
        hidden = self.last_of([draft.row for draft in drafts])
        self.growth.fill(drafts, self.heads(hidden, max(draft.cap for draft in drafts), self._output))

    def open(self, drafts: Sequence[GrowingDraft]) -> torch.Tensor:
        """What the first head says after the pending tokens."""
        self._inputs = self.last_of([draft.row for draft in drafts])
        self._number_of = [{-1: number} for number in range(len(drafts))]
        return self.expand(drafts)

    def expand(self, drafts: Sequence[GrowingDraft]) -> torch.Tensor:
        """What the head of this level says after every node, given the path that leads there."""
        nodes = [(i, draft, node) for i, draft in enumerate(drafts) for node in draft.frontier]
        above = [self._number_of[i][draft.parents[node]] for i, draft, node in nodes]
        tokens = torch.tensor([draft.tokens[node] for _, draft, node in nodes], device=self._inputs.device)
        self._inputs = torch.cat([self._inputs[above], self._embed(tokens)], dim=-1)
        self._number_of = [{} for _ in drafts]
        for number, (i, _, node) in enumerate(nodes):
            self._number_of[i][node] = number
        _, draft, node = nodes[0]
        return self.heads.logits(draft.depths[node], self._inputs, self._output)


def build(options: MedusaOptions | HydraOptions, context: DrafterContext) -> MultiHeadDrafter:
    """Drafts with the heads that the config names.

    Raises: ConfigError for heads with a prefix layer where the method is Hydra, and without one where it is Hydra++.
    """
    target, of_medusa = context.target, isinstance(options, MedusaOptions)
    context.check_trees(options.method)
    size = int(target.config.hidden_size)
    known = PUBLISHED.get(options.method, {}).get((size, target.num_layers, target.vocab_size), ())

    def read(found: Checkpoint) -> tuple[MultiHeads, Sequence[str]]:
        if of_medusa:
            return read_medusa(found, size, target.vocab_size)
        return read_hydra(found, size, target.vocab_size, LayerShape.of(target.config))

    heads = load_head(options, context, MedusaHeads if of_medusa else HydraHeads, read, known)
    if heads.kind != options.method:
        raise ConfigError(f"these are heads of {heads.kind!r}, not of {options.method!r}; name that as the method")
    if heads.offset > target.num_layers:
        raise ConfigError(
            f"hidden_state_offset of these heads is {heads.offset}, and the target has {target.num_layers} layers; "
            "correct their config, or name heads of this target"
        )
    vocabulary = chosen_vocabulary(options, context)
    if vocabulary is not None:
        heads = _reduced(heads, vocabulary, context)
    tree = static_tree(options, target, MEDUSA_ACCURACIES if of_medusa else HYDRA_ACCURACIES, heads.num_heads)
    return MultiHeadDrafter(heads, target.num_layers, **options.growth(tree, target.vocab_size))


def _reduced(heads: MultiHeads, vocabulary: DraftVocabulary, context: DrafterContext) -> MultiHeads:
    """The heads with output layers for some tokens alone, made once.

    Raises: ConfigError for heads that have chosen their tokens already.
    """
    if heads.vocabulary is not None:
        raise ConfigError(f"these heads know {len(heads.vocabulary)} tokens only; leave draft_vocabulary out")
    key = ("reduced", id(heads), tuple(vocabulary.target_ids.tolist()))
    return context.keep(key, lambda: heads.reduced(vocabulary, lambda layer: rows_of_output(layer, vocabulary)))

"""Drafting with Medusa, Hydra and Hydra++: several heads, each of which guesses one of the next tokens, in a static
tree.

Medusa heads are independent of one another. Each Hydra head reads the path that it continues, so that the tokens of a
path fit together. Hydra++ heads are deeper, and read the output of an additional layer that attends to the whole row.
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
"""Probability that the candidate of each rank is right, by head.

The first ranks and the sum of the first five ranks of head 0 are from the published training log of Medusa v0.1
(Vicuna-7B). The accuracies of other ranks and heads are assumed to decrease in the same way.
"""

HYDRA_ACCURACIES = [
    [share * scale for share in (0.62, 0.12, 0.06, 0.035, 0.025, 0.02, 0.015, 0.012, 0.01, 0.008)]
    for scale in (1.0, 0.95, 0.9, 0.85, 0.8)
]
"""Probability by depth that the candidate of each rank is right if its ancestors are right. Assumed, because no such
table was published."""

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
"""Hub ids of heads by (hidden size, layers, vocabulary) of the target; heads for other sizes do not fit."""


class MultiHeadDrafter(HeadDrafter):
    """Drafter of a static tree from heads that each guess one of the next tokens.

    Source: Medusa (Cai et al. 2024, arXiv:2401.10774); Hydra (Ankner et al. 2024, arXiv:2402.05109), with its prefix
      layer for Hydra++ heads. Deviations: heads run on the last accepted node alone, not on all nodes of the tree.
      Paths are followed from parent to child, without padding. In sampled rows the candidates are drawn with the
      target's own noise, which preserves the target's distribution and tokens. The prefix layer has its own cache.

    Args:
      heads: heads on the device of the target; see `MedusaHeads` and `HydraHeads`.
      num_target_layers: number of layers of the target, for heads that read an earlier hidden state than the last one.
      growth: arguments of `Growth`.

    Exactness: lossless for any heads, except for acceptance="typical".
    Randomness: keyed, see ``acceptance`` of `Growth`; none when greedy.
    Cost: one pass over as many heads as the tree has levels, for all rows together. Medusa runs all heads at once.
      Hydra runs one head per level, for the nodes of all rows. With a prefix layer, that layer runs once over all
      tokens, and
    its keys and values are stored.
    """

    def __init__(self, heads: MultiHeads, num_target_layers: int, **growth: Any) -> None:
        self.facts = DrafterFacts(heads.kind)
        self.heads = heads
        self.reach = heads.num_heads
        self.growth = Growth(vocabulary=heads.vocabulary, **growth)
        self._layer = num_target_layers - heads.offset if heads.offset else None
        self.cache = ragged.KVCache(1, device=heads.device)  # of the prefix layer; column t is token t
        self._embed: Any = None
        self._output: OutputLayer | None = None
        self._inputs: torch.Tensor  # (M, (depth + 1) H) of the level that was fed last
        self._number_of: list[dict[int, int]] = []  # per draft, row in _inputs by node of this level

    def along(self, depth: int, states: torch.Tensor, token_ids: torch.Tensor, first: int) -> torch.Tensor:
        """Return the logits of head ``depth`` along a known token sequence, given the tokens before each of its
        guesses.

        Args:
          depth: index of the head.
          states: (T, H), target states after the tokens that the heads read.
          token_ids: (T,), the tokens.
          first: first position to evaluate.

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
        """Return hidden states of the target, from the last or an earlier layer: (n, H)."""
        return features.last_hidden(nodes) if self._layer is None else features.layer_input(self._layer, nodes)

    def _take_in(self, rows: Sequence[Row], inputs: Sequence[torch.Tensor], starts: Sequence[int]) -> None:
        """Store the last states, or the prefix layer's outputs for them."""
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
        """Feed the next states of neighbouring rows to the prefix layer; returns the last output (H,) of each row."""
        counts = list(map(len, states))
        width = max(counts)
        device = self.cache.device
        hidden = torch.nn.utils.rnn.pad_sequence(list(states), batch_first=True)  # (B, width, H)
        # NaN would stay in the cache behind the committed columns, and a masked sum with it is NaN (0 * NaN)
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
        """Return the logits of the first head after the pending tokens."""
        self._inputs = self.last_of([draft.row for draft in drafts])
        self._number_of = [{-1: number} for number in range(len(drafts))]
        return self.expand(drafts)

    def expand(self, drafts: Sequence[GrowingDraft]) -> torch.Tensor:
        """Return the logits of the head of this level after every node, given the path to the node."""
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
    """Make the drafter with the heads that the config names.

    Raises: ConfigError for Hydra heads with a prefix layer if the method is "hydra", and without one if it is
    "hydra++".
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
        raise ConfigError(f"these are {heads.kind!r} heads, not {options.method!r} heads; set method={heads.kind!r}")
    if heads.offset > target.num_layers:
        raise ConfigError(
            f"hidden_state_offset of these heads is {heads.offset}, and the target has {target.num_layers} layers; "
            "correct their config, or use heads for this target"
        )
    vocabulary = chosen_vocabulary(options, context)
    if vocabulary is not None:
        heads = _reduced(heads, vocabulary, context)
    tree = static_tree(options, target, MEDUSA_ACCURACIES if of_medusa else HYDRA_ACCURACIES, heads.num_heads)
    return MultiHeadDrafter(heads, target.num_layers, **options.growth(tree, target.vocab_size))


def _reduced(heads: MultiHeads, vocabulary: DraftVocabulary, context: DrafterContext) -> MultiHeads:
    """Return the heads with output layers for some tokens only, made once.

    Raises: ConfigError for heads that already have a reduced vocabulary.
    """
    if heads.vocabulary is not None:
        raise ConfigError(
            f"these heads already have a reduced vocabulary of {len(heads.vocabulary)} tokens; leave draft_vocabulary "
            "out"
        )
    key = ("reduced", id(heads), tuple(vocabulary.target_ids.tolist()))
    return context.keep(key, lambda: heads.reduced(vocabulary, lambda layer: rows_of_output(layer, vocabulary)))

"""Nodes of growing drafts in a drafter's cache, fed behind the committed columns of their rows."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from foredraft.drafters.parts.growth import GrowingDraft
from foredraft.engine.row import Row
from foredraft.model.cache.ragged import KVCache
from foredraft.model.lm import CausalLM, Nodes

MAX_GAP = 2
"""Largest number of slots, fed as padding, between two rows that are fed together."""


class FedNodes:
    """Feeder of growing drafts to a model, level by level, behind the committed columns of their rows.

    Node i of a draft is ``draft.column_of[i]`` columns behind the row. When the drafts are finished, these columns are
    rolled back. These columns stay in place until something else is fed, so that accepted nodes may be committed.

    Args:
      cache: cache in which all tokens of every row are committed.
      drafts: growing drafts, in the order of their slots. Rows between them are padded.
    """

    def __init__(self, cache: KVCache, drafts: Sequence[GrowingDraft]) -> None:
        slots = [draft.row.slot for draft in drafts]
        self._cache = cache
        self.first, self.num_rows = slots[0], slots[-1] + 1 - slots[0]
        self._places = [slot - slots[0] for slot in slots]
        self._lengths = cache.lengths[self.first : slots[-1] + 1]
        self._num_fed = 0

    def nodes(self, drafts: Sequence[GrowingDraft], *, are_chains: bool) -> Nodes:
        """Return the frontier of every draft, for rows ``first`` to ``first + num_rows - 1``."""
        width = max(1, *(len(draft.frontier) for draft in drafts))
        num_fed = self._num_fed
        for draft in drafts:
            draft.column_of.update(zip(draft.frontier, range(num_fed, num_fed + width), strict=False))
        tokens = torch.full((self.num_rows, width), drafts[0].tokens[0])  # padding; see `Nodes`
        counts = [0] * self.num_rows
        for place, draft in zip(self._places, drafts, strict=True):
            tokens[place] = draft.tokens[0]
            if draft.frontier:
                counts[place] = len(draft.frontier)
                tokens[place, : counts[place]] = torch.tensor([draft.tokens[node] for node in draft.frontier])
        if are_chains:
            return Nodes(tokens, torch.tensor([[0 if count else -1 - num_fed] for count in counts]), tuple(counts))
        return Nodes(tokens, *self._shape(drafts, num_fed, width, counts), num_fed=num_fed)

    def _shape(
        self, drafts: Sequence[GrowingDraft], num_fed: int, width: int, counts: Sequence[int]
    ) -> tuple[torch.Tensor, tuple[int, ...], torch.Tensor]:
        """Return depths (B, S + F), counts and ancestors (B, F, S + F) of a frontier of F nodes after S fed columns.

        Padding has depth -1, the position of the pending token, because the next position may be outside of the
        context.
        """
        depths = np.full((self.num_rows, num_fed + width), -1, dtype=np.int64)
        ancestors = np.zeros((self.num_rows, width, num_fed + width), dtype=bool)
        for place, count in enumerate(counts):
            for j in range(count, width):
                ancestors[place, j, num_fed + j] = True
        for place, draft in zip(self._places, drafts, strict=True):
            for node, column in draft.column_of.items():
                depths[place, column] = draft.depths[node] - 1  # the pending token is already committed
            for j, node in enumerate(draft.frontier):
                ancestors[place, j, [draft.column_of[above] for above in draft.path(node)]] = True
        return torch.from_numpy(depths), tuple(counts), torch.from_numpy(ancestors)

    def commit(self, width: int) -> None:
        """Commit ``width`` columns of every row, the width of a level."""
        self._cache.commit([range(width)] * self.num_rows, self.first)
        self._num_fed += width

    def close(self) -> None:
        """Roll back all columns behind the rows."""
        self._cache.rollback(self._lengths, self.first)

    def feed(self, model: CausalLM, drafts: Sequence[GrowingDraft], *, are_chains: bool) -> torch.Tensor:
        """Run the frontier of every draft; returns logits (B, F, V) of rows ``first`` to ``first + num_rows - 1``."""
        nodes = self.nodes(drafts, are_chains=are_chains)
        known_tokens(model, nodes.tokens)
        logits = model.forward(nodes, self._cache, first_row=self.first)
        self.commit(nodes.width)
        return logits

    def listed(self, values: torch.Tensor, drafts: Sequence[GrowingDraft]) -> torch.Tensor:
        """Return the values of rows (B, F, ...) as a list of nodes (M, ...), draft by draft. Nothing is copied if
        nothing is padded.
        """
        width, counts = values.shape[1], [len(draft.frontier) for draft in drafts]
        flat = values.flatten(0, 1)
        if sum(counts) == len(flat):
            return flat
        pairs = zip(self._places, counts, strict=True)
        return flat[[place * width + j for place, count in pairs for j in range(count)]]


def chains_by_slot(drafts: Sequence[GrowingDraft], texts: Sequence[list[int]]) -> list[list[int]]:
    """Return token lists for all slots from the first draft to the last, empty for rows in between."""
    first = drafts[0].row.slot
    chains: list[list[int]] = [[] for _ in range(first, drafts[-1].row.slot + 1)]
    for draft, tokens in zip(drafts, texts, strict=True):
        chains[draft.row.slot - first] = tokens
    return chains


def known_tokens(model: CausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """Clamp tokens in place to the drafter's vocabulary: unknown tokens become its last token."""
    return tokens.clamp_(max=model.num_embeddings - 1)


def reach(model: CausalLM, row: Row) -> int:
    """Return the number of tokens that a model can draft after a row, 0 or less for none; the last one is never fed."""
    context = model.context_length
    return sys.maxsize if context is None else context - len(row.token_ids) + 1


def spans(slots: Iterable[int], max_gap: int = MAX_GAP) -> list[range]:
    """Group slots into runs with small gaps or none: with gaps of up to 2 slots, 1 2 4 9 gives 1..4 and 9."""
    spans: list[range] = []
    for slot in sorted(slots):
        if spans and slot - spans[-1].stop <= max_gap:
            spans[-1] = range(spans[-1].start, slot + 1)
        else:
            spans.append(range(slot, slot + 1))
    return spans

"""The rows of a cache that belongs to a drafter: which lies where, how far it is filled, and what is kept of it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from foredraft.beginnings import bytes_of
from foredraft.lazy import Lazy

if TYPE_CHECKING:
    import torch

    import foredraft.model.lm as lm
    from foredraft.drafters.parts.draft import GrowingDraft
    from foredraft.engine.row import Row
    from foredraft.model.cache.ragged import KVCache, RowStates
    from foredraft.model.lm import CausalLM
else:
    torch = Lazy("torch")
    lm = Lazy("foredraft.model.lm")


MAX_GAP = 2
"""Slots between two rows that are fed together, which are padding."""


@dataclass(eq=False)
class CachedRow:
    """Where a row lies in a cache of a drafter's own, and what is there.

    The first ``trunk`` entries are of its text. Nodes of a draft that were fed lie after them: node i in column
    ``trunk + offset_of[i]``.
    """

    slot: int
    trunk: int = 0
    offset_of: dict[int, int] = field(default_factory=dict)

    def fed_along(self, draft: GrowingDraft, tokens: Iterable[int]) -> list[int]:
        """Columns, counted from the trunk, of the fed nodes along a path of tokens from the root."""
        node, offsets = 0, []
        for token in tokens:
            node = draft.child_of.get((node, token), -1)
            if node not in self.offset_of:
                break
            offsets.append(self.offset_of[node])
        return offsets


@dataclass(frozen=True)
class CacheMemory:
    """The beginning of a text in the cache of a drafter, in copies of its own, for texts that begin alike.

    Args:
      writer: who computed it; nobody else has a use for it.
      length: columns.
    """

    writer: object
    states: RowStates
    length: int

    @property
    def num_bytes(self) -> int:
        """Memory of the copies."""
        return bytes_of(self.states)


class CachedRows:
    """Rows of a drafter's own cache. They lie in an order of their own until the engine's is asked for."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self._order: list[int] = []  # row ids by slot
        self._rows: dict[int, CachedRow] = {}

    def __contains__(self, row_id: int) -> bool:
        return row_id in self._rows

    def __getitem__(self, row_id: int) -> CachedRow:
        return self._rows[row_id]

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, row_id: int) -> CachedRow | None:
        """Where a row lies, if it has a place."""
        return self._rows.get(row_id)

    def enter(self, row_id: int) -> CachedRow:
        """Where a row lies; a new place at the end where it has none."""
        if row_id not in self._rows:
            self._rows[row_id] = CachedRow(self.cache.add_rows())
            self._order.append(row_id)
        return self._rows[row_id]

    def fork(self, row_id: int, copy_id: int) -> None:
        """Give another row what this one holds."""
        source = self._rows[row_id]
        self._rows[copy_id] = CachedRow(self.cache.fork(source.slot), source.trunk)
        self._order.append(copy_id)

    def keep(self, row_id: int, writer: object) -> CacheMemory | None:
        """What the cache holds of the text of a row; None where that has no place in it."""
        if row_id not in self._rows:
            return None
        row = self._rows[row_id]
        return CacheMemory(writer, self.cache.export(row.slot, row.trunk), row.trunk)

    def recall(self, row_id: int, memory: CacheMemory, most: int) -> int:
        """Take over at most so many entries of a text that began alike; how many."""
        row = self.enter(row_id)
        row.trunk = min(memory.length, most)
        self.cache.load(row.slot, memory.states, row.trunk)
        return row.trunk

    def remove(self, row_ids: Iterable[int]) -> None:
        """Drop rows, as far as they are there."""
        leaving = set(row_ids)
        if self._rows.keys() <= leaving:  # no need to move anything, nor to trust the order
            self._rows, self._order = {}, []
            self.cache.clear()
            return
        for row_id in leaving & self._rows.keys():
            slot = self._rows.pop(row_id).slot
            self.cache.remove(slot)
            last = self._order.pop()
            if last != row_id:
                self._order[slot] = last
                self._rows[last].slot = slot

    def align(self, row_ids: Sequence[int]) -> list[CachedRow]:
        """Bring rows to the front of the cache, in this order. Moves nothing as long as the engine keeps its order."""
        for slot, row_id in enumerate(row_ids):
            place, other = self._rows[row_id], self._order[slot]
            if other != row_id:
                self.cache.swap(place.slot, slot)
                self._order[place.slot], self._order[slot] = other, row_id
                self._rows[other].slot, place.slot = place.slot, slot
        return [self._rows[row_id] for row_id in row_ids]


def feed(
    model: CausalLM, cache: KVCache, drafts: Sequence[GrowingDraft], places: Sequence[CachedRow], *, are_chains: bool
) -> torch.Tensor:
    """Run the frontier of every draft through a model, behind what was fed before; logits (B, F, V).

    Draft i lies in row i of the cache. Rows with a smaller frontier are padded.
    """
    nodes = frontier_nodes(cache, drafts, places, are_chains=are_chains)
    known_tokens(model, nodes.tokens)
    logits = model.forward(nodes, cache)
    cache.commit([range(nodes.width)] * len(drafts))
    return logits


def frontier_nodes(
    cache: KVCache, drafts: Sequence[GrowingDraft], places: Sequence[CachedRow], *, are_chains: bool
) -> lm.Nodes:
    """The frontier of every draft, behind what was fed before, which its places note; draft i lies in row i."""
    width = max(1, *(len(draft.frontier) for draft in drafts))
    num_fed = cache.lengths[places[0].slot] - places[0].trunk
    for draft, place in zip(drafts, places, strict=True):
        place.offset_of.update(zip(draft.frontier, range(num_fed, num_fed + width), strict=False))
    fed = [[draft.tokens[node] for node in draft.frontier] for draft in drafts]
    padded = [row + [draft.tokens[0]] * (width - len(row)) for draft, row in zip(drafts, fed, strict=True)]
    tokens = torch.tensor(padded)  # see `Nodes` on what pads
    counts = tuple(map(len, fed))
    if are_chains:
        return lm.Nodes(tokens, torch.tensor([[0 if count else -1 - num_fed] for count in counts]), counts)
    return lm.Nodes(tokens, *_shape(drafts, places, num_fed, width), num_fed=num_fed)


def unpadded(values: torch.Tensor, drafts: Sequence[GrowingDraft]) -> torch.Tensor:
    """What was computed for frontiers, (B, F, ...) -> (M, ...), draft by draft; without a copy where none is padded."""
    width, counts = values.shape[1], [len(draft.frontier) for draft in drafts]
    flat = values.flatten(0, 1)
    if min(counts) == width:
        return flat
    return flat[[row * width + j for row, count in enumerate(counts) for j in range(count)]]


def known_tokens(model: CausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """These tokens, in place; the drafter's last one stands for those of a larger vocabulary that it does not know."""
    return tokens.clamp_(max=model.num_embeddings - 1)


def reach(model: CausalLM, row: Row) -> int:
    """How many tokens a model can draft after a row: the last is never fed; 0 or less for none."""
    context = model.context_length
    return sys.maxsize if context is None else context - len(row.token_ids) + 1


def spans(slots: Iterable[int], max_gap: int = MAX_GAP) -> list[range]:
    """Runs of slots with small gaps, or none: with gaps of up to 2 slots, 1 2 4 9 makes 1..4 and 9."""
    spans: list[range] = []
    for slot in sorted(slots):
        if spans and slot - spans[-1].stop <= max_gap:
            spans[-1] = range(spans[-1].start, slot + 1)
        else:
            spans.append(range(slot, slot + 1))
    return spans


def _shape(
    drafts: Sequence[GrowingDraft], places: Sequence[CachedRow], num_fed: int, width: int
) -> tuple[torch.Tensor, tuple[int, ...], torch.Tensor]:
    """Depths (B, S + F), counts and ancestors (B, F, S + F) of a frontier after S fed columns.

    Padding has depth -1, the position of the pending token: the next one may lie outside of the context.
    """
    depths = np.full((len(drafts), num_fed + width), -1, dtype=np.int64)
    ancestors = np.zeros((len(drafts), width, num_fed + width), dtype=bool)
    for i, (draft, place) in enumerate(zip(drafts, places, strict=True)):
        for node, offset in place.offset_of.items():
            depths[i, offset] = draft.depths[node] - 1  # the pending token is part of the trunk by now
        for j, node in enumerate(draft.frontier):
            ancestors[i, j, [place.offset_of[above] for above in draft.path(node)]] = True
        for j in range(len(draft.frontier), width):
            ancestors[i, j, num_fed + j] = True
    return torch.from_numpy(depths), tuple(len(draft.frontier) for draft in drafts), torch.from_numpy(ancestors)

"""The rows of a cache that belongs to a drafter: which row lies where, and how far it is filled."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from foretoken.lazy import Lazy

if TYPE_CHECKING:
    import torch

    import foretoken.model.execution.node_lists as node_lists
    import foretoken.model.lm as lm
    from foretoken.drafters.parts.draft import GrowingDraft
    from foretoken.engine.sequence import Sequence
    from foretoken.model.cache.ragged import KVCache
    from foretoken.model.lm import CausalLM
else:
    torch = Lazy("torch")
    lm = Lazy("foretoken.model.lm")
    node_lists = Lazy("foretoken.model.execution.node_lists")


MAX_GAP = 2
"""Slots between two rows that are fed together, which are padding."""


@dataclass(eq=False)
class Place:
    """Where one row lies in a cache.

    The first ``trunk`` tokens of its text are there. Nodes of a draft that were fed lie after them: node i in column
    ``trunk + offset_of[i]``.
    """

    slot: int
    trunk: int = 0
    offset_of: dict[int, int] = field(default_factory=dict)

    def fed_along(self, draft: GrowingDraft, tokens: Iterable[int]) -> list[int]:
        """Columns, counted from the trunk, of the fed nodes along a path of tokens from the root."""
        children = {pair: node for node, pair in enumerate(zip(draft.parents, draft.tokens, strict=True)) if node}
        node, offsets = 0, []
        for token in tokens:
            node = children.get((node, token), -1)
            if node not in self.offset_of:
                break
            offsets.append(self.offset_of[node])
        return offsets


class CachedRows:
    """Rows of a drafter's own cache. They lie in an order of their own until the engine's is asked for."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self._order: list[int] = []  # row ids by slot
        self._places: dict[int, Place] = {}

    def __contains__(self, row_id: int) -> bool:
        return row_id in self._places

    def __getitem__(self, row_id: int) -> Place:
        return self._places[row_id]

    def __len__(self) -> int:
        return len(self._places)

    def get(self, row_id: int) -> Place | None:
        """The place of a row, if it has one."""
        return self._places.get(row_id)

    def enter(self, row_id: int) -> Place:
        """The place of a row, a new one at the end where it has none."""
        if row_id not in self._places:
            self._places[row_id] = Place(self.cache.add_rows())
            self._order.append(row_id)
        return self._places[row_id]

    def fork(self, row_id: int, copy_id: int) -> None:
        """Give another row what this one holds."""
        source = self._places[row_id]
        self._places[copy_id] = Place(self.cache.fork(source.slot), source.trunk)
        self._order.append(copy_id)

    def remove(self, row_ids: Iterable[int]) -> None:
        """Drop rows, as far as they are there."""
        leaving = set(row_ids)
        if self._places.keys() <= leaving:  # no need to move anything, nor to trust the order
            self._places, self._order = {}, []
            self.cache.clear()
            return
        for row_id in leaving & self._places.keys():
            slot = self._places.pop(row_id).slot
            self.cache.remove(slot)
            last = self._order.pop()
            if last != row_id:
                self._order[slot] = last
                self._places[last].slot = slot

    def align(self, row_ids: Seq[int]) -> list[Place]:
        """Bring rows to the front of the cache, in this order. Moves nothing as long as the engine keeps its order."""
        for slot, row_id in enumerate(row_ids):
            place, other = self._places[row_id], self._order[slot]
            if other != row_id:
                self.cache.swap(place.slot, slot)
                self._order[place.slot], self._order[slot] = other, row_id
                self._places[other].slot, place.slot = place.slot, slot
        return [self._places[row_id] for row_id in row_ids]


def feed(
    model: CausalLM, cache: KVCache, drafts: Seq[GrowingDraft], places: Seq[Place], *, are_chains: bool
) -> torch.Tensor:
    """Run the frontier of every draft through a model, behind what was fed before; logits (B, F, V).

    Draft i lies in row i of the cache. Rows with a smaller frontier are padded.
    """
    nodes = frontier_nodes(cache, drafts, places, are_chains=are_chains)
    known_tokens(model, nodes.tokens)
    logits = model.forward(nodes, cache)
    cache.commit([range(nodes.width)] * len(drafts))
    return logits


class Frontier(Protocol):
    """What is to be known of a draft whose nodes are fed level by level."""

    @property
    def tokens(self) -> Seq[int]: ...

    @property
    def depths(self) -> Seq[int]: ...

    @property
    def frontier(self) -> Seq[int]: ...

    def path(self, node: int) -> Seq[int]:
        """Nodes from below the root to this one."""
        ...


def frontier_list(
    cache: KVCache, drafts: Seq[Frontier], places: Seq[Place], width: int, *, are_chains: bool = False
) -> tuple[node_lists.NodeList, list[int]]:
    """`frontier_nodes` as a list without padding, and the place of every node in the rectangle (B, ``width``)."""
    num_fed = cache.lengths[places[0].slot] - places[0].trunk
    tokens, positions, columns, prefixes = list[int](), list[int](), list[int](), list[int]()
    above, numbers = list[list[int]](), list[int]()
    for row, (draft, place) in enumerate(zip(drafts, places, strict=True)):
        trunk, depths = place.trunk, draft.depths if draft.frontier else ()
        place.offset_of.update(zip(draft.frontier, range(num_fed, num_fed + width), strict=False))
        for j, node in enumerate(draft.frontier):
            tokens.append(draft.tokens[node])
            positions.append(trunk + depths[node] - 1)  # the pending token is part of the trunk by now
            columns.append(trunk + num_fed + j)
            if are_chains:  # all that lies before it are its ancestors
                prefixes.append(trunk + num_fed + 1)
            else:
                prefixes.append(trunk)
                above.append([trunk + place.offset_of[one] for one in draft.path(node)])
            numbers.append(row * width + j)
    counts = [len(draft.frontier) for draft in drafts]
    return node_lists.NodeList(tokens, positions, columns, prefixes, counts, above), numbers


def in_rectangle(found: torch.Tensor, numbers: Seq[int], num_rows: int, width: int) -> torch.Tensor:
    """What was computed for a list (n, ...) by row (B, F, ...): zeros where there is no node."""
    if len(numbers) < num_rows * width:
        found = found.new_zeros(num_rows * width, found.shape[1]).index_copy_(0, torch.tensor(numbers), found)
    return found.view(num_rows, width, -1)


def frontier_nodes(cache: KVCache, drafts: Seq[Frontier], places: Seq[Place], *, are_chains: bool) -> lm.Nodes:
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


def known_tokens(model: CausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """These tokens, in place; the drafter's last one stands for those of a larger vocabulary that it does not know."""
    return tokens.clamp_(max=model.vocab_size - 1)


def reach(model: CausalLM, row: Sequence) -> int:
    """How many tokens a model can draft after a row: the last is never fed; 0 or less for none."""
    context = model.context_length
    return sys.maxsize if context is None else context - len(row.token_ids) + 1


def neighbours(slots: Iterable[int]) -> list[list[int]]:
    """Runs of consecutive slots: 1 2 4 makes [1, 2], [4]."""
    runs: list[list[int]] = []
    for slot in sorted(slots):
        if runs and runs[-1][-1] == slot - 1:
            runs[-1].append(slot)
        else:
            runs.append([slot])
    return runs


def spans(slots: Iterable[int]) -> list[range]:
    """Runs of slots with small gaps: 1 2 4 9 makes 1..4 and 9."""
    spans: list[range] = []
    for slot in sorted(slots):
        if spans and slot - spans[-1].stop <= MAX_GAP:
            spans[-1] = range(spans[-1].start, slot + 1)
        else:
            spans.append(range(slot, slot + 1))
    return spans


def _shape(
    drafts: Seq[Frontier], places: Seq[Place], num_fed: int, width: int
) -> tuple[torch.Tensor, tuple[int, ...], torch.Tensor]:
    """Depths (B, S + F), counts and ancestors (B, F, S + F) of a frontier after S fed columns.

    Padding has depth -1, the position of the pending token: the next one may lie outside of the context.
    """
    depths = np.full((len(drafts), num_fed + width), -1, dtype=np.int64)
    ancestors = np.zeros((len(drafts), width, num_fed + width), dtype=bool)
    for i, (draft, place) in enumerate(zip(drafts, places, strict=True)):
        levels = draft.depths  # some are computed as they are asked for
        for node, offset in place.offset_of.items():
            depths[i, offset] = levels[node] - 1  # the pending token is part of the trunk by now
        for j, node in enumerate(draft.frontier):
            ancestors[i, j, [place.offset_of[above] for above in draft.path(node)]] = True
        for j in range(len(draft.frontier), width):
            ancestors[i, j, num_fed + j] = True
    return torch.from_numpy(depths), tuple(len(draft.frontier) for draft in drafts), torch.from_numpy(ancestors)

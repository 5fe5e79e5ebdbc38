"""Rows that run attention together: neighbours of like length and draft, so that none pays for a much longer one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from foretoken.model.masks import FULL, Masks, folded
from foretoken.model.nodes import FlatNodes, Nodes
from foretoken.model.promise import MOST_NODES
from foretoken.native.attention import DecodeAttention, PrefillAttention

if TYPE_CHECKING:
    from foretoken.native.library import Library

CALL_COLUMNS = 256
"""What one more call of attention costs, in columns of one row and node: some 20 microseconds on a CPU."""

BLOCK = 256
"""Nodes of a long chain that run attention together."""

NODES_PER_READING = 8
"""How many nodes cost as much arithmetic as reading the keys and values of a row costs."""


@dataclass(frozen=True)
class RowGroup:
    """Neighbouring rows of one forward.

    Args:
      rows: of the forward.
      nodes: theirs in the list.
      flat: how they lie in a rectangle.
      columns: T, over which they run attention.
      masks: (R or 1, 1, N, T) by kind of attention, None where every column is seen.
      head: columns before the first node, of one row with a chain; None for others.
      few, many: attention of these rows by kernels of the library's own; None where there are none.
    """

    rows: range
    nodes: range
    flat: FlatNodes
    columns: int
    masks: dict[str, torch.Tensor | None]
    head: int | None = None
    few: DecodeAttention | None = None
    many: PrefillAttention | None = None
    _folded: dict[tuple[str, int, int], torch.Tensor] = field(default_factory=dict)

    @property
    def blocks(self) -> Iterator[tuple[int, int, int]]:
        """Nodes that run together, from and to, and the columns that any of them sees.

        A long chain runs in blocks, since its first nodes see none of the last columns: half of all, for a prompt.
        """
        width = self.flat.shape[1]
        if self.head is None or width <= BLOCK:
            yield 0, width, self.columns
            return
        for first in range(0, width, BLOCK):
            last = min(first + BLOCK, width)
            yield first, last, self.columns if last == width else self.head + last

    def folded(self, kind: str, group_size: int, block: tuple[int, int, int]) -> torch.Tensor | None:
        """The mask of a block where the query heads of a group are more queries of one head: (R or 1, 1, g * N, T)."""
        mask = self.masks[kind]
        first, last, columns = block
        if mask is None:
            return None
        key = kind, group_size, first
        if key not in self._folded:
            self._folded[key] = folded(mask[:, :, first:last, :columns], group_size)
        return self._folded[key]


class Grouping:
    """Groups the rows of forwards over lists of nodes.

    Args:
      masks: of the model.
      kernels: by which few nodes run attention; None for torch's alone.
    """

    def __init__(self, masks: Masks, kernels: Library | None = None) -> None:
        self._masks = masks
        self._kernels = kernels

    def of(
        self,
        nodes: Nodes,
        counts: Sequence[int],
        starts: torch.Tensor,
        positions: torch.Tensor,
        trunks: Sequence[int],
        width: int | None = None,
        columns: int | None = None,
    ) -> tuple[RowGroup, ...]:
        """The groups of a forward, in the order of its rows.

        Args:
          counts: nodes of every row.
          starts, positions: as for `Masks.of`.
          trunks: columns of every row before the root of its draft.
          width: of the rectangle of every group; None for as few nodes as there need be.
          columns: T, and all rows are to run together; None for as few as there need be.
        """
        found, first = [], 0
        heads = [trunk + nodes.num_fed for trunk in trunks]
        all_rows = range(len(counts))
        for rows in [all_rows] if columns is not None else _alike(heads, counts):
            widest = max(counts[row] for row in rows)
            wide = width or widest
            length = columns or max(heads[row] for row in rows) + wide
            size = sum(counts[row] for row in rows)
            flat = FlatNodes([counts[row] for row in rows], wide, starts.device)
            before = [heads[row] for row in rows]
            masks = self._masks_of(nodes, rows, wide, before, starts, positions, length)
            are_chains = nodes.ancestors is None and nodes.num_fed == 0
            head = before[0] if are_chains and len(rows) == 1 else None
            seen = [min(heads[row] + counts[row], length) for row in rows]
            few = None if self._kernels is None else DecodeAttention(self._kernels, flat.counts, seen)
            many = None
            if few is not None and not few.is_few and are_chains:
                many = PrefillAttention(few.kernels, flat.counts, before, self._masks.windows)
            found.append(RowGroup(rows, range(first, first + size), flat, length, masks, head, few, many))
            first += size
        return tuple(found)

    def _masks_of(
        self,
        nodes: Nodes,
        rows: range,
        width: int,
        heads: Sequence[int],
        starts: torch.Tensor,
        positions: torch.Tensor,
        columns: int,
    ) -> dict[str, torch.Tensor | None]:
        kinds = self._masks.kinds
        if nodes.ancestors is None and nodes.num_fed == 0:
            sees_all = width == 1 and all(head + 1 == columns for head in heads)
            return {
                kind: None if kind == FULL and sees_all else self._masks.of_chains(kind, heads, width, columns)
                for kind in kinds
            }
        span = slice(rows.start, rows.stop)
        ancestors = None if nodes.ancestors is None else nodes.ancestors[span, :width, : nodes.num_fed + width]
        part = Nodes(
            nodes.tokens[span, :width],
            nodes.depths[span, : nodes.num_fed + width],
            tuple(nodes.counts[row] for row in rows),
            ancestors,
            nodes.num_fed,
        )
        masks = self._masks.of(part, starts[span], positions[span, : nodes.num_fed + width], columns, True)
        if isinstance(masks, dict):
            return dict(masks)
        return dict.fromkeys(kinds, masks)


def _alike(lengths: Sequence[int], counts: Sequence[int]) -> Iterator[range]:
    """Neighbours whose padding costs less than calls of their own would, and that are for the same kernels.

    Lengths 100 100 900 of one node each make two groups: two rows of 900 columns would cost 1,600 columns more than
    they need, and another call costs 256.
    """
    first, longest, widest = 0, lengths[0], counts[0]
    for row in range(1, len(lengths)):
        longer, wider = max(longest, lengths[row]), max(widest, counts[row])
        together = (row - first + 1) * _cost(longer, wider)
        apart = (row - first) * _cost(longest, widest) + _cost(lengths[row], counts[row]) + CALL_COLUMNS
        if together > apart or (widest <= MOST_NODES) != (counts[row] <= MOST_NODES):
            yield range(first, row)
            first, longer, wider = row, lengths[row], counts[row]
        longest, widest = longer, wider
    yield range(first, len(lengths))


def _cost(length: int, count: int) -> float:
    return length * (1 + count / NODES_PER_READING)

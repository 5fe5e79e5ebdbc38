"""Chosen columns of the rows of a cache, in a smaller cache of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch

from foredraft.errors import ShapeError
from foredraft.model.cache.ragged import KVCache
from foredraft.model.cache.storage import RaggedLayer

Columns: TypeAlias = torch.Tensor | tuple[range, ...]
"""Columns of one layer that are kept: int64 (heads, kept), ascending for every head, or ranges for all heads."""


class ViewCache(KVCache):
    """A cache whose rows hold chosen columns of rows of another one, at the positions that they have there.

    A forward over it attends to these columns and to what it writes behind them, and gives its nodes the positions
    that follow the whole row: positions are apart from columns. What it writes stays here. Keys are copied as they
    are, turned by the positions that they were written at. Both caches have one dtype.

    Sliding layers count their window in columns, so what they keep must be the last columns of the row, without gaps.

    Source: constant-size caches of drafters as in MagicDec (Sadhukhan et al. 2024, arXiv:2408.11049).
    Deviation: keys keep their original positions under every selection.
    """

    def end(self, row: int) -> int:
        """The number of columns of the other cache that a row of the view stands for."""
        return self.lengths[row] + self.offsets[row]

    @torch.inference_mode()
    def choose(self, row: int, source: KVCache, layers: Sequence[Columns]) -> None:
        """Make the chosen columns of a row of another cache those of this row, in every layer as many.

        Raises: ShapeError where layers keep different numbers of columns.
        """
        sizes = {_size(columns) for columns in layers}
        if len(sizes) != 1:
            raise ShapeError(f"the layers of a view keep {sorted(sizes)} columns; all must keep as many")
        (size,) = sizes
        self.reserve(size)
        for own, other, columns in zip(self.layers, source.layers, layers, strict=True):
            if not other.is_initialized:
                continue
            self._begin(own, other)
            for kept, whole in ((own.keys, other.keys), (own.values, other.values)):
                _copy(kept[row], whole[row], columns)
        self.lengths[row] = size
        self._hold(row, size)
        self.offsets[row] = source.lengths[row] - size

    @torch.inference_mode()
    def append(self, source: KVCache, spans: Mapping[int, range]) -> None:
        """Copy further columns of rows of the other cache behind what rows of the view hold, one operation a buffer.

        Args:
          spans: neighbouring columns by row; a row has one number in both caches.
        Raises: ShapeError for columns that do not begin where their row of the view ends.
        """
        for row, span in spans.items():
            if span.start != self.end(row):
                raise ShapeError(f"row {row} of the view ends at {self.end(row)}, not at {span.start}")
        spans = {row: span for row, span in spans.items() if span}
        if not spans:
            return
        self.reserve(max(self.lengths[row] + len(span) for row, span in spans.items()))
        rows = self._index(row for row, span in spans.items() for _ in span)
        targets = self._index(self.lengths[row] + i for row, span in spans.items() for i in range(len(span)))
        sources = self._index(column for span in spans.values() for column in span)
        for own, other in zip(self.layers, source.layers, strict=True):
            if other.is_initialized:
                self._begin(own, other)
                own.keys[rows, :, targets] = other.keys[rows, :, sources]  # (columns, heads, head_dim)
                own.values[rows, :, targets] = other.values[rows, :, sources]
        for row, span in spans.items():
            self.lengths[row] += len(span)
            self._hold(row, self.lengths[row])

    @torch.inference_mode()
    def give_back(self, row: int, target: KVCache) -> None:
        """Commit the columns of a row that lie behind the end of that row of the other cache there, too.

        Of a view of 100 columns whose end is 950, where the other cache holds 945, the columns 95 to 99.

        Raises: ShapeError where the view does not hold all of them.
        """
        start, length = target.lengths[row], self.lengths[row]
        count = self.end(row) - start
        if count <= 0:
            return
        if count > length:
            raise ShapeError(f"row {row} of the view holds {length} columns; {count} are missing in the other one")
        target.reserve(start + count)
        for own, other in zip(self.layers, target.layers, strict=True):
            if own.is_initialized:
                self._begin(other, own)
                for kept, whole in ((own.keys, other.keys), (own.values, other.values)):
                    whole[row, :, start : start + count] = kept[row, :, length - count : length]
        target.commit([range(count)], row)

    def _index(self, numbers: object) -> torch.Tensor:
        return torch.tensor(list(numbers), device=self.device)  # type: ignore[call-overload]

    @staticmethod
    def _begin(own: RaggedLayer, other: RaggedLayer) -> None:
        if not own.is_initialized:
            own.begin(other.keys[:1], other.values[:1])


def _size(columns: Columns) -> int:
    return columns.shape[1] if isinstance(columns, torch.Tensor) else sum(map(len, columns))


def _copy(kept: torch.Tensor, whole: torch.Tensor, columns: Columns) -> None:
    """Chosen columns of one row: from (heads, T, head_dim) to the first ones of (heads, capacity, head_dim)."""
    if isinstance(columns, torch.Tensor):
        heads = torch.arange(len(columns), device=columns.device)[:, None]
        kept[:, : columns.shape[1]] = whole[heads, columns]
        return
    start = 0
    for span in columns:
        kept[:, start : start + len(span)] = whole[:, span.start : span.stop]
        start += len(span)

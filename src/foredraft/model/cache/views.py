"""Caches that contain a selection of another cache's columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch

from foredraft.errors import ShapeError
from foredraft.model.cache.ragged import KVCache
from foredraft.model.cache.storage import RaggedLayer

Columns: TypeAlias = torch.Tensor | tuple[range, ...]
"""Selected columns of one layer: int64 (heads, kept), ascending for every head, or ranges that apply to all heads."""


class ViewCache(KVCache):
    """A cache whose rows contain selected columns of another cache's rows, at their original positions.

    A forward pass over a view attends to these columns and to the nodes that it writes after them. The nodes get the
    positions that follow the whole row, so positions differ from columns. Writes stay in the view. Keys are copied with
    the rotary positions at which they were written. Both caches have the same dtype.

    Sliding layers count their window in columns, so they must keep the last columns of the row, without gaps.

    Source: constant-size caches of drafters as in MagicDec (Sadhukhan et al. 2024, arXiv:2408.11049).
    Deviation: keys keep their original positions under every selection.
    """

    def end(self, row: int) -> int:
        """Return the number of columns of the other cache that a row of the view represents."""
        return self.lengths[row] + self.offsets[row]

    @torch.inference_mode()
    def choose(self, row: int, source: KVCache, layers: Sequence[Columns]) -> None:
        """Replace a row of the view by selected columns of a row of another cache; every layer keeps the same number.

        Raises: ShapeError if layers keep different numbers of columns.
        """
        sizes = {_size(columns) for columns in layers}
        if len(sizes) != 1:
            raise ShapeError(f"the layers of a view keep {sorted(sizes)} columns; all must keep the same number")
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
        """Copy further columns of the other cache's rows to the ends of the view's rows, in one operation per buffer.

        Args:
          spans: consecutive columns by row; a row has the same index in both caches.
        Raises: ShapeError for columns that do not begin where the view's row ends.
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
        """Copy the columns after the end of a row of the other cache from the view into that row, and commit them.

        If the view has 100 columns and its end is 950, and the other cache has 945, these are columns 95 to 99.

        Raises: ShapeError if the view does not contain all of them.
        """
        start, length = target.lengths[row], self.lengths[row]
        count = self.end(row) - start
        if count <= 0:
            return
        if count > length:
            raise ShapeError(f"row {row} of the view has {length} columns, but the other cache lacks {count}")
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
    """Copy selected columns of one row (heads, T, head_dim) to the first columns of (heads, capacity, head_dim)."""
    if isinstance(columns, torch.Tensor):
        heads = torch.arange(len(columns), device=columns.device)[:, None]
        kept[:, : columns.shape[1]] = whole[heads, columns]
        return
    start = 0
    for span in columns:
        kept[:, start : start + len(span)] = whole[:, span.start : span.stop]
        start += len(span)

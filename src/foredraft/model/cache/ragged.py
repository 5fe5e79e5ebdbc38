"""Keys and values of many rows of different length, written by unmodified models; and all caches of an engine.

This is the only file that owns lengths, commit and rollback. A row has one slot in all caches of an engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, TypeAlias

import torch
from transformers.cache_utils import Cache

from foredraft.errors import ShapeError
from foredraft.model.cache import storage
from foredraft.model.cache.storage import (
    SMALL_COLUMNS,
    SMALL_ROWS,
    Device,
    RaggedLayer,
    Rounded,
    Window,
    enlarged,
    fitting,
    grown,
    held,
)
from foredraft.model.nodes import FlatNodes

KEPT_COLUMNS = 64
"""Columns behind a row that drafts have written, which are not given back."""

RowStates: TypeAlias = tuple[tuple[torch.Tensor, torch.Tensor] | None, ...]
"""Keys and values of one row, layer by layer; None for a layer that keeps none."""


class KVCache(Cache):  # type: ignore[misc]
    """A preallocated `transformers` cache whose rows have lengths of their own.

    ``lengths[row]`` columns of a row are committed; a forward writes its nodes behind them, and nothing counts
    before ``commit``. Columns grow in steps, rows too. Sliding-window layers keep every position and are
    restricted by the mask, so that rollback stays exact after the window has filled.

    Args:
      num_layers: of the model.
      num_rows: rows to start with, of length 0.
      capacity: columns to start with.
      device: of the model, for index tensors.
      dtype: that keys and values are rounded to when they are written: also its own are so for a forward.

    Attributes:
      offsets: one per row, see `row_offsets`.
      max_cells: rows times columns that are to be allocated at most, unless more are asked for at once. Near the limit
        the cache grows to just below it, and gives columns back for rows, or rows for columns. See `limit`.
      memory: another object after buffers were allocated.
    """

    def __init__(
        self, num_layers: int, *, num_rows: int = 0, capacity: int = 256, device: Device = "cpu", dtype: Rounded = None
    ) -> None:
        super().__init__(layers=[RaggedLayer(self) for _ in range(num_layers)])
        self.device = torch.device(device)
        self.dtype = dtype
        self.lengths: list[int] = [0] * num_rows
        self.offsets: list[int] = [0] * num_rows
        self.capacity = capacity
        self.num_slots = max(num_rows, 1)
        self.window = Window(0, 1, 0, None, 0)
        self.max_cells: int | None = None
        self._least = capacity, 1  # columns and rows, below which it does not shrink
        self._needed_columns = self._needed_rows = 0  # at most since `shrink`
        self.memory = object()
        self._held = [0] * self.num_slots  # columns that have memory, where it is lazy
        self.addresses: Any = None  # of the buffers, as the native program keeps them
        self._movable: list[Any] = []  # the buffers, as columns of them are moved
        self._movable_memory: object = None

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    @property
    def is_lazy(self) -> bool:
        """Whether rows take memory for their own columns alone; else each takes as much as the longest."""
        return storage.IS_LAZY and self.device.type == "cpu"

    @property
    def num_bytes(self) -> int:
        """Memory that the buffers hold: of all columns, or where it is lazy of those that were written."""
        if self.is_lazy:
            return self.column_bytes * sum(self._held)
        return sum(buffer.nbytes for buffer in self._buffers())

    @property
    def column_bytes(self) -> int:
        """Memory of one column of one row."""
        return sum(buffer.nbytes // (buffer.shape[0] * buffer.shape[2]) for buffer in self._buffers())

    # -- one forward -------------------------------------------------------------------------------------------

    def open(
        self,
        first_row: int,
        num_rows: int,
        width: int,
        flat: FlatNodes | None = None,
        ends: torch.Tensor | None = None,
    ) -> int:
        """Make room for ``width`` new columns after the committed ones of the given rows.

        Args:
          flat: the nodes come as a list.
          ends: (B, 1), the committed lengths, where they are on the device already.
        Returns: the number of columns T that attention will run over.
        """
        lengths = self.row_lengths(first_row, num_rows)
        num_columns = max(lengths) + width
        self.reserve(num_columns, first_row + num_rows)
        columns = None
        if (flat is not None and not flat.is_full) or min(lengths) != max(lengths):
            ends = torch.tensor(lengths, device=self.device)[:, None] if ends is None else ends
            columns = ends + torch.arange(width, device=self.device)
        self.window = Window(first_row, num_rows, max(lengths), columns, num_columns, flat)
        return num_columns

    def row_lengths(self, first_row: int, num_rows: int) -> list[int]:
        """Committed lengths of some rows; 0 for slots after the last row, which may pad a batch."""
        lengths = self.lengths[first_row : first_row + num_rows]
        return lengths + [0] * (num_rows - len(lengths))

    def row_offsets(self, first_row: int, num_rows: int) -> list[int] | None:
        """How far the positions of the next tokens of some rows are ahead of their columns; None for nowhere."""
        offsets = self.offsets[first_row : first_row + num_rows]
        return offsets + [0] * (num_rows - len(offsets)) if any(offsets) else None

    def reserve(self, capacity: int, num_slots: int = 0) -> None:
        """Grow to at least ``capacity`` columns and ``num_slots`` rows, in steps, one buffer after the other.

        Buffers that move anyway are cut in the other direction to what rows need now, where they need far less.
        """
        if capacity > self._needed_columns:
            self._needed_columns = capacity
        if num_slots > self._needed_rows:
            self._needed_rows = num_slots
        if capacity <= self.capacity and num_slots <= self.num_slots:
            return
        columns, rows = max(capacity, *self.lengths, 1), max(num_slots, self.num_rows, 1)
        if self.is_lazy:
            self._resize(enlarged(self.capacity, columns, SMALL_COLUMNS), enlarged(self.num_slots, rows, SMALL_ROWS))
            return
        self._resize(*grown((self.capacity, columns), (self.num_slots, rows), self.max_cells, self._least))

    def limit(self, max_cells: int) -> None:
        """Keep to so many rows times columns from now on, where each row takes as much as the longest."""
        if self.is_lazy:
            return
        self.max_cells, self.capacity = max_cells, min(self.capacity, max_cells)
        self._least = min(self._least[0], max_cells), 1

    def shrink(self) -> bool:
        """Give back what has not been needed since the last call, where that is half or more; whether it was.

        Call it between forwards, and so seldom that rows come and go between two calls: buffers are copied. Where it is
        lazy, rows have left nothing behind.
        """
        if self.is_lazy:
            return False
        most_columns, most_rows = max(self._needed_columns, *self.lengths, 0), max(self._needed_rows, self.num_rows)
        self._needed_columns = self._needed_rows = 0
        columns, rows = fitting((most_columns, self.capacity), (most_rows, self.num_slots), self._least)
        if 2 * columns * rows > self.capacity * self.num_slots:
            return False
        self._resize(columns, rows)
        return True

    def _hold(self, row: int, length: int) -> None:
        """A row ends here now: what has been held behind it is given back, where that is more than drafts need."""
        if self.is_lazy and self._held[row] > length + KEPT_COLUMNS * (length > 0):
            for buffer in self._buffers():
                storage.give_back(buffer, row, length)
            self._held[row] = length
        self._held[row] = max(self._held[row], length)

    def release(self) -> bool:
        """Give back all memory of a cache without rows; whether there was any."""
        if self.lengths or not any(layer.is_initialized for layer in self.layers):
            return False
        for layer in self.layers:
            layer.release()
        self.capacity, self.num_slots = self._least
        self._held = [0] * self.num_slots
        self._needed_columns = self._needed_rows = 0
        self._movable = []
        return True

    def _resize(self, capacity: int, num_slots: int) -> None:
        self._movable = []  # else the old buffers would be kept
        try:
            for layer in self.layers:
                layer.resize(num_slots, capacity)
        finally:  # what all layers hold, where there was no memory for more
            self.num_slots, self.capacity = held(self.layers, num_slots, capacity)
            self._held = [*self.lengths[: self.num_slots], *[0] * (self.num_slots - self.num_rows)]

    def commit(self, paths: Sequence[Sequence[int]], first_row: int = 0) -> None:
        """Keep the accepted nodes of every row, in path order, and forget the others.

        ``paths[i]`` are node indices of row ``first_row + i``, ascending, root first; an empty path commits nothing.
        Nodes of length L cache lie in columns L + node; path (0, 2, 3) copies columns L + 2, L + 3 to L + 1, L + 2.
        """
        rows, sources, targets = [], [], []
        for row, path in enumerate(paths, first_row):
            length = self.lengths[row]
            for i, node in enumerate(path):
                if node != i:
                    rows.append(row)
                    sources.append(length + node)
                    targets.append(length + i)
        if rows:
            self._move_columns(rows, sources, targets)
        for row, path in enumerate(paths, first_row):
            self.lengths[row] += len(path)
            if self.lengths[row] > self._held[row]:
                self._held[row] = self.lengths[row]

    @torch.inference_mode()
    def _move_columns(self, rows: Sequence[int], sources: Sequence[int], targets: Sequence[int]) -> None:
        if self._movable_memory is not self.memory or not self._movable:
            self._movable = []  # else the old buffers would be kept
            if self.device.type == "cpu":
                self._movable += storage.arrays_of(self._buffers())
            else:  # done when a draft first leaves columns to be moved, and again after the cache has grown
                self._movable += storage.slabs_of(self.layers)
                self.memory = object()
            self._movable_memory = self.memory
        if self.device.type == "cpu":
            storage.move_columns(self._movable, rows, sources, targets)
        else:
            storage.move_in_slabs(self._movable, rows, sources, targets)

    def rollback(self, lengths: Sequence[int], first_row: int = 0) -> None:
        """Forget everything after the given lengths. Costs nothing.

        Raises: ShapeError when a length is negative or longer than what is committed.
        """
        for row, length in enumerate(lengths, first_row):
            if not 0 <= length <= self.lengths[row]:
                raise ShapeError(f"row {row} holds {self.lengths[row]} committed columns; cannot roll back to {length}")
        self.lengths[first_row : first_row + len(lengths)] = lengths

    @torch.inference_mode()
    def kept(self, row: int, first_column: int, last_column: int) -> ExitStack:
        """Let the block write over columns ``first_column`` to ``last_column - 1`` of a row, and put them back.

        Inside, the row ends at ``first_column``, so that a forward writes there; afterwards it is as long as before.

        Raises: ShapeError for columns that are not all committed.
        """
        length = self.lengths[row]
        if not 0 <= first_column <= last_column <= length:
            raise ShapeError(
                f"columns {first_column}..{last_column - 1} of row {row} cannot be kept: it holds {length} columns"
            )
        columns = slice(first_column, last_column)
        saved = [buffer[row, :, columns].clone() for buffer in self._buffers()]
        stack = ExitStack()  # a generator that Ctrl-C leaves suspended would write them when it is collected
        stack.callback(self._put_back, row, columns, saved, length)
        self.lengths[row] = first_column
        return stack

    @torch.inference_mode()
    def _put_back(self, row: int, columns: slice, saved: Sequence[torch.Tensor], length: int) -> None:
        for buffer, states in zip(self._buffers(), saved, strict=True):
            buffer[row, :, columns] = states
        self.lengths[row] = length

    # -- rows --------------------------------------------------------------------------------------------------

    def add_rows(self, num_rows: int = 1) -> int:
        """Append empty rows; returns the index of the first."""
        first = self.num_rows
        self.lengths.extend([0] * num_rows)
        self.offsets.extend([0] * num_rows)
        self.reserve(0, self.num_rows)
        return first

    def clear(self) -> None:
        """Drop all rows."""
        self.lengths, self.offsets = [], []
        for row in range(self.num_slots):
            self._hold(row, 0)

    @torch.inference_mode()
    def erase(self, row: int | None = None, first_column: int = 0) -> None:
        """Zero the columns of a row, or of all rows, from the given one on, the uncommitted ones too.

        A NaN left behind would reach the next row in this place through masked columns, since 0 * NaN is NaN.
        """
        rows = range(self.num_slots) if row is None else (row,)
        for buffer in self._buffers():
            for each in rows:
                storage.erase(buffer, each, first_column)
        for each in rows:
            self._held[each] = min(self._held[each], first_column)

    def fork(self, row: int) -> int:
        """Append a copy of a row; returns its index."""
        copy = self.add_rows()
        self.move(row, copy)
        return copy

    @torch.inference_mode()
    def export(self, row: int, length: int) -> RowStates:
        """Copies of the first columns of a row, layer by layer: keys and values (heads, length, head_dim)."""
        return tuple(
            (layer.keys[row, :, :length].clone(), layer.values[row, :, :length].clone())
            if layer.is_initialized
            else None
            for layer in self.layers
        )

    @torch.inference_mode()
    def load(self, row: int, states: RowStates, length: int) -> None:
        """Make the first ``length`` exported columns the committed ones of a row."""
        self.reserve(length)
        for layer, pair in zip(self.layers, states, strict=True):
            if pair is None:
                continue
            keys, values = pair
            if not layer.is_initialized:
                layer.begin(keys[None], values[None])
            layer.keys[row, :, :length] = keys[:, :length]
            layer.values[row, :, :length] = values[:, :length]
        self.lengths[row] = length
        self._hold(row, length)

    @torch.inference_mode()
    def swap(self, row: int, other: int) -> None:
        """Exchange two rows."""
        if row == other:
            return
        length, other_length = self.lengths[row], self.lengths[other]
        for buffer in self._buffers():
            kept = buffer[row, :, :length].clone()
            buffer[row, :, :other_length] = buffer[other, :, :other_length]
            buffer[other, :, :length] = kept
        for each in (self.lengths, self.offsets):
            each[row], each[other] = each[other], each[row]
        self._hold(row, other_length)
        self._hold(other, length)

    def remove(self, row: int) -> None:
        """Drop a row; the last row takes its place."""
        last = self.num_rows - 1
        if row != last:
            self.move(last, row)
        self.lengths.pop()
        self.offsets.pop()
        self._hold(last, 0)

    @torch.inference_mode()
    def reorder(self, rows: Sequence[int]) -> None:
        """Make the rows these ones, in this order; a row may appear several times or not at all."""
        index = torch.tensor(list(rows), dtype=torch.long, device=self.device)
        lengths, offsets = ([each[row] for row in rows] for each in (self.lengths, self.offsets))
        self.lengths, self.offsets = self.lengths[: len(lengths)], self.offsets[: len(lengths)]
        if len(lengths) > self.num_rows:
            self.add_rows(len(lengths) - self.num_rows)
        longest = max(lengths, default=0)
        for buffer in self._buffers():
            buffer[: len(lengths), :, :longest] = buffer[index, :, :longest]
        self.lengths, self.offsets = lengths, offsets
        for row in range(self.num_slots):
            self._hold(row, lengths[row] if row < len(lengths) else 0)

    @torch.inference_mode()
    def move(self, row: int, target: int) -> None:
        """Put a copy of a row in the place of another."""
        length = self.lengths[row]
        for buffer in self._buffers():
            buffer[target, :, :length] = buffer[row, :, :length]
        self.lengths[target], self.offsets[target] = length, self.offsets[row]
        self._hold(target, length)

    def _buffers(self) -> list[torch.Tensor]:
        initialized = (layer for layer in self.layers if layer.is_initialized)
        return [buffer for layer in initialized for buffer in (layer.keys, layer.values)]


class CacheGroup:
    """All caches of an engine: adds, moves, copies and removes rows in all of them. Their lengths differ.

    Args:
      caches: without rows, or with as many rows as the others; the target's comes first.
    """

    def __init__(self, caches: Sequence[KVCache]) -> None:
        self.caches = tuple(caches)

    def __iter__(self) -> Iterator[KVCache]:
        return iter(self.caches)

    @property
    def num_bytes(self) -> int:
        """Memory that all buffers hold."""
        return sum(cache.num_bytes for cache in self.caches)

    def add(self) -> int:
        """Append an empty row; its slot."""
        slots = [cache.add_rows() for cache in self.caches]
        return slots[0] if slots else -1

    def fork(self, slot: int) -> int:
        """Append a copy of a row; its slot."""
        slots = [cache.fork(slot) for cache in self.caches]
        return slots[0] if slots else -1

    def swap(self, slot: int, other: int) -> None:
        """Exchange two rows."""
        for cache in self.caches:
            cache.swap(slot, other)

    def move(self, slot: int, target: int) -> None:
        """Put a row in the place of another, which leaves; its own is free."""
        for cache in self.caches:
            cache.move(slot, target)

    def remove(self, slot: int) -> None:
        """Drop a row; the last row takes its place."""
        for cache in self.caches:
            cache.remove(slot)

    def erase(self, slot: int | None = None) -> None:
        """Zero all columns of a row, or of all rows, which may hold what is not finite."""
        for cache in self.caches:
            cache.erase(slot)

    def clear(self) -> None:
        """Drop all rows."""
        for cache in self.caches:
            cache.clear()

    def shrink(self) -> bool:
        """Give back what no row has needed since the last call; whether there was anything."""
        return sum(cache.shrink() for cache in self.caches) > 0

    def release(self) -> bool:
        """Give back all memory of caches without rows; whether there was any."""
        return sum(cache.release() for cache in self.caches) > 0

"""Key-value cache for rows of different lengths, written by unmodified models, and the group of all caches of an
engine.

Only `foredraft.model.cache.ragged` changes lengths, commits and rolls back. A row has one slot in all caches of an
engine.
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
"""Number of columns after the end of a row whose memory is kept. Drafts write into columns after the end of a row."""

RowStates: TypeAlias = tuple[tuple[torch.Tensor, torch.Tensor] | None, ...]
"""Keys and values of one row, layer by layer; None for a layer that stores none."""


class KVCache(Cache):  # type: ignore[misc]
    """A preallocated `transformers` cache in which every row has its own length.

    ``lengths[row]`` columns of a row are committed. A forward pass writes its nodes after the committed columns, and
    these nodes count only after ``commit``. Columns and rows grow in steps. Sliding-window layers keep every position
    and are restricted by the mask, so rollback stays exact after the window has filled.

    Args:
      num_layers: number of layers of the model.
      num_rows: initial number of rows, each of length 0.
      capacity: initial number of columns.
      device: device of the model, for index tensors.
      dtype: dtype to which keys and values are rounded when they are written. A forward pass also reads its own nodes
        rounded.

    Attributes:
      offsets: distance between positions and columns, one per row; see `row_offsets`.
      max_cells: limit on rows times columns to allocate, exceeded only if one call needs more. Near the limit the cache
        grows to just below it, and trades columns for rows or rows for columns. See `limit`.
      memory: token object that is replaced whenever buffers are allocated.
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
        self._least = capacity, 1  # minimum columns and rows when shrinking
        self._needed_columns = self._needed_rows = 0  # maximum since the last `shrink`
        self.memory = object()
        self._held = [0] * self.num_slots  # columns with memory, by slot, if memory is lazy
        self.addresses: Any = None  # buffer addresses, cached by the native program
        self._movable: list[Any] = []  # views of the buffers, for moving columns
        self._movable_memory: object = None

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    @property
    def is_lazy(self) -> bool:
        """True if rows take memory only for their own columns. If False, each row takes as much as the longest row."""
        return storage.IS_LAZY and self.device.type == "cpu"

    @property
    def num_bytes(self) -> int:
        """Memory of the buffers in bytes: of all columns, or of the written ones if memory is lazy."""
        if self.is_lazy:
            return self.column_bytes * sum(self._held)
        return sum(buffer.nbytes for buffer in self._buffers())

    @property
    def column_bytes(self) -> int:
        """Memory of one column of one row, in bytes."""
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
        """Reserve ``width`` new columns after the committed ones of the given rows.

        Args:
          flat: layout of the nodes, if they come as a list.
          ends: (B, 1), the committed lengths, if already on the device.
        Returns: the number of columns T that attention will read.
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
        """Return the committed lengths of some rows; 0 for slots after the last row, which may pad a batch."""
        lengths = self.lengths[first_row : first_row + num_rows]
        return lengths + [0] * (num_rows - len(lengths))

    def row_offsets(self, first_row: int, num_rows: int) -> list[int] | None:
        """Return the distance between positions and columns for the next tokens of some rows; None if all are 0."""
        offsets = self.offsets[first_row : first_row + num_rows]
        return offsets + [0] * (num_rows - len(offsets)) if any(offsets) else None

    def reserve(self, capacity: int, num_slots: int = 0) -> None:
        """Grow to at least ``capacity`` columns and ``num_slots`` rows, in steps, one buffer after the other.

        Buffers that must be copied anyway shrink in the other dimension if rows need far less of it.
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
        """Limit rows times columns to ``max_cells``. Without effect if memory is lazy."""
        if self.is_lazy:
            return
        self.max_cells, self.capacity = max_cells, min(self.capacity, max_cells)
        self._least = min(self._least[0], max_cells), 1

    def shrink(self) -> bool:
        """Free memory that was not needed since the last call, if that is at least half of it. Return whether any was
        freed.

        Call `shrink` between forward passes, and rarely, because buffers are copied. Lazy memory needs no shrinking.
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
        """Record the new end of a row, and free the memory after it if that is more than drafts need."""
        if self.is_lazy and self._held[row] > length + KEPT_COLUMNS * (length > 0):
            for buffer in self._buffers():
                storage.give_back(buffer, row, length)
            self._held[row] = length
        self._held[row] = max(self._held[row], length)

    def release(self) -> bool:
        """Free all memory of a cache without rows; return whether there was any."""
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
        self._movable = []  # a view would keep the old buffers alive
        try:
            for layer in self.layers:
                layer.resize(num_slots, capacity)
        finally:  # if memory ran out, use the size that all layers have
            self.num_slots, self.capacity = held(self.layers, num_slots, capacity)
            self._held = [*self.lengths[: self.num_slots], *[0] * (self.num_slots - self.num_rows)]

    def commit(self, paths: Sequence[Sequence[int]], first_row: int = 0) -> None:
        """Keep the accepted nodes of every row, in path order, and drop the others.

        ``paths[i]`` contains node indices of row ``first_row + i``, ascending, root first; an empty path commits
        nothing. In a row of length L, node n is in column L + n; path (0, 2, 3) copies columns L + 2, L + 3 to L + 1, L
        + 2.
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
            self._movable = []  # a view would keep the old buffers alive
            if self.device.type == "cpu":
                self._movable += storage.arrays_of(self._buffers())
            else:  # runs when columns first have to move, and again after the cache has grown
                self._movable += storage.slabs_of(self.layers)
                self.memory = object()
            self._movable_memory = self.memory
        if self.device.type == "cpu":
            storage.move_columns(self._movable, rows, sources, targets)
        else:
            storage.move_in_slabs(self._movable, rows, sources, targets)

    def rollback(self, lengths: Sequence[int], first_row: int = 0) -> None:
        """Drop everything after the given lengths. No data is moved.

        Raises: ShapeError if a length is negative or longer than the committed part.
        """
        for row, length in enumerate(lengths, first_row):
            if not 0 <= length <= self.lengths[row]:
                raise ShapeError(f"row {row} has {self.lengths[row]} committed columns; cannot roll back to {length}")
        self.lengths[first_row : first_row + len(lengths)] = lengths

    @torch.inference_mode()
    def kept(self, row: int, first_column: int, last_column: int) -> ExitStack:
        """Return a context in which columns ``first_column`` to ``last_column - 1`` of a row may be overwritten.

        Inside, the row ends at ``first_column``, so a forward pass writes there. At exit the columns and the length are
        restored.

        Raises: ShapeError for columns that are not all committed.
        """
        length = self.lengths[row]
        if not 0 <= first_column <= last_column <= length:
            raise ShapeError(
                f"columns {first_column}..{last_column - 1} of row {row} cannot be kept: it has {length} columns"
            )
        columns = slice(first_column, last_column)
        saved = [buffer[row, :, columns].clone() for buffer in self._buffers()]
        stack = ExitStack()  # a generator suspended by Ctrl-C would restore them only when it is collected
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
        """Append empty rows and return the index of the first."""
        first = self.num_rows
        self.lengths.extend([0] * num_rows)
        self.offsets.extend([0] * num_rows)
        self.reserve(0, self.num_rows)
        return first

    def clear(self) -> None:
        """Remove all rows."""
        self.lengths, self.offsets = [], []
        for row in range(self.num_slots):
            self._hold(row, 0)

    @torch.inference_mode()
    def erase(self, row: int | None = None, first_column: int = 0) -> None:
        """Zero the columns of a row, or of all rows, from ``first_column`` on, including uncommitted ones.

        A leftover NaN would reach the next row in this slot through masked columns, since 0 * NaN is NaN.
        """
        rows = range(self.num_slots) if row is None else (row,)
        for buffer in self._buffers():
            for each in rows:
                storage.erase(buffer, each, first_column)
        for each in rows:
            self._held[each] = min(self._held[each], first_column)

    def fork(self, row: int) -> int:
        """Append a copy of a row and return its index."""
        copy = self.add_rows()
        self.move(row, copy)
        return copy

    @torch.inference_mode()
    def export(self, row: int, length: int) -> RowStates:
        """Return copies of the first columns of a row, layer by layer: keys and values (heads, length, head_dim)."""
        return tuple(
            (layer.keys[row, :, :length].clone(), layer.values[row, :, :length].clone())
            if layer.is_initialized
            else None
            for layer in self.layers
        )

    @torch.inference_mode()
    def load(self, row: int, states: RowStates, length: int) -> None:
        """Replace the committed columns of a row by the first ``length`` exported columns."""
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
        """Remove a row; the last row takes its slot."""
        last = self.num_rows - 1
        if row != last:
            self.move(last, row)
        self.lengths.pop()
        self.offsets.pop()
        self._hold(last, 0)

    @torch.inference_mode()
    def reorder(self, rows: Sequence[int]) -> None:
        """Replace the rows by the given rows, in the given order. A row may appear several times or not at all."""
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
        """Copy a row over another row."""
        length = self.lengths[row]
        for buffer in self._buffers():
            buffer[target, :, :length] = buffer[row, :, :length]
        self.lengths[target], self.offsets[target] = length, self.offsets[row]
        self._hold(target, length)

    def _buffers(self) -> list[torch.Tensor]:
        initialized = (layer for layer in self.layers if layer.is_initialized)
        return [buffer for layer in initialized for buffer in (layer.keys, layer.values)]


class CacheGroup:
    """All caches of an engine. Rows are added, moved, copied and removed in all of them; lengths differ per cache.

    Args:
      caches: caches with equal numbers of rows; the target's comes first.
    """

    def __init__(self, caches: Sequence[KVCache]) -> None:
        self.caches = tuple(caches)

    def __iter__(self) -> Iterator[KVCache]:
        return iter(self.caches)

    @property
    def num_bytes(self) -> int:
        """Memory of all buffers, in bytes."""
        return sum(cache.num_bytes for cache in self.caches)

    def add(self) -> int:
        """Append an empty row and return its slot."""
        slots = [cache.add_rows() for cache in self.caches]
        return slots[0] if slots else -1

    def fork(self, slot: int) -> int:
        """Append a copy of a row and return its slot."""
        slots = [cache.fork(slot) for cache in self.caches]
        return slots[0] if slots else -1

    def swap(self, slot: int, other: int) -> None:
        """Exchange two rows."""
        for cache in self.caches:
            cache.swap(slot, other)

    def move(self, slot: int, target: int) -> None:
        """Copy a row over another row, whose content is lost. The old slot is then free."""
        for cache in self.caches:
            cache.move(slot, target)

    def remove(self, slot: int) -> None:
        """Remove a row; the last row takes its slot."""
        for cache in self.caches:
            cache.remove(slot)

    def erase(self, slot: int | None = None) -> None:
        """Zero all columns of a row, or of all rows, which may contain NaN or infinity."""
        for cache in self.caches:
            cache.erase(slot)

    def clear(self) -> None:
        """Remove all rows."""
        for cache in self.caches:
            cache.clear()

    def shrink(self) -> bool:
        """Free memory that no row has needed since the last call; return whether any was freed."""
        return sum(cache.shrink() for cache in self.caches) > 0

    def release(self) -> bool:
        """Free all memory of caches without rows; return whether there was any."""
        return sum(cache.release() for cache in self.caches) > 0

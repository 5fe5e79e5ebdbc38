"""Memory of a cache: keys and values of one layer, and the place where a forward pass writes them.

On Linux, CPU memory is lazy: pages that have never been written read as zeros and take no memory. A rectangle of rows
and columns then costs only the memory of its rows' contents, even next to a long row. On other systems, and on
accelerators, the whole rectangle takes memory.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from math import prod
from typing import Any, TypeAlias

import numpy as np
import torch
from transformers.cache_utils import CacheLayerMixin

from foredraft.devices import upload
from foredraft.model.nodes import FlatNodes
from foredraft.native.abi import SCALE_BYTES

Device: TypeAlias = torch.device | str
Rounded: TypeAlias = torch.dtype | None
"""Dtype to which a cache rounds keys and values; None for no rounding."""


def stored(states: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return states (..., D) in the storage format of a cache of this dtype; for int8 (..., D + 4).

    In int8, a head of a token is D integers from -127 to 127, followed by the 4 bytes of their float32 scale. If the
    largest number is 2.54, the scale is 0.02 and 1.0 becomes 50. Every head is rounded independently.
    """
    if dtype is not torch.int8:
        return states.to(dtype)
    wide = states.float()
    scales = wide.abs().amax(-1, keepdim=True) / 127
    codes = (wide / scales).nan_to_num(0.0).round().clamp(-127, 127).to(torch.int8)
    return torch.cat([codes, scales.contiguous().view(torch.int8)], -1)


def restored(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return states (..., D) in this dtype from the format of `stored`."""
    if rows.dtype is not torch.int8:
        return rows.to(dtype)
    scales = rows[..., -SCALE_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return (rows[..., :-SCALE_BYTES] * scales).to(dtype)


class RaggedLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer: two buffers (rows, heads, capacity, head_dim), zero where never written.

    If the cache has its own dtype, the buffers contain states as `stored`, and a forward pass reads them `restored`.
    Buffers start as zeros because even masked columns must be finite: 0 * NaN is NaN.

    Args:
      cache: the `KVCache` of this layer, which has its rows, columns, dtype and window.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, cache: Any) -> None:
        super().__init__()
        self._cache = cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate both buffers for states of the shape (B, heads, N, head_dim)."""
        self.begin(*(self._stored(states[:1, :, :1]) for states in (key_states, value_states)))

    def begin(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Allocate both buffers with the heads, head_dim, dtype and device of stored keys and values."""
        self.keys = self._allocate(keys, self._cache.num_slots, self._cache.capacity)
        self.values = self._allocate(values, self._cache.num_slots, self._cache.capacity)
        self.is_initialized = True
        self._cache.memory = object()

    @staticmethod
    def _allocate(like: torch.Tensor, num_slots: int, capacity: int) -> torch.Tensor:
        return zeros((num_slots, like.shape[1], capacity, like.shape[3]), like.dtype, like.device)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write (B, heads, N, head_dim) at the offsets of the current rows; return all columns up to the last one."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._write(self.keys, key_states), self._write(self.values, value_states)

    def _stored(self, states: torch.Tensor) -> torch.Tensor:
        return states if self._cache.dtype is None else stored(states, self._cache.dtype)

    def _write(self, buffer: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        window, states = self._cache.window, self._stored(given)
        rows = buffer[window.first_row : window.first_row + window.num_rows]
        if (
            window.flat is not None and window.columns is not None
        ):  # (1, heads, S, head_dim) of the real nodes of all rows
            rows.transpose(1, 2)[window.row_index, window.columns] = states[0].transpose(0, 1)
        elif window.columns is None:
            if window.flat is not None and window.num_rows > 1:
                states = (
                    states[0].view(states.shape[1], *window.flat.shape, -1).transpose(0, 1)
                )  # (B, heads, N, head_dim)
            rows[:, :, window.offset : window.offset + states.shape[2]] = states
        else:
            # not scatter_, which takes a thousand times longer in half precision and grows with the whole buffer
            rows.transpose(1, 2)[window.row_index, window.columns] = states.transpose(1, 2)  # (B, N, heads, head_dim)
        seen = rows[:, :, : window.view_length]
        return seen if self._cache.dtype is None else restored(seen, given.dtype)

    @torch.inference_mode()
    def resize(self, num_slots: int, capacity: int) -> None:
        """Copy both buffers into buffers of this size, one after the other. Entries that do not fit are dropped."""
        if not self.is_initialized:
            return
        for name in ("keys", "values"):
            old = getattr(self, name)
            if (old.shape[0], old.shape[2]) == (num_slots, capacity):
                continue
            new = self._allocate(old, num_slots, capacity)
            for row, length in enumerate(self._cache.lengths[: min(num_slots, old.shape[0])]):
                columns = min(length, capacity)
                new[row, :, :columns] = old[row, :, :columns]
            setattr(self, name, new)
            self._cache.memory = object()

    def release(self) -> None:
        """Free both buffers; the next write allocates new ones."""
        if self.is_initialized:
            self.is_initialized = False
            self.keys, self.values = self.keys.new_empty(0), self.values.new_empty(0)
            self._cache.memory = object()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.window.view_length, 0

    def get_seq_length(self) -> int:
        return int(self._cache.window.offset)

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:  # its name in older transformers
        return -1


class Window:
    """Place where the running forward pass writes: rows from ``first_row`` on, at one offset or at columns (B, N).

    With ``flat``, states are those of a list of nodes, and columns are (S,).
    """

    __slots__ = ("columns", "first_row", "flat", "num_rows", "offset", "row_index", "view_length")

    def __init__(
        self,
        first_row: int,
        num_rows: int,
        offset: int,
        columns: torch.Tensor | None,
        view_length: int,
        flat: FlatNodes | None = None,
    ) -> None:
        self.first_row = first_row
        self.num_rows = num_rows
        self.offset = offset
        self.view_length = view_length
        self.flat = flat
        self.columns = columns
        self.row_index = None if columns is None else torch.arange(num_rows, device=columns.device)[:, None]
        if columns is not None and self.row_index is not None and flat is not None:
            self.columns = flat.listed(columns)
            self.row_index = flat.listed(self.row_index.expand_as(columns))


SMALL_COLUMNS, SMALL_ROWS = 2048, 16
"""Sizes up to which a cache doubles when it grows; larger caches grow by a quarter."""


TRADED = 4
"""Factor by which a cache must become smaller for one direction to be cut while the other grows."""


def grown(
    columns: tuple[int, int], rows: tuple[int, int], max_cells: int | None, least: tuple[int, int] = (1, 1)
) -> tuple[int, int]:
    """Return the columns and rows to allocate, in steps and within a limit.

    256 columns and 4 rows become 512 and 8 if 300 and 5 are needed, or 5 rows of 400 columns under a limit of 2,000
    cells. 8,192 columns grow to 10,240. The direction that does not grow is cut to what is needed if that leaves
    a quarter or less: one row of 2,048 columns becomes 16 rows of 256 when 16 rows need 100 columns.

    Args:
      columns, rows: present size and needed size.
      max_cells: limit on columns times rows; None for no limit.
      least: columns and rows below which neither direction is cut.
    """
    wide, high = enlarged(*columns, SMALL_COLUMNS), enlarged(*rows, SMALL_ROWS)
    if wide == columns[0] or high == rows[0]:
        few = fitting((columns[1], columns[0]), (rows[1], rows[0]), least)
        narrow, low = (wide, few[1]) if high == rows[0] else (few[0], high)
        if narrow * low * TRADED <= wide * high:
            wide, high = narrow, low
    if max_cells is None or wide * high <= max_cells:
        return wide, high
    return max(columns[1], min(wide, max_cells // rows[1])), rows[1]


def fitting(columns: tuple[int, int], rows: tuple[int, int], least: tuple[int, int]) -> tuple[int, int]:
    """Return the number of columns and rows that are sufficient, in the growth steps of a cache.

    Args:
      columns, rows: needed size and maximum size.
      least: smallest columns and rows.
    """
    wide, high = enlarged(least[0], columns[0], SMALL_COLUMNS), enlarged(least[1], rows[0], SMALL_ROWS)
    return min(wide, columns[1]), min(high, rows[1])


def held(layers: Sequence[RaggedLayer], num_slots: int, capacity: int) -> tuple[int, int]:
    """Return the rows and columns that all layers have, limited to the given numbers."""
    shapes = [buffer.shape for layer in layers if layer.is_initialized for buffer in (layer.keys, layer.values)]
    return min([num_slots, *(shape[0] for shape in shapes)]), min([capacity, *(shape[2] for shape in shapes)])


def enlarged(size: int, wanted: int, small: int) -> int:
    """Return the grown size that is at least ``wanted``: doubled up to ``small``, then grown by a quarter at a time."""
    while size < wanted:
        size += size if size < small else size // 4
    return size


WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by size in bytes."""


def arrays_of(buffers: Iterable[torch.Tensor]) -> list[np.ndarray]:
    """Return CPU buffers as integer arrays, for `move_columns`."""
    return [buffer.view(WHOLE[buffer.element_size()]).numpy() for buffer in buffers]


def move_columns(
    arrays: Sequence[np.ndarray], rows: Sequence[int], sources: Sequence[int], targets: Sequence[int]
) -> None:
    """Move column ``sources[i]`` of row ``rows[i]`` to ``targets[i]`` in arrays (R, H, T, D), ascending in a row.

    Numpy takes a fifth of the time of torch.
    """
    for array in arrays:
        for row, source, target in zip(rows, sources, targets, strict=True):
            array[row, :, target] = array[row, :, source]  # ascending, so nothing is read after it was written


SLAB_BYTES = 1 << 28
"""Maximum size of one slab. A cache needs this much extra memory for a short time while its buffers are merged."""


def slabs_of(layers: Sequence[RaggedLayer]) -> list[torch.Tensor]:
    """Merge the buffers of layers on an accelerator: buffers of one shape become one tensor (buffers, R, H, T, D).

    Columns of many buffers can then be moved in one operation. The layers' buffers become views of these tensors.
    """
    return [_put_together(places) for places in _alike(layers)]


def move_in_slabs(
    slabs: Sequence[torch.Tensor], rows: Sequence[int], sources: Sequence[int], targets: Sequence[int]
) -> None:
    """Move column ``sources[i]`` of row ``rows[i]`` to ``targets[i]`` in all slabs of `slabs_of`.

    All sources are read before any target is written, so the order of the moves does not matter.
    """
    if not slabs:
        return
    moves = torch.tensor([rows, sources, targets], device="cpu")
    (there,) = upload([moves], slabs[0].device)
    of_rows, old, new = there
    for slab in slabs:
        slab[:, of_rows, :, new] = slab[:, of_rows, :, old]  # (moves, buffers, heads, head_dim)


def _put_together(places: Sequence[tuple[RaggedLayer, str]]) -> torch.Tensor:
    """Merge these buffers into one tensor; the buffers become views of it."""
    slab = torch.stack([getattr(layer, name) for layer, name in places])
    for (layer, name), buffer in zip(places, slab, strict=True):
        setattr(layer, name, buffer)
    return slab


def _alike(layers: Sequence[RaggedLayer]) -> Iterator[list[tuple[RaggedLayer, str]]]:
    """Group the buffers by shape and dtype, with at most `SLAB_BYTES` per group."""
    groups: dict[tuple[torch.Size, torch.dtype], list[tuple[RaggedLayer, str]]] = {}
    for layer in layers:
        for name in ("keys", "values") if layer.is_initialized else ():
            buffer = getattr(layer, name)
            groups.setdefault((buffer.shape, buffer.dtype), []).append((layer, name))
    for places in groups.values():
        size = max(1, SLAB_BYTES // getattr(*places[0]).nbytes)
        for first in range(0, len(places), size):
            yield places[first : first + size]


# -- pages -------------------------------------------------------------------------------------------------------------


IS_LAZY = sys.platform == "linux"
"""True if CPU memory pages are allocated on first write and can be freed one by one."""

NO_RESERVE = 0x4000
"""Flag MAP_NORESERVE of mmap, which Python does not define everywhere: memory is not reserved beforehand."""


def _whole_pages(first: int, last: int) -> tuple[int, int]:
    """Bounds of the whole pages within bytes ``first`` to ``last - 1``; start >= end if there are none."""
    return -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, last // mmap.PAGESIZE * mmap.PAGESIZE


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros of this shape; in CPU memory on Linux, pages are allocated when they are written.

    Raises: MemoryError if the process may not allocate that much.
    """
    if not IS_LAZY or device.type != "cpu" or not prod(shape):
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    num_bytes = prod(shape) * dtype.itemsize
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    except OSError as error:
        raise MemoryError(f"cannot allocate {num_bytes} bytes of keys and values ({error})") from None
    with suppress(OSError):  # raised by kernels without huge pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)  # a huge page would take 2 MB for one byte
    found = torch.frombuffer(memory, dtype=dtype).view(tuple(shape))
    found.pages = memory  # type: ignore[attr-defined]
    return found


def is_lazy(buffer: torch.Tensor) -> bool:
    """Return whether a buffer was made by `zeros` with lazy pages."""
    return isinstance(getattr(buffer, "pages", None), mmap.mmap)


def give_back(buffer: torch.Tensor, row: int, first_column: int) -> None:
    """Free the memory of a row's columns (R, H, T, D) from ``first_column`` on; partly used pages stay unchanged."""
    memory: mmap.mmap = buffer.pages  # type: ignore[attr-defined]
    for first, last in _heads(buffer, row, first_column):
        start, end = _whole_pages(first, last)
        if start >= end:
            continue
        try:
            memory.madvise(mmap.MADV_DONTNEED, start, end - start)
        except OSError:  # the process has locked its memory
            memory[start:end] = bytes(end - start)


@torch.inference_mode()
def erase(buffer: torch.Tensor, row: int, first_column: int) -> None:
    """Zero the columns of a row (R, H, T, D) from ``first_column`` on, without allocating memory."""
    if not is_lazy(buffer):
        buffer[row, :, first_column:] = 0
        return
    there = buffer.view(-1).view(torch.uint8)
    give_back(buffer, row, first_column)
    for first, last in _heads(buffer, row, first_column):
        start, end = _whole_pages(first, last)
        if start >= end:
            there[first:last] = 0
        else:
            there[first:start] = 0
            there[end:last] = 0


def _heads(buffer: torch.Tensor, row: int, first_column: int) -> list[tuple[int, int]]:
    """Byte ranges of a row's columns from ``first_column`` on, one per head; one range for all columns."""
    _, num_heads, num_columns, size = buffer.shape
    line = size * buffer.element_size()
    if first_column == 0:
        return [(row * num_heads * num_columns * line, (row + 1) * num_heads * num_columns * line)]
    heads = range(row * num_heads, (row + 1) * num_heads)
    return [((head * num_columns + first_column) * line, (head + 1) * num_columns * line) for head in heads]

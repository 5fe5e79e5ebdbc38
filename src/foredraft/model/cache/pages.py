"""Memory that holds only what was written: pages that nobody has touched read as zeros and take none.

So a rectangle of rows and columns costs what its rows hold, however long the longest of them is. Linux gives such
memory to processes; elsewhere, and on accelerators, all of a rectangle is held.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence
from contextlib import suppress
from math import prod

import torch

IS_LAZY = sys.platform == "linux"
"""Whether pages of the processor's memory come when they are written, and can be given back alone."""

NO_RESERVE = 0x4000
"""Flag of mmap (MAP_NORESERVE), which Python's module does not name everywhere: memory is not promised beforehand."""


class Pages:
    """Bytes that are zero until they are written.

    Args:
      num_bytes: 1 or more.

    Raises: MemoryError where the process may not have as many.
    """

    def __init__(self, num_bytes: int) -> None:
        try:
            self.buffer = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
        except OSError as error:
            raise MemoryError(f"cannot allocate {num_bytes} bytes of keys and values ({error})") from None
        with suppress(OSError):  # of kernels without huge pages
            self.buffer.madvise(mmap.MADV_NOHUGEPAGE)  # else a byte holds 2 MB

    def give_back(self, first: int, last: int) -> None:
        """Give back whole pages within bytes ``first`` to ``last - 1``, which are zero from then on."""
        start, end = _whole_pages(first, last)
        if start >= end:
            return
        try:
            self.buffer.madvise(mmap.MADV_DONTNEED, start, end - start)
        except OSError:  # of memory that the process has locked
            self.buffer[start:end] = bytes(end - start)


def _whole_pages(first: int, last: int) -> tuple[int, int]:
    """Bounds of the whole pages within bytes ``first`` to ``last - 1``; the first is not below the second for none."""
    return -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, last // mmap.PAGESIZE * mmap.PAGESIZE


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros of this shape; on Linux's processors they take memory page by page, as they are written."""
    if not IS_LAZY or device.type != "cpu" or not prod(shape):
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    pages = Pages(prod(shape) * dtype.itemsize)
    found = torch.frombuffer(pages.buffer, dtype=dtype).view(tuple(shape))
    found.pages = pages  # type: ignore[attr-defined]
    return found


def is_lazy(buffer: torch.Tensor) -> bool:
    """Whether it was made by `zeros` and holds its pages alone."""
    return isinstance(getattr(buffer, "pages", None), Pages)


def give_back(buffer: torch.Tensor, row: int, first_column: int) -> None:
    """Give back what columns of a row (R, H, T, D) hold, from the first one on; the part of a page stays as it is."""
    pages: Pages = buffer.pages  # type: ignore[attr-defined]
    for first, last in _heads(buffer, row, first_column):
        pages.give_back(first, last)


@torch.inference_mode()
def erase(buffer: torch.Tensor, row: int, first_column: int) -> None:
    """Zero columns of a row (R, H, T, D), from the first one on, without holding more for that."""
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
    """The bytes of columns of a row, from the first one on, head by head; of all columns at once."""
    _, num_heads, num_columns, size = buffer.shape
    line = size * buffer.element_size()
    if first_column == 0:
        return [(row * num_heads * num_columns * line, (row + 1) * num_heads * num_columns * line)]
    heads = range(row * num_heads, (row + 1) * num_heads)
    return [((head * num_columns + first_column) * line, (head + 1) * num_columns * line) for head in heads]

"""Memory of kernels: huge pages for weights that every step reads from end to end, and scratch by thread.

With pages of 4 KiB, a step of a large model waits for the addresses of pages as well as for the weights, and how long
depends on where the pages happen to lie. Linux gives pages of 2 MiB to memory that asks for them, unless it was told
never to; elsewhere memory is as it always is.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from foredraft import forking
from foredraft.machine import return_free_memory

HUGE = 2**21
"""Bytes of a huge page."""
REGION = 8 * HUGE
"""Bytes that smaller tensors share, one after another; they are given back with the last of them."""
_LIBC = ctypes.CDLL(None) if hasattr(mmap, "MADV_DONTNEED") else None
LINE = 64
"""Bytes. Tensors begin at a multiple."""


def _region(num_bytes: int) -> tuple[mmap.mmap, int]:
    """Memory, and where in it a huge page begins; bytes behind its last whole one are in small pages.

    Raises: OSError where there is no memory.
    """
    length = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE + HUGE
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    first = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % HUGE
    end = first + num_bytes // HUGE * HUGE
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE, first, end - first)
        memory.madvise(mmap.MADV_NOHUGEPAGE, end, length - end)
    return memory, first


class _Shared:
    """Where the next small tensor goes."""

    def __init__(self) -> None:
        self._lock = forking.lock()
        self._memory: weakref.ref[mmap.mmap] | None = None
        self._next = self._end = 0

    def take(self, num_bytes: int) -> tuple[mmap.mmap, int]:
        """Memory, and where in it so many bytes are free."""
        with self._lock:
            memory = None if self._memory is None else self._memory()
            if memory is None or self._next + num_bytes > self._end:
                memory, self._next = _region(REGION)
                self._end = self._next + REGION
                self._memory = weakref.ref(memory)
            first = self._next
            self._next += -(-num_bytes // LINE) * LINE
            return memory, first


_shared = _Shared()


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor like that of ``torch.empty``, in huge pages where the system has them."""
    count = math.prod(shape)
    if count == 0 or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    num_bytes = count * dtype.itemsize
    try:
        memory, first = _shared.take(num_bytes) if num_bytes < HUGE else _region(num_bytes)
    except OSError:  # torch says it in its own words
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=first).view(shape)


class PageReleaser:
    """Tells the system that nobody reads again what tensors hold, as far as that is mapped from a file.

    Its pages count as memory of the process for as long as anything of the file is mapped. Memory of another kind is
    left alone: its pages would be zeros for whoever still has a view of it. Nor may a tensor have been written to since
    it was mapped: what was written would be gone.

    Args:
      tensors: that are left, whole or a part at a time. Files stay mapped for as long as this lives. One for all
        weights of a model: to find files among the mappings takes longer than to pack a small layer.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        given = list(tensors)
        self._addresses = {tensor.data_ptr() for tensor in given}
        spans = [(span, tensor) for tensor in given if (span := _pages_of(tensor)) is not None]
        mapped = _mapped_from_files() if _LIBC is not None and spans else []
        found = [each for each in spans if _is_within(each[0], mapped)]
        self._spans = [span for span, _ in found]
        self._held = [tensor.detach() for _, tensor in found]  # the addresses stay theirs

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return tensor.data_ptr() in self._addresses

    def __call__(self, part: torch.Tensor) -> bool:
        """Leave the whole pages of a part; False where it is not of a file."""
        span = _pages_of(part) if self._spans else None
        if span is None or not _is_within(span, self._spans):
            return False
        assert _LIBC is not None
        _LIBC.madvise(ctypes.c_void_p(span[0]), ctypes.c_size_t(span[1] - span[0]), mmap.MADV_DONTNEED)
        return True

    def whole(self, tensors: Iterable[torch.Tensor]) -> None:
        """Leave tensors to the end, and give back what packing them has freed."""
        if sum(map(self, tensors)):
            return_free_memory()


def _is_within(span: tuple[int, int], spans: Iterable[tuple[int, int]]) -> bool:
    return any(first <= span[0] and span[1] <= last for first, last in spans)


def _pages_of(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Addresses of the whole pages of a tensor that torch did not allocate itself; None where there is none."""
    if tensor.device.type != "cpu" or tensor.untyped_storage().resizable() or not tensor.is_contiguous():
        return None
    first, page = tensor.data_ptr(), mmap.PAGESIZE
    begin, end = -(-first // page) * page, (first + tensor.nbytes) // page * page
    return (begin, end) if begin < end else None


def _mapped_from_files() -> list[tuple[int, int]]:
    """Addresses of this process behind which there is a file; none on a system that does not tell."""
    found: list[tuple[int, int]] = []
    try:
        lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    except OSError:
        return found
    for line in lines:  # 7f12a000-7f12b000 r--p 00000000 08:01 1234 /home/model.safetensors
        span, _, _, _, inode, *_ = line.split(maxsplit=5)
        if inode == "0":
            continue
        first, last = (int(address, 16) for address in span.split("-"))
        if found and found[-1][1] == first:  # parts of one mapping that differ in what may be done
            first = found.pop()[0]
        found.append((first, last))
    return found


_scratch = threading.local()
"""Working memory of every thread that runs forwards, which grows with what is needed."""


def scratch_address(num_bytes: int) -> int:
    """The address of so many bytes, which belong to this thread until it asks for more."""
    known: torch.Tensor | None = getattr(_scratch, "bytes", None)
    if known is None or len(known) < num_bytes + LINE:
        known = _scratch.bytes = torch.empty(num_bytes + LINE, dtype=torch.uint8)
    return -(-known.data_ptr() // LINE) * LINE

"""Memory for kernels: huge pages for weights, which every step reads completely, and scratch memory per thread.

With pages of 4 KiB, a step of a large model waits for address translation as well as for the weights, and the duration
depends on the physical location of the pages. Linux provides pages of 2 MiB on request, if they are not disabled. On
other systems, memory is ordinary.
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
"""Bytes of a region that small tensors share. It is freed together with the last of them."""
_LIBC = ctypes.CDLL(None) if hasattr(mmap, "MADV_DONTNEED") else None
LINE = 64
"""Bytes of a cache line. Tensors begin at a multiple."""


def _region(num_bytes: int) -> tuple[mmap.mmap, int]:
    """Return memory and the offset of its first huge page. Bytes after the last whole huge page use small pages.

    Raises: OSError if there is not enough memory.
    """
    length = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE + HUGE
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    first = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % HUGE
    end = first + num_bytes // HUGE * HUGE
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE, first, end - first)
        memory.madvise(mmap.MADV_NOHUGEPAGE, end, length - end)
    return memory, first


class _Shared:
    """Allocator of small tensors in a shared region."""

    def __init__(self) -> None:
        self._lock = forking.lock()
        self._memory: weakref.ref[mmap.mmap] | None = None
        self._next = self._end = 0

    def take(self, num_bytes: int) -> tuple[mmap.mmap, int]:
        """Return memory and the offset of ``num_bytes`` free bytes in it."""
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
    """Return a tensor as ``torch.empty`` does, in huge pages if the system has them."""
    count = math.prod(shape)
    if count == 0 or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    num_bytes = count * dtype.itemsize
    try:
        memory, first = _shared.take(num_bytes) if num_bytes < HUGE else _region(num_bytes)
    except OSError:  # torch then raises its own error
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=first).view(shape)


class PageReleaser:
    """Releases the pages of memory-mapped tensors that will not be read again.

    Pages of a mapped file count as memory of the process as long as the file is mapped. Other memory is not touched,
    because its pages would become zeros for every other view of it. Tensors must not have been written to since they
    were mapped, because the changes would be lost.

    Args:
      tensors: tensors that will be released, whole or in parts. Their files stay mapped as long as this object lives.
        Use one object for all weights of a model, since finding mapped files takes longer than packing a small layer.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        given = list(tensors)
        self._addresses = {tensor.data_ptr() for tensor in given}
        spans = [(span, tensor) for tensor in given if (span := _pages_of(tensor)) is not None]
        mapped = _mapped_from_files() if _LIBC is not None and spans else []
        found = [each for each in spans if _is_within(each[0], mapped)]
        self._spans = [span for span, _ in found]
        self._held = [tensor.detach() for _, tensor in found]  # keeps the addresses valid

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return tensor.data_ptr() in self._addresses

    def __call__(self, part: torch.Tensor) -> bool:
        """Release the whole pages of a part. Returns False if the part is not mapped from a file."""
        span = _pages_of(part) if self._spans else None
        if span is None or not _is_within(span, self._spans):
            return False
        assert _LIBC is not None
        _LIBC.madvise(ctypes.c_void_p(span[0]), ctypes.c_size_t(span[1] - span[0]), mmap.MADV_DONTNEED)
        return True

    def whole(self, tensors: Iterable[torch.Tensor]) -> None:
        """Release tensors completely, and return freed memory to the system."""
        if sum(map(self, tensors)):
            return_free_memory()


def _is_within(span: tuple[int, int], spans: Iterable[tuple[int, int]]) -> bool:
    return any(first <= span[0] and span[1] <= last for first, last in spans)


def _pages_of(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Return the addresses of a tensor's whole pages if torch did not allocate them; None if there are none."""
    if tensor.device.type != "cpu" or tensor.untyped_storage().resizable() or not tensor.is_contiguous():
        return None
    first, page = tensor.data_ptr(), mmap.PAGESIZE
    begin, end = -(-first // page) * page, (first + tensor.nbytes) // page * page
    return (begin, end) if begin < end else None


def _mapped_from_files() -> list[tuple[int, int]]:
    """Return the address ranges of this process that are mapped from files; empty if the system does not list them."""
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
        if found and found[-1][1] == first:  # parts of one mapping with different permissions
            first = found.pop()[0]
        found.append((first, last))
    return found


_scratch = threading.local()
"""Scratch memory of every thread that runs forward passes. It grows as needed."""


def scratch_address(num_bytes: int) -> int:
    """Return the address of ``num_bytes`` of scratch memory, valid until the next call in this thread."""
    known: torch.Tensor | None = getattr(_scratch, "bytes", None)
    if known is None or len(known) < num_bytes + LINE:
        known = _scratch.bytes = torch.empty(num_bytes + LINE, dtype=torch.uint8)
    return -(-known.data_ptr() // LINE) * LINE

"""One shard of a datastore: token ids and their suffix array, sorted in bounded memory and read from memory maps."""

from __future__ import annotations

import mmap
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from foredraft.errors import DatastoreError
from foredraft.extras import install_command

PADDING = 64
"""Number of separators after the last token, so that a continuation can be read past the end. This is also the length
of the longest continuation."""

Ids = npt.NDArray[np.int64]

_LANDMARK_BYTES = 8
_LEAST_STRIDE = 16
_MAX_LANDMARKS = 1 << 18
BYTES_PER_TOKEN_BYTE = 5
"""Memory for sorting, per byte of token ids: the byte itself and a 32-bit position."""
_PIECE = 1 << 22
_INT32_MAX = 2**31 - 1


def width_of(vocab_size: int) -> int:
    """Return the bytes per token: the smallest number that leaves the largest id free as separator of documents."""
    width = 1
    while vocab_size >= 256**width:
        width += 1
    return width


def encode(ids: npt.NDArray[np.integer] | Sequence[int], width: int) -> bytes:
    """Return token ids as big-endian bytes, which sort like the ids."""
    wide = np.asarray(ids, dtype=">u4").reshape(-1, 1).view(np.uint8)
    return wide[:, 4 - width :].tobytes()


def decode(data: npt.NDArray[np.uint8], width: int) -> Ids:
    """Return the ids of bytes of shape (..., num_tokens * width)."""
    if width == 2:
        return data.view(">u2").astype(np.int64)
    pieces = data.reshape(*data.shape[:-1], -1, width)
    ids = np.zeros(pieces.shape[:-1], np.int64)
    for byte in range(width):
        ids = (ids << 8) | pieces[..., byte]
    return ids


class Shard:
    """A searchable part of a datastore.

    Occurrences of a context are ranges of suffixes in sorted order.

    Args:
      tokens: file of ids, ``width`` bytes each. A separator follows every document, and `PADDING` separators the last.
      index: file of little-endian 32-bit positions, sorted by the suffixes that begin there.
      num_tokens: number of tokens in the index, separators included.
      width: bytes per token.

    Cost: a search bisects sampled prefixes in memory (at most 4 MiB, read at the first search), then makes about ten
    probes of the files, each with two random reads, for up to 2^28 tokens.
    """

    def __init__(self, tokens: Path, index: Path, num_tokens: int, width: int) -> None:
        self.num_tokens = num_tokens
        self.width = width
        self.separator = 256**width - 1
        self._text = _mapped(tokens)
        self._index_map = _mapped(index)
        self._order = memoryview(self._index_map).cast("I")
        self._positions = np.frombuffer(self._index_map, dtype="<u4")
        self._separator_bytes = encode([self.separator], width)
        self._windows_of: dict[int, npt.NDArray[np.void]] = {}
        self._stride = max(_LEAST_STRIDE, 1 << (num_tokens // _MAX_LANDMARKS).bit_length())

    @cached_property
    def _landmarks(self) -> memoryview:
        """First 8 bytes of every ``_stride``-th suffix as big-endian numbers, in ascending order."""
        places = self._positions[:: self._stride].astype(np.int64)
        numbers = self._windows(_LANDMARK_BYTES)[places].view(">u8").astype(np.uint64)
        return memoryview(numbers.data)

    def _windows(self, num_bytes: int) -> npt.NDArray[np.void]:
        """Return the ``num_bytes`` bytes from every token on, as records (num_tokens,) that are views of the file."""
        windows = self._windows_of.get(num_bytes)
        if windows is None:
            windows = self._windows_of[num_bytes] = np.ndarray(
                (self.num_tokens + PADDING - -(-num_bytes // self.width) + 1,),
                dtype=f"V{num_bytes}",
                buffer=self._text,
                strides=(self.width,),
            )
        return windows

    def _lower(self, pattern: bytes) -> int:
        """Return the number of suffixes that are smaller than ``pattern``."""
        landmarks, stride, size = self._landmarks, self._stride, len(pattern)
        begin = int.from_bytes(pattern[:_LANDMARK_BYTES].ljust(_LANDMARK_BYTES, b"\0"), "big")
        block = above = bisect_left(landmarks, begin)
        if size > _LANDMARK_BYTES:  # a landmark with the same first bytes may still be smaller
            above = bisect_right(landmarks, begin, block)
        low, high = max(0, (block - 1) * stride + 1), min(above * stride, self.num_tokens)
        return self._bisected(pattern, low, high)

    def _bisected(self, pattern: bytes, low: int, high: int) -> int:
        """Return the first suffix from ``low`` to ``high`` that is not smaller than ``pattern``."""
        text, order, width, size = self._text, self._order, self.width, len(pattern)
        while low < high:
            middle = (low + high) >> 1
            place = order[middle] * width
            if text[place : place + size] < pattern:
                low = middle + 1
            else:
                high = middle
        return low

    def _lowest(self, context: bytes) -> int | None:
        """Return the first suffix that begins with ``context`` and continues in its document; None if there is none."""
        low = self._lower(context)
        if low == self.num_tokens:
            return None
        place, size = self._order[low] * self.width, len(context)
        found = self._text[place : place + size + self.width]
        # separators sort last, so if any occurrence continues, the first one does
        return low if found.startswith(context) and not found.endswith(self._separator_bytes) else None

    def find(self, context: bytes) -> range:
        """Return all occurrences of ``context`` (token bytes) with a next token in the same document."""
        low = self._lowest(context)
        return range(0) if low is None else self._from(low, context)

    def _from(self, low: int, context: bytes) -> range:
        """Return the occurrences of ``context`` from the first one on."""
        beyond = context + self._separator_bytes
        if len(beyond) <= _LANDMARK_BYTES:
            return range(low, self._lower(beyond))
        text, order, width, size = self._text, self._order, self.width, len(beyond)
        step = 1  # a search in growing steps, because most long contexts are rare
        while low + step < self.num_tokens:
            place = order[low + step] * width
            if text[place : place + size] >= beyond:
                break
            step *= 2
        return range(low, self._bisected(beyond, low + step // 2, min(low + step, self.num_tokens)))

    def longest(self, context: bytes, shortest: int, longest: int) -> tuple[int, range]:
        """Return the longest suffix of ``context``, from ``shortest`` to ``longest`` tokens, that occurs, with its
        occurrences.

        If a context occurs, its suffixes occur as well, so the length is found by bisection.

        Returns: length in tokens and occurrences; 0 and an empty range if not even the shortest suffix occurs.
        """
        best, found = 0, -1
        low, high = shortest, min(longest, len(context) // self.width)
        while low <= high:
            middle = (low + high) // 2
            first = self._lowest(context[len(context) - middle * self.width :])
            if first is None:
                high = middle - 1
            else:
                best, found, low = middle, first, middle + 1
        if best == 0:
            return 0, range(0)
        return best, self._from(found, context[len(context) - best * self.width :])

    def positions(self, hits: range, limit: int) -> Ids:
        """Return the positions of occurrences; if more than ``limit``, a sample at equal distances in sorted order."""
        count = len(hits)
        if count <= limit:
            return self._positions[hits.start : hits.stop].astype(np.int64)
        ranks = hits.start + np.arange(limit) * count // limit
        return self._positions[ranks].astype(np.int64)

    def continuations(self, positions: Ids, depth: int) -> npt.NDArray[np.void]:
        """Return the bytes of the ``depth`` tokens from each position on, (num_positions,)."""
        return self._windows(depth * self.width)[positions]

    def close(self) -> None:
        """Close the files."""
        self._order.release()
        self._windows_of.clear()
        self.__dict__.pop("_landmarks", None)
        del self._positions


def _mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def tokens_within(memory_bytes: int, width: int) -> int:
    """Return the number of tokens that can be sorted in this much memory, at most what 32-bit positions can address."""
    return min(memory_bytes // (BYTES_PER_TOKEN_BYTE * width), _INT32_MAX // width) - 1


def write_suffix_array(tokens: Path, num_tokens: int, width: int, out: BinaryIO) -> None:
    """Sort the suffixes of a file of big-endian ids, and write positions to ``out`` as little-endian 32-bit numbers.

    Bytes are sorted by libdivsufsort (Mori; O(n log n) in the worst case, linear in practice). Positions inside a token
    are dropped. The result is right because big-endian ids sort like their bytes.

    Memory: 5 bytes per byte of token ids, the same as in `tokens_within`.
    Raises: DatastoreError if the library is missing, or the memory is too small.
    """
    size = num_tokens * width
    text = np.fromfile(tokens, dtype=np.uint8, count=size)
    try:
        positions = _sorter()(text)
    except MemoryError:
        raise DatastoreError(
            f"sorting {num_tokens} tokens needs {BYTES_PER_TOKEN_BYTE * size >> 20} MiB of memory, more than is free "
            "on this machine; use a smaller --memory"
        ) from None
    del text
    for start in range(0, size, _PIECE):
        piece = positions[start : start + _PIECE]
        if width > 1:
            piece = piece[piece % width == 0] // width
        out.write(piece.astype("<u4").tobytes())


def _sorter() -> Callable[[npt.NDArray[np.uint8]], npt.NDArray[np.int32]]:
    try:
        from pydivsufsort import divsufsort  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError as error:
        raise DatastoreError(
            f"building a datastore needs the package pydivsufsort ({error}); install it with: "
            f"{install_command('datastore')}. Using an "
            "existing datastore does not need it"
        ) from None
    sort: Callable[[npt.NDArray[np.uint8]], npt.NDArray[np.int32]] = divsufsort
    return sort

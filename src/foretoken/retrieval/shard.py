"""One shard of a datastore: token ids and their suffix array, both memory-mapped."""

from __future__ import annotations

import mmap
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

PADDING = 64
"""Separators behind the last token, so that a continuation may be read past the end. Also the longest continuation."""

Ids = npt.NDArray[np.int64]


def width_of(vocab_size: int) -> int:
    """Bytes per token: the fewest that leave the largest id free, which separates documents."""
    width = 1
    while vocab_size >= 256**width:
        width += 1
    return width


def encode(ids: npt.NDArray[np.integer] | Seq[int], width: int) -> bytes:
    """Token ids as big-endian bytes, which compare like the ids themselves."""
    wide = np.asarray(ids, dtype=">u4").reshape(-1, 1).view(np.uint8)
    return wide[:, 4 - width :].tobytes()


def decode(data: npt.NDArray[np.uint8], width: int) -> Ids:
    """The ids of bytes of shape (..., num_tokens * width)."""
    if width == 2:
        return data.view(">u2").astype(np.int64)
    pieces = data.reshape(*data.shape[:-1], -1, width)
    ids = np.zeros(pieces.shape[:-1], np.int64)
    for byte in range(width):
        ids = (ids << 8) | pieces[..., byte]
    return ids


class Interval(NamedTuple):
    """Occurrences of a context that something follows: suffixes ``low`` to ``high`` - 1 in sorted order."""

    low: int
    high: int

    @property
    def num_hits(self) -> int:
        return self.high - self.low


class Shard:
    """A searchable piece of a datastore.

    Args:
      tokens: file of ids, ``width`` bytes each, every document followed by a separator, then `PADDING` separators.
      index: file of little-endian 32-bit positions, in the order of the suffixes that begin there.
      num_tokens: of the index, separators included.
      width: bytes per token.

    Cost: O(log num_tokens) probes per search, each two random reads.
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
        self._range_of: dict[bytes, Interval] = {}

    def _suffix(self, size: int) -> Callable[[int], bytes]:
        """What to compare with patterns of up to ``size`` bytes: the text from a position on."""
        text, width = self._text, self.width
        return lambda position: text[position * width : position * width + size]

    def _first(self, token: bytes) -> Interval:
        """The suffixes that begin with one token. Known after the first time: every search starts there."""
        known = self._range_of.get(token)
        if known is None:
            suffix = self._suffix(self.width)
            low = bisect_left(self._order, token, key=suffix)
            known = self._range_of[token] = Interval(low, bisect_right(self._order, token, low, key=suffix))
        return known

    def _lowest(self, context: bytes) -> int | None:
        """The first suffix that begins with ``context`` and goes on in its document; None when there is none."""
        width = self.width
        low, high = self._first(context[:width])
        suffix = self._suffix(len(context) + width)
        low = bisect_left(self._order, context, low, high, key=suffix)
        if low == high:
            return None
        found = suffix(self._order[low])  # separators sort last: the first one goes on if any does
        return low if found.startswith(context) and not found.endswith(self._separator_bytes) else None

    def find(self, context: bytes) -> Interval:
        """All occurrences of ``context`` (token bytes) with a next token in the same document."""
        low = self._lowest(context)
        return Interval(0, 0) if low is None else self._from(low, context)

    def _from(self, low: int, context: bytes) -> Interval:
        """The occurrences from the first one on: a search in growing steps, for most contexts are rare."""
        suffix = self._suffix(len(context) + self.width)
        beyond = context + self._separator_bytes
        last = self._first(context[: self.width]).high
        step = 1
        while low + step < last and suffix(self._order[low + step]) < beyond:
            step *= 2
        high = bisect_left(self._order, beyond, low + step // 2, min(low + step, last), key=suffix)
        return Interval(low, high)

    def longest(self, context: bytes, shortest: int, longest: int) -> tuple[int, Interval]:
        """The longest end of ``context``, from ``shortest`` to ``longest`` tokens, that occurs, with its occurrences.

        A context occurs only where its own ends occur too, so the length is found by bisection.

        Returns: 0 and an empty interval when not even the shortest occurs.
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
            return 0, Interval(0, 0)
        return best, self._from(found, context[len(context) - best * self.width :])

    def positions(self, interval: Interval, limit: int) -> Ids:
        """Where the occurrences begin; of more than ``limit``, that many at equal distances in sorted order."""
        count = interval.num_hits
        if count <= limit:
            return self._positions[interval.low : interval.high].astype(np.int64)
        ranks = interval.low + np.arange(limit) * count // limit
        return self._positions[ranks].astype(np.int64)

    def continuations(self, positions: Ids, depth: int) -> Ids:
        """The ``depth`` ids from each position on: (num_positions, depth)."""
        windows = self._windows_of.get(depth)
        if windows is None:
            windows = self._windows_of[depth] = np.ndarray(
                (self.num_tokens + PADDING - depth + 1,),
                dtype=f"V{depth * self.width}",
                buffer=self._text,
                strides=(self.width,),
            )
        rows = windows[positions].view(np.uint8).reshape(len(positions), depth * self.width)
        return decode(rows, self.width)

    def close(self) -> None:
        """Give the files back."""
        self._order.release()
        self._windows_of.clear()
        del self._positions


def _mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

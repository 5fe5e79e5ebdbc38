"""A few tokens of each of several rows, kept as flat arrays, so that one operation serves all rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from torch import Tensor

TABLE_SIZE = 1 << 18
"""Scores that are worked on at once: as many rows as stay in the processor's cache."""

LOWEST = np.finfo(np.float32).min
"""Below every score of a token that is possible at all."""

COLUMN = 64
"""Scores per column when the k largest are looked for by the columns' maxima."""


@dataclass(frozen=True)
class Segments:
    """Places in a table (M, V), those of one row after those of the row before; at least one in every row.

    Args:
      rows: int64 (S,), the row of each place, ascending.
      ids: int64 (S,), its column, ascending within a row.
      starts: int64 (M,), where each row begins among them.

    For rows (0, 0, 1) and ids (3, 7, 2) starts are (0, 2).
    """

    rows: np.ndarray
    ids: np.ndarray
    starts: np.ndarray

    @classmethod
    def at_least(cls, table: np.ndarray, bounds: np.ndarray) -> Segments:
        """Where a table (M, V) is no less than the bound of its row (M,)."""
        return cls.in_mask(table >= bounds[:, None])

    @classmethod
    def in_mask(cls, mask: np.ndarray) -> Segments:
        """Where bool (M, V) is true."""
        num_rows, width = mask.shape
        flat = np.flatnonzero(mask)
        rows = flat // width
        return cls(rows, flat - rows * width, np.searchsorted(flat, np.arange(num_rows) * width))

    def where(self, keep: np.ndarray) -> Segments:
        """The places that bool (S,) names, at least one of every row."""
        rows = self.rows[keep]
        return Segments(rows, self.ids[keep], np.searchsorted(rows, np.arange(len(self.starts))))

    def of(self, table: np.ndarray) -> np.ndarray:
        """What stands there in a table (M, V): (S,)."""
        values: np.ndarray = table[self.rows, self.ids]
        return values

    @property
    def counts(self) -> np.ndarray:
        """Number of places per row, int64 (M,)."""
        return np.diff(self.starts, append=len(self.rows))

    def padded(self, values: np.ndarray, fill: float) -> np.ndarray:
        """Values (S,) as a table (M, K) for K the largest count; what is left over holds ``fill``."""
        table = np.full((len(self.starts), int(self.counts.max())), fill, dtype=values.dtype)
        table[self.rows, np.arange(len(self.rows)) - self.starts[self.rows]] = values
        return table

    def best(self, values: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k largest of float64 (S,) in every row, of equal ones the lowest id, -inf never.

        Returns: places in the arrays, int64 (M, k), best first, and the values; -1 and -inf where there is none.
        """
        places = np.full((len(self.starts), k), -1, dtype=np.int64)
        if k == 1:
            peaks = np.maximum.reduceat(values, self.starts)
            order = np.flatnonzero((values == peaks[self.rows]) & (values > -np.inf))[::-1]
            places[self.rows[order], 0] = order  # the lowest id is written last
        else:
            order = np.lexsort((-values, self.rows))
            ranks = np.arange(len(order)) - self.starts[self.rows]
            chosen = (ranks < k) & (values[order] > -np.inf)
            places[self.rows[chosen], ranks[chosen]] = order[chosen]
        return places, np.where(places >= 0, values[places], -np.inf)


def scaled(scores: np.ndarray, temperature: float) -> np.ndarray:
    """Float32 scores over temperature, with the bits that torch gives them."""
    if temperature == 1.0:
        return scores
    with np.errstate(over="ignore"):
        return scores / np.float32(temperature)


def tables(scores: Tensor, temperature: float = 1.0) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """A few healthy rows of (M, V) on the CPU at a time; rows without a finite maximum are left out.

    Yields: their numbers, int64 (m,); their scores, float32 (m, V); the largest of each over the temperature, (m,).
    """
    num_rows = max(1, TABLE_SIZE // scores.shape[1])
    for first in range(0, len(scores), num_rows):
        table = scores[first : first + num_rows].detach().float().contiguous().numpy()
        peaks = scaled(table.max(axis=1), temperature)
        healthy = np.isfinite(peaks)
        rows = first + np.flatnonzero(healthy)
        if len(rows) == len(table):
            yield rows, table, peaks
        elif len(rows):
            yield rows, table[healthy], peaks[healthy]


def tops(table: np.ndarray, k: int) -> np.ndarray:
    """Per row of (M, V), V >= k, a bound (M,) that its k largest values reach, and usually few others.

    The values are cut into columns. The k-th largest of the columns' maxima is no larger than the k-th largest value,
    and seldom much smaller where there are many more columns than k.
    """
    num_rows, width = table.shape
    height = max(1, min(COLUMN, width // (4 * k)))
    num_columns = width // height
    maxima = table[:, : num_columns * height].reshape(num_rows, height, num_columns).max(axis=1)
    bounds: np.ndarray = np.partition(maxima, num_columns - k, axis=1)[:, num_columns - k]
    return bounds

"""Continuations of many occurrences as a trie whose nodes are ranges of sorted rows."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from foretoken.retrieval.growth import Candidate

Ids = npt.NDArray[np.int64]


class Range(NamedTuple):
    """Rows that share their first ``depth`` tokens."""

    first: int
    end: int
    depth: int


class Level(NamedTuple):
    """The nodes of one depth: where their rows begin (and end), weight, latest position, token."""

    starts: list[int]
    weights: list[float]
    recency: list[int]
    tokens: list[int]


class ContinuationTrie:
    """What followed a context, with counts.

    Args:
      rows: (M, D) token ids.
      positions: (M,) where the rows stand in the datastore: larger is more recent.
      weights: (M,) how much a row counts; None for 1 each.
      separator: the id that ends a document; it and what follows is no continuation.
      is_sorted: the rows are in lexicographic order.
      escape: weight of the unknown: a token that followed n of m times scores n / (m + escape).
    """

    def __init__(
        self,
        rows: Ids,
        positions: Ids,
        weights: npt.NDArray[np.float64] | None = None,
        *,
        separator: int,
        is_sorted: bool = True,
        escape: float = 0.0,
    ) -> None:
        if not is_sorted:
            order = np.lexsort(rows.T[::-1])
            rows, positions = rows[order], positions[order]
            weights = None if weights is None else weights[order]
        self._rows, self._positions, self._weights = rows, positions, weights
        self._separator = separator
        self._levels: dict[int, Level] = {}
        self._total = (len(rows) if weights is None else float(weights.sum())) + escape

    @property
    def root(self) -> Range:
        return Range(0, len(self._rows), 0)

    def candidates(self, place: Range) -> Iterable[Candidate]:
        """The children of a node: tokens that follow its rows."""
        first, end, depth = place
        if depth == self._rows.shape[1]:
            return
        if end - first == 1:
            token = int(self._rows[first, depth])
            if token != self._separator:
                weight = 1.0 if self._weights is None else float(self._weights[first])
                yield Candidate(weight / self._total, int(self._positions[first]), token, Range(first, end, depth + 1))
            return
        starts, weights, recency, tokens = self._level(depth)
        node = bisect_left(starts, first)
        while starts[node] < end:
            if tokens[node] != self._separator:
                after = Range(starts[node], starts[node + 1], depth + 1)
                yield Candidate(weights[node] / self._total, recency[node], tokens[node], after)
            node += 1

    @cached_property
    def _common(self) -> Ids:
        """How many tokens each row shares with the one before; -1 for the first."""
        differs = self._rows[1:] != self._rows[:-1]
        common = np.where(differs.any(axis=1), differs.argmax(axis=1), self._rows.shape[1])
        return np.concatenate([[-1], common])

    def _level(self, depth: int) -> Level:
        level = self._levels.get(depth)
        if level is None:
            starts = np.flatnonzero(self._common <= depth)
            ends = [*starts.tolist(), len(self._rows)]
            if self._weights is None:
                weights: list[float] = np.diff(ends).astype(float).tolist()
            else:
                weights = np.add.reduceat(self._weights, starts).tolist()
            recency = np.maximum.reduceat(self._positions, starts).tolist()
            level = Level(ends, weights, recency, self._rows[starts, depth].tolist())
            self._levels[depth] = level
        return level

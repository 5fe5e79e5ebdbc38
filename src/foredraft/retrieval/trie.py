"""Continuations of many occurrences as a trie of which only the best nodes are built."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from foredraft.retrieval.growth import Candidate, Candidates, TreeLimits
from foredraft.retrieval.shard import PADDING, decode
from foredraft.tree import DraftTree

Ids = npt.NDArray[np.int64]

_UNIT = 64
_SURPLUS = 8  # candidates per wanted node if the limit of branches will drop some


_Node = tuple[int, int, int, int, float]
"""A node of the trie: its index in the flattened (depth, rows), the index of its parent, and its level, token and
weight."""


class ContinuationTrie:
    """The continuations of a context, with counts.

    A node is a run of rows with the same first tokens. No child counts more than its parent. Therefore the best n nodes
    of the trie are a tree, and best-first expansion is one selection over all nodes.

    Args:
      rows: (M,) records of the bytes of D tokens, big-endian.
      positions: (M,) positions of the rows in the datastore; larger is more recent.
      weights: (M,) weight of every row, a multiple of 1 / 64; None for 1 each.
      width: bytes per token. The largest id ends a document; it and the ids after it are not part of a continuation.
      is_sorted: True if the rows are in lexicographic order.
      escape: weight of unseen tokens. A token that followed n of m times has the score n / (m + escape).
    """

    def __init__(
        self,
        rows: npt.NDArray[np.void],
        positions: Ids,
        weights: npt.NDArray[np.float64] | None = None,
        *,
        width: int,
        is_sorted: bool = True,
        escape: float = 0.0,
    ) -> None:
        if not is_sorted:
            order = rows.view(f"S{rows.itemsize}").argsort(kind="stable")  # stable sorting merges sorted parts
            rows, positions = rows[order], positions[order]
            weights = None if weights is None else weights[order]
        self._columns = _columns(rows, width)
        self._positions, self._weights = positions, weights
        self._separator = 256**width - 1
        self._has_ends = b"\xff" * width in rows.tobytes()  # may be a false alarm across two ids
        self._is_swapped = width == 2 and sys.byteorder == "little"
        self._total = (len(rows) if weights is None else float(weights.sum())) + escape
        self._escape = escape

    def share(self, score: float) -> float:
        """Return the share of the occurrences that belongs to a score, without the escape weight."""
        return score * self._total / (self._total - self._escape)

    def tree(self, pending: int, shape: TreeLimits, name: str = "") -> DraftTree:
        """Return the heaviest nodes within the limits of ``shape``: equal weights by recency, parents first."""
        max_nodes, max_depth, max_branches, min_score = shape
        wanted = max_nodes - 1
        if max_branches < wanted:
            wanted *= _SURPLUS
        tokens, parents, scores, branches = [pending], [-1], [1.0], [0]
        node_of: dict[int, int] = {}
        for key, above, level, token, weight in self._heaviest(wanted, max_depth):
            parent = node_of.get(above) if level else 0
            score = weight / self._total
            if len(tokens) == max_nodes or score < min_score:
                break
            if parent is None or branches[parent] == max_branches:
                continue
            node_of[key] = len(tokens)
            branches[parent] += 1
            branches.append(0)
            tokens.append(token)
            parents.append(parent)
            scores.append(score)
        return DraftTree(tuple(tokens), tuple(parents), scores=tuple(scores), source=name)

    def _heaviest(self, count: int, max_depth: int) -> Iterable[_Node]:
        """Return the ``count`` best nodes, best first."""
        columns = self._columns[:max_depth]
        depth, num_rows = columns.shape
        if depth == 0:
            return []
        starts = np.flatnonzero(_is_start(columns))
        ends = np.empty_like(starts)
        ends[:-1], ends[-1] = starts[1:], depth * num_rows
        weights = self._weights_from(starts, ends, depth)
        if self._has_ends:
            is_over = np.logical_or.accumulate(columns == self._separator, axis=0)
            weights[is_over.ravel()[starts]] = 0
        best = _largest(weights, count)
        keys, weights = starts[best], weights[best]
        levels = keys // num_rows
        recency = self._most_recent(keys - levels * num_rows, ends[best] - levels * num_rows)
        order = _best(weights, recency * PADDING - levels, count)  # parents before their children
        keys, weights, levels = keys[order], weights[order], levels[order]
        above = starts[starts.searchsorted(keys - num_rows, "right") - 1]  # arbitrary for nodes of the first level
        tokens = columns.ravel()[keys]
        if self._is_swapped:
            tokens = tokens.byteswap()
        found = (keys, above, levels, tokens, weights / _UNIT)
        return zip(*(column.tolist() for column in found), strict=True)

    def _weights_from(self, starts: Ids, ends: Ids, depth: int) -> Ids:
        """Return the weights of runs of the flattened (depth, M), in units of 1 / 64. The runs cover everything."""
        if self._weights is None:
            counts: Ids = (ends - starts) * _UNIT
            return counts
        units = (self._weights * _UNIT).astype(np.int64)
        sums: Ids = np.add.reduceat(units[None].repeat(depth, 0).ravel(), starts)
        return sums

    def _most_recent(self, starts: Ids, ends: Ids) -> Ids:
        """Return the latest position in every run of rows."""
        bounds = np.empty(2 * len(starts), np.int64)
        bounds[::2], bounds[1::2] = starts, ends
        latest: Ids = np.maximum.reduceat(np.append(self._positions, 0), bounds)[::2]
        return latest


def _is_start(columns: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.bool_]:
    """Return where nodes begin, (D, M): rows that differ from the previous one in this token or an earlier one."""
    is_start = np.ones(columns.shape, np.bool_)
    np.logical_or.accumulate(columns[:, 1:] != columns[:, :-1], axis=0, out=is_start[:, 1:])
    return is_start


def _largest(weights: Ids, count: int) -> Ids:
    """Return the indices of the positive weights that are not smaller than the ``count``-th largest one."""
    least = max(1, int(np.sort(weights)[-count])) if count < len(weights) else 1
    return np.flatnonzero(weights >= least)


def _best(weights: Ids, recency: Ids, count: int) -> Ids:
    """Return the indices of the ``count`` heaviest nodes, equal ones by recency, best first.

    Recencies are all different. Weights come from `_largest`, so only nodes of the smallest weight can be in excess.
    """
    surplus = len(weights) - count
    if surplus <= 0:
        return np.lexsort((recency, weights))[::-1]
    is_least = weights == weights.min()
    kept = np.flatnonzero(~is_least | (recency >= np.sort(recency[is_least])[surplus]))
    return kept[np.lexsort((recency[kept], weights[kept]))[::-1]]


def _columns(rows: npt.NDArray[np.void], width: int) -> npt.NDArray[np.integer[Any]]:
    """Return (M,) records as (D, M) ids for comparison. Two-byte ids keep the byte order of the file."""
    data = rows.view(np.uint8).reshape(len(rows), -1)
    ids = data if width == 1 else data.view(np.uint16) if width == 2 else decode(data, width)
    return np.ascontiguousarray(ids.T)


def candidates_of(tree: DraftTree) -> Candidates:
    """Return a grown tree as a source of candidates, to be merged with others. The places of candidates are nodes.

    Candidates are in the order of the tree's nodes, which is the order of their scores.
    """
    scores = tree.scores or (0.0,) * len(tree)
    found = [Candidate(scores[node], len(tree) - node, tree.tokens[node], node) for node in range(len(tree))]
    return lambda node, floor: [found[child] for child in tree.children[node] if found[child].score >= floor]

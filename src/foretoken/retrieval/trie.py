"""Continuations of many occurrences as a trie, of which only the best nodes are ever built."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from foretoken.engine.tree import DraftTree
from foretoken.retrieval.growth import Candidate, Shape
from foretoken.retrieval.shard import PADDING

Ids = npt.NDArray[np.int64]

_UNIT = 64
_SURPLUS = 8  # candidates per wanted node where a limit of branches will drop some


class ContinuationTrie:
    """What followed a context, with counts.

    A node is a run of rows that share their first tokens. No child counts more than its parent, so the best n nodes
    of the trie are a tree, and best-first expansion is one selection over all nodes.

    Args:
      rows: (M, D) token ids.
      positions: (M,) where the rows stand in the datastore: larger is more recent.
      weights: (M,) how much a row counts, a multiple of 1 / 64; None for 1 each.
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
        self._total = (len(rows) if weights is None else float(weights.sum())) + escape

    def tree(self, pending: int, shape: Shape, name: str = "") -> DraftTree:
        """The heaviest nodes within the limits of ``shape``; equal weights by recency, parents first."""
        max_nodes, max_depth, max_branches, min_score = shape
        wanted = max_nodes - 1
        if max_branches < wanted:
            wanted *= _SURPLUS
        tokens, parents, scores, branches = [pending], [-1], [1.0], [0]
        node_of: dict[tuple[int, int], int] = {}  # (first row, depth of its token below the root) -> node
        for row, depth, parent_row, weight in self._heaviest(wanted, max_depth):
            parent = node_of.get((parent_row, depth - 1)) if depth else 0
            score = weight / self._total
            if len(tokens) == max_nodes or score < min_score:
                break
            if parent is None or branches[parent] == max_branches:
                continue
            node_of[row, depth] = len(tokens)
            branches[parent] += 1
            branches.append(0)
            tokens.append(int(self._rows[row, depth]))
            parents.append(parent)
            scores.append(score)
        return DraftTree(tuple(tokens), tuple(parents), scores=tuple(scores), source=name)

    @property
    def _common(self) -> Ids:
        """How many tokens each row shares with the one before; -1 for the first."""
        differs = self._rows[1:] != self._rows[:-1]
        common = np.full(len(self._rows), -1)
        np.copyto(common[1:], np.where(differs.any(axis=1), differs.argmax(axis=1), self._rows.shape[1]))
        return common

    def _heaviest(self, count: int, max_depth: int) -> Seq[tuple[int, int, int, float]]:
        """(first row, depth, first row of the parent, weight) of the ``count`` best nodes, best first."""
        num_rows, depth = len(self._rows), min(max_depth, self._rows.shape[1])
        if depth == 0:
            return []
        everywhere = np.arange(depth * num_rows).reshape(depth, num_rows)
        is_start = self._common <= everywhere[:, :1] // num_rows  # (depth, M): a node begins here
        starts = np.flatnonzero(is_start)
        level = starts // num_rows
        row = starts - level * num_rows
        weights = self._weights_from(starts, depth)
        key = weights * num_rows + np.maximum.reduceat(self._recency[None].repeat(depth, 0).ravel(), starts)
        key = key * PADDING + (PADDING - 1 - level)
        key[level >= self._lengths[row]] = -1
        best = key.argpartition(-count)[-count:] if count < len(key) else everywhere.ravel()[: len(key)]
        best = best[key[best].argsort()[::-1]]
        best = best[key[best] >= 0]
        above = np.maximum.accumulate(np.where(is_start, everywhere, -1), axis=1)  # where the node of a row began
        rows, levels = row[best], level[best]
        parents = above[levels - 1, rows] % num_rows  # of the first level: any
        return list(
            zip(rows.tolist(), levels.tolist(), parents.tolist(), (weights[best] / _UNIT).tolist(), strict=True)
        )

    def _weights_from(self, starts: Ids, depth: int) -> Ids:
        """Weights of the nodes that begin at flat places of (depth, M), in units of 1 / 64."""
        if self._weights is None:
            ends = np.empty_like(starts)
            ends[:-1] = starts[1:]
            ends[-1] = depth * len(self._rows)
            counts: Ids = ends - starts
            return counts * _UNIT
        units = (self._weights * _UNIT).astype(np.int64)
        sums: Ids = np.add.reduceat(units[None].repeat(depth, 0).ravel(), starts)
        return sums

    @property
    def _recency(self) -> Ids:
        """Rank of every row, the most recent has the highest."""
        ranks = np.empty(len(self._rows), np.int64)
        ranks[self._positions.argsort()] = np.arange(len(self._rows))
        return ranks

    @property
    def _lengths(self) -> Ids:
        """Tokens of every row before its document ends."""
        ends = self._rows == self._separator
        if not ends.any():
            return np.full(len(ends), ends.shape[1], np.int64)
        lengths: Ids = np.where(ends.any(axis=1), ends.argmax(axis=1), self._rows.shape[1])
        return lengths


class Children(NamedTuple):
    """A grown tree as a source of candidates, to be merged with others; its places are nodes."""

    of: tuple[tuple[Candidate, ...], ...]

    @classmethod
    def of_tree(cls, tree: DraftTree) -> Children:
        """Candidates in the order of the tree's nodes, which is their order of promise."""
        scores = tree.scores or (0.0,) * len(tree)
        return cls(
            tuple(
                tuple(Candidate(scores[node], len(tree) - node, tree.tokens[node], node) for node in nodes)
                for nodes in tree.children
            )
        )

    def candidates(self, node: int) -> tuple[Candidate, ...]:
        return self.of[node]

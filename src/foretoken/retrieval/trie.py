"""Continuations of many occurrences as a trie, of which only the best nodes are ever built."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from foretoken.engine.tree import DraftTree
from foretoken.retrieval.growth import Candidate, Shape

Ids = npt.NDArray[np.int64]

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
        node_of = {(0, -1): 0}  # (first row, depth of the last token) -> node
        for row, depth, parent_row, weight in self._heaviest(wanted, max_depth):
            parent = node_of.get((parent_row, depth - 1))
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

    @cached_property
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
        levels = np.arange(depth)[:, None]
        is_start = self._common <= levels  # (depth, M): a node begins here
        starts = np.flatnonzero(is_start)
        ranks = np.empty(num_rows, np.int64)
        ranks[np.argsort(self._positions)] = np.arange(num_rows)
        recency = np.maximum.reduceat(np.tile(ranks, depth), starts)
        if self._weights is None:
            weights = np.diff(starts, append=depth * num_rows).astype(np.float64)
        else:
            weights = np.add.reduceat(np.tile(self._weights, depth), starts)
        level, row = np.divmod(starts, num_rows)
        ends = self._rows[:, :depth] == self._separator
        length = np.where(ends.any(axis=1), ends.argmax(axis=1), depth)
        key = (weights * (64 * num_rows)).astype(np.int64) // num_rows * num_rows + recency
        key = np.where(length[row] > level, key * 64 + (63 - level), -1)
        best = np.argpartition(key, -count)[-count:] if count < len(key) else np.arange(len(key))
        best = best[np.argsort(-key[best])]
        best = best[key[best] >= 0]
        above = np.maximum.accumulate(np.where(is_start, np.arange(num_rows), 0), axis=1)
        rows, depths = row[best], level[best]
        parent_rows = np.where(depths > 0, above[depths - 1, rows], 0)
        return list(zip(rows.tolist(), depths.tolist(), parent_rows.tolist(), weights[best].tolist(), strict=True))


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

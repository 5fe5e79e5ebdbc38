"""Static trees: a shape that is the same in every step, filled with the tokens of the moment."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush

from foretoken.drafters.parts.adjacency import AdjacencyMatrix
from foretoken.tree import DraftTree

RANK_SHARES = (0.45, 0.13, 0.07, 0.05, 0.035, 0.025, 0.02, 0.015)
"""How often the target's token is the candidate of each rank. Further ranks are worth half of the one before."""


@dataclass(frozen=True)
class TreeShape:
    """A tree without tokens, level by level: node i is the ``ranks[i]``-th best successor of ``parents[i]``.

    Args:
      parents: as in `DraftTree`; nodes are sorted by depth.
      ranks: N ranks, from 0; that of the root means nothing.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """How many nodes are as deep as 0, 1, 2 ... or less."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return (*(depths.index(depth) for depth in range(1, depths[-1] + 1)), len(depths))

    def filled(self, pending: int, max_depth: int, matrix: AdjacencyMatrix, source: str = "") -> DraftTree:
        """The tree below a token with what the matrix knows, as deep as allowed; nothing follows the unknown."""
        end = self.ends[min(max_depth, len(self.ends) - 1)]
        tokens, parents = [pending], [-1]
        places = [0]  # of nodes of the shape in the tree; -1 where nothing is known
        below: dict[int, list[int]] = {}  # what follows nodes of the tree
        for node in range(1, end):
            above = places[self.parents[node]]
            token = -1
            if above >= 0:
                if above not in below:
                    below[above] = matrix.after(tokens[above])
                token = below[above][self.ranks[node]]
            if token < 0:
                places.append(-1)
                continue
            places.append(len(tokens))
            tokens.append(token)
            parents.append(above)
        return DraftTree(tuple(tokens), tuple(parents), source=source)


def best_shape(num_nodes: int, max_depth: int, num_candidates: int, shares: Seq[float] = RANK_SHARES) -> TreeShape:
    """The tree that accepts most when the candidate of rank r is right with probability ``shares[r]`` everywhere.

    A node is worth the product of the shares along its path, and the expected acceptance is the sum of these, so the
    best tree holds the nodes that are worth most (Chen et al. 2024, Sequoia, arXiv:2402.12374, for shares that do not
    grow). Levels are the breadth-first ones that `TreeShape` wants.

    Args:
      num_nodes: root included.
    """
    shares = [*shares, *(shares[-1] * 0.5**i for i in range(1, num_candidates + 1))][:num_candidates]
    chosen: list[tuple[int, ...]] = []  # ranks from below the root to a node
    open_ends: list[tuple[float, tuple[int, ...]]] = [(-shares[0], (0,))]
    while open_ends and len(chosen) < num_nodes - 1:
        negative, path = heappop(open_ends)
        chosen.append(path)
        rank = path[-1]
        if rank + 1 < num_candidates:
            heappush(open_ends, (negative / shares[rank] * shares[rank + 1], (*path[:-1], rank + 1)))
        if len(path) < max_depth:
            heappush(open_ends, (negative * shares[0], (*path, 0)))
    chosen.sort(key=lambda path: (len(path), path))
    index = {path: node for node, path in enumerate([(), *chosen])}
    return TreeShape((-1, *(index[path[:-1]] for path in chosen)), (0, *(path[-1] for path in chosen)))

"""A draft while it grows: a tree whose nodes are added level by level."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import exp, inf

import torch

from foredraft.engine.row import Row
from foredraft.methods.rank_tree import TreeShape
from foredraft.tree import DraftPlan, DraftTree


@dataclass(eq=False)
class GrowingDraft:
    """The tree of one row in the making.

    Args:
      row: whose text goes on; node 0 is its pending token.
      cap: levels below the root at most; 0 for no draft.
      plan: plan of the length policy; None without one.
      max_nodes: root included.
      num_branches: siblings per node at most.
      beam_width: nodes of a level that are expanded at most.
      least: score from which on nodes are expanded.
      shape: of a static tree, which is then all that there may be.

    Attributes:
      tokens, parents, depths: of the nodes.
      scores: of the nodes, the higher the likelier; of a path the sum, so never above the parent's.
      probs: by node, the distribution (V,) that its children were drawn from, where the acceptance rule needs it.
      frontier: nodes that are to be expanded next, the best one first.
      spots: of a static tree, the node of the shape that every node fills.
      child_of: by parent and token, the node.
      column_of: number of columns behind the text of the row, by node that was fed to a model; see `FedNodes`.
    """

    row: Row
    cap: int
    max_nodes: int = sys.maxsize
    num_branches: int = 1
    beam_width: int = 1
    least: float = -inf
    shape: TreeShape | None = None
    plan: DraftPlan | None = None
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=lambda: [-1])
    depths: list[int] = field(default_factory=lambda: [0])
    scores: list[float] = field(default_factory=lambda: [0.0])
    probs: dict[int, torch.Tensor] = field(default_factory=dict)
    frontier: list[int] = field(default_factory=lambda: [0])
    spots: list[int] = field(default_factory=lambda: [0])
    child_of: dict[tuple[int, int], int] = field(default_factory=dict)
    column_of: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tokens = [self.row.pending]

    @property
    def room(self) -> int:
        """How many more nodes there may be."""
        return self.max_nodes - len(self.tokens)

    def width(self, node: int) -> int:
        """How many children a node may have."""
        return self.num_branches if self.shape is None else len(self.shape.children[self.spots[node]])

    def add(self, parent: int, token: int, score: float = 0.0) -> int:
        """Add a child; ``score`` is its own, at most 0."""
        self.child_of[parent, token] = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.scores.append(self.scores[parent] + score)
        return len(self.tokens) - 1

    def child(self, parent: int | None, token: int) -> int | None:
        """The child that carries a token, new or old; None where it would be too deep, or in the air."""
        if parent is None or self.depths[parent] >= self.cap:
            return None
        node = self.child_of.get((parent, token))
        return self.add(parent, token) if node is None else node

    def add_path(self, tokens: Iterable[int], max_nodes: int = sys.maxsize) -> None:
        """One continuation of the root, as far as ``max_nodes`` in all allow; what is there already counts once."""
        node: int | None = 0
        for token in tokens:
            if len(self.tokens) >= max_nodes and (node, token) not in self.child_of:
                return
            node = self.child(node, token)

    def fill(self, parent: int, tokens: Iterable[int]) -> None:
        """Give a node of a static tree its children, the best first; those that have any are to be expanded in turn."""
        if self.shape is not None:
            for spot, token in zip(self.shape.children[self.spots[parent]], tokens, strict=False):
                node = self.add(parent, token)
                self.spots.append(spot)
                if self.shape.children[spot]:
                    self.frontier.append(node)

    def take_frontier(self) -> list[int]:
        """The nodes that are to be expanded, whose children make the next frontier."""
        frontier, self.frontier = self.frontier, []
        return frontier

    def path(self, node: int) -> list[int]:
        """Nodes from below the root to ``node``."""
        nodes = []
        while node > 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def path_tokens(self, node: int) -> tuple[int, ...]:
        return tuple(self.tokens[i] for i in self.path(node))

    def columns_along(self, tokens: Iterable[int]) -> list[int]:
        """Columns, counted from the end of the text, of the fed nodes along a path of tokens from the root."""
        node, columns = 0, []
        for token in tokens:
            node = self.child_of.get((node, token), -1)
            if node not in self.column_of:
                break
            columns.append(self.column_of[node])
        return columns

    def can_gain(self, least_mass: float) -> bool:
        """Whether children of the frontier could be among the best nodes, and are as likely as this together.

        A child has at most the score of its parent, and of equal ones the earlier stay: where the best of the frontier
        is no better than the last of the best nodes so far, nothing that comes can be among these.
        """
        scores = [self.scores[node] for node in self.frontier]
        if sum(map(exp, scores)) < least_mass:
            return False
        ranked = sorted(self.scores[1:], reverse=True)
        return len(ranked) < self.max_nodes - 1 or self.max_nodes < 2 or max(scores) > ranked[self.max_nodes - 2]

    def best(self, max_nodes: int) -> list[int]:
        """The nodes with the highest scores, root included, ascending; of equal ones those that came first.

        A node's score is never above its parent's, and parents come first: what is chosen is a tree.
        """
        others = sorted(range(1, len(self.tokens)), key=self.scores.__getitem__, reverse=True)
        return [0, *sorted(others[: max_nodes - 1])]

    def tree(self, source: str, *, has_chances: bool = False, is_whole: bool = False) -> DraftTree:
        """All of it, as the engine takes it.

        Args:
          has_chances: scores are logarithms of how likely paths are to be accepted.
          is_whole: it must not be cut.
        """
        table = None
        scores = tuple(map(exp, self.scores)) if has_chances else None
        if self.probs:
            blank = torch.zeros_like(next(iter(self.probs.values())))
            table = torch.stack([self.probs.get(node, blank) for node in range(max(self.probs) + 1)])
        return DraftTree(
            tuple(self.tokens), tuple(self.parents), table, scores, source, plan=self.plan, is_whole=is_whole
        )

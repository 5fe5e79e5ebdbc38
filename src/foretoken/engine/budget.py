"""How much of a draft is worth making."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from foretoken.tree import DraftTree


class Budget(int):
    """How much may be drafted for one row in one step. As a number it is the depth.

    Args:
      depth: tokens on one path, the pending one not counted; 0 for no draft.
      nodes: of the whole draft, root included.
      chains_only: whether only the continuation of first children will be verified.
      least: chance of a node, below which neither it nor what follows it will be verified; drafters may ignore it.
    """

    nodes: int
    chains_only: bool
    least: float

    def __new__(cls, depth: int, nodes: int = sys.maxsize, chains_only: bool = False, least: float = 0.0) -> Self:
        self = super().__new__(cls, depth)
        self.nodes, self.chains_only, self.least = nodes, chains_only, least
        return self

    def __repr__(self) -> str:
        return f"Budget(depth={self.depth}, nodes={self.nodes}, chains_only={self.chains_only}, least={self.least})"

    @property
    def depth(self) -> int:
        """Tokens on one path."""
        return int(self)

    @classmethod
    def of(cls, budget: int) -> Budget:
        """The budget itself, or one that limits the depth alone."""
        return budget if isinstance(budget, Budget) else cls(budget)

    def within(self, depth: int, least: float) -> Budget:
        """As much of it as a governor wants."""
        return Budget(min(self.depth, depth), self.nodes, self.chains_only, least)

    def width(self, num_branches: int) -> int:
        """How many of the wanted siblings are worth drafting."""
        return 1 if self.chains_only else num_branches

    def max_nodes(self, limit: int | None = None) -> int:
        """Nodes of the draft, within a limit of the drafter's own."""
        return self.nodes if limit is None else min(self.nodes, limit)

    def cut(self, tree: DraftTree) -> DraftTree:
        """Cut a draft to the budget; if it has too many nodes, the first ones stay."""
        if len(tree) == 1:
            return tree
        tree = (tree.main_chain() if self.chains_only else tree).cut(self.depth)
        return tree if len(tree) <= self.nodes else tree.restricted(range(max(1, self.nodes)))

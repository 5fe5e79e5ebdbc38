"""How much may be drafted, what limits that, and what every limit has cut off in the end."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple, Self

if TYPE_CHECKING:
    from foredraft.tree import DraftTree

NOTHING_FOUND = "nothing_found"
"""Why a step has no draft whose drafter was asked and proposed nothing. All other causes keep it from drafting."""

CAUSES: Mapping[str, str] = {
    "governor": "the governor",
    "bits": "the promise of bits",
    "chains": "a model or rule that verifies chains only",
    "memory": "the limit of memory",
    "budget": "the end of the text's budget",
    "policy": "the length policy",
    "context": "the context of the draft model",
    "request": "the request",
    "doubt": "a step that gave no token",
    "fault": "a fault of the drafter",
}
"""What keeps tokens from being drafted or verified, and how it is called in messages."""


class DraftSize(int):
    """How much may be drafted for one row in one step. As a number it is the depth.

    Args:
      depth: tokens on one path, the pending one not counted; 0 for no draft.
      nodes: of the whole draft, root included.
      chains_only: whether only the continuation of first children will be verified.
      least: chance of a node, below which neither it nor what follows it will be verified; drafters may ignore it.

    Attributes:
      arm: number of the way in which a drafter of several is to draft (`DrafterFacts.arms`); None for its own choice.
    """

    nodes: int
    chains_only: bool
    least: float
    arm: int | None = None

    def __new__(cls, depth: int, nodes: int = sys.maxsize, chains_only: bool = False, least: float = 0.0) -> Self:
        self = super().__new__(cls, depth)
        self.nodes, self.chains_only, self.least = nodes, chains_only, least
        return self

    def __repr__(self) -> str:
        return f"DraftSize(depth={self.depth}, nodes={self.nodes}, chains_only={self.chains_only}, least={self.least})"

    @property
    def depth(self) -> int:
        """Tokens on one path."""
        return int(self)

    @classmethod
    def of(cls, budget: int) -> DraftSize:
        """The budget itself, or one that limits the depth alone."""
        return budget if isinstance(budget, DraftSize) else cls(budget)

    def within(self, depth: int, least: float, arm: int | None = None) -> DraftSize:
        """As much of it as a governor wants, and in which way."""
        if depth >= self and not least and arm is None:
            return self
        size = DraftSize(min(self, depth), self.nodes, self.chains_only, least)
        size.arm = arm
        return size

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


class Limits(NamedTuple):
    """Budget of a row, and the causes (`CAUSES`) of its bounds.

    Args:
      budget: as much as all of them allow.
      depth: the cause of its depth.
      nodes: of its number of nodes.
    """

    budget: DraftSize
    depth: str
    nodes: str = "memory"

    def stages(self, budget: DraftSize, draft: DraftTree) -> Iterator[tuple[str, int]]:
        """Tokens that are left of a draft within a budget, cause by cause."""
        if budget.chains_only:
            draft = draft.main_chain()
            yield "chains", len(draft) - 1
        yield self.depth if draft.depth > budget.depth else self.nodes, len(budget.cut(draft)) - 1

    def why_nothing(self, budget: DraftSize, draft: DraftTree) -> str:
        """The cause of an empty draft."""
        if budget.depth == 0:
            return self.depth
        if budget.nodes <= 1:
            return self.nodes
        return draft.plan.cause if draft.plan is not None and draft.plan.gamma == 0 else NOTHING_FOUND


def describe_cuts(tokens: Counter[str], steps: Counter[str]) -> str:
    """Description of cuts for people, the cause of most first; empty where nothing was cut.

    Args:
      tokens: drafted tokens that were left out, by cause.
      steps: steps without a draft, by cause; those of `NOTHING_FOUND` are not described.

    Example:
        >>> describe_cuts(Counter(governor=8), Counter(governor=2, nothing_found=1))
        'the governor cut 8 drafted tokens and left 2 steps without a draft'
    """
    described = []
    for cause in sorted(CAUSES, key=lambda cause: (-steps[cause], -tokens[cause])):
        parts = [f"cut {counted(tokens[cause], 'drafted token')}"] if tokens[cause] else []
        parts += [f"left {counted(steps[cause], 'step')} without a draft"] if steps[cause] else []
        if parts:
            described.append(f"{CAUSES[cause]} {' and '.join(parts)}")
    return ", ".join(described)


def counted(number: int, noun: str) -> str:
    """``1 step``, ``2,000 steps``, ``2 guesses``."""
    plural = "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{'' if number == 1 else plural}"

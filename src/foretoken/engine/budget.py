"""How much of a draft is worth making, what limits that, and what every limit has cut off in the end."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Self

if TYPE_CHECKING:
    from foretoken.tree import DraftTree

NOTHING_FOUND = "nothing_found"
"""Why a step has no draft whose drafter was asked and proposed nothing. All other causes keep it from drafting."""

NO_TOKENS: Mapping[str, int] = {}

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


class Limits(NamedTuple):
    """Budget of a row, and the causes (`CAUSES`) of its bounds.

    Args:
      budget: as much as all of them allow.
      depth: the cause of its depth.
      nodes: of its number of nodes.
      shape: of its being for chains only, where it is.
    """

    budget: Budget
    depth: str
    nodes: str = "memory"
    shape: str = "chains"

    def stages(self, budget: Budget, draft: DraftTree) -> Iterator[tuple[str, int]]:
        """Tokens that are left of a draft within a budget, cause by cause."""
        if budget.chains_only:
            draft = draft.main_chain()
            yield self.shape, len(draft) - 1
        yield self.depth if draft.depth > budget.depth else self.nodes, len(budget.cut(draft)) - 1

    def why_nothing(self, budget: Budget, draft: DraftTree) -> str:
        """The cause of an empty draft."""
        if budget.depth == 0:
            return self.depth
        if budget.nodes <= 1:
            return self.nodes
        return draft.plan.cause if draft.plan is not None and draft.plan.gamma == 0 else NOTHING_FOUND


@dataclass
class Cuts:
    """Counts of one row, or of several together.

    Attributes:
      tokens: drafted tokens that were left out before verifying, by what left them out.
      steps: steps without a draft, by what kept them from having one: a cause, or `NOTHING_FOUND`.
      latest: why the newest step had no draft; empty where it had one.
      latest_tokens: what was left out of the newest draft, like ``tokens``.
    """

    tokens: Counter[str] = field(default_factory=Counter)
    steps: Counter[str] = field(default_factory=Counter)
    latest: str = ""
    latest_tokens: Mapping[str, int] = field(default_factory=lambda: NO_TOKENS)

    def count(
        self, limits: Limits, budget: Budget, draft: DraftTree, tree: DraftTree, *, has_failed: bool = False
    ) -> None:
        """Count what was cut from the draft of a step, or why there is none.

        Args:
          budget: as much of that of ``limits`` as the governor has left, which the drafter was given.
          tree: what is verified of the draft.
          has_failed: whether a fault of the drafter has ended drafting.
        """
        if len(tree) == len(draft) > 1:
            self.latest, self.latest_tokens = "", NO_TOKENS
            return
        if budget != limits.budget:
            limits = limits._replace(depth="governor")
        if len(draft) > 1:
            self.record("", len(draft) - 1, [*limits.stages(budget, draft), ("governor", len(tree) - 1)])
        else:
            self.record("fault" if has_failed else limits.why_nothing(budget, draft), 0)

    def record(self, cause: str, num_proposed: int, stages: Seq[tuple[str, int]] = ()) -> None:
        """Count one step.

        Args:
          cause: why there is no draft where nothing was proposed.
          num_proposed: tokens of the draft.
          stages: in order, what may cut it and how many tokens are then left; the last ones are verified.

        Of eight tokens the promise of bits leaves five, and the governor none. Stages (("bits", 5), ("governor", 0))
        count three tokens for the promise, five for the governor, and a step without a draft for the governor.
        """
        if not num_proposed:
            self.latest, self.latest_tokens = cause, NO_TOKENS
            self.steps[cause] += 1
            return
        left = num_proposed
        cut: dict[str, int] = {}
        for stage, num_left in stages:
            if num_left < left:
                cut[stage] = cut.get(stage, 0) + left - num_left
                cause, left = stage, num_left
        self.latest, self.latest_tokens = "" if left else cause, cut
        self.tokens.update(cut)
        if not left:
            self.steps[cause] += 1

    def add(self, other: Cuts) -> None:
        """Pool the counts of another row."""
        self.tokens.update(other.tokens)
        self.steps.update(other.steps)

    @property
    def num_tokens(self) -> int:
        """Drafted tokens that were left out."""
        return self.tokens.total()

    @property
    def num_held_steps(self) -> int:
        """Steps that were kept from having a draft."""
        return self.steps.total() - self.steps[NOTHING_FOUND]

    @property
    def main_cause(self) -> str:
        """What kept most steps from having a draft; empty where nothing did."""
        held = [(count, cause) for cause, count in self.steps.items() if cause != NOTHING_FOUND]
        return max(held, default=(0, ""))[1]

    def describe(self) -> str:
        """What was cut, for people, the cause of most first; empty where nothing was.

        Example:
            >>> cuts = Cuts()
            >>> cuts.record("nothing_found", 8, [("governor", 0)])
            >>> cuts.record("governor", 0)
            >>> cuts.describe()
            'the governor cut 8 drafted tokens and left 2 steps without a draft'
        """
        causes = sorted(CAUSES, key=lambda cause: (-self.steps[cause], -self.tokens[cause]))
        said = [self._of(cause) for cause in causes if self.steps[cause] or self.tokens[cause]]
        return ", ".join(said)

    def _of(self, cause: str) -> str:
        tokens, steps = self.tokens[cause], self.steps[cause]
        parts = [f"cut {counted(tokens, 'drafted token')}"] if tokens else []
        parts += [f"left {counted(steps, 'step')} without a draft"] if steps else []
        return f"{CAUSES[cause]} {' and '.join(parts)}"


def counted(number: int, noun: str) -> str:
    """``1 step``, ``2,000 steps``, ``2 guesses``."""
    plural = "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{'' if number == 1 else plural}"

"""Which of several methods to draft with, by the time that their tokens took."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from foretoken.engine.cost_model import SHARE
from foretoken.engine.governor import Governor, Patience
from foretoken.engine.stats import Totals

if TYPE_CHECKING:
    from foretoken.engine.budget import Budget, Habit, NumNodes
    from foretoken.engine.cost_model import CostModel
    from foretoken.engine.drafter import Drafter
    from foretoken.engine.outputs import RowOutput
    from foretoken.engine.sequence import Sequence
    from foretoken.engine.stats import Steps
    from foretoken.tree import DraftTree

TURN = 8
"""Steps that an arm runs before another is considered, and half of those that every arm gets at first: fewer would
mostly show what the first step of a drafter costs."""


class MethodBandit:
    """Chooses among the arms of a drafter, each of which has a governor of its own.

    The arm whose tokens took the least time of late runs; the others get a turn as often as `SHARE` of the time, for
    all of them together, allows for what they are expected to lose, so that one which has become better is noticed.

    Args:
      drafter: has two or more ``arms``.
      costs: of steps without a draft, for all of them.

    Exactness, randomness: as of `Governor`.
    """

    def __init__(self, drafter: Drafter, costs: CostModel) -> None:
        self._drafter = drafter
        self._arms = [Governor(costs.beside(), title=title) for title in drafter.arms]
        self._steps = [0] * len(self._arms)
        self.patience = Patience(len(self._arms))
        self._credits = [0.0] * len(self._arms)
        self._active = 0
        self._left = 2 * TURN
        self._turn = 2 * TURN  # steps of the last turn

    def budgets(
        self,
        rows: Seq[Sequence],
        budgets: Seq[Budget],
        num_nodes: NumNodes,
        *,
        is_closed: bool = False,
        context: float = 0.0,
    ) -> list[Budget]:
        """Choose who drafts; what may be drafted for every row."""
        if self._left <= 0:
            self._turn = TURN - self._left
            self._choose()
        self._drafter.choose_arm(self._active)
        return self._current.budgets(rows, budgets, num_nodes, is_closed=is_closed, context=context)

    def _choose(self) -> None:
        """The arm for the next steps."""
        self._left = TURN
        untried = [arm for arm, count in enumerate(self._steps) if count < 2 * TURN]
        if untried:
            self._active, self._left = untried[0], 2 * TURN
            return
        gains = [arm.pace.gain for arm in self._arms]
        best = max(range(len(gains)), key=gains.__getitem__)
        self._active = best
        for arm, gain in enumerate(gains):
            loss = self._turn * (1.0 - gain / gains[best])
            if arm != best and self._credits[arm] > loss:
                self._credits[arm] = 0.0
                self._active = arm
                return

    def trimmed(self, rows: Seq[Sequence], trees: Seq[DraftTree], num_nodes: NumNodes) -> list[DraftTree]:
        """The parts of drafts that are worth verifying."""
        return self._current.trimmed(rows, trees, num_nodes)

    def cut(self, rows: Seq[Sequence], trees: Seq[DraftTree], num_nodes: NumNodes) -> list[DraftTree]:
        """The parts of drafts that are verified in a step between two decisions, see `Governor.cut`."""
        return self._current.cut(rows, trees, num_nodes)

    def learn(
        self,
        trees: Seq[DraftTree],
        outputs: Seq[RowOutput],
        num_nodes: NumNodes,
        *,
        drafting_seconds: float,
        other_seconds: float,
    ) -> None:
        """Take in what a step has brought and what it has cost."""
        self._current.learn(trees, outputs, num_nodes, drafting_seconds=drafting_seconds, other_seconds=other_seconds)
        for governor in self._others:
            governor.follow(outputs)
        self._count(1)

    def follow_steps(self, steps: Steps) -> None:
        """Count steps between two decisions."""
        self._current.follow_steps(steps)
        self._count(steps.num_steps)

    def follow(self, outputs: Seq[RowOutput], drafts: Seq[DraftTree] = ()) -> None:
        """Hold drafts against the tokens that have come, see `Governor.follow`."""
        self._current.follow(outputs, drafts)
        for governor in self._others:
            governor.follow(outputs)

    def value_of(self, outputs: Seq[RowOutput]) -> float:
        """Tokens that a step has brought, see `Governor.value_of`."""
        return self._current.value_of(outputs)

    def leave(self, rows: Seq[Sequence]) -> None:
        """Drop what is known of rows alone, see `Governor.leave`."""
        for governor in self._arms:
            governor.leave(rows)

    def _count(self, num_steps: int) -> None:
        for arm in range(len(self._arms)):
            if arm != self._active:
                self._credits[arm] += num_steps * SHARE / (len(self._arms) - 1)
        self._steps[self._active] += num_steps
        self._left -= num_steps

    @property
    def habit(self) -> Habit:
        """What the arm that drafts decided last."""
        return self._current.habit

    @property
    def totals(self) -> Totals:
        """Counts of all arms together."""
        return sum((arm.totals for arm in self._arms), start=self.patience.totals)

    def describe(self) -> str | None:
        """What is decided at present, and why; None before the first step."""
        if not self.patience.is_attending:
            return self.patience.describe()
        best = max(range(len(self._arms)), key=lambda arm: (self._steps[arm] >= 2 * TURN, self._arms[arm].pace.gain))
        said = self._arms[best].describe()
        others = [
            f"{arm.title} {arm.pace.gain:.2f}" for arm, count in zip(self._arms, self._steps, strict=True) if count
        ]
        return None if said is None else f"{said}; speeds of late by plain decoding: {', '.join(others)}"

    @property
    def _current(self) -> Governor:
        return self._arms[self._active]

    @property
    def _others(self) -> list[Governor]:
        return [governor for arm, governor in enumerate(self._arms) if arm != self._active]

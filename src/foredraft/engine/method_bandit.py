"""Which of several methods to draft with, by the time that their tokens took."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from foredraft.engine.cost_model import SHARE
from foredraft.engine.governor import Governor, Patience
from foredraft.engine.stats import Totals

if TYPE_CHECKING:
    from foredraft.engine.budget import DraftSize, Habit
    from foredraft.engine.cost_model import CostModel
    from foredraft.engine.drafter import DrafterFacts
    from foredraft.engine.outputs import RowOutput
    from foredraft.engine.row import Row
    from foredraft.engine.stats import Steps
    from foredraft.tree import DraftTree

TURN = 8
"""Steps that an arm runs before another is considered, and half of those that every arm gets at first: fewer would
mostly show what the first step of a drafter costs."""


class _Turns:
    """Whose turn it is in batches of about so many rows, and how many steps of it are left.

    Args:
      num_arms: among which is chosen.
      arm: that begins.
    """

    def __init__(self, num_arms: int, arm: int) -> None:
        self.arm = arm
        self._steps = [0] * num_arms
        self._credits = [0.0] * num_arms
        self._left = 2 * TURN
        self._turn = 2 * TURN  # steps of the last turn

    def choose(self, gains: Sequence[float]) -> None:
        """The arm for the next step, where a turn has ended, by the speed of every arm."""
        if self._left > 0:
            return
        self._turn = TURN - self._left
        self._left = TURN
        untried = [arm for arm in range(len(gains)) if not self.is_tried(arm)]
        if untried:
            self.arm, self._left = untried[0], 2 * TURN
            return
        best = max(range(len(gains)), key=gains.__getitem__)
        self.arm = best
        for arm, gain in enumerate(gains):
            loss = self._turn * (1.0 - gain / gains[best])
            if arm != best and self._credits[arm] > loss:
                self._credits[arm] = 0.0
                self.arm = arm
                return

    def count(self, num_steps: int) -> None:
        """Steps have run."""
        for arm in range(len(self._credits)):
            if arm != self.arm:
                self._credits[arm] += num_steps * SHARE / (len(self._credits) - 1)
        self._steps[self.arm] += num_steps
        self._left -= num_steps

    def is_tried(self, arm: int) -> bool:
        """Whether an arm has had the steps that every one gets."""
        return self._steps[arm] >= 2 * TURN


class MethodBandit:
    """Chooses among the arms of a drafter, each of which has a governor of its own.

    The arm whose tokens took the least time of late runs, in batches of about as many rows: what pays for one row does
    not for eight. The others get a turn as often as `SHARE` of the time, for all of them together, allows for what they
    are expected to lose, so that one which has become better is noticed.

    Args:
      drafter: has two or more ``arms``.
      costs: of steps without a draft, for all of them.

    Attributes:
      governors: of the arms.

    Exactness, randomness: as of `Governor`.
    """

    def __init__(self, drafter: DrafterFacts, costs: CostModel) -> None:
        self.governors = [Governor(costs.beside(), title=title) for title in drafter.arms]
        self.patience = Patience(len(self.governors) - 1)
        self._num_rows = 1
        self._turns = _Turns(len(self.governors), drafter.arm)
        self._turns_of: dict[int, _Turns] = {}  # by magnitude of rows

    @property
    def arm(self) -> int:
        """The one whose turn it is."""
        return self._turns.arm

    def budgets(
        self,
        rows: Sequence[Row],
        budgets: Sequence[DraftSize],
        *,
        is_closed: bool = False,
        context: float = 0.0,
    ) -> list[DraftSize]:
        """Choose who drafts; what may be drafted for every row."""
        size = len(rows).bit_length()
        if size not in self._turns_of:
            self._turns_of[size] = _Turns(len(self.governors), self._turns.arm)
        self._num_rows, self._turns = len(rows), self._turns_of[size]
        self._turns.choose(self._gains())
        return self._current.budgets(rows, budgets, is_closed=is_closed, context=context)

    def _gains(self) -> list[float]:
        return [governor.gain(self._num_rows) for governor in self.governors]

    def trimmed(self, rows: Sequence[Row], trees: Sequence[DraftTree]) -> list[DraftTree]:
        """The parts of drafts that are worth verifying."""
        return self._current.trimmed(rows, trees)

    def cut(self, rows: Sequence[Row], trees: Sequence[DraftTree]) -> list[DraftTree]:
        """The parts of drafts that are verified in a step between two decisions, see `Governor.cut`."""
        return self._current.cut(rows, trees)

    def learn(
        self,
        trees: Sequence[DraftTree],
        outputs: Sequence[RowOutput],
        *,
        drafting_seconds: float,
        other_seconds: float,
    ) -> None:
        """Take in what a step has brought and what it has cost."""
        self._current.learn(trees, outputs, drafting_seconds=drafting_seconds, other_seconds=other_seconds)
        for governor in self._others:
            governor.follow(outputs)
        self._turns.count(1)

    def follow_steps(self, steps: Steps) -> None:
        """Count steps between two decisions."""
        self._current.follow_steps(steps)
        self._turns.count(steps.num_steps)

    def follow(self, outputs: Sequence[RowOutput], drafts: Sequence[DraftTree] = ()) -> None:
        """Hold drafts against the tokens that have come, see `Governor.follow`."""
        self._current.follow(outputs, drafts)
        for governor in self._others:
            governor.follow(outputs)

    def value_of(self, outputs: Sequence[RowOutput]) -> float:
        """Tokens that a step has brought, see `Governor.value_of`."""
        return self._current.value_of(outputs)

    @property
    def habit(self) -> Habit:
        """What the arm that drafts decided last."""
        return self._current.habit

    @property
    def totals(self) -> Totals:
        """Counts of all arms together."""
        return sum((governor.totals for governor in self.governors), start=self.patience.totals)

    def describe(self) -> str | None:
        """What is decided at present, and why; None before the first step."""
        if not self.patience.is_attending:
            return self.patience.describe()
        gains = self._gains()
        best = max(range(len(gains)), key=lambda arm: (self._turns.is_tried(arm), gains[arm]))
        said = self.governors[best].describe() or self._current.describe()
        speeds = [f"{governor.title} {gain:.2f}" for governor, gain in zip(self.governors, gains, strict=True)]
        return None if said is None else f"{said}; speeds of late by plain decoding: {', '.join(speeds)}"

    @property
    def _current(self) -> Governor:
        return self.governors[self.arm]

    @property
    def _others(self) -> list[Governor]:
        return [governor for arm, governor in enumerate(self.governors) if arm != self.arm]

"""Between an engine and its governor, if it has one."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, TypeAlias

from foretoken.engine.acceptance_model import KINDS
from foretoken.engine.cost_model import FEW, MEMORY, SHARE, Average, CostModel
from foretoken.engine.costs import cost_curve, facts_of, forget_curve
from foretoken.engine.governor import Governor
from foretoken.engine.method_bandit import MethodBandit
from foretoken.engine.stats import Steps

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from foretoken.engine.budget import Budget
    from foretoken.engine.drafter import Drafter
    from foretoken.engine.forwards import Forwards
    from foretoken.engine.outputs import RowOutput
    from foretoken.engine.profiles import Profile
    from foretoken.engine.scheduler import Scheduler
    from foretoken.engine.sequence import Sequence
    from foretoken.engine.stats import Clock
    from foretoken.model.lm import CausalLM
    from foretoken.tree import DraftTree

logger = logging.getLogger("foretoken")

AnyGovernor: TypeAlias = Governor | MethodBandit

USUAL_TRIALS = 8.0
"""Outcomes that the usual acceptance of a drafter is worth: it takes more than a few misses to doubt it."""

MOST_DECIDING = 12 * SHARE
"""Of a step, for a decision: where it takes more, so does learning of drafts in the steps between, which takes a sixth
of that and brings 2 to 7 % of the speed of drafts with scores (dev/measurements/governor.md)."""

LONGEST = MEMORY // 2
"""Steps between two decisions, at most: half of an answer."""


class Governing:
    """Asks a governor and tells it of steps; without one, as much is drafted and verified as is allowed.

    So that its own time stays small beside that of steps, a governor decides in some of them only, see `Attention`; in
    those between, what it decided last is followed.

    Args:
      forwards: of the engine; they know how many nodes a step runs.
      scheduler: of the engine; it knows whether requests wait.
    """

    def __init__(self, governor: AnyGovernor | None, forwards: Forwards, scheduler: Scheduler) -> None:
        self._governor = governor
        self._scheduler = scheduler
        self._forwards = forwards
        self._attention = Attention()
        self._allowed: list[Budget] = []
        self._followed = Steps()  # since the last decision
        self._own_seconds = 0.0  # of the step that runs, before it verifies

    @property
    def is_deciding(self) -> bool:
        """Whether the step that runs, or ran last, is one that the governor decides in."""
        return self._attention.is_deciding

    def welcomes(self) -> bool:
        """Whether a row that comes in now has the drafter."""
        return self._governor is None or self._governor.patience.welcomes()

    def leaves(self, rows: Seq[Sequence]) -> bool:
        """Whether these rows, all that run, are to go on without the drafter; it knows no more of them then."""
        if self._governor is None or not self._governor.patience.ends():
            return False
        self._hand_over()
        self._governor.leave(rows)
        logger.debug("%d rows go on without the drafter, which costs more than it brings", len(rows))
        return True

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Let the drafter read chunks of prompts within it."""
        start = perf_counter()
        yield
        if self._governor is not None:
            self._governor.patience.read(perf_counter() - start)

    def rested(self, num_rows: int, clock: Clock) -> None:
        """A step has run without the drafter."""
        if self._governor is not None:
            self._governor.patience.rested(num_rows, sum(clock.laps.values()))

    def budgets(self, rows: Seq[Sequence], budgets: list[Budget]) -> list[Budget]:
        """What may be drafted for every row."""
        if self._governor is None:
            return budgets
        start = perf_counter()
        if self._attention.begin(len(rows)):
            self._hand_over()
            self._allowed = self._governor.budgets(
                rows,
                budgets,
                self._forwards.num_nodes,
                is_closed=not self._scheduler.waiting and not self._scheduler.prefilling,
                context=sum(len(row.token_ids) for row in rows) / max(len(rows), 1),
            )
        else:
            self._allowed = self._governor.habit.budgets(budgets)
        self._own_seconds = perf_counter() - start
        return self._allowed

    def trimmed(self, rows: Seq[Sequence], trees: list[DraftTree]) -> list[DraftTree]:
        """What is to be verified of drafts."""
        if self._governor is None:
            return trees
        start = perf_counter()
        for tree, allowed in zip(trees, self._allowed, strict=True):
            if tree.plan is not None:  # traces show what was planned in the end
                tree.plan.gamma = min(tree.plan.gamma, allowed.depth)
        if self._attention.is_deciding:
            trees = self._governor.trimmed(rows, trees, self._forwards.num_nodes)
        else:
            trees = self._governor.cut(rows, trees, self._forwards.num_nodes, learns=self._attention.is_learning)
        self._own_seconds += perf_counter() - start
        return trees

    def learn(self, trees: Seq[DraftTree], outputs: Seq[RowOutput], clock: Clock) -> None:
        """Take in what a step has brought, and what it has cost."""
        if self._governor is None:
            return
        start = perf_counter()
        upkeep = max(clock.laps["propose_seconds"] - self._own_seconds, 0.0) + clock.laps["observe_seconds"]
        rest = sum(clock.laps.values()) - clock.laps["propose_seconds"] - clock.laps["observe_seconds"]
        drafting = upkeep + self._attention.following_seconds
        drafts = any(len(tree) > 1 for tree in trees)
        if self._attention.is_deciding:
            num_nodes = self._forwards.num_nodes
            self._governor.learn(trees, outputs, num_nodes, drafting_seconds=drafting, other_seconds=rest)
        else:
            self._follow(trees, outputs, drafting, rest)
        own = self._own_seconds + perf_counter() - start
        self._attention.end(own, upkeep + rest)
        value = self._governor.value_of(outputs)
        self._governor.patience.attended(len(outputs), value, own + upkeep, rest, drafts=drafts)

    def _follow(self, trees: Seq[DraftTree], outputs: Seq[RowOutput], drafting: float, other: float) -> None:
        """Count a step in which nothing was decided."""
        assert self._governor is not None
        num_rows = len(outputs)
        num_tokens = sum([len(output.token_ids) for output in outputs])
        self._followed.add(num_rows, sum(map(len, trees)) - num_rows, num_tokens, drafting, other)
        has_ended = any(output.row.is_finished for output in outputs)
        if has_ended or self._governor.has_open_drafts:
            self._governor.follow(outputs)
        if has_ended:
            self._hand_over()

    def _hand_over(self) -> None:
        """Tell the governor of the steps since its last decision."""
        if self._governor is not None and self._followed.num_steps:
            self._governor.follow_steps(self._followed)
            self._followed = Steps()


@dataclass
class _Meter:
    """Logarithms of seconds of steps like one another: whole ones, and what governing took where it decided or not."""

    step: Average = field(default_factory=Average)
    deciding: Average = field(default_factory=Average)
    following: Average = field(default_factory=Average)

    @property
    def following_seconds(self) -> float:
        return math.exp(self.following.value) if self.following.count else 0.0

    @property
    def interval(self) -> int:
        """Steps from one decision to the next."""
        most = min(1 + self.deciding.count // FEW, LONGEST)
        deciding, following = math.exp(self.deciding.value), self.following_seconds
        allowed = SHARE * math.exp(self.step.value) - following
        if most == 1 or allowed <= 0.0:
            return most
        return max(1, min(math.ceil((deciding - following) / allowed), most))


class Attention:
    """Spends a governor's time: as often as it may, it decides; in the steps between, the last decision is followed.

    Decisions are close together at first, when most is learned by them, and made anew where the number of rows has
    doubled or halved.
    """

    def __init__(self) -> None:
        self._meters: dict[int, _Meter] = {}
        self._class = 0
        self._left = 0  # steps to the next decision
        self.is_deciding = True

    def begin(self, num_rows: int) -> bool:
        """Whether the step that begins is one to decide in."""
        size = num_rows.bit_length()
        self.is_deciding = self._left <= 0 or size != self._class
        self._class = size
        return self.is_deciding

    @property
    def is_learning(self) -> bool:
        """Whether steps are long beside what it takes to hold their drafts against the text between two decisions."""
        meter = self._meters.get(self._class)
        return meter is not None and meter.deciding.value <= meter.step.value + math.log(MOST_DECIDING)

    @property
    def following_seconds(self) -> float:
        """What governing takes of a step like the one that runs, in which nothing is decided; 0 until that is known."""
        meter = self._meters.get(self._class)
        return 0.0 if meter is None else meter.following_seconds

    def end(self, own_seconds: float, step_seconds: float) -> None:
        """A step has taken so long; governing alone, and all the rest."""
        if not self.is_deciding:
            self._left -= 1
            if self._left <= 0:
                self._meters[self._class].following.add(math.log(own_seconds))
            return
        meter = self._meters.setdefault(self._class, _Meter())
        meter.deciding.add(math.log(own_seconds))
        meter.step.add(math.log(step_seconds))
        self._left = meter.interval - 1


def new_governor(target: CausalLM, drafter: Drafter, profile: Profile | None = None) -> AnyGovernor:
    """One that begins with what forwards of the target cost on this machine, see `cost_curve`.

    Args:
      profile: measured before: its costs if they are of this machine, its acceptance if it is of this drafter.

    Raises: ConfigError for a profile of another model.
    """
    facts = facts_of(target)
    difference = None if profile is None else profile.difference(facts)
    if difference is not None:
        logger.warning("the profile was measured otherwise (%s): its costs are not used", difference)
    curve = profile.curve() if profile is not None and difference is None else None
    costs = CostModel(cost_curve(target), partial(forget_curve, facts)) if curve is None else CostModel(curve)
    if len(drafter.arms) > 1:
        return MethodBandit(drafter, costs)
    governor = Governor(costs)
    if drafter.usual_acceptance is not None:
        for depth in range(1, KINDS + 1):
            governor.acceptance.expect(drafter.name, depth, drafter.usual_acceptance, USUAL_TRIALS)
    if profile is not None and profile.method == drafter.name:
        profile.teach(governor, has_costs=difference is None)
    return governor

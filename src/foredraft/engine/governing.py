"""Between an engine and its governor, if it has one."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from foredraft.engine.acceptance_model import KINDS, AcceptanceModel
from foredraft.engine.cost_model import FEW, MEMORY, SHARE, Average, CostModel
from foredraft.engine.costs import cost_curve, facts_of, forget_curve
from foredraft.engine.governor import Governor
from foredraft.engine.method_bandit import MethodBandit
from foredraft.engine.stats import Steps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foredraft.engine.budget import DraftSize
    from foredraft.engine.drafter import Drafter, DrafterFacts
    from foredraft.engine.outputs import RowOutput
    from foredraft.engine.profiles import Profile
    from foredraft.engine.row import Row
    from foredraft.engine.scheduler import Scheduler
    from foredraft.engine.stats import Clock
    from foredraft.model.lm import CausalLM
    from foredraft.tree import DraftTree

logger = logging.getLogger("foredraft")

AnyGovernor: TypeAlias = Governor | MethodBandit

USUAL_TRIALS = 8.0
"""Outcomes that the usual acceptance of a drafter is worth: it takes more than a few misses to doubt it."""

MOST_FOLLOWING = 2 * SHARE
"""Of a step, for following what was decided: where it takes more, nothing is learned of drafts between two decisions,
which brings 2 to 7 % of the speed of drafts with scores (dev/measurements/governor.md)."""

LONGEST = MEMORY // 2
"""Steps between two decisions, at most: half of an answer."""


class Governing:
    """Asks a governor and tells it of steps; without one, as much is drafted and verified as is allowed.

    So that its own time stays small beside that of steps, a governor decides in some of them only, see `Attention`; in
    those between, what it decided last is followed.

    Args:
      drafter: what is known of the drafter.
      scheduler: of the engine; it knows whether requests wait.
    """

    def __init__(self, governor: AnyGovernor | None, drafter: DrafterFacts, scheduler: Scheduler) -> None:
        self._governor = governor
        self._arm: int | None = None  # in which the drafter is to draft
        self._scheduler = scheduler
        self._attention = Attention()
        self._acceptance: AcceptanceModel | None = None  # without a governor, until heads are compared
        if governor is None and drafter.validated_acceptance:
            self._acceptance = AcceptanceModel()
            self._acceptance.compare_with(drafter.validated_acceptance)
        self._allowed: list[DraftSize] = []
        self._drafts: Sequence[DraftTree] = ()  # of the step that runs, whole
        self._followed: list[_Followed] = []  # since the last decision
        self._own_seconds = 0.0  # of the step that runs, before it verifies

    @property
    def is_deciding(self) -> bool:
        """Whether the step that runs, or ran last, is one that the governor decides in."""
        return self._attention.is_deciding

    def welcomes(self) -> bool:
        """Whether a row that comes in now has the drafter."""
        return self._governor is None or self._governor.patience.welcomes()

    def leaves(self, rows: Sequence[Row]) -> bool:
        """Whether these rows, all that run, are to go on without the drafter; it knows no more of them then."""
        if self._governor is None or not self._governor.patience.ends():
            return False
        self._hand_over()
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

    def budgets(self, rows: Sequence[Row], budgets: list[DraftSize]) -> list[DraftSize]:
        """What may be drafted for every row."""
        if self._governor is None:
            return budgets
        start = perf_counter()
        if self._attention.begin(len(rows)):
            self._hand_over()
            self._allowed = self._governor.budgets(
                rows,
                budgets,
                is_closed=not self._scheduler.waiting and not self._scheduler.prefilling,
                context=sum(len(row.token_ids) for row in rows) / max(len(rows), 1),
            )
            self._arm = self._governor.arm
        else:
            self._allowed = self._governor.habit.budgets(budgets)
        if self._arm is not None:
            for size in self._allowed:
                size.arm = self._arm
        self._own_seconds = perf_counter() - start
        return self._allowed

    def trimmed(self, rows: Sequence[Row], trees: list[DraftTree]) -> list[DraftTree]:
        """What is to be verified of drafts."""
        if self._governor is None:
            self._drafts = trees
            return trees
        start = perf_counter()
        for tree, allowed in zip(trees, self._allowed, strict=True):
            if tree.plan is not None:  # traces show what was planned in the end
                tree.plan.gamma = min(tree.plan.gamma, allowed.depth)
        if self._attention.is_deciding:
            trees = self._governor.trimmed(rows, trees)
        else:
            self._drafts, trees = trees, self._governor.cut(rows, trees)
        self._own_seconds += perf_counter() - start
        return trees

    def learn(self, trees: Sequence[DraftTree], outputs: Sequence[RowOutput], clock: Clock) -> None:
        """Take in what a step has brought, and what it has cost; between two decisions that waits for the next one.

        A forward leaves nothing of Python in the caches of a processor: of several steps at once, this takes less.
        """
        if self._governor is None:
            if self._acceptance is not None:
                self._compare(self._acceptance, outputs)
            return
        start = perf_counter()
        if self._attention.is_deciding:
            drafting, rest = _times(clock.laps, self._own_seconds)
            following = self._attention.following_seconds
            self._governor.learn(trees, outputs, drafting_seconds=drafting + following, other_seconds=rest)
            own = self._own_seconds + perf_counter() - start
            self._attention.end(own, drafting + rest)
            self._attend(trees, outputs, own + drafting, rest)
            return
        self._followed.append(_Followed(self._drafts, trees, outputs, clock.laps, self._own_seconds))
        if any(output.row.is_finished for output in outputs):
            self._hand_over()
        self._attention.follow(self._own_seconds + perf_counter() - start)

    def _compare(self, acceptance: AcceptanceModel, outputs: Sequence[RowOutput]) -> None:
        """Hold the drafts of a step without a governor against the tokens that have come."""
        for draft, output in zip(self._drafts, outputs, strict=True):
            acceptance.proposed(output.row, draft)
            acceptance.came(output.row, output.token_ids)
        if not acceptance.is_comparing:
            self._acceptance = None

    def _attend(self, trees: Sequence[DraftTree], outputs: Sequence[RowOutput], taken: float, rest: float) -> None:
        """Enter a step into the account of what attending to the drafter loses."""
        assert self._governor is not None
        drafts = any(len(tree) > 1 for tree in trees)
        self._governor.patience.attended(len(outputs), self._governor.value_of(outputs), taken, rest, drafts=drafts)

    def _hand_over(self) -> None:
        """Tell the governor of the steps since its last decision."""
        if self._governor is None or not self._followed:
            return
        steps, following = Steps(), self._attention.following_seconds
        for drafts, trees, outputs, laps, own_seconds in self._followed:
            self._governor.follow(outputs, drafts if self._attention.is_learning else ())
            drafting, rest = _times(laps, own_seconds)
            num_rows, num_tokens = len(outputs), sum([len(output.token_ids) for output in outputs])
            steps.add(num_rows, sum(map(len, trees)) - num_rows, num_tokens, drafting + following, rest)
            self._attend(trees, outputs, drafting + following, rest)
        self._governor.follow_steps(steps)
        self._followed.clear()


def _times(laps: Mapping[str, float], own_seconds: float) -> tuple[float, float]:
    """Seconds of a step that its drafter took, and of all the rest, governing left out."""
    drafting = max(laps["propose_seconds"] - own_seconds, 0.0) + laps["observe_seconds"]
    return drafting, sum(laps.values()) - laps["propose_seconds"] - laps["observe_seconds"]


class _Followed(NamedTuple):
    """A step in which nothing was decided: its drafts, whole and as verified, what it brought, and its times.

    Args:
      own_seconds: of governing before it verified.
    """

    drafts: Sequence[DraftTree]
    trees: Sequence[DraftTree]
    outputs: Sequence[RowOutput]
    laps: Mapping[str, float]
    own_seconds: float


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
        most = min(1 + max(self.deciding.count - FEW, 0), LONGEST)
        deciding, following = math.exp(self.deciding.value), self.following_seconds
        allowed = SHARE * math.exp(self.step.value) - following
        if most == 1 or allowed <= 0.0:
            return most
        return max(1, min(math.ceil((deciding - following) / allowed), most))


class Attention:
    """Spends a governor's time: as often as it may, it decides; in the steps between, the last decision is followed.

    Decisions are close together at first, when most is learned by them, and made anew where the number of rows has
    doubled or halved.

    Attributes:
      is_deciding: whether the step that runs is decided in.
      following_seconds: what governing takes of a step like those since the last decision; 0 until that is known.
      is_learning: whether these steps are long enough for what is decided in some to be learned of all.
    """

    def __init__(self) -> None:
        self._meters: dict[int, _Meter] = {}
        self._class = 0
        self._left = 0  # steps to the next decision
        self._followed: list[float] = []  # seconds of steps since the last one
        self.is_deciding = True
        self.following_seconds = 0.0
        self.is_learning = False

    def begin(self, num_rows: int) -> bool:
        """Whether the step that begins is one to decide in."""
        size = num_rows.bit_length()
        self.is_deciding = self._left <= 0 or size != self._class
        self._class = size
        return self.is_deciding

    def follow(self, own_seconds: float) -> None:
        """In a step in which nothing was decided, governing has taken so long."""
        self._followed.append(own_seconds)
        self._left -= 1
        if self._left <= 0:
            self._meters[self._class].following.add(math.log(fmean(self._followed)))

    def end(self, own_seconds: float, step_seconds: float) -> None:
        """A step that was decided in has taken so long; governing alone, and all the rest."""
        meter = self._meters.setdefault(self._class, _Meter())
        meter.deciding.add(math.log(own_seconds))
        meter.step.add(math.log(step_seconds))
        self._left = meter.interval - 1
        self._followed.clear()
        self.following_seconds = meter.following_seconds
        self.is_learning = self.following_seconds <= MOST_FOLLOWING * math.exp(meter.step.value)


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
    bandit = MethodBandit(drafter.facts, costs) if drafter.facts.arms else None
    governor = Governor(costs) if bandit is None else bandit.governors[drafter.facts.arm]
    for one in [governor] if bandit is None else bandit.governors:
        one.acceptance.compare_with(drafter.facts.validated_acceptance)
    if drafter.facts.usual_acceptance is not None:
        for depth in range(1, KINDS + 1):
            governor.acceptance.expect(drafter.name, depth, drafter.facts.usual_acceptance, USUAL_TRIALS)
    if profile is not None and profile.method == drafter.name:
        profile.teach(governor, has_costs=difference is None)
    return bandit or governor

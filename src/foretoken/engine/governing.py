"""Between an engine and its governor, if it has one."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeAlias

from foretoken.engine.arms import ArmsGovernor
from foretoken.engine.cost_curves import cost_curve, facts_of
from foretoken.engine.governor import Governor
from foretoken.engine.step_costs import StepCosts
from foretoken.engine.survival import DEEPEST

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from foretoken.engine.batch import Batch
    from foretoken.engine.budget import Budget
    from foretoken.engine.drafter import Drafter
    from foretoken.engine.forwards import Forwards
    from foretoken.engine.outputs import RowOutput
    from foretoken.engine.profiles import Profile
    from foretoken.engine.sequence import Sequence
    from foretoken.engine.stats import Clock
    from foretoken.model.lm import CausalLM
    from foretoken.tree import DraftTree

logger = logging.getLogger("foretoken")

AnyGovernor: TypeAlias = Governor | ArmsGovernor

LEAST_SECONDS = 0.008
"""Plain steps that take less are not governed: the governor's own tenth of a millisecond would be more than 1 % of
them, and what they take is host time for the most part."""


USUAL_TRIALS = 8
"""Outcomes that the usual acceptance of a drafter is worth."""


class Governing:
    """Asks a governor and tells it of steps; without one, as much is drafted and verified as is allowed.

    Args:
      forwards: of the engine; they know how many nodes a step runs.
      batch: of the engine; it knows whether requests wait.
    """

    def __init__(self, governor: AnyGovernor | None, forwards: Forwards, batch: Batch) -> None:
        self._governor = governor
        self._batch = batch
        self._forwards = forwards
        self._allowed: list[Budget] = []

    def budgets(self, rows: Seq[Sequence], budgets: list[Budget]) -> list[Budget]:
        """What may be drafted for every row."""
        if self._governor is None:
            return budgets
        self._allowed = self._governor.budgets(
            rows,
            budgets,
            self._forwards.num_nodes,
            is_closed=not self._batch.waiting and not self._batch.prefilling,
            context=sum(len(row.token_ids) for row in rows) / max(len(rows), 1),
        )
        return self._allowed

    def trimmed(self, rows: Seq[Sequence], trees: list[DraftTree]) -> list[DraftTree]:
        """What is to be verified of drafts, at shapes that forwards can run."""
        trees = self._forwards.fitted(trees)
        if self._governor is None:
            return trees
        for tree, allowed in zip(trees, self._allowed, strict=True):
            if tree.plan is not None:  # traces show what was planned in the end
                tree.plan.gamma = min(tree.plan.gamma, allowed.depth)
        num_nodes, is_padded = self._forwards.num_nodes, self._forwards.pads_chains
        return self._forwards.fitted(self._governor.trimmed(rows, trees, num_nodes, is_padded=is_padded))

    def learn(self, trees: Seq[DraftTree], outputs: Seq[RowOutput], clock: Clock) -> None:
        """Take in what a step has brought, and what it has cost."""
        if self._governor is not None:
            drafting = clock.laps["propose_seconds"]
            other = sum(clock.laps.values()) - drafting
            num_nodes = self._forwards.num_nodes
            self._governor.learn(trees, outputs, num_nodes, drafting_seconds=drafting, other_seconds=other)


def new_governor(target: CausalLM, drafter: Drafter, profile: Profile | None = None) -> AnyGovernor | None:
    """One that begins with what forwards of the target cost on this machine, see `cost_curve`; None for toys.

    Args:
      profile: measured before: its costs if they are of this machine, its acceptance if it is of this drafter.

    Raises: ConfigError for a profile of another model.
    """
    difference = None if profile is None else profile.difference(facts_of(target))
    if difference is not None:
        logger.warning("the profile was measured otherwise (%s): its costs are not used", difference)
    curve = profile.curve() if profile is not None and difference is None else None
    curve = curve or cost_curve(target)
    if curve.seconds[1] < LEAST_SECONDS:
        return None
    costs = StepCosts(curve)
    if len(drafter.arms) > 1:
        return ArmsGovernor(drafter, costs)
    governor = Governor(costs, divisible=drafter.is_divisible)
    if drafter.usual_acceptance is not None:
        for depth in range(1, DEEPEST + 1):
            governor.survival.expect(drafter.name, depth, drafter.usual_acceptance, USUAL_TRIALS)
    if profile is not None and profile.method == drafter.name:
        profile.teach(governor, has_costs=difference is None)
    return governor

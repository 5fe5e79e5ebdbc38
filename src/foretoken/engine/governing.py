"""Between an engine and its governor, if it has one."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from foretoken.engine.arms import ArmsGovernor
from foretoken.engine.cost_curves import cost_curve
from foretoken.engine.governor import Governor
from foretoken.engine.step_costs import StepCosts

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from foretoken.engine.budget import Budget
    from foretoken.engine.drafter import Drafter
    from foretoken.engine.forwards import Forwards
    from foretoken.engine.outputs import RowOutput
    from foretoken.engine.sequence import Sequence
    from foretoken.engine.stats import Clock
    from foretoken.model.lm import CausalLM
    from foretoken.tree import DraftTree

AnyGovernor: TypeAlias = Governor | ArmsGovernor


class Governing:
    """Asks a governor and tells it of steps; without one, as much is drafted and verified as is allowed.

    Args:
      forwards: of the engine; they know how many nodes a step runs.
    """

    def __init__(self, governor: AnyGovernor | None, forwards: Forwards) -> None:
        self._governor = governor
        self._forwards = forwards

    def budgets(self, rows: Seq[Sequence], budgets: list[Budget]) -> list[Budget]:
        """What may be drafted for every row."""
        if self._governor is None:
            return budgets
        return self._governor.budgets(rows, budgets, self._forwards.num_nodes)

    def trimmed(self, rows: Seq[Sequence], trees: list[DraftTree]) -> list[DraftTree]:
        """What is to be verified of drafts, at shapes that forwards can run."""
        trees = self._forwards.fitted(trees)
        if self._governor is None:
            return trees
        num_nodes, is_padded = self._forwards.num_nodes, self._forwards.pads_chains
        return self._forwards.fitted(self._governor.trimmed(rows, trees, num_nodes, is_padded=is_padded))

    def learn(self, trees: Seq[DraftTree], outputs: Seq[RowOutput], clock: Clock) -> None:
        """Take in what a step has brought, and what it has cost."""
        if self._governor is not None:
            drafting = clock.laps["propose_seconds"]
            other = sum(clock.laps.values()) - drafting
            num_nodes = self._forwards.num_nodes
            self._governor.learn(trees, outputs, num_nodes, drafting_seconds=drafting, other_seconds=other)


def new_governor(target: CausalLM, drafter: Drafter) -> AnyGovernor:
    """One that begins with what forwards of the target cost on this machine; see `cost_curve`."""
    costs = StepCosts(cost_curve(target))
    if len(drafter.arms) > 1:
        return ArmsGovernor(drafter, costs)
    return Governor(costs, divisible=drafter.is_divisible)

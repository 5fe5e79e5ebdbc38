"""A governor for a drafter over a target."""

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
    from foretoken.engine.outputs import RowOutput
    from foretoken.engine.sequence import Sequence
    from foretoken.engine.trimming import NumNodes
    from foretoken.model.lm import CausalLM
    from foretoken.tree import DraftTree

AnyGovernor: TypeAlias = Governor | ArmsGovernor


class Ungoverned:
    """As much is drafted and verified as the drafter and the rows allow."""

    def budgets(self, rows: Seq[Sequence], budgets: list[Budget], num_nodes: NumNodes) -> list[Budget]:
        """All that is allowed."""
        return budgets

    def trimmed(
        self, rows: Seq[Sequence], trees: list[DraftTree], num_nodes: NumNodes, *, is_padded: bool
    ) -> list[DraftTree]:
        """All that was drafted."""
        return trees

    def learn(
        self,
        trees: Seq[DraftTree],
        outputs: Seq[RowOutput],
        num_nodes: NumNodes,
        *,
        drafting_seconds: float,
        other_seconds: float,
    ) -> None:
        """Nothing to learn."""


def new_governor(target: CausalLM, drafter: Drafter) -> AnyGovernor:
    """One that begins with what forwards of the target cost on this machine; see `cost_curve`."""
    costs = StepCosts(cost_curve(target))
    if len(drafter.arms) > 1:
        return ArmsGovernor(drafter, costs)
    return Governor(costs, divisible=drafter.is_divisible)

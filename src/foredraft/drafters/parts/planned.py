"""Drafters whose drafts are as long as a length policy says."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from torch import Tensor

from foredraft.engine.drafter import ContextDrafter, PromptChunk, StepResult
from foredraft.engine.row import Row
from foredraft.errors import ConfigError
from foredraft.methods.lengths import NOTHING, LengthPolicy
from foredraft.tree import DraftPlan

State = TypeVar("State")


class PlannedDrafter(ContextDrafter, Generic[State]):
    """A `ContextDrafter` with a length policy: its drafts carry what that has planned, and their outcome is told.

    Args:
      length_policy: decides how deep drafts are.
    """

    def __init__(self, length_policy: LengthPolicy) -> None:
        self.length_policy = length_policy

    @abstractmethod
    def new_state(self, row: Row) -> State:
        """The state of a row that begins, ``row.state[self]`` from then on."""

    def start(self, rows: Sequence[Row], chunks: Sequence[PromptChunk]) -> None:
        for row in rows:
            row.state[self] = self.new_state(row)

    def length(self, row: Row, budget: int, log_shares: Callable[[int], Tensor | None] | None = None) -> int:
        """The draft length within ``budget``, of a draft that is known beforehand.

        Args:
          log_shares: for policies that look at the confidence: logarithm of the share of the best token after so many
            of them, (1,); None where the draft ends.

        Raises: ConfigError for a policy that looks at what the drafter does not have.
        """
        policy = self.length_policy
        plan = self._plan = DraftPlan(policy.longest(row))
        if policy.looks_at == NOTHING:
            return min(plan.gamma, budget)
        if log_shares is None:
            raise ConfigError(
                f"length_policy {policy.name!r} looks at the {policy.looks_at} of the drafter, and {self.name} has "
                "none; use 'fixed' or 'heuristic'"
            )
        depth = 0
        while depth < min(plan.gamma, budget):
            if policy.looks(depth):
                shares = log_shares(depth)
                if shares is None:
                    break
                policy.stop(row, plan, depth, shares)
            depth = min(depth + 1, plan.gamma)
        return depth

    def observe(self, rows: Sequence[Row], results: Sequence[StepResult]) -> None:
        for row, result in zip(rows, results, strict=True):
            self.length_policy.update(row, result.tree.depth, result.num_accepted)

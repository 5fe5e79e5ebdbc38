"""Drafters whose draft lengths come from a length policy."""

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
    """`ContextDrafter` with a length policy: its drafts carry the policy's plan, and the policy gets their outcomes.

    Args:
      length_policy: policy that decides the depth of drafts.
    """

    def __init__(self, length_policy: LengthPolicy) -> None:
        self.length_policy = length_policy

    @abstractmethod
    def new_state(self, row: Row) -> State:
        """Return the state of a new row, which is stored as ``row.state[self]``."""

    def start(self, rows: Sequence[Row], chunks: Sequence[PromptChunk]) -> None:
        for row in rows:
            row.state[self] = self.new_state(row)

    def length(self, row: Row, budget: int, log_shares: Callable[[int], Tensor | None] | None = None) -> int:
        """Return the length of a draft that is known beforehand, at most ``budget``.

        Args:
          row: row of the draft.
          budget: largest length.
          log_shares: function for policies that need the confidence. The function returns the log-probability (1,) of
            the best token at a depth, or None at the end of the draft.

        Raises: ConfigError for a policy that needs an input which the drafter does not provide.
        """
        policy = self.length_policy
        plan = self._plan = DraftPlan(policy.longest(row))
        if policy.looks_at == NOTHING:
            return min(plan.gamma, budget)
        if log_shares is None:
            raise ConfigError(
                f"length_policy {policy.name!r} needs the drafter's {policy.looks_at}, which {self.name} does not "
                "provide; use 'fixed' or 'heuristic'"
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

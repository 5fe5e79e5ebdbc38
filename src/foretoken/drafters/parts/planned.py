"""Drafters that look at one row at a time, keep a state of it, and ask a length policy how far."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Seq
from typing import Generic, TypeVar

from foretoken.drafters.lengths import LengthPolicy
from foretoken.engine.drafter import Budget, ContextDrafter, StepResult
from foretoken.engine.sequence import Sequence
from foretoken.tree import DraftTree

State = TypeVar("State")


class PlannedDrafter(ContextDrafter, Generic[State]):
    """A `ContextDrafter` with a length policy: its drafts carry what that has planned, and their outcome is told.

    Args:
      length_policy: decides how deep drafts are.
    """

    def __init__(self, length_policy: LengthPolicy) -> None:
        self.length_policy = length_policy
        self._state_of: dict[int, State] = {}

    @abstractmethod
    def new_state(self, row: Sequence) -> State:
        """The state of a row that begins, which is kept until it is forgotten."""

    def start(self, rows: Seq[Sequence]) -> None:
        for row in rows:
            self._state_of[row.id] = self.new_state(row)

    def propose(self, rows: Seq[Sequence], budgets: Seq[Budget]) -> list[DraftTree]:
        trees = super().propose(rows, budgets)
        return [tree.planned(self.length_policy.take_plan(row)) for tree, row in zip(trees, rows, strict=True)]

    def observe(self, rows: Seq[Sequence], results: Seq[StepResult]) -> None:
        for row, result in zip(rows, results, strict=True):
            self.length_policy.end(row, result.tree.depth, result.num_accepted)

    def forget(self, rows: Seq[Sequence]) -> None:
        for row in rows:
            self.length_policy.forget(row)
            self._state_of.pop(row.id, None)

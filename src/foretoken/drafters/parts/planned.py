"""Drafters that look at one row at a time and ask a length policy how far."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from foretoken.drafters.lengths import LengthPolicy
from foretoken.engine.drafter import Budget, ContextDrafter, StepResult
from foretoken.engine.sequence import Sequence
from foretoken.tree import DraftTree


class PlannedDrafter(ContextDrafter):
    """A `ContextDrafter` with a length policy: its drafts carry what that has planned, and their outcome is told."""

    length_policy: LengthPolicy

    def propose(self, rows: Seq[Sequence], budgets: Seq[Budget]) -> list[DraftTree]:
        trees = super().propose(rows, budgets)
        return [tree.planned(self.length_policy.take_plan(row)) for tree, row in zip(trees, rows, strict=True)]

    def observe(self, rows: Seq[Sequence], results: Seq[StepResult]) -> None:
        for row, result in zip(rows, results, strict=True):
            self.length_policy.end(row, result.tree.depth, result.num_accepted)

    def forget(self, rows: Seq[Sequence]) -> None:
        for row in rows:
            self.length_policy.forget(row)

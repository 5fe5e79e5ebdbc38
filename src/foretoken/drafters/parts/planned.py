"""Drafters that look at one row at a time and ask a length policy how far."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from foretoken.drafters.lengths import LengthPolicy
from foretoken.engine.drafter import Budget, ContextDrafter
from foretoken.engine.sequence import Sequence
from foretoken.tree import DraftTree


class PlannedDrafter(ContextDrafter):
    """A `ContextDrafter` whose drafts carry what its length policy planned for them."""

    length_policy: LengthPolicy

    def propose(self, rows: Seq[Sequence], budgets: Seq[Budget]) -> list[DraftTree]:
        trees = super().propose(rows, budgets)
        return [tree.planned(self.length_policy.take_plan(row)) for tree, row in zip(trees, rows, strict=True)]

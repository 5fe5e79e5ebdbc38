"""The empty draft: plain decoding is speculative decoding with it."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from foretoken.drafters.base import Drafter
from foretoken.engine.sequence import Sequence
from foretoken.engine.tree import DraftTree


class EmptyDrafter(Drafter):
    """Proposes nothing, so every step emits the target's one token."""

    name = "none"

    def propose(self, rows: Seq[Sequence], budgets: Seq[int]) -> list[DraftTree]:
        return [DraftTree.root(row.token_ids[-1], self.name) for row in rows]

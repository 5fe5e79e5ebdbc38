"""Empty draft, with which speculative decoding is plain decoding."""

from __future__ import annotations

from collections.abc import Sequence

from foredraft.drafters.context import DrafterContext
from foredraft.engine.drafter import Drafter, DrafterFacts, DraftSize
from foredraft.engine.row import Row
from foredraft.methods.lm import NoOptions
from foredraft.tree import DraftTree


class EmptyDrafter(Drafter):
    """Drafter that proposes nothing, so that every step emits one token of the target."""

    facts = DrafterFacts("none", drafts_from_text=True)

    def propose(self, rows: Sequence[Row], budgets: Sequence[DraftSize]) -> list[DraftTree]:
        return [DraftTree.root(row.token_ids[-1], self.name) for row in rows]


def build(options: NoOptions, context: DrafterContext) -> EmptyDrafter:
    """Make the drafter of plain decoding."""
    return EmptyDrafter()

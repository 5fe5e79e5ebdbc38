"""The empty draft: plain decoding is speculative decoding with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from foredraft.config.method import Method
from foredraft.config.options import Options
from foredraft.engine.drafter import Drafter, DrafterFacts, DraftSize
from foredraft.engine.row import Row
from foredraft.tree import DraftTree

if TYPE_CHECKING:
    from foredraft.drafters.context import DrafterContext


@dataclass(frozen=True, kw_only=True)
class NoOptions(Options):
    """Plain decoding has no keys."""

    method: ClassVar[str] = "none"
    num_speculative_tokens: ClassVar[int] = 0
    rejection_sample_method: ClassVar[str] = "match"


class EmptyDrafter(Drafter):
    """Proposes nothing, so every step emits the target's one token."""

    facts = DrafterFacts("none", drafts_from_text=True)

    def propose(self, rows: Sequence[Row], budgets: Sequence[DraftSize]) -> list[DraftTree]:
        return [DraftTree.root(row.token_ids[-1], self.name) for row in rows]


def build(options: NoOptions, context: DrafterContext) -> EmptyDrafter:
    """Plain decoding."""
    return EmptyDrafter()


METHOD = Method(NoOptions, build, summary="nothing: plain decoding", aliases=("off", "disabled"))

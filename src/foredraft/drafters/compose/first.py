"""Several drafters as one: the first of them that expects enough."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from foredraft.config.method import Method
from foredraft.config.options import number, option
from foredraft.drafters import make_drafter
from foredraft.drafters.parts.composite import CompositeDrafter, CompositeOptions
from foredraft.engine.drafter import DrafterFacts
from foredraft.tree import DraftTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foredraft.drafters.context import DrafterContext
    from foredraft.engine.drafter import Drafter, DraftSize


@dataclass(frozen=True, kw_only=True)
class FirstOptions(CompositeOptions):
    """Keys of taking the first drafter that expects enough; "a>b" takes b where a does not."""

    method: ClassVar[str] = "first"
    min_expected_tokens: float = option(number(0.0), 0.5, "accepted tokens that a draft must promise, by experience")


class FirstDrafter(CompositeDrafter):
    """Takes the draft of the first part that expects enough of it; the last part is taken as it is.

    Later parts are not asked for that row, so a cheap drafter saves the forwards of an expensive one.

    Args:
      min_expected: accepted tokens that a draft must promise, by its calibrated scores.

    Exactness: as of the parts; the choice between them looks at drafts, so rules other than "match" are refused.
    Randomness: of the parts.
    """

    facts = DrafterFacts("first")
    sign = ">"

    def __init__(self, parts: Sequence[Drafter], min_expected: float = FirstOptions.min_expected_tokens) -> None:
        super().__init__(parts)
        self._min_expected = min_expected

    def _budgets(
        self, place: int, by_part: Sequence[Sequence[DraftTree]], budgets: Sequence[DraftSize]
    ) -> Sequence[DraftSize]:
        return self._lacking(by_part, budgets, self._min_expected)

    def _combined(self, trees: Sequence[DraftTree]) -> DraftTree:
        """The last draft there is: no part after one that promised enough was asked."""
        return next((tree for tree in reversed(trees) if tree.num_draft_tokens), trees[-1])


def build(options: FirstOptions, context: DrafterContext) -> FirstDrafter:
    """Makes the parts."""
    return FirstDrafter([make_drafter(part, context) for part in options.drafters], options.min_expected_tokens)


METHOD = Method(
    FirstOptions,
    build,
    summary="with the first of several methods that expects enough",
    sign=">",
    sample={"drafters": ("ngram", "nasd")},
)

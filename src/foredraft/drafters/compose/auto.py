"""Several drafters, of which measured time chooses."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from foredraft.config.drafting import node_limit
from foredraft.config.method import Method, recognized
from foredraft.config.options import anything, option
from foredraft.drafters import make_drafter
from foredraft.drafters.compose.union import UnionDrafter
from foredraft.drafters.parts.composite import CompositeOptions
from foredraft.engine.drafter import DrafterFacts, DraftSize, StepResult
from foredraft.errors import ConfigError
from foredraft.tree import DraftTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foredraft.drafters.context import DrafterContext
    from foredraft.engine.drafter import Drafter
    from foredraft.engine.row import Row

logger = logging.getLogger("foredraft")

FREE = ("suffix", "token_recycling")
"""What is chosen from where nothing is named: text that repeats, and what mostly follows a token."""
ENOUGH = 2.0  # tokens that a draft must promise, by experience, for later parts not to be asked
LITTLE = 0.03  # tokens per step, about what asking one takes
SELDOM = 4
SHARE = 0.08  # of the newest step in what a part adds


@dataclass(frozen=True, kw_only=True)
class AutoOptions(CompositeOptions):
    """Keys of choosing by measured time."""

    method: ClassVar[str] = "auto"
    drafters: Any = option(
        anything("list of names, mappings or configs"),
        help="what is chosen from; suffix, token_recycling and the model that is given, if any, by default",
    )
    max_draft_nodes: int = node_limit(32)

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> AutoOptions:
        """A model or a head that is given is one more drafter."""
        drafters: tuple[str, ...] = FREE
        if given.get("model") is not None:
            found = recognized(given["model"])
            drafters = (*FREE, "draft_model" if found is None else found.name)
        return super().read({"drafters": drafters, **given})

    def check(self) -> None:
        super().check()
        if not self.is_governed:
            raise ConfigError(
                f"method 'auto' chooses by measured time, and length_policy is {self.length_policy!r}; leave "
                "length_policy out, or name one method"
            )


class AutoDrafter(UnionDrafter):
    """Drafts with what is free, and with at most one of the others: the one whose tokens took the least time.

    Free parts cost time, too: one after the first is not asked for a row where the draft so far promises enough, and in
    every fourth step only where it has lately added next to nothing to what the others had right.

    Proposals of free parts are merged with those of the part that is chosen, most promising nodes first, and cut to
    the nodes that pay. A bandit over measured time chooses (`foredraft.engine.method_bandit`).

    Args:
      parts: drafters.
      max_nodes: of the merged tree, root included.

    Exactness: lossless under "match", which takes any tree. Randomness: of the parts; the choice depends on time.
    """

    facts = DrafterFacts("auto")

    def __init__(self, parts: Sequence[Drafter], max_nodes: int = AutoOptions.max_draft_nodes) -> None:
        super().__init__(parts, max_nodes)
        self.facts = replace(self.facts, arm=0)
        self._later = [place for place, part in enumerate(self.parts) if part.facts.is_free][1:]
        self._gains = dict.fromkeys(self._later, 1.0)
        self._was_asked: set[int] = set()
        self._num_asked = 0

    def _ways_with(self, free: tuple[int, ...]) -> list[tuple[int, ...]]:
        others = [(*free, place) for place in range(len(self.parts)) if place not in free]
        return [free, *others] if free else others

    def propose(self, rows: Sequence[Row], budgets: Sequence[DraftSize]) -> list[DraftTree]:
        self._num_asked += 1
        self._was_asked = set()
        return super().propose(rows, budgets)

    def _budgets(
        self, place: int, by_part: Sequence[Sequence[DraftTree]], budgets: Sequence[DraftSize]
    ) -> Sequence[DraftSize]:
        if place not in self._later:
            return budgets
        is_due = self._gains[place] >= LITTLE or self._num_asked % SELDOM == 0
        wanted = self._lacking(by_part, budgets, ENOUGH) if is_due else [DraftSize(0)] * len(budgets)
        if any(wanted):
            self._was_asked.add(place)
        return wanted

    def _compare(self, outcomes: Sequence[Sequence[StepResult]]) -> None:
        for place in self._was_asked:
            others = [own for other, own in enumerate(outcomes) if other != place]
            added = [
                max(0, result.num_accepted - max(own[row].num_accepted for own in others))
                for row, result in enumerate(outcomes[place])
            ]
            if added:
                self._gains[place] += SHARE * (sum(added) / len(added) - self._gains[place])


def build(options: AutoOptions, context: DrafterContext) -> Drafter:
    """Makes the parts; where only chains can be verified, those that draft trees are left out, and that is said.

    Where one part is left there is nothing to choose, and it drafts alone.
    """
    chosen = [part for part in options.drafters if context.target.supports_trees or not part.definition.drafts_trees]
    for part in options.drafters:
        if part not in chosen:
            logger.info("auto drafts without %s: %s verifies chains only.", part.title, context.target.name)
    if not chosen:
        context.check_trees("auto")
    parts = [make_drafter(part, context) for part in chosen]
    if len(parts) == 1:
        return parts[0]
    return AutoDrafter(parts, options.max_draft_nodes)


METHOD = Method(
    AutoOptions,
    build,
    summary="with whichever of several methods makes tokens in the least time, as measured while it runs",
)

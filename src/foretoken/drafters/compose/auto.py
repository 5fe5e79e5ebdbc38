"""Several drafters, of which measured time chooses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from foretoken.config.composite import CompositeOptions
from foretoken.config.drafting import node_limit
from foretoken.config.method import Method, recognized
from foretoken.config.options import anything, option
from foretoken.drafters.compose.union import merged
from foretoken.drafters.materials import make_drafter
from foretoken.drafters.parts.composite import CompositeDrafter
from foretoken.engine.drafter import Budget
from foretoken.errors import ConfigError
from foretoken.tree import DraftTree

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from foretoken.drafters.materials import Materials
    from foretoken.engine.drafter import Drafter
    from foretoken.engine.sequence import Sequence

FREE = ("ngram", "suffix")
"""Methods that need neither a model nor forwards: they cost next to nothing where they find nothing."""


@dataclass(frozen=True, kw_only=True)
class AutoOptions(CompositeOptions):
    """Keys of choosing by measured time."""

    method: ClassVar[str] = "auto"
    drafters: Any = option(
        anything("list of names, mappings or configs"),
        help="what is chosen from; ngram, suffix and the model that is given, if any, by default",
    )
    max_draft_nodes: int = node_limit(32)

    @classmethod
    def defaults_beside(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """A model or a head that is given is one more drafter."""
        if given.get("model") is None:
            return {"drafters": FREE}
        found = recognized(given["model"])
        return {"drafters": (*FREE, "draft_model" if found is None else found.name)}

    def check(self) -> None:
        super().check()
        if not self.is_governed:
            raise ConfigError(
                f"method 'auto' chooses by measured time, and length_policy is {self.length_policy!r}; leave "
                "length_policy out, or name one method"
            )


class AutoDrafter(CompositeDrafter):
    """Drafts with what is free, and with at most one of the others: the one whose tokens took the least time.

    Proposals of free parts are merged with those of the part that is chosen, most promising nodes first, and cut to
    the nodes that pay. A bandit over measured time chooses (`foretoken.engine.arms`).

    Args:
      parts: drafters.
      is_free: of every part, whether it is always asked.
      max_nodes: of the merged tree, root included.

    Exactness: lossless under "match", which takes any tree. Randomness: of the parts; the choice depends on time.
    """

    name = "auto"

    def __init__(self, parts: Seq[Drafter], is_free: Seq[bool], max_nodes: int = AutoOptions.max_draft_nodes) -> None:
        super().__init__(parts)
        free = tuple(part for part, one in enumerate(is_free) if one)
        others = [part for part, one in enumerate(is_free) if not one]
        self._asked = [(*free, part) for part in others]
        if free:
            self._asked.insert(0, free)
        self.arms = tuple("+".join(parts[part].name for part in arm) for arm in self._asked)
        self._max_nodes = max_nodes
        self._arm = 0

    def choose_arm(self, arm: int) -> None:
        self._arm = arm

    def _ask(self, rows: Seq[Sequence], budgets: Seq[Budget]) -> list[list[DraftTree]]:
        nothing = [Budget(0)] * len(rows)
        asked = self._asked[self._arm]
        by_part = [part.propose(rows, budgets if place in asked else nothing) for place, part in enumerate(self.parts)]
        return [list(trees) for trees in zip(*by_part, strict=True)]

    def _combined(self, trees: Seq[DraftTree]) -> DraftTree:
        found = [(place, tree) for place, tree in enumerate(trees) if len(tree) > 1]
        if len(found) < 2:
            return found[0][1] if found else trees[0]
        scores = [self._calibrations[place].scores(tree) for place, tree in found]
        return merged([tree for _, tree in found], scores, self._max_nodes, self.name)


def build(options: AutoOptions, materials: Materials) -> AutoDrafter:
    """Makes the parts."""
    parts = [make_drafter(part, materials) for part in options.drafters]
    return AutoDrafter(parts, [part.method in FREE for part in options.drafters], options.max_draft_nodes)


METHOD = Method(
    AutoOptions,
    build,
    summary="with whichever of several methods makes tokens in the least time, as measured while it runs",
)

"""EAGLE: a head that extrapolates the last hidden state, token by token along the branches of a static tree."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from foretoken.config.method import Method
from foretoken.drafters.heads.options import HeadOptions
from foretoken.drafters.parts.eagle_levels import EagleLevels
from foretoken.drafters.parts.eagle_options import EagleHeadOptions, eagle_head
from foretoken.drafters.parts.eagle_rows import EagleRows
from foretoken.drafters.parts.ranked import Pick, RankedDraft, RankedGrowth
from foretoken.drafters.parts.reduced_output import chosen_vocabulary, output_of
from foretoken.drafters.parts.states_drafter import StatesDrafter
from foretoken.engine.drafter import Budget
from foretoken.engine.sequence import Sequence
from foretoken.lazy import Lazy

if TYPE_CHECKING:
    import torch

    from foretoken.drafters.context import DrafterContext
    from foretoken.heads.eagle import EagleHead
    from foretoken.heads.vocabulary import DraftVocabulary
    from foretoken.model.lm import CausalLM
    from foretoken.tree import DraftTree
else:
    torch = Lazy("torch")

USUAL_ACCURACIES = [[0.75, 0.11, 0.04, 0.025, 0.015, 0.01]] * 5
"""How often the candidate of each rank is right at each depth, for the tree where none is given. First ranks are about
those of the published heads, which lose little from depth to depth; the others are assumed."""

MAX_DEPTH = 64
"""Of a tree: one head drafts as deep as it is asked to, and nobody can want more."""


@dataclass(frozen=True, kw_only=True)
class EagleOptions(HeadOptions, EagleHeadOptions):
    """Keys of drafting as EAGLE does."""

    method: ClassVar[str] = "eagle"


@dataclass
class _Level:
    """The nodes of one depth of a static tree, as they are fed."""

    draft: RankedDraft
    frontier: list[int]

    @property
    def tokens(self) -> Seq[int]:
        return self.draft.tokens

    @property
    def parents(self) -> Seq[int]:
        return self.draft.shape.parents

    @property
    def depths(self) -> Seq[int]:
        return [len(self.path(node)) for node in range(len(self.parents))]

    def path(self, node: int) -> list[int]:
        """Nodes from below the root to this one."""
        nodes: list[int] = []
        while node > 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]


class EagleDrafter(StatesDrafter[EagleRows]):
    """A static tree from a head that is fed its own predictions of the target's features.

    Source: EAGLE (Li et al. 2024, arXiv:2401.15077); its tree is ``speculative_token_tree="eagle"``. Deviations: where
    the target draws tokens, siblings share its noise, under "match"; "standard" draws as published.

    Args:
      head: on the device of the target, in its dtype.
      target: whose features it reads.
      vocabulary: tokens that may be drafted; None for all.
      growth: arguments of `RankedGrowth`.

    Exactness: lossless for any head, but for acceptance="typical".
    Randomness: keyed, see ``acceptance`` of `RankedGrowth`; none when greedy.
    Cost: a step runs the head once over the committed tokens and once per further level, for all rows together.
    """

    name = "eagle"

    def __init__(
        self, head: EagleHead, target: CausalLM, *, vocabulary: DraftVocabulary | None = None, **growth: Any
    ) -> None:
        kept, output = output_of(head, target, vocabulary)
        self.growth = RankedGrowth(vocabulary=kept, **growth)
        self.growth.takes_trees = target.supports_trees
        self.states = EagleRows(head, target, output, kept)
        self.requires = self.states.requires
        self._levels = EagleLevels(self.states)
        self._growing: list[RankedDraft] = []

    # -- rows --------------------------------------------------------------------------------------------------

    # -- propose -----------------------------------------------------------------------------------------------

    def propose(self, rows: Seq[Sequence], budgets: Seq[Budget]) -> list[DraftTree]:
        drafts = [self.growth.begin(row, budget) for row, budget in self.within(rows, budgets)]
        self._growing = [draft for draft in drafts if draft.depth > 0]
        if self._growing:
            try:
                self.growth.fill(self._growing, self)
            finally:
                self._growing = []
                self._levels.close()
        return [draft.tree(self.name) for draft in drafts]

    def level(self, depth: int, picks: Seq[Pick]) -> torch.Tensor:
        """What follows every picked node; only these are fed, and only they go through the output layer."""
        if depth == 0:
            outputs = self._levels.open([draft.row for draft in self._growing])
        else:
            levels = [_Level(draft, []) for draft in self._growing]
            for pick in picks:
                levels[pick.index].frontier.append(pick.node)
            outputs = self._levels.feed(levels)
        columns = [0] * len(self._growing)
        places = []
        for pick in picks:
            places.append((pick.index, columns[pick.index]))
            columns[pick.index] += 1
        index, column = (list(values) for values in zip(*places, strict=True))
        return self.states.logits(outputs[index, column])


def build(options: EagleOptions, context: DrafterContext) -> EagleDrafter:
    """Drafts with the head that the config names."""
    target = context.target
    context.check_trees(options.method)
    head = eagle_head(options, context, generation=1)
    tree = options.tree(target, USUAL_ACCURACIES, MAX_DEPTH)
    vocabulary = chosen_vocabulary(options, context)
    return EagleDrafter(head, target, vocabulary=vocabulary, **options.growth(tree, target))


METHOD = Method(
    EagleOptions,
    build,
    summary="with a head that extrapolates the target's features, along a static tree",
    aliases=("eagle1", "eagle_1"),
)

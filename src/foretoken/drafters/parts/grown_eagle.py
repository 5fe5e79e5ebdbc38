"""Dynamic trees from a head of EAGLE: expanded level by level, the likeliest nodes of the whole pool kept."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from math import exp
from typing import TYPE_CHECKING, Any

from foretoken.drafters.parts.eagle_levels import EagleLevels
from foretoken.drafters.parts.eagle_native import MOST_GROWN
from foretoken.drafters.parts.eagle_rows import EagleRows
from foretoken.drafters.parts.growth import Growth
from foretoken.drafters.parts.reduced_output import output_of
from foretoken.drafters.parts.states_drafter import StatesDrafter
from foretoken.engine.drafter import Budget, StepResult
from foretoken.engine.sequence import Sequence
from foretoken.tree import DraftTree

if TYPE_CHECKING:
    import torch

    from foretoken.drafters.parts.draft import GrowingDraft
    from foretoken.heads.eagle import EagleHead
    from foretoken.heads.vocabulary import DraftVocabulary
    from foretoken.model.lm import CausalLM

MOST_CAP = 60
"""Levels of a draft that is grown in one call."""


class GrownEagleDrafter(StatesDrafter[EagleRows]):
    """Drafts with a head of EAGLE, and a tree that takes shape by what the head is sure of.

    Source: EAGLE-2 (Li et al. 2024, arXiv:2406.16858). Deviations: where the target draws tokens, siblings share its
    noise (see `Growth`); children, frontier and final nodes have limits of their own.

    Args:
      head: on the device of the target, in its dtype.
      target: whose features it reads.
      vocabulary: tokens that may be drafted, of a head without an output layer of its own; None for all.
      growth: arguments of `Growth`.

    Exactness: lossless for any head.
    Randomness: keyed, see ``acceptance`` of `Growth`; none when greedy.
    Cost: a step runs the head once over the committed tokens and once per further level, for all rows together.
    """

    def __init__(
        self, head: EagleHead, target: CausalLM, *, vocabulary: DraftVocabulary | None = None, **growth: Any
    ) -> None:
        kept, output = output_of(head, target, vocabulary)
        self.growth = Growth(vocabulary=kept, **growth)
        self.growth.takes_trees = target.supports_trees
        self.states = EagleRows(head, target, output, kept)
        self.requires = self.states.requires
        self._levels = EagleLevels(self.states)

    # -- rows --------------------------------------------------------------------------------------------------

    def forget(self, rows: Seq[Sequence]) -> None:
        self.growth.forget(rows)
        super().forget(rows)

    def observe(self, rows: Seq[Sequence], results: Seq[StepResult]) -> None:
        super().observe(rows, results)
        for row, result in zip(rows, results, strict=True):
            self.growth.end(row, result)

    # -- propose -----------------------------------------------------------------------------------------------

    def propose(self, rows: Seq[Sequence], budgets: Seq[Budget]) -> list[DraftTree]:
        drafts = [self.growth.begin(row, budget) for row, budget in self.within(rows, budgets)]
        growing = [draft for draft in drafts if draft.cap > 0]
        if 0 < len(growing) <= MOST_GROWN and all(self._grows_at_once(draft) for draft in growing):
            return [self._grown(draft) if draft.cap > 0 else self.growth.tree(draft, self.name) for draft in drafts]
        if growing:
            try:
                self.growth.grow(growing, self)
            finally:
                self._levels.close()
        return [self.growth.tree(draft, self.name) for draft in drafts]

    def _grows_at_once(self, draft: GrowingDraft) -> bool:
        """Whether a draft can be grown by the library's own kernels: nothing but the head has a say in it."""
        has_room = draft.cap <= MOST_CAP and self.growth.is_unconditional
        return self.states.native is not None and has_room and draft.row.law.is_argmax

    def _grown(self, draft: GrowingDraft) -> DraftTree:
        tokens, parents, scores = self.states.grow(draft, self.growth.least_mass, self.growth.sharpness)
        plan = self.growth.policy.take_plan(draft.row)
        return DraftTree(tuple(tokens), tuple(parents), scores=tuple(map(exp, scores)), source=self.name, plan=plan)

    def open(self, drafts: Seq[GrowingDraft]) -> torch.Tensor:
        """What follows the pending tokens was computed when these became known; the output layer is missing."""
        return self.states.logits(self._levels.open([draft.row for draft in drafts]))

    def expand(self, drafts: Seq[GrowingDraft]) -> torch.Tensor:
        """Feed the frontier of every draft, each node with the output of its parent."""
        return self.states.logits(self._levels.feed(drafts, are_chains=self.growth.drafts_chains))

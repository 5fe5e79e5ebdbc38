"""Drafts that are not expected to pay, made to notice where they would."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from foretoken.engine.step_costs import StepCosts
    from foretoken.engine.trimming import NumNodes
    from foretoken.tree import DraftTree

DEPTH = 2
VERIFIED = 4  # levels
DEAR = 0.5  # plain steps, above which a probe has one level only
FEW_DRAFTS = 4  # that are no row's first one, before it is believed what they cost,
MOST_TRIED = 8  # tries to get so many,
INTERVAL = 8  # and steps between two of them
SHARE = 0.01  # of the time
RARELY = 1024  # steps after which a draft is tried that would not make up for its time if it were never wrong
BELIEVED = 2.0  # plain steps, the most that a curve alone can say a probe costs


class Probing:
    """Spends 1 % of the time on short drafts, and nearly none where they could not pay if they were never wrong.

    What a draft costs to verify is believed of a curve only until some were verified: where none is, one is that does
    not seem to pay, as often as 1 % of the time allows. So a curve that is wrong does not keep drafts away for good.

    Args:
      costs: of steps.
    """

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._credit = 0.0  # for drafts, in plain steps
        self._now = self._verified = 0  # steps so far, and when a draft was verified that did not seem to pay
        self._num_steps = 1  # since the last decision
        self._num_tried = 0  # drafts that were made to see what they cost

    def passed(self, num_steps: int, *, is_decided: bool) -> None:
        """So many steps have run."""
        self._now += num_steps
        self._num_steps = 1 if is_decided else self._num_steps + num_steps

    def depth(self, num_rows: int, cap: int, num_nodes: NumNodes, since_draft: int, are_chains: bool) -> int:
        """Levels of a draft for this step; mostly 0.

        Args:
          cap: levels that may be drafted.
          since_draft: steps since anything was drafted.
          are_chains: whether drafts do not branch.
        """
        costs = self._costs
        plain = costs.verify(num_rows, num_nodes([1] * num_rows, True))
        depth = min(cap, DEPTH)
        if (costs.draft(num_rows, depth) or 0.0) > DEAR * plain:
            depth = 1
        if costs.times_drafted(num_rows) < FEW_DRAFTS and self._num_tried < MOST_TRIED:
            if self._num_tried and since_draft < INTERVAL:
                return 0
            self._num_tried += 1
            return depth

        def cost(depth: int) -> float:
            verifying = costs.verify(num_rows, num_nodes([depth + 1] * num_rows, are_chains)) - plain
            return verifying + (costs.draft(num_rows, depth) or 0.0)

        can_pay = any(depth * plain > cost(depth) for depth in {1, min(cap, DEPTH), cap})
        if not can_pay and costs.knows_drafts(num_rows):
            return depth if since_draft >= RARELY else 0
        self._credit += SHARE * self._num_steps
        if self._credit < (costs.draft(num_rows, depth) or 0.0) / plain:
            return 0
        self._credit = 0.0
        return depth

    def verified(
        self, trees: Seq[DraftTree], kept: list[DraftTree], num_nodes: NumNodes, is_divisible: bool
    ) -> list[DraftTree]:
        """What is verified where no draft seems to pay; mostly nothing."""
        costs, num_rows = self._costs, len(trees)
        if costs.knows_drafts(num_rows):
            return kept
        place = max(range(num_rows), key=lambda place: len(trees[place]))
        draft = trees[place].main_chain().cut(VERIFIED) if is_divisible else trees[place]
        probed = [*kept[:place], draft, *kept[place + 1 :]]
        seconds = costs.verify(num_rows, num_nodes([len(tree) for tree in probed], draft.is_chain))
        more = seconds / costs.verify(num_rows, num_nodes([1] * num_rows, True)) - 1.0
        if SHARE * (self._now - self._verified) < min(more, BELIEVED):
            return kept
        self._verified = self._now
        return probed

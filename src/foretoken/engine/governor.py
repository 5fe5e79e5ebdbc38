"""Whether, how deep and how wide to draft, by what it costs and what it brings: measured while decoding."""

from __future__ import annotations

import sys
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from foretoken.engine.habit import Habit
from foretoken.engine.pace import Pace, Steps
from foretoken.engine.probing import Probing
from foretoken.engine.survival import Survival
from foretoken.engine.trimming import NumNodes, Trimming, Worth, weights_of
from foretoken.engine.verifying_costs import FEW

if TYPE_CHECKING:
    from foretoken.engine.budget import Budget
    from foretoken.engine.outputs import RowOutput
    from foretoken.engine.sequence import Sequence
    from foretoken.engine.step_costs import StepCosts
    from foretoken.tree import DraftTree

CHEAP = 0.02  # tokens per row that the time of drafting could have brought: so little is not worth a plan
MOST_DROPPED = 6  # cheap drafts one after another of which nothing was verified or would have been right, after which
DROPPED_INTERVAL = 4  # only every fourth step makes one
FIRST_DEPTH = 2  # of the first draft, whose cost is not known
PLAIN_INTERVAL = 128  # steps after which one goes without a draft, to keep its cost known
FIRST_PLAIN_INTERVAL = 24
MARGIN = 0.02  # tokens per row that drafting must promise to begin again
SHOWN_LENGTH = 4
MOST_OTHER_ROWS = 16
FEW_STEPS = 8  # of a row, before its pace counts
LEAST_SHARE = 0.03  # of steps that draft, below which it is said that none do


class Governor:
    """Decides per step how much is drafted and how much of that is verified, to make tokens in the least time.

    A node is worth verifying where its chance to be accepted is larger than the tokens that its time would make
    otherwise; a level is worth drafting where the same holds for its nodes and the time of drafting it. Chances are
    learned per drafter, depth and rank or score, and per row (`Survival`); times per number of rows and nodes
    (`StepCosts`). Where drafting does not pay, 1 % of the time goes into drafts that show whether it would.

    One governor serves all requests of a drafter: what it learns, it keeps. It need not be asked in every step: in
    those between, its `habit` says what was decided last.

    Args:
      costs: of steps.
      divisible: whether parts of a draft may be left out; else it is verified whole or not made.
      title: of what drafts, where there are several.

    Source: cost-aware draft lengths; the best nodes by the product of acceptance rates along their path are Sequoia's
    optimal tree (Chen et al. 2024, arXiv:2402.12374).
    Exactness: for the rule "match", under which tokens do not depend on drafts.
    Randomness: none; decisions depend on measured times.
    """

    def __init__(self, costs: StepCosts, *, divisible: bool = True, title: str = "") -> None:
        self.title = title
        self.costs = costs
        self.survival = Survival()
        self.trimming = Trimming(self.survival)
        self.pace = Pace()
        self.totals = self.pace.totals
        self.habit = Habit(divisible=divisible)
        self._is_divisible = divisible
        self._probing = Probing(costs)
        self._since_plain = 0
        self._since_draft = 0
        self._is_drafting = True
        self._asked_depth = 0
        self._reach = 0  # levels of the deepest draft so far, and
        self._is_at_end = False  # whether more were allowed: the drafter makes no deeper ones
        self._weights: list[float] = []
        self._begun: set[int] = set()  # rows that were drafted for
        self._num_dropped = 0  # drafts one after another of which nothing was verified, and none was right
        self._plain_seconds = 0.0  # of a step like the last one, without a draft
        self._last: tuple[int, NumNodes] | None = None

    # -- before drafting -------------------------------------------------------------------------------------------

    def budgets(
        self,
        rows: Seq[Sequence],
        budgets: Seq[Budget],
        num_nodes: NumNodes,
        *,
        is_closed: bool = False,
        context: float = 0.0,
    ) -> list[Budget]:
        """What may be drafted for every row: what was allowed, or less.

        Args:
          is_closed: whether no request waits for the place of a row that ends.
          context: tokens that rows have, on average.
        """
        self.costs.after(context)
        self._weights = [1.0] * len(rows)
        if is_closed and len(rows) > 1:
            share = self._plain(len(rows) - 1, num_nodes) / self._plain(len(rows), num_nodes)
            paces = [row.num_output_tokens / max(row.num_steps, 1) for row in rows if row.num_steps >= FEW_STEPS]
            self._weights = weights_of([row.num_remaining_tokens for row in rows], share, paces)
        if self.survival.num_rows > len(rows) + MOST_OTHER_ROWS:  # which were aborted
            self._begun &= {row.id for row in rows}
            self.survival.keep_only(row.id for row in rows)
        cap = int(max(budgets, default=0))
        depth = self._depth(rows, budgets, cap, num_nodes) if cap else 0
        self._asked_depth = min(depth, cap)
        return [budget.within(depth, self.habit.least) for budget in budgets]

    def _depth(self, rows: Seq[Sequence], budgets: Seq[Budget], cap: int, num_nodes: NumNodes) -> int:
        num_rows = len(rows)
        cost = self.costs.draft(num_rows, cap)
        if cost is None and self.totals.num_drafted == 0:
            return min(cap, FIRST_DEPTH)
        if self._is_plain_due(num_rows, num_nodes):
            return 0
        price = self._price(num_rows, num_nodes)
        if cost is not None and cost * price <= CHEAP * sum(self._weights):
            is_dropped = self._num_dropped >= MOST_DROPPED
            self.habit.depth = 0 if is_dropped else sys.maxsize
            return 0 if is_dropped and self._since_draft < DROPPED_INTERVAL - 1 else cap
        self.habit.depth = self._best_depth(rows, budgets, cap, price, num_nodes)
        if self.habit.depth:
            return self.habit.depth
        return self._probing.depth(num_rows, cap, num_nodes, self._since_draft, not self.trimming.has_cut_trees)

    def _best_depth(
        self, rows: Seq[Sequence], budgets: Seq[Budget], cap: int, price: float, num_nodes: NumNodes
    ) -> int:
        """The depth of which most is to be expected, 0 where that is nothing."""
        num_rows = len(rows)
        most = min(cap, self._reach) if self._is_at_end else cap
        chances = [0.0] * most
        for row, budget, weight in zip(rows, budgets, self._weights, strict=True):
            for level, chance in enumerate(self.survival.by_depth(row.id, min(int(budget), most))):
                chances[level] += weight * chance
        plain = self._plain(num_rows, num_nodes)
        best_value, best_depth, kept, gained, width = 0.0, 0, 0.0, 0.0, 1.0
        for level, chance in enumerate(chances, 1):
            if not chance:
                break
            gained += chance * self.trimming.coverage(level)
            width += self.trimming.width(level)
            size = num_nodes([round(width)] * num_rows, not self.trimming.has_cut_trees)
            kept = max(kept, gained - price * (self.costs.verify(num_rows, size) - plain))
            value = kept - price * (self.costs.draft(num_rows, level) or 0.0)
            if value > best_value:
                best_value, best_depth = value, level
        margin = 0.0 if self._is_drafting else MARGIN * num_rows
        self._is_drafting = best_value > margin
        if not self._is_drafting:
            return 0
        return min(cap, best_depth + 1) if best_depth == most else best_depth  # it ends by itself, or has come to go on

    def _is_plain_due(self, num_rows: int, num_nodes: NumNodes) -> bool:
        """Whether a step should go without a draft, so that its cost stays known."""
        seen = self.costs.times_seen(num_rows, num_nodes([1] * num_rows, True))
        return self._since_plain >= (PLAIN_INTERVAL if seen >= FEW else FIRST_PLAIN_INTERVAL)

    # -- before verifying ------------------------------------------------------------------------------------------

    def trimmed(self, rows: Seq[Sequence], trees: Seq[DraftTree], num_nodes: NumNodes) -> list[DraftTree]:
        """The parts of drafts that are worth verifying."""
        for row, tree in zip(rows, trees, strict=True):
            self.survival.proposed(row.id, tree)
        deepest = max(tree.depth for tree in trees)
        self._reach = max(self._reach, deepest)
        self._is_at_end = 0 < self._reach < self._asked_depth if deepest == self._reach else self._is_at_end
        if all(len(tree) == 1 for tree in trees):
            return list(trees)
        worth = self._worth(len(rows), num_nodes)
        if self._is_divisible:
            kept = self.trimming.best(rows, trees, worth, self._weights)
        else:
            kept = self.trimming.whole_or_none(rows, trees, worth)
        is_dropped = all(len(tree) == 1 for tree in kept)
        self._num_dropped = self._num_dropped + 1 if is_dropped else 0
        self.habit.adopt(trees, kept)
        return self._probing.verified(trees, kept, num_nodes, self._is_divisible) if is_dropped else kept

    def cut(self, trees: Seq[DraftTree], num_nodes: NumNodes) -> list[DraftTree]:
        """The parts of drafts that are verified in a step between two decisions."""
        return self.habit.cut(trees, self._worth(len(trees), num_nodes), self.survival.trust)

    def _worth(self, num_rows: int, num_nodes: NumNodes) -> Worth:
        """How many tokens must be gained by verifying drafts of some sizes."""
        price, plain, verify = self._price(num_rows, num_nodes), self._plain(num_rows, num_nodes), self.costs.verify

        def worth(sizes: Seq[int], are_chains: bool) -> float:
            return price * (verify(num_rows, num_nodes(sizes, are_chains), are_chains=are_chains) - plain)

        return worth

    # -- after a step ----------------------------------------------------------------------------------------------

    def learn(
        self,
        trees: Seq[DraftTree],
        outputs: Seq[RowOutput],
        num_nodes: NumNodes,
        *,
        drafting_seconds: float,
        other_seconds: float,
    ) -> None:
        """Take in what a step has brought and what it has cost."""
        num_rows = len(outputs)
        self._last = num_rows, num_nodes
        plain = self._plain(num_rows, num_nodes)
        are_chains = all(tree.is_chain for tree in trees)
        size = num_nodes([len(tree) for tree in trees], are_chains)
        self.costs.verified(num_rows, size, other_seconds, are_chains=are_chains)
        if self._asked_depth:
            rows = {output.row.id for output in outputs}
            num_levels = min(self._asked_depth, self._reach) if self._is_at_end else self._asked_depth
            self.costs.drafted(num_rows, num_levels, drafting_seconds, is_first=not rows <= self._begun)
            self._begun |= rows
            self._since_draft = 0
        else:
            self._since_draft += 1
        num_right = self.survival.num_right
        self.follow(outputs)
        if self.survival.num_right > num_right:
            self._num_dropped = 0
        done = Steps()
        num_nodes_drafted = size - num_rows if any(len(tree) > 1 for tree in trees) else 0
        num_tokens = sum(len(output.token_ids) for output in outputs)
        done.add(num_rows, num_nodes_drafted, num_tokens, drafting_seconds, other_seconds)
        self._plain_seconds = plain
        self._count(done, is_decided=True)

    def follow_steps(self, steps: Steps) -> None:
        """Count steps between two decisions."""
        self._since_draft = 0 if self.habit.depth else self._since_draft + steps.num_steps
        self._count(steps, is_decided=False)

    def _count(self, steps: Steps, *, is_decided: bool) -> None:
        self._since_plain = self._since_plain + steps.num_steps if steps.num_drafted == steps.num_steps else 0
        self.pace.add(steps, self._plain_seconds)
        self._probing.passed(steps.num_steps, is_decided=is_decided)

    @property
    def has_open_drafts(self) -> bool:
        """Whether the fate of a draft is not known yet."""
        return self.survival.has_open_drafts

    def follow(self, outputs: Seq[RowOutput], *, is_decided: bool = True) -> None:
        """Hold drafts against the tokens that have come, whoever drafted them.

        Args:
          is_decided: whether it is known what was drafted in this step.
        """
        for output in outputs:
            row = output.row
            self.survival.came(row.id, output.token_ids, fades=is_decided)
            if row.is_finished:
                self.survival.forget(row.id)
                self._begun.discard(row.id)

    # -- what it knows ---------------------------------------------------------------------------------------------

    @property
    def gain(self) -> float:
        """Speed of late by that of plain decoding, as far as is known; never below 1, since that is always at hand."""
        return max(1.0, self.pace.gain)

    @property
    def speedup(self) -> float | None:
        """Estimated speed of all steps so far by that of plain decoding; None before the first."""
        return self.totals.speedup

    def describe(self) -> str | None:
        """What is decided at present, and why; None before the first step."""
        if self._last is None:
            return None
        num_rows, num_nodes = self._last
        plain = self._plain(num_rows, num_nodes)
        drafts = self.pace.share >= LEAST_SHARE
        length = max(1, round(self.pace.length)) if drafts else SHOWN_LENGTH
        size, least = num_nodes([length + 1] * num_rows, True), num_nodes([1] * num_rows, True)
        reasons = [f"verify({size})/verify({least}) = {self.costs.verify(num_rows, size) / plain:.2f}"]
        draft = self.costs.draft(num_rows, length)
        if draft is not None and draft * self._price(num_rows, num_nodes) > CHEAP * num_rows:
            reasons.append(f"drafting {length} takes {draft / plain:.2f} of a plain step")
        if self.survival.has_outcomes:
            reasons.append(f"acceptance {self.survival.at_depth(1):.2f} at depth 1")
        else:
            reasons.append("nothing was drafted so far")
        rows = "" if num_rows == 1 else f" with {num_rows} rows"
        what = f"drafting in {self.pace.share:.0%} of the steps" if drafts else "not drafting"
        return f"{what}{rows}: {', '.join(reasons)}"

    def _plain(self, num_rows: int, num_nodes: NumNodes) -> float:
        """Seconds of a step without a draft."""
        return self.costs.verify(num_rows, num_nodes([1] * num_rows, True))

    def _price(self, num_rows: int, num_nodes: NumNodes) -> float:
        """Tokens that a second brings otherwise."""
        return self.gain * num_rows / self._plain(num_rows, num_nodes)

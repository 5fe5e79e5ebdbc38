"""Whether, how deep and how wide to draft, by what it costs and what it brings: measured while decoding; and whether a
drafter is attended to at all, since beside short steps being told of them takes more than drafts bring."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from foredraft.engine.acceptance_model import LITTLE, ROW_MEMORY, AcceptanceModel, Rate
from foredraft.engine.budget import Chances, Habit, Worth, best_counts, weights_of
from foredraft.engine.cost_model import FAR, FEW, MEMORY, RATE, SHARE, Average
from foredraft.engine.stats import Pace, Steps, Totals
from foredraft.tree import DraftTree

if TYPE_CHECKING:
    from foredraft.engine.budget import DraftSize
    from foredraft.engine.cost_model import CostModel
    from foredraft.engine.outputs import RowOutput
    from foredraft.engine.row import Row


TO_LOSE = 16.0
"""Plain steps whose time may be lost by each way of drafting before it is judged: an eighth of an answer, in which a
drafter that loses a tenth of every step is watched for 160 of them."""

TO_RETURN = 0.25
"""Of that, what has to be there again before a drafter that was left is tried anew: other texts may suit it, and with
all of it a session that begins with texts that do not went on without it for 1,600 steps."""

BEARABLE = 0.03
"""Of a step that drafts nothing: what a drafter may take of it without being left (issue 26: never slower by more)."""

WORST = 4.0
"""Plain steps that one step can lose, at most; and no more than steps that draft take of late, but for `FAR`: pauses
of the machine are not the drafter's."""


class Patience:
    """An account, in steps of plain decoding, of what attending to a drafter loses.

    What is drafted is decided by a governor. A drafter works in steps without a draft, too: features are gathered for
    it, and it takes in the text, that of prompts as well, much for heads if answers are short. Beside a step
    of 9 ms that is nothing, beside one of half a millisecond up to half of it. So what every step loses is taken from
    the account and what drafts bring is added, and `SHARE` of each step. When nothing is left, the rows that run go on
    without the drafter for good, and rows that come have none either, until `TO_RETURN` of the account is there again;
    so what is lost over time stays below `SHARE`.

    Args:
      num_arms: ways of drafting that a governor has to try.

    Attributes:
      totals: counts of the steps without the drafter.
    """

    def __init__(self, num_arms: int = 1) -> None:
        self._most = TO_LOSE * max(num_arms, 1)
        self._left = self._most
        self._taken = 0.0  # share of steps without a draft
        self._size = 0  # magnitude of rows of the last step
        self._bare: dict[int, Average] = {}  # logarithms of their seconds without the drafter, by magnitude of rows,
        self._drafting: dict[int, Average] = {}  # and of all of steps that draft, by those
        self.is_attending = True
        self.totals = Totals()

    def welcomes(self) -> bool:
        """Whether a row that comes in now has the drafter."""
        self.is_attending = self.is_attending or self._left >= TO_RETURN * self._most
        return self.is_attending

    def attended(
        self, num_rows: int, num_tokens: float, drafter_seconds: float, seconds: float, *, drafts: bool
    ) -> None:
        """A step has run.

        Args:
          num_tokens: that it brought, of all rows, those that make nothing end sooner left out.
          drafter_seconds: of drafter and governor; ``seconds`` of all the rest.
          drafts: whether a draft was verified.
        """
        size = self._size = num_rows.bit_length()
        bare = self._bare.setdefault(size, Average())
        if drafts:
            usual = self._drafting.setdefault(size, Average())
            taken = math.log(drafter_seconds + seconds) - (bare.value if bare.count else math.log(seconds))
            usual.add(taken)
            lost = math.exp(min(taken, usual.value + FAR)) - num_tokens / num_rows
        else:
            bare.add(math.log(seconds))
            lost = drafter_seconds / seconds
            self._taken += max(RATE, 1.0 / bare.count) * (min(lost, 1.0) - self._taken)
        self._left = min(self._left + SHARE - min(lost, WORST), self._most)

    def read(self, drafter_seconds: float) -> None:
        """The drafter has taken so long to read prompts, which it has to before anything is drafted after them."""
        if (bare := self._bare.get(self._size)) is not None and bare.count:
            lost = min(drafter_seconds / math.exp(bare.value), WORST)
            self._taken += RATE * lost
            self._left -= lost

    def rested(self, num_rows: int, seconds: float) -> None:
        """A step has run without the drafter, and brought a token of every row."""
        self._left = min(self._left + SHARE, self._most)
        self.totals.num_steps += 1
        self.totals.num_tokens += num_rows
        self.totals.seconds += seconds
        self.totals.plain_seconds += seconds

    def describe(self) -> str:
        """Why nothing is drafted."""
        return (
            f"not drafting: rows go on without the drafter, which takes {self._taken:.0%} of a step beside drafts and "
            "brings less"
        )

    def ends(self) -> bool:
        """Whether the rows that run are to go on without the drafter."""
        if self.is_attending and self._left < 0.0 and self._taken > BEARABLE:
            self.is_attending, self._left = False, 0.0
            return True
        self._left = max(self._left, 0.0)
        return False


PROBE_DEPTH = 2
"""Levels of a draft that is made to see what it costs and brings: the fewest that show what one more level takes."""


class Governor:
    """Decides per step how much is drafted and how much of that is verified, to make tokens in the least time.

    A node is worth verifying where its chance to be accepted is larger than the tokens that its time would make
    otherwise; a level is worth drafting where the same holds for its nodes and the time of drafting it. Chances are
    learned per drafter, depth and rank or score, and per row (`AcceptanceModel`); times per number of rows and nodes
    (`CostModel`). Where drafting does not pay, `SHARE` of the time goes into drafts that show whether it would.

    One governor serves all requests of a drafter: what it learns, it keeps. It need not be asked in every step: in
    those between, its `habit` says what was decided last.

    Args:
      costs: of steps.
      title: of what drafts, where there are several.

    Source: cost-aware draft lengths; for rates that fall with the rank, the n nodes with the largest products along
    their path are the best tree of n nodes (Sequoia, Chen et al. 2024, arXiv:2402.12374).
    Exactness: for the rule "match", under which tokens do not depend on drafts.
    Randomness: none; decisions depend on measured times.
    """

    arm: int | None = None
    """Of the drafter's ways to draft, the one to take; it is not chosen here."""

    def __init__(self, costs: CostModel, *, title: str = "") -> None:
        self.title = title
        self.costs = costs
        self.acceptance = AcceptanceModel()
        self._paces: dict[int, Pace] = {}  # by magnitude of rows
        self.habit = Habit()
        self.patience = Patience()
        self._credit = float(FEW)  # plain steps that may go into drafts which are not expected to pay
        self._is_probing = False
        self._since_plain = 0
        self._is_drafting = True
        self._asked_depth = 0
        self._reach = 0  # levels of the deepest draft so far, and
        self._is_at_end = False  # whether more were allowed: the drafter makes no deeper ones
        self._weights: list[float] = []
        self._widths: dict[int, float] = {}  # nodes per row that are kept at a depth, of drafts that branch
        self._coverage: dict[int, float] = {}  # share of the chance of a level that the kept nodes have
        self._value = Rate(0.0)  # tokens per row that the best parts of drafts with scores gain
        self._plain_seconds = 0.0  # of a step like the last one, without a draft
        self._num_rows = 0  # of the last step; 0 before the first
        self._worths: dict[int, Worth] = {}  # since the last decision, by rows

    # -- before drafting -------------------------------------------------------------------------------------------

    def budgets(
        self,
        rows: Sequence[Row],
        budgets: Sequence[DraftSize],
        *,
        is_closed: bool = False,
        context: float = 0.0,
    ) -> list[DraftSize]:
        """What may be drafted for every row: what was allowed, or less.

        Args:
          is_closed: whether no request waits for the place of a row that ends.
          context: tokens that rows have, on average.
        """
        self.costs.after(context)
        self._worths.clear()
        self._is_probing = False
        self._weights = [1.0] * len(rows)
        if is_closed and len(rows) > 1:
            share = self._plain(len(rows) - 1) / self._plain(len(rows))
            self._weights = weights_of([_steps_left(row) for row in rows], share)
        cap = int(max(budgets, default=0))
        self._asked_depth = min(self._depth(rows, budgets, cap), cap) if cap else 0
        return [budget.within(self._asked_depth, self.habit.least) for budget in budgets]

    def _depth(self, rows: Sequence[Row], budgets: Sequence[DraftSize], cap: int) -> int:
        num_rows = len(rows)
        cost, probe = self.costs.draft(num_rows, cap), min(cap, PROBE_DEPTH)
        if cost is None:
            return probe
        depth = self._expected_depth(rows, budgets, cap, cost)
        self.habit.depth = depth
        if self._is_plain_due(num_rows):
            return 0
        if depth:
            return depth
        self._is_probing = self._affords(self._cost_of_probe(num_rows, probe))
        return probe if self._is_probing else 0

    def _expected_depth(self, rows: Sequence[Row], budgets: Sequence[DraftSize], cap: int, cost: float) -> int:
        """How deep drafts are to be, 0 where none are expected to pay; more than any where depth is nearly free.

        Args:
          cost: seconds of the deepest.
        """
        num_rows, price = len(rows), self._price(len(rows))
        if cost * price <= LITTLE * sum(self._weights):
            return sys.maxsize
        depth = self._best_depth(rows, budgets, cap, price)
        if not depth:  # by the mean of drafts; some of those with scores may be sure of themselves
            worth = self._value.value * num_rows
            some_depths = (cap, min(cap, PROBE_DEPTH))
            depth = next((some for some in some_depths if worth > (self.costs.draft(num_rows, some) or 0.0) * price), 0)
        if depth and (cost - (self.costs.draft(num_rows, depth) or 0.0)) * price <= LITTLE * num_rows:
            return sys.maxsize
        return depth

    def _cost_of_probe(self, num_rows: int, depth: int) -> float:
        """Plain steps that drafting so deep takes, and verifying where that is not known; 1 at most of what is not."""
        plain = self._plain(num_rows)
        drafting = (self.costs.draft(num_rows, depth) or 0.0) / plain
        verifying = 0.0
        if not self.costs.knows_drafts(num_rows):
            verifying = self.costs.verify(num_rows, (depth + 1) * num_rows) / plain - 1.0
        return (drafting if self.costs.knows_drafting else min(drafting, 1.0)) + min(verifying, 1.0)

    def _best_depth(self, rows: Sequence[Row], budgets: Sequence[DraftSize], cap: int, price: float) -> int:
        """The depth of which most is to be expected, 0 where that is nothing."""
        num_rows = len(rows)
        most = min(cap, self._reach) if self._is_at_end else cap
        chances: list[float] = []
        for row, budget, weight in zip(rows, budgets, self._weights, strict=True):
            for level, chance in enumerate(self.acceptance.by_depth(row, min(int(budget), most))):
                if level == len(chances):
                    chances.append(0.0)
                chances[level] += weight * chance
        plain = self._plain(num_rows)
        best_value, best_depth, kept, gained, width = 0.0, 0, 0.0, 0.0, 1.0
        for level, chance in enumerate(chances, 1):
            gained += chance * self._coverage.get(level, 1.0)
            width += self._widths.get(level, 1.0)
            size = round(width) * num_rows
            kept = max(kept, gained - price * (self.costs.verify(num_rows, size) - plain))
            value = kept - price * (self.costs.draft(num_rows, level) or 0.0)
            if value > best_value:
                best_value, best_depth = value, level
        margin = 0.0 if self._is_drafting else LITTLE * num_rows
        self._is_drafting = best_value > margin
        if not self._is_drafting:
            return 0
        return min(cap, best_depth + 1) if best_depth == most else best_depth  # it ends by itself, or has come to go on

    def _is_plain_due(self, num_rows: int) -> bool:
        """Whether a step should go without a draft, so that its cost stays known.

        Sooner where it is not yet, and soon for several rows: the curve was measured with one, and what it says of
        theirs decides, where tiles are full, whether one node more is nearly free or dear.
        """
        if self.costs.times_seen(num_rows, num_rows) >= FEW:
            return self._since_plain >= MEMORY
        return self._since_plain >= (MEMORY // (2 * FEW) if num_rows == 1 else 2 * FEW)

    def _affords(self, cost: float) -> bool:
        """Spend so many plain steps on a draft that is not expected to pay, as often as `SHARE` of the time allows."""
        if self._credit < cost:
            return False
        self._credit = min(self._credit, float(FEW)) - cost if cost < FEW else 0.0
        return True

    # -- before verifying ------------------------------------------------------------------------------------------

    def trimmed(self, rows: Sequence[Row], trees: Sequence[DraftTree]) -> list[DraftTree]:
        """The parts of drafts that are worth verifying."""
        self._hold(rows, trees)
        deepest = max(tree.depth for tree in trees)
        self._reach = max(self._reach, deepest)
        self._is_at_end = 0 < self._reach < self._asked_depth if deepest == self._reach else self._is_at_end
        if all(len(tree) == 1 for tree in trees):
            return list(trees)
        worth = self._worth(len(rows))
        is_whole = any(tree.is_whole for tree in trees)
        if is_whole:
            kept = self._whole_or_none(rows, trees, worth)
        else:
            found = self._best(rows, trees, worth)
            kept = _parts(trees, found)
            if not all(tree.is_chain for tree in trees):
                self._note_shape(rows, trees, found)
        self.habit.adopt(trees, kept, worth)
        return self._probed(trees, kept) if all(len(tree) == 1 for tree in kept) else kept

    def cut(self, rows: Sequence[Row], trees: Sequence[DraftTree]) -> list[DraftTree]:
        """The parts of drafts that are verified in a step between two decisions."""
        if not any(tree.scores is not None and len(tree) > 1 and not tree.is_whole for tree in trees):
            return self.habit.cut(trees)
        worth = self._worths.get(len(rows))
        if worth is None:
            worth = self._worths[len(rows)] = self._worth(len(rows))
        return _parts(trees, self._best(rows, trees, worth))

    def _hold(self, rows: Sequence[Row], trees: Sequence[DraftTree]) -> None:
        """Keep drafts until their texts have come."""
        for row, tree in zip(rows, trees, strict=True):
            self.acceptance.proposed(row, tree)

    def _worth(self, num_rows: int) -> Worth:
        """How many tokens must be gained by verifying drafts of so many nodes."""
        price, plain, verify = self._price(num_rows), self._plain(num_rows), self.costs.verify

        @cache
        def worth(size: int, are_chains: bool) -> float:
            return price * (verify(num_rows, size, are_chains=are_chains) - plain)

        return worth

    def _whole_or_none(self, rows: Sequence[Row], trees: Sequence[DraftTree], worth: Worth) -> list[DraftTree]:
        """All drafts as they are where that pays, else none."""
        gained = sum(sum(self.acceptance.by_depth(row, tree.depth)) for row, tree in zip(rows, trees, strict=True))
        if gained > worth(sum(map(len, trees)), False):
            return list(trees)
        return [DraftTree.root(tree.tokens[0], tree.source) for tree in trees]

    def _best(self, rows: Sequence[Row], trees: Sequence[DraftTree], worth: Worth) -> list[Chances]:
        """The nodes of every draft that pay."""
        found = [self.acceptance.best_nodes(row, tree) for row, tree in zip(rows, trees, strict=True)]
        if len(rows) > 1:
            weights = self._weights_for(len(rows))
            found = [[(w * chance, node) for chance, node in nodes] for w, nodes in zip(weights, found, strict=True)]
        counts, value = best_counts(found, worth, are_chains=all(tree.is_chain for tree in trees))
        if any(tree.scores is not None for tree in trees):
            self._value.add(value / len(rows), 0)
        return [nodes[:count] for nodes, count in zip(found, counts, strict=True)]

    def _weights_for(self, num_rows: int) -> list[float]:
        return self._weights if len(self._weights) == num_rows else [1.0] * num_rows

    def _note_shape(self, rows: Sequence[Row], trees: Sequence[DraftTree], kept: Sequence[Chances]) -> None:
        """Remember how wide trees are once they are cut, and how much of the chance of a level the rest has."""
        widths: dict[int, float] = {}
        covered: dict[int, float] = {}
        whole: dict[int, float] = {}
        for row, tree, nodes in zip(rows, trees, kept, strict=True):
            for level, chance in enumerate(self.acceptance.by_depth(row, tree.depth), 1):
                whole[level] = whole.get(level, 0.0) + chance
            for chance, node in nodes:
                level = tree.depths[node]
                widths[level] = widths.get(level, 0.0) + 1.0 / len(rows)
                covered[level] = covered.get(level, 0.0) + chance
        for level, width in widths.items():
            share = min(covered[level] / whole[level], 1.0) if whole.get(level) else 1.0
            for known, value in ((self._widths, max(width, 1.0)), (self._coverage, share)):
                known[level] = ROW_MEMORY * known.get(level, value) + (1.0 - ROW_MEMORY) * value

    def _probed(self, trees: Sequence[DraftTree], kept: list[DraftTree]) -> list[DraftTree]:
        """What is verified where no draft seems to pay; mostly nothing.

        What a draft costs to verify is believed of a curve only until some were verified: a curve that is wrong must
        not keep drafts away for good.
        """
        num_rows = len(trees)
        if self.costs.knows_drafts(num_rows):
            return kept
        place = max(range(num_rows), key=lambda place: len(trees[place]))
        draft = trees[place].main_chain().cut(2 * PROBE_DEPTH) if not trees[place].is_whole else trees[place]
        probed = [*kept[:place], draft, *kept[place + 1 :]]
        seconds = self.costs.verify(num_rows, sum(map(len, probed)))
        more = seconds / self._plain(num_rows) - 1.0
        return probed if self._is_probing or self._affords(min(more, 1.0)) else kept

    # -- after a step ----------------------------------------------------------------------------------------------

    def learn(
        self,
        trees: Sequence[DraftTree],
        outputs: Sequence[RowOutput],
        *,
        drafting_seconds: float,
        other_seconds: float,
    ) -> None:
        """Take in what a step has brought and what it has cost."""
        num_rows = len(outputs)
        self._num_rows = num_rows
        self._plain_seconds = self._plain(num_rows)
        are_chains = all(tree.is_chain for tree in trees)
        size = sum(map(len, trees))
        self.costs.verified(num_rows, size, other_seconds, are_chains=are_chains)
        if self._asked_depth:
            num_levels = min(self._asked_depth, self._reach) if self._is_at_end else self._asked_depth
            is_first = not all(self in output.row.state for output in outputs)
            self.costs.drafted(num_rows, num_levels, drafting_seconds, is_first=is_first)
            for output in outputs:
                output.row.state[self] = True  # that it has been drafted for
        else:
            for output in outputs:
                self.acceptance.rested(output.row)
        self.follow(outputs)
        done = Steps()
        num_drafted = size - num_rows if any(len(tree) > 1 for tree in trees) else 0
        done.add(
            num_rows, num_drafted, sum(len(output.token_ids) for output in outputs), drafting_seconds, other_seconds
        )
        self.follow_steps(done)

    def follow_steps(self, steps: Steps) -> None:
        """Count steps, those between two decisions too."""
        self._since_plain = self._since_plain + steps.num_steps if steps.num_drafted == steps.num_steps else 0
        self._credit += SHARE * steps.num_steps
        self._pace.add(steps, self._plain_seconds)

    def follow(self, outputs: Sequence[RowOutput], drafts: Sequence[DraftTree] = ()) -> None:
        """Hold drafts against the tokens that have come, whoever drafted them.

        Args:
          drafts: of the same step, whole, that are not held yet.
        """
        if drafts:
            self._hold([output.row for output in outputs], drafts)
        for output in outputs:
            self.acceptance.came(output.row, output.token_ids)

    def value_of(self, outputs: Sequence[RowOutput]) -> float:
        """Tokens that a step has brought, those of drafts as far as they make the batch end sooner."""
        weights = self._weights_for(len(outputs))
        gained = [weight * (len(output.token_ids) - 1) for weight, output in zip(weights, outputs, strict=True)]
        return len(outputs) + sum(gained)

    # -- what it knows ---------------------------------------------------------------------------------------------

    @property
    def totals(self) -> Totals:
        """Counts of all steps."""
        return sum((pace.totals for pace in self._paces.values()), start=self.patience.totals)

    def gain(self, num_rows: int) -> float:
        """Speed of late by that of plain decoding, of about so many rows; 1 where there were none."""
        pace = self._paces.get(num_rows.bit_length())
        return 1.0 if pace is None else pace.gain

    @property
    def _pace(self) -> Pace:
        """Of steps like the last one."""
        return self._paces.setdefault(self._num_rows.bit_length(), Pace())

    def describe(self) -> str | None:
        """What is decided at present, and why; None before the first step."""
        if not self._num_rows:
            return None
        if not self.patience.is_attending:
            return self.patience.describe()
        num_rows = self._num_rows
        plain = self._plain(num_rows)
        pace = self._pace
        drafts = pace.share >= LITTLE
        length = max(1, round(pace.length)) if drafts else 2 * PROBE_DEPTH
        size = (length + 1) * num_rows
        reasons = [f"verify({size})/verify({num_rows}) = {self.costs.verify(num_rows, size) / plain:.2f}"]
        draft = self.costs.draft(num_rows, length)
        if draft is not None and draft * self._price(num_rows) > LITTLE * num_rows:
            reasons.append(f"drafting {length} takes {draft / plain:.2f} of a plain step")
        if self.acceptance.has_outcomes:
            reasons.append(f"acceptance {self.acceptance.at_depth(1):.2f} at depth 1")
        else:
            reasons.append("nothing was drafted so far")
        rows = "" if num_rows == 1 else f" with {num_rows} rows"
        what = f"drafting in {pace.share:.0%} of the steps" if drafts else "not drafting"
        return f"{what}{rows}: {', '.join(reasons)}"

    def _plain(self, num_rows: int) -> float:
        """Seconds of a step without a draft."""
        return self.costs.verify(num_rows, num_rows)

    def _price(self, num_rows: int) -> float:
        """Tokens that a second brings otherwise: at the speed of late, or plainly, which is always at hand."""
        return max(1.0, self.gain(num_rows)) * num_rows / self._plain(num_rows)


def _steps_left(row: Row) -> float:
    """Steps that a row has before it, at most, at the pace that it had so far."""
    return row.num_remaining_tokens * (row.stats.num_steps + FEW) / (row.stats.num_emitted_tokens + FEW)


def _parts(trees: Sequence[DraftTree], kept: Sequence[Chances]) -> list[DraftTree]:
    """Drafts with the nodes that are kept of them."""
    return [
        tree if len(nodes) + 1 == len(tree) else tree.restricted([0, *sorted(node for _, node in nodes)])
        for tree, nodes in zip(trees, kept, strict=True)
    ]

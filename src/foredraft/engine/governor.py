"""Governor: chooses the drafting mode and the draft size that maximise tokens per second.

The governor uses step times and acceptance rates measured while decoding. Plain decoding is one of the choices.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeAlias

from foredraft.engine.acceptance_model import KINDS, LITTLE, ROW_MEMORY, AcceptanceModel, Rate
from foredraft.engine.cost_model import FEW, MEMORY, RATE, SHARE, CostModel
from foredraft.engine.costs import cost_curve, facts_of, forget_curve
from foredraft.engine.drafter import Drafter, DrafterFacts
from foredraft.engine.stats import StepSeconds
from foredraft.tree import DraftSize, DraftTree

if TYPE_CHECKING:
    from foredraft.engine.profiles import Profile
    from foredraft.engine.row import Row, RowOutput
    from foredraft.model.lm import CausalLM

logger = logging.getLogger("foredraft")

INTERVAL = 4
"""Number of steps between two decisions, if neither rows nor limits change."""

PROBE_DEPTH = 2
"""Depth of a draft made only to measure its cost and acceptance. One level is the smallest depth that shows the cost of
a further level.
"""

TURN = 8
"""Number of steps for which a drafting mode runs before another is considered. At first, every mode gets twice as many.
Fewer steps would mostly measure the cost of a drafter's first step.
"""

TO_LOSE = 16.0
"""Time, in plain steps, that each mode may lose before rows go on without drafts: an eighth of an answer."""

TO_RETURN = 0.25
"""Fraction of this budget that must be restored before drafting is tried again. Later texts may suit the drafter
better."""

BEARABLE = 0.03
"""Largest fraction of the speed of plain decoding that drafting may lose before it is stopped (issue 26: never slower
by more).
"""

APART = 0.1
"""Lead over the slowest row, as a fraction of a batch's remaining steps. A row that is ahead of the slowest row by this
many steps is 1/e times as likely to end last.
"""

USUAL_TRIALS = 8.0
"""Number of outcomes for which a drafter's usual acceptance rate counts, so that a few misses do not outweigh it."""

Worth: TypeAlias = Callable[[int, bool], float]
"""Function of (number of nodes, whether all drafts are chains). The function returns the number of tokens that could be
generated otherwise in the time of verifying these nodes.
"""

Chances: TypeAlias = list[tuple[float, int]]
"""Nodes of a draft as pairs (acceptance probability, node), the likeliest first."""


@dataclass
class Totals:
    """Counts of the steps that a governor has seen.

    Args:
      num_drafted: number of steps that verified a draft.
      plain_seconds: estimated time of plain decoding for the same tokens.
    """

    num_steps: int = 0
    num_drafted: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    plain_seconds: float = 0.0

    @property
    def speedup(self) -> float | None:
        """Estimated speed of these steps relative to plain decoding; None before the first step."""
        return self.plain_seconds / self.seconds if self.seconds else None


@dataclass
class _Pace:
    """Recent performance of one drafting mode in batches of about the same number of rows.

    Args:
      tokens: decayed sum of the tokens per row.
      time: decayed sum of the step times, relative to a plain step.
      share: recent share of steps that verified a draft.
      length: recent mean of drafted nodes per row in such steps, without the pending one.
      num_steps: number of steps.
      credit: time, counted in plain steps, that may still be lost by trying this mode again.
    """

    tokens: float = 0.0
    time: float = 0.0
    share: float = 0.0
    length: float = 0.0
    num_steps: int = 0
    num_drafted: int = 0
    credit: float = 0.0

    @property
    def gain(self) -> float:
        """Speed relative to plain decoding; 1.0 if it is not known yet."""
        return self.tokens / self.time if self.time > 0.0 else 1.0

    def add(self, num_rows: int, num_nodes: int, num_tokens: int, time: float) -> None:
        """Count a step that verified ``num_nodes`` drafted nodes. ``time`` is relative to a plain step."""
        self.num_steps += 1
        self.tokens = (1.0 - RATE) * self.tokens + num_tokens / num_rows
        self.time = (1.0 - RATE) * self.time + time
        self.share += max(RATE, 1.0 / self.num_steps) * ((num_nodes > 0) - self.share)
        if num_nodes:
            self.num_drafted += 1
            self.length += max(RATE, 1.0 / self.num_drafted) * (num_nodes / num_rows - self.length)


class _Batch:
    """Statistics for batches of about the same number of rows: the pace of every mode, and whether any is worth it.

    Each mode first gets a few steps. Afterwards the mode with the least recent time per token runs. The other modes get
    a turn as often as `SHARE` of the time, for all of them together, covers their expected loss. An account contains
    the time, in plain steps, that drafting may still lose in such batches. When this budget is used up and no mode is
    nearly as fast as plain decoding, rows rest.

    Args:
      num_ways: number of drafting modes.
      way: index of the mode that starts.
    """

    def __init__(self, num_ways: int, way: int) -> None:
        self.paces = [_Pace() for _ in range(num_ways)]
        self.way = way
        self.is_resting = False
        self._most = self._account = TO_LOSE * num_ways
        self._left = 2 * TURN

    @property
    def pace(self) -> _Pace:
        """Pace of the current mode."""
        return self.paces[self.way]

    def choose(self) -> None:
        """Select the mode for the next steps, if a turn has ended."""
        if self._left > 0 or len(self.paces) == 1:
            return
        turn, self._left = TURN - self._left, TURN
        untried = [way for way, pace in enumerate(self.paces) if pace.num_steps < 2 * TURN]
        if untried:
            self.way, self._left = untried[0], 2 * TURN
            return
        gains = [pace.gain for pace in self.paces]
        self.way = best = max(range(len(gains)), key=gains.__getitem__)
        for way, pace in enumerate(self.paces):
            if way != best and pace.credit > turn * (1.0 - gains[way] / gains[best]):
                pace.credit = 0.0
                self.way = way
                return

    def lose(self, lost: float) -> None:
        """Withdraw ``lost`` plain steps from the account."""
        self._account -= lost

    def count(self, lost: float) -> None:
        """Count a step. ``lost`` is the time, in plain steps, by which it took longer than plain decoding of its
        tokens."""
        self._left -= 1
        if len(self.paces) > 1 and not self.is_resting:
            for way, pace in enumerate(self.paces):
                if way != self.way:
                    pace.credit += SHARE / (len(self.paces) - 1)
        self._account = min(self._account + SHARE - lost, self._most)
        if self.is_resting:
            self.is_resting = self._account < TO_RETURN * self._most
        elif self._account < 0.0:
            self._account = 0.0
            self.is_resting = max(pace.gain for pace in self.paces) < 1.0 - BEARABLE


@dataclass(eq=False)
class _Way:
    """One drafting mode, and the shape of its drafts.

    Args:
      number: index of the mode in `DrafterFacts.arms`.
      reach: largest depth of any draft until now.
      is_at_end: True if the drafter was allowed to draft deeper and did not.
      widths: number of kept nodes per row, by depth, for drafts that branch.
      coverage: share of the acceptance probability that the kept nodes have, by depth.
      value: expected gain, in tokens per row, of the best parts of drafts with scores.
      credit: time, counted in plain steps, that may still be spent on drafts that are not expected to be worth it.
      governing: recent time of deciding on a draft, in seconds.
    """

    number: int
    title: str
    reach: int = 0
    is_at_end: bool = False
    widths: dict[int, float] = field(default_factory=dict)
    coverage: dict[int, float] = field(default_factory=dict)
    value: Rate = field(default_factory=lambda: Rate(0.0))
    credit: float = float(FEW)
    governing: float = 0.0
    is_drafting: bool = True

    def affords(self, cost: float, reserve: float = 0.0) -> bool:
        """Spend ``cost`` plain steps on a draft not expected to be worth it; return whether the credit allows it.

        The credit grows by `SHARE` per step.

        Args:
          reserve: credit, in plain steps, that must be left afterwards.
        """
        if self.credit < cost + reserve:
            return False
        self.credit = min(self.credit, float(FEW)) - cost if cost < FEW else 0.0
        return True


class Governor:
    """Chooses how much is drafted and how much of that is verified, to generate tokens in the least time.

    A node is worth verifying if its acceptance probability exceeds the number of tokens that could be generated
    otherwise in its time. A level is worth drafting if the same holds for its nodes, with the time of drafting
    included. Probabilities come from the engine's `AcceptanceModel`. Times are learned per number of rows and nodes
    (`CostModel`). If drafting is not worth it, `SHARE` of the time is spent on drafts that show whether this has
    changed. If a drafter has several modes (`DrafterFacts.arms`), the governor uses the one with the least recent time
    per token. Plain decoding is one more option. If all modes lose, rows rest: the drafter gets no more calls for them.

    The depth is decided every fourth step, and whenever rows change. The nodes to verify are chosen in every step, with
    the node costs of the last decision. One governor serves all requests of a drafter and keeps its measurements.

    Args:
      costs: cost model of steps.
      facts: facts of the drafter.
      acceptance: acceptance model of the engine.

    Attributes:
      costs: cost model of steps, and of drafting in each mode.
      totals: counts of all steps.

    Source: cost-aware draft lengths. For rates that fall with the rank, the n nodes with the largest products along
    their path are the best tree of n nodes (Sequoia, Chen et al. 2024, arXiv:2402.12374).
    Exactness: only for the rule "match", under which tokens do not depend on drafts.
    Randomness: none; decisions depend on measured times.
    """

    def __init__(
        self, costs: CostModel, facts: DrafterFacts | None = None, acceptance: AcceptanceModel | None = None
    ) -> None:
        facts = facts or DrafterFacts("drafter")
        self.acceptance = acceptance or AcceptanceModel()
        self.acceptance.compare_with(facts.validated_acceptance)
        if facts.usual_acceptance is not None:
            for depth in range(1, KINDS + 1):
                self.acceptance.expect(facts.name, depth, facts.usual_acceptance, USUAL_TRIALS)
        self.costs = costs
        self.totals = Totals()
        self._first_way = facts.arm if facts.arms else 0
        self._ways = [_Way(number, title) for number, title in enumerate(facts.arms or (facts.name,))]
        self._is_choosing = bool(facts.arms)
        self._batches: dict[int, _Batch] = {}  # by bit length of the number of rows
        self._turn_to(1)
        self._since_plain = 0
        # the last decision, and the rows for which it was made
        self._rows: tuple[int, ...] = ()
        self._cap = self._depth = self._left = 0
        self._least = 0.0
        self._weights: list[float] = []
        self._plain_seconds = 0.0  # expected time of a step without a draft
        self._worth: Worth = lambda _size, _are_chains: 0.0
        # of the current step
        self._sizes: list[DraftSize] = []
        self._is_deciding = False

    # -- plan ------------------------------------------------------------------------------------------------------

    def attends(self, num_rows: int) -> bool:
        """Return whether the drafter serves batches of this many rows. Otherwise they rest."""
        batch = self._batches.get(num_rows.bit_length())
        return batch is None or not batch.is_resting

    def plan(self, rows: Sequence[Row], limits: Sequence[DraftSize], *, is_closed: bool = False) -> list[DraftSize]:
        """Return the draft size that is worth it for every row, within its limit.

        Args:
          is_closed: True if no request waits for the slot of a row that ends.
        """
        these, cap = tuple(map(id, rows)), max(limits)
        depth = self._depth
        self._is_deciding = self._left <= 0 or cap > self._cap or these != self._rows
        if self._is_deciding:
            self._rows, self._cap, self._left = these, cap, INTERVAL
            depth = self._decide(rows, limits, is_closed)
        self._left -= 1
        least, arm = self._least, self._way.number if self._is_choosing else None
        self._sizes = []
        for limit in limits:
            self._sizes.append(limit.within(depth, least, arm))
        return self._sizes

    def _decide(self, rows: Sequence[Row], limits: Sequence[DraftSize], is_closed: bool) -> int:
        """Decide depth and node cost for the next steps; returns the depth for this step."""
        num_rows, cap = len(rows), int(self._cap)
        self._of(num_rows).choose()
        self._turn_to(num_rows)
        costs, way = self.costs, self._way
        num_tokens = 0
        for row in rows:
            num_tokens += len(row.token_ids)
        costs.set_context(num_tokens / num_rows)
        plain = self._plain_seconds = costs.verify(num_rows, num_rows)
        price, verify = self._price, costs.verify
        self._weights = [1.0] * num_rows
        if is_closed and num_rows > 1:
            share = costs.verify(num_rows - 1, num_rows - 1) / plain
            self._weights = weights_of([_steps_left(row) for row in rows], share)

        @cache
        def worth(size: int, are_chains: bool) -> float:
            return price * (verify(num_rows, size, are_chains=are_chains) - plain)

        self._worth = worth
        if not cap:
            self._depth = 0
            return 0
        probe, cost = min(cap, PROBE_DEPTH), costs.draft(num_rows, cap, way.number)
        if cost is None:
            self._depth, self._left = 0, 1
            return probe
        self._depth = self._best_depth(rows, limits, cap, cost, price)
        if self._is_plain_due(num_rows):
            return 0
        if not self._depth:  # a draft shows its acceptance even if it is not verified
            drafting = ((costs.draft(num_rows, probe, way.number) or 0.0) + way.governing) / plain
            reserve = 0.0 if costs.knows_drafts(num_rows) else 1.0  # for verifying it, see `_probed`
            if way.affords(drafting if costs.knows_drafting(way.number) else min(drafting, 1.0), reserve):
                self._left = 1
                return probe
        return self._depth

    def _best_depth(self, rows: Sequence[Row], limits: Sequence[DraftSize], cap: int, cost: float, price: float) -> int:
        """Return the best depth, 0 if no depth is worth it, and `sys.maxsize` if deeper drafts are nearly free.

        Args:
          cost: seconds of the deepest draft.
        """
        num_rows, way, draft = len(rows), self._way, self.costs.draft
        if cost * price <= LITTLE * sum(self._weights):
            return sys.maxsize
        depth = self._depth_by_chances(rows, limits, cap, price)
        if not depth:  # that was the mean of all drafts; drafts with scores may include confident ones
            worth = way.value.value * num_rows
            for some in (cap, min(cap, PROBE_DEPTH)):
                if not depth and worth > (draft(num_rows, some, way.number) or 0.0) * price:
                    depth = some
        if depth and (cost - (draft(num_rows, depth, way.number) or 0.0)) * price <= LITTLE * num_rows:
            return sys.maxsize
        return depth

    def _depth_by_chances(self, rows: Sequence[Row], limits: Sequence[DraftSize], cap: int, price: float) -> int:
        """Return the depth with the largest expected gain, or 0 if no depth has any."""
        num_rows, way = len(rows), self._way
        most = min(cap, way.reach) if way.is_at_end else cap
        chances: list[float] = []
        for row, limit, weight in zip(rows, limits, self._weights, strict=True):
            for level, chance in enumerate(self.acceptance.by_depth(row, min(int(limit), most), way.title)):
                if level == len(chances):
                    chances.append(0.0)
                chances[level] += weight * chance
        best_value, best_depth, kept, gained, width = 0.0, 0, 0.0, 0.0, 1.0
        for level, chance in enumerate(chances, 1):
            gained += chance * way.coverage.get(level, 1.0)
            width += way.widths.get(level, 1.0)
            verifying = self.costs.verify(num_rows, round(width) * num_rows) - self._plain_seconds
            kept = max(kept, gained - price * verifying)
            value = kept - price * (self.costs.draft(num_rows, level, way.number) or 0.0)
            if value > best_value:
                best_value, best_depth = value, level
        way.is_drafting = best_value > (0.0 if way.is_drafting else LITTLE * num_rows)
        if not way.is_drafting:
            return 0
        return min(cap, best_depth + 1) if best_depth == most else best_depth  # one more level, to see if it helps

    def _is_plain_due(self, num_rows: int) -> bool:
        """Return whether a step should run without a draft, so that the cost of plain steps stays known.

        A plain step is due sooner while that cost is unknown. With several rows a plain step is due very soon. The
        curve was measured with one row, and with a wrong cost of plain steps an additional node looks nearly free or
        too expensive.
        """
        if self.costs.times_seen(num_rows, num_rows) >= FEW:
            return self._since_plain >= MEMORY
        return self._since_plain >= (MEMORY // (2 * FEW) if num_rows == 1 else 2 * FEW)

    # -- select ----------------------------------------------------------------------------------------------------

    def select(self, rows: Sequence[Row], drafts: Sequence[DraftTree]) -> list[DraftTree]:
        """Return the parts of drafts that are worth verifying."""
        way, deepest, are_whole, are_chains, have_scores = self._way, 0, False, True, False
        for tree, size in zip(drafts, self._sizes, strict=True):
            if tree.plan is not None:  # traces contain the final plan
                tree.plan.gamma = min(tree.plan.gamma, int(size))
            deepest = max(deepest, tree.depth)
            are_whole, are_chains = are_whole or tree.is_whole, are_chains and tree.is_chain
            have_scores = have_scores or tree.scores is not None
        way.reach = max(way.reach, deepest)
        way.is_at_end = 0 < way.reach < max(self._sizes) if deepest == way.reach else way.is_at_end
        if not deepest:
            return list(drafts)
        if are_whole:
            kept = self._whole_or_none(rows, drafts)
        else:
            found = self._best(rows, drafts, are_chains, have_scores)
            kept = []
            for tree, nodes in zip(drafts, found, strict=True):
                kept.append(_part(tree, nodes))
            if self._is_deciding and not are_chains:
                self._note_shape(rows, drafts, found)
        if self._is_deciding:
            num_nodes = 0
            for tree in kept:
                num_nodes += len(tree.tokens)
            if are_whole or have_scores:
                self._least = max(self._worth(num_nodes + 1, are_chains) - self._worth(num_nodes, are_chains), 0.0) / 2
            if num_nodes == len(kept):
                return self._probed(drafts, kept)
        return kept

    def _whole_or_none(self, rows: Sequence[Row], drafts: Sequence[DraftTree]) -> list[DraftTree]:
        """Return all drafts unchanged if that is worth it, else empty drafts."""
        by_depth, title = self.acceptance.by_depth, self._way.title
        gained = sum(sum(by_depth(row, tree.depth, title)) for row, tree in zip(rows, drafts, strict=True))
        if gained > self._worth(sum(map(len, drafts)), False):
            return list(drafts)
        return [DraftTree.root(tree.tokens[0], tree.source) for tree in drafts]

    def _best(
        self, rows: Sequence[Row], drafts: Sequence[DraftTree], are_chains: bool, have_scores: bool
    ) -> list[Chances]:
        """Return the nodes of every draft that are worth verifying."""
        best_nodes, found = self.acceptance.best_nodes, []
        for row, tree, weight in zip(rows, drafts, self._weights, strict=True):
            nodes = best_nodes(row, tree)
            found.append(nodes if weight == 1.0 else [(weight * chance, node) for chance, node in nodes])
        counts, value = best_counts(found, self._worth, are_chains=are_chains)
        if have_scores:
            self._way.value.add(value / len(rows), 0)
        for place, count in enumerate(counts):
            del found[place][count:]
        return found

    def _note_shape(self, rows: Sequence[Row], drafts: Sequence[DraftTree], kept: Sequence[Chances]) -> None:
        """Record, per level, the width of trees after cutting and the share of acceptance probability that is kept."""
        way = self._way
        widths: dict[int, float] = {}
        covered: dict[int, float] = {}
        whole: dict[int, float] = {}
        for row, tree, nodes in zip(rows, drafts, kept, strict=True):
            for level, chance in enumerate(self.acceptance.by_depth(row, tree.depth, way.title), 1):
                whole[level] = whole.get(level, 0.0) + chance
            for chance, node in nodes:
                level = tree.depths[node]
                widths[level] = widths.get(level, 0.0) + 1.0 / len(rows)
                covered[level] = covered.get(level, 0.0) + chance
        for level, width in widths.items():
            share = min(covered[level] / whole[level], 1.0) if whole.get(level) else 1.0
            for known, value in ((way.widths, max(width, 1.0)), (way.coverage, share)):
                known[level] = ROW_MEMORY * known.get(level, value) + (1.0 - ROW_MEMORY) * value

    def _probed(self, drafts: Sequence[DraftTree], kept: list[DraftTree]) -> list[DraftTree]:
        """Return the drafts to verify if none seems worth it: usually none, sometimes one, to measure its cost.

        The curve is trusted only until some drafts were verified. A wrong curve must not prevent drafting forever.
        """
        num_rows, costs = len(drafts), self.costs
        if costs.knows_drafts(num_rows):
            return kept
        place = max(range(num_rows), key=lambda place: len(drafts[place]))
        draft = drafts[place].main_chain().cut(2 * PROBE_DEPTH) if not drafts[place].is_whole else drafts[place]
        probed = [*kept[:place], draft, *kept[place + 1 :]]
        more = costs.verify(num_rows, sum(map(len, probed))) / self._plain_seconds - 1.0
        return probed if self._way.affords(min(more, 1.0)) else kept

    # -- observe ---------------------------------------------------------------------------------------------------

    def observe(self, trees: Sequence[DraftTree], outputs: Sequence[RowOutput], seconds: StepSeconds) -> None:
        """Learn from the tokens and times of a step.

        Args:
          trees: drafts that were verified.
        """
        num_rows = len(outputs)
        if not self._sizes:  # rows rest
            self._turn_to(num_rows)
        way, batch, depth = self._way, self._batch, max(self._sizes, default=0)
        size, are_chains, num_tokens, gained, is_first = 0, True, 0, 0.0, False
        has_weights = len(self._weights) == num_rows
        for place, (tree, output) in enumerate(zip(trees, outputs, strict=True)):
            size += len(tree.tokens)
            are_chains = are_chains and tree.is_chain
            num_tokens += len(output.token_ids)
            gained += (self._weights[place] if has_weights else 1.0) * (len(output.token_ids) - 1)
            if depth and way not in output.row.state:
                is_first = output.row.state[way] = True  # marks the row as drafted for in this mode
        self.costs.verified(num_rows, size, seconds.verifying, are_chains=are_chains)
        if depth:
            way.governing += RATE * (seconds.governing - way.governing)
            levels = min(depth, way.reach) if way.is_at_end else depth
            self.costs.drafted(num_rows, levels, seconds.drafting, way=way.number, is_first=is_first)
        num_drafted = size - num_rows
        plain = self._plain_seconds or seconds.verifying
        taken, totals = sum(seconds), self.totals
        totals.num_steps += 1
        totals.num_tokens += num_tokens
        totals.seconds += taken
        if num_drafted:
            self._since_plain += 1
            totals.num_drafted += 1
            totals.plain_seconds += plain * num_tokens / num_rows
            lost = taken / plain - (1.0 + gained / num_rows)  # counts tokens only as far as they shorten the batch
        else:
            self._since_plain = 0
            totals.plain_seconds += seconds.verifying
            lost = (seconds.drafting + seconds.governing) / seconds.verifying
        way.credit += SHARE
        if self._sizes:
            batch.pace.add(num_rows, num_drafted, num_tokens, taken / plain)
        batch.count(min(lost, 1.0))
        self._sizes = []

    def read(self, seconds: float) -> None:
        """Count the time that the drafter took to read prompts, which is a cost of drafting."""
        if self._plain_seconds:
            lost = min(seconds / self._plain_seconds, TURN)
            self._batch.pace.time += lost
            self._batch.lose(lost)

    # -- current state ---------------------------------------------------------------------------------------------

    @property
    def way(self) -> int:
        """Index of the current drafting mode in `DrafterFacts.arms`."""
        return self._way.number

    @property
    def title(self) -> str:
        """Name of the current drafting mode, under which the acceptance model counts its drafts."""
        return self._way.title

    def _of(self, num_rows: int) -> _Batch:
        size = num_rows.bit_length()
        batch = self._batches.get(size)
        if batch is None:
            batch = self._batches[size] = _Batch(len(self._ways), self._first_way)
        return batch

    def _turn_to(self, num_rows: int) -> None:
        self._num_rows, self._batch = num_rows, self._of(num_rows)
        self._way = self._ways[self._batch.way]

    @property
    def _price(self) -> float:
        """Tokens per second that could be generated otherwise: at the recent speed, or plainly if that is faster."""
        return max(1.0, self._batch.pace.gain) * self._num_rows / self._plain_seconds

    def report(self, before: Totals) -> dict[str, Any]:
        """Return the latest decision, and the speed relative to plain decoding of the steps since ``before``.

        The speed is None if none of these steps verified a draft.
        """
        totals = self.totals
        seconds = totals.seconds - before.seconds
        has_drafts = totals.num_drafted > before.num_drafted
        speed = (totals.plain_seconds - before.plain_seconds) / seconds if has_drafts and seconds > 0.0 else None
        return {"estimated_speedup": speed, "decision": self.describe()}

    def describe(self) -> str | None:
        """Describe the current decision and its reasons; None before the first step."""
        num_rows = self._num_rows
        if not self.totals.num_steps:
            return None
        batch = self._batch
        rows = "" if num_rows == 1 else f" with {num_rows} rows"
        if batch.is_resting:
            best = max(pace.gain for pace in batch.paces)
            return f"not drafting{rows}: with the drafter, speed was {best:.2f} times that of plain decoding"
        way, pace = self._way, batch.pace
        if len(self._ways) > 1:
            tried = [number for number, one in enumerate(batch.paces) if one.num_steps >= 2 * TURN]
            number = max(tried, key=lambda number: batch.paces[number].gain, default=batch.way)
            way, pace = self._ways[number], batch.paces[number]
        plain = self.costs.verify(num_rows, num_rows)
        drafts = pace.share >= LITTLE
        length = max(1, round(pace.length)) if drafts else 2 * PROBE_DEPTH
        size = (length + 1) * num_rows
        reasons = [f"verify({size})/verify({num_rows}) = {self.costs.verify(num_rows, size) / plain:.2f}"]
        draft = self.costs.draft(num_rows, length, way.number)
        if draft is not None and draft * max(1.0, pace.gain) > LITTLE * plain:
            reasons.append(f"drafting {length} takes {draft / plain:.2f} of a plain step")
        if self.acceptance.has_outcomes:
            reasons.append(f"acceptance {self.acceptance.at_depth(1, way.title):.2f} at depth 1")
        else:
            reasons.append("nothing was drafted so far")
        what = f"drafting in {pace.share:.0%} of the steps" if drafts else "not drafting"
        said = f"{what}{rows}: {', '.join(reasons)}"
        if len(self._ways) > 1:
            speeds = [f"{way.title} {pace.gain:.2f}" for way, pace in zip(self._ways, batch.paces, strict=True)]
            said += f"; recent speed relative to plain decoding: {', '.join(speeds)}"
        return said


def new_governor(target: CausalLM, drafter: Drafter, profile: Profile | None = None) -> Governor:
    """Make a governor that starts with the measured costs of forward passes on this machine; see `cost_curve`.

    Args:
      profile: earlier measurements. The measured costs are used if they are of this machine, its acceptance if it is of
        this drafter.

    Raises: ConfigError for a profile of another model.
    """
    facts = facts_of(target)
    difference = None if profile is None else profile.difference(facts)
    if difference is not None:
        logger.warning("the profile was measured under other conditions (%s), so its costs are not used", difference)
    curve = profile.curve() if profile is not None and difference is None else None
    costs = CostModel(cost_curve(target), partial(forget_curve, facts)) if curve is None else CostModel(curve)
    governor = Governor(costs, drafter.facts)
    if profile is not None and profile.method == drafter.name:
        profile.teach(governor.acceptance, governor.title, governor.costs if difference is None else None)
    return governor


def weights_of(num_left: Sequence[float], share: float) -> list[float]:
    """Return the weight of a token in every row, for a batch in which no request waits for the slot of a row that ends.

    The duration of a batch is that of its longest row. Tokens of other rows save only the cost of a row in later steps.
    The row-dependent cost of a step is therefore shared by all rows, and the rest of the cost is shared by the rows
    that may end last: each of k such rows gets a kth of it. Gains vary between rows, and the row with the smallest gain
    is the last. This predicts the gain of batches of 8 recorded texts to 1.6 % for 64 steps and to 1.1 % for 200 steps
    (dev/log, 2026-11-27).

    Args:
      num_left: expected number of remaining steps of every row, at its present rate.
      share: time of a step with one row fewer, as a share of the time of a step.
    """
    most, count = max(num_left), len(num_left)
    ahead = min(max(count * (1.0 - share), 0.0), 1.0)
    lasts = [math.exp((left - most) / (APART * most)) for left in num_left]
    total, squares = sum(lasts), sum([last * last for last in lasts])
    rest = (1.0 - ahead) * count * squares / total**3  # a kth, where k = total**2 / squares rows may be last
    return [ahead + rest * last for last in lasts]


def best_counts(found: Sequence[Chances], worth: Worth, *, are_chains: bool = False) -> tuple[list[int], float]:
    """Return how many of the likeliest nodes of every row are worth verifying, and the expected gain in tokens."""
    ranked = found[0]
    if len(found) > 1:
        ranked = [(chance, row) for row, nodes in enumerate(found) for chance, _ in nodes]
        ranked.sort(key=itemgetter(0), reverse=True)
    best_value, best, gained, most = 0.0, 0, 0.0, 0.0
    for chance, _ in ranked:
        most += chance
    for size, (chance, _) in enumerate(ranked, len(found) + 1):
        gained += chance
        price = worth(size, are_chains)
        if gained - price > best_value:
            best_value, best = gained - price, size - len(found)
        if most - price <= best_value:  # even all nodes together could not gain more at this cost
            break
    if len(found) == 1:
        return [best], best_value
    counts = [0] * len(found)
    for _, row in ranked[:best]:
        counts[row] += 1
    return counts, best_value


def _steps_left(row: Row) -> float:
    """Maximum number of remaining steps of a row, at its present rate."""
    return row.num_remaining_tokens * (row.stats.num_steps + FEW) / (row.stats.num_emitted_tokens + FEW)


def _part(tree: DraftTree, kept: Chances) -> DraftTree:
    """Return a draft reduced to the given nodes."""
    if len(kept) + 1 == len(tree.tokens):
        return tree
    if not kept:
        return DraftTree.root(tree.tokens[0], tree.source).planned(tree.plan)
    return tree.restricted([0, *sorted([node for _, node in kept])])

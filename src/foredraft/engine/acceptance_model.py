"""How likely the nodes of drafts are to be accepted, learned from the texts that came in their place."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING

from foredraft.engine.cost_model import MEMORY, RATE
from foredraft.tree import DraftTree

if TYPE_CHECKING:
    from foredraft.engine.row import Row

logger = logging.getLogger("foredraft")

KINDS = 8
"""Depths, ranks among siblings, and eighths of a drafter's own estimate, that are told apart: finer ones are seen too
seldom to be learned in an answer (24 recorded texts per kind lose less by 8 depths than by 12)."""

PRIOR_WEIGHT = 3.0
"""Outcomes that a rate is worth before there are any; twice that a draft is judged by what it has seen."""

FIRST_RATE = 0.6
LATER_RATE = 0.1
"""Rates of a first and of any other child until there is experience: high, so that drafts are tried at first."""

ROW_MEMORY = 0.9
"""What an outcome of a row counts for, one later: ten tokens are a sentence, and the next may repeat nothing."""

ROW_PRIOR = 6.0
"""Outcomes that the rates of all rows are worth beside a row's own. By 10 to 40, outcomes are foretold best (of five
methods, greedy and at temperature 1), but drafts that have become good are then noticed late; by 3, rows that fared as
others were believed to fare half as well, or twice (dev/log, 2026-11-25)."""

LITTLE = 0.02
"""Tokens per row and step that are not worth a thought: less than what a step varies by."""

NUM_COMPARED = 128
"""Different tokens that a head has drafted after when it is compared with its validation."""

FAR_BELOW = 0.2
"""Share of what was stored. A right head keeps more on text unlike its training: on zoo:tiny 0.3 in the worst of 8
prompts (random letters, sampled), and heads with permuted weights 0 to 0.15, all prompts together."""

MOST_CERTAIN = 1.0 - 1.0 / MEMORY

Kind = tuple[str, int, int]
"""Nodes that count as alike: the drafter, the depth, and the rank among siblings or the drafter's own estimate."""


class Rate:
    """A mean of outcomes, mostly of whether something was right; the newest `MEMORY` count.

    Args:
      prior: the rate before there is experience.
    """

    __slots__ = ("hits", "last", "trials")

    def __init__(self, prior: float) -> None:
        self.trials = PRIOR_WEIGHT
        self.hits = PRIOR_WEIGHT * prior
        self.last = 0

    def add(self, outcome: float, now: int) -> None:
        """Count an outcome."""
        self.last = now
        self.trials += 1.0
        self.hits += outcome
        if self.trials > MEMORY:
            self.trials *= 0.5
            self.hits *= 0.5

    @property
    def value(self) -> float:
        """Of late."""
        return self.hits / self.trials

    def beside(self, above: float, now: int) -> float:
        """The rate where the level above has another: what was seen long ago gives way to that.

        So a depth that was bad once and is not drafted any more is tried again where drafts have become good.
        """
        weight = math.exp2((self.last - now) / MEMORY)
        return (weight * self.hits + PRIOR_WEIGHT * above) / (weight * self.trials + PRIOR_WEIGHT)


@dataclass
class RowAcceptance:
    """How a row fares, by what the rates of all rows let expect: its own rate, which begins with theirs."""

    trials: float = 0.0
    hits: float = 0.0
    expected: float = 0.0

    def add(self, is_hit: bool, expected: float) -> None:
        """Take in whether the next token was drafted."""
        self.trials = ROW_MEMORY * self.trials + 1.0
        self.hits = ROW_MEMORY * self.hits + is_hit
        self.expected = ROW_MEMORY * self.expected + expected

    def fade(self) -> None:
        """Nothing was drafted: what was seen grows old."""
        self.trials *= 1.0 - RATE
        self.hits *= 1.0 - RATE
        self.expected *= 1.0 - RATE

    @property
    def factor(self) -> float:
        """By which rates are multiplied."""
        if not self.trials:
            return 1.0
        expected = max(self.expected / self.trials, LITTLE)
        own = (self.hits + ROW_PRIOR * expected) / (self.trials + ROW_PRIOR)
        return own / expected


@dataclass
class _Open:
    """A draft whose fate is not known yet: the text has followed it so far.

    Args:
      node: that of the last token of the text.
      is_newest: of its row; older ones say nothing new of how that fares.
    """

    tree: DraftTree
    node: int = 0
    is_newest: bool = True


@dataclass
class _Row:
    """State of a row: ``row.state[model]``."""

    fares: RowAcceptance = field(default_factory=RowAcceptance)
    drafts: list[_Open] = field(default_factory=list)


class AcceptanceModel:
    """Learns how often nodes are accepted once their parents were.

    Whether a node would have been accepted does not depend on its having been verified: under "match" a draft is
    accepted as far as it agrees with the text, and the text comes anyway. So drafts are held against the text that
    comes, whatever was cut from them before they were verified.

    Randomness: none.
    """

    def __init__(self) -> None:
        self._known: dict[Kind, Rate] = {}
        self._depth_rates: dict[int, Rate] = {}
        self._now = 0  # drafts so far
        self._num_outcomes = 0
        self._trust = Rate(1.0)  # of nodes with scores: seen by what these let expect
        self._rates_at = -1
        self._rates_now: list[float] = []
        self._validated: dict[str, float] = {}  # by the name of what drafts, until it was compared
        self._first_hits: dict[str, dict[int, bool]] = defaultdict(dict)  # of these, by the token before

    # -- learning --------------------------------------------------------------------------------------------------

    def proposed(self, row: Row, tree: DraftTree) -> None:
        """A draft was made for a row, whole: before anything is cut from it."""
        if len(tree) > 1:
            self._now += 1
            known: _Row = row.state.setdefault(self, _Row())
            for draft in known.drafts:
                draft.is_newest = False
            known.drafts.append(_Open(tree))

    def came(self, row: Row, tokens: Sequence[int]) -> None:
        """These tokens have followed in the text of a row."""
        known: _Row | None = row.state.get(self)
        if known is not None:
            for token in tokens:
                known.drafts = [draft for draft in known.drafts if self._follow(known, draft, token)]

    def _follow(self, row: _Row, draft: _Open, token: int) -> bool:
        """Go one token on; whether there is more of the draft."""
        tree, parent = draft.tree, draft.node
        if not tree.children[parent]:
            return False
        depth = tree.depths[parent] + 1
        hit = tree.child(parent, token)
        if parent == 0 and self._validated:
            self._compare(tree, hit is not None)
        expected, stated = 0.0, 0.0
        for rank, node in enumerate(tree.children[parent]):
            rate = self._rate(tree, node, depth, rank)
            expected += rate.value
            rate.add(node == hit, self._now)
            if tree.scores is not None:
                stated += _stated(tree.scores, parent, node)
        if tree.scores is not None:
            self._trust.trials += stated - 1.0
            self._trust.add(hit is not None, self._now)
        self._depth_rate(depth).add(hit is not None, self._now)
        self._num_outcomes += 1
        if draft.is_newest:
            row.fares.add(hit is not None, min(expected, 1.0))
        if hit is None:
            return False
        draft.node = hit
        return bool(tree.children[hit])

    def compare_with(self, validated: Mapping[str, float]) -> None:
        """Warn once of each head whose drafts are accepted far less often than when it was validated.

        Such a head was trained for something else: another target, another layer, other angles, another chat template.
        Only the first draft after a token counts: a text that repeats itself repeats the same rejection. Drafts that
        other drafters have a part in say nothing of a head alone and are left out.

        Args:
          validated: shares of drafts whose first token was accepted, see `DrafterFacts.validated_acceptance`.
        """
        self._validated.update(validated)

    @property
    def is_comparing(self) -> bool:
        """Whether a head has not been compared with its validation yet."""
        return bool(self._validated)

    def _compare(self, tree: DraftTree, is_hit: bool) -> None:
        """Take in the fate of the first token of a draft."""
        name, *others = {tree.source_of(node) for node in tree.children[0]}
        if others or name not in self._validated:
            return
        hits = self._first_hits[name]
        hits.setdefault(tree.tokens[0], is_hit)
        if len(hits) < NUM_COMPARED:
            return
        validated, share = self._validated.pop(name), sum(hits.values()) / len(hits)
        del self._first_hits[name]
        if share < FAR_BELOW * validated:
            logger.warning(
                "%s: the target took the first token of %.0f %% of the drafts after %d different tokens, and of "
                "%.0f %% when the head was validated. It may be of another target, of other layers or angles "
                "(draft_rope_theta), or made for another chat template.",
                name,
                100 * share,
                len(hits),
                100 * validated,
            )

    def rested(self, row: Row) -> None:
        """Nothing was drafted for a row: that it fared badly counts less and less."""
        if self in row.state:
            row.state[self].fares.fade()

    def expect(self, source: str, depth: int, rate: float, num_trials: float) -> None:
        """Begin with a rate that was measured elsewhere, of first children of a drafter."""
        level = min(depth, KINDS)
        for known in (self._known.setdefault((source, level, 0), Rate(rate)), self._depth_rate(level)):
            known.trials, known.hits = num_trials, rate * num_trials

    # -- asking ----------------------------------------------------------------------------------------------------

    @property
    def trust(self) -> float:
        """How often a child of a node that was right is right itself, by what drafters estimate; 1 at most."""
        return min(self._trust.value, 1.0)

    def factor(self, row: Row) -> float:
        """How much better or worse a row fares than others."""
        known: _Row | None = row.state.get(self)
        return 1.0 if known is None else known.fares.factor

    def by_depth(self, row: Row, depth: int) -> list[float]:
        """The chance that a draft is accepted to depth 1, 2, ... ``depth``, as far as that is worth a thought."""
        factor, chance, chances = self.factor(row), 1.0, []
        rates = self._depth_rates_now()
        for level in range(depth):
            chance *= min(rates[min(level, KINDS - 1)] * factor, MOST_CERTAIN)
            if chance < LITTLE:
                break
            chances.append(chance)
        return chances

    def _depth_rates_now(self) -> list[float]:
        """The rate of every depth, what is old given way; the same for all rows of a step."""
        if self._rates_at != self._num_outcomes:
            self._rates_at = self._num_outcomes
            rate = self._depth_rate(1).value
            self._rates_now = [rate]
            for level in range(2, KINDS + 1):
                rate = self._depth_rate(level).beside(rate, self._now)
                self._rates_now.append(rate)
        return self._rates_now

    @property
    def has_outcomes(self) -> bool:
        """Whether any draft was held against its text yet; else its rates are what was expected beforehand."""
        return self._num_outcomes > 0

    def at_depth(self, depth: int) -> float:
        """How often a draft that was right so far is right at this depth, too; over all rows."""
        return self._depth_rate(depth).value

    def best_nodes(self, row: Row, tree: DraftTree, least: float = LITTLE) -> list[tuple[float, int]]:
        """Nodes of a draft and their chances, the likeliest first and each after its parent, down to a chance."""
        parents, scores, of_row = tree.parents, tree.scores, self.factor(row)
        chances, depths, ranks = [1.0], [0], [0] * len(parents)
        found = []
        for node in range(1, len(parents)):
            parent = parents[node]
            above, depth, chance = chances[parent], depths[parent] + 1, 0.0
            if above > least:
                rate = self._rate(tree, node, depth, ranks[parent])
                certain = rate.hits / rate.trials
                if scores is None or depth == 1:  # deeper ones say by themselves how sure one can be
                    certain *= of_row
                chance = above * (certain if certain < MOST_CERTAIN else MOST_CERTAIN)
                if chance > least:
                    found.append((chance, node))
            ranks[parent] += 1
            chances.append(chance)
            depths.append(depth)
        found.sort(key=itemgetter(0), reverse=True)
        return found

    # -- rates -----------------------------------------------------------------------------------------------------

    def _rate(self, tree: DraftTree, node: int, depth: int, rank: int) -> Rate:
        """The rate of nodes like one, which has so many siblings before it."""
        level = depth if depth < KINDS else KINDS
        likeness = min(rank, KINDS) if tree.scores is None else _eighth(tree.scores, tree.parents[node], node)
        source = tree.source if tree.sources is None else tree.sources[node]
        rate = self._known.get((source, level, likeness))
        if rate is None:
            above = self._known.get((source, level - 1, likeness))
            rate = Rate(self._prior(tree, node, likeness) if above is None else above.value)
            self._known[source, level, likeness] = rate
        return rate

    def _prior(self, tree: DraftTree, node: int, likeness: int) -> float:
        """What is expected of a node like which none was seen: what its drafter states, as far as that was right."""
        if tree.scores is not None:
            return max(self.trust * _stated(tree.scores, tree.parents[node], node), LATER_RATE)
        return FIRST_RATE if likeness == 0 else LATER_RATE

    def _depth_rate(self, depth: int) -> Rate:
        depth = min(depth, KINDS)
        rate = self._depth_rates.get(depth)
        if rate is None:
            above = self._depth_rates.get(depth - 1)
            rate = self._depth_rates[depth] = Rate(FIRST_RATE if above is None else above.value)
        return rate


def _eighth(scores: Sequence[float], parent: int, node: int) -> int:
    """The drafter's own estimate in eighths, as a negative number."""
    eighth = int(_stated(scores, parent, node) * KINDS)
    return -1 - (eighth if eighth < KINDS else KINDS - 1)


def _stated(scores: Sequence[float], parent: int, node: int) -> float:
    """The drafter's own estimate for a node, given its parent."""
    above, own = scores[parent], scores[node]
    if own >= above:
        return 1.0 if above > 0.0 else 0.0
    return own / above if own > 0.0 else 0.0

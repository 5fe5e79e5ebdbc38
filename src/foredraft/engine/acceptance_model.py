"""Rates at which drafted tokens are right: one model for all who ask, learned from the texts that came instead."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, Protocol

from foredraft.engine.cost_model import MEMORY, RATE
from foredraft.tree import DraftTree

logger = logging.getLogger("foredraft")

PREDICTION, GRAMMAR, GUESSED = "prediction", "grammar", "grammar_guess"
"""Sources that requests bring along: their predicted output, tokens that a grammar forces, and those that came of the
same choice of the grammar before."""

OF_REQUESTS = frozenset((PREDICTION, GRAMMAR, GUESSED))

KINDS = 8
"""Depths, ranks among siblings, and eighths of a drafter's own estimate, that are told apart: finer ones are seen too
seldom to be learned in an answer (24 recorded texts per kind lose less by 8 depths than by 12)."""

WHOLE = KINDS + 1
"""Likeness of whole drafts: whether any of the siblings at a depth is right."""

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
"""Nodes that count as alike: the source, the depth, and the rank among siblings or the drafter's own estimate."""


class Rate:
    """A mean of outcomes, mostly of whether something was right; the newest `MEMORY` count.

    Args:
      prior: the rate before there is experience.
    """

    __slots__ = ("hits", "last", "trials")

    def __init__(self, prior: float, num_trials: float = PRIOR_WEIGHT) -> None:
        self.trials = num_trials
        self.hits = num_trials * prior
        self.last = 0

    def add(self, outcome: float, now: int, weight: float = 1.0) -> None:
        """Count an outcome, as so much of a trial."""
        self.last = now
        self.trials += weight
        self.hits += outcome
        if self.trials > MEMORY:
            self.trials *= 0.5
            self.hits *= 0.5

    @property
    def value(self) -> float:
        """Of late."""
        return self.hits / self.trials

    def beside(self, other: float, now: int) -> float:
        """The rate as what was seen long ago gives way to another one, such as that of the level above.

        So a depth that was bad once and is not drafted any more is tried again where drafts have become good.
        """
        weight = math.exp2((self.last - now) / MEMORY)
        return (weight * self.hits + PRIOR_WEIGHT * other) / (weight * self.trials + PRIOR_WEIGHT)


@dataclass
class _Open:
    """A draft whose fate is not known yet: the text has followed it so far.

    Args:
      drafter: name of what made it, as a whole.
      rates: of its nodes, those of nodes like them.
      node: that of the last token of the text.
      is_newest: of its row; older ones say nothing new of how that fares.
    """

    tree: DraftTree
    drafter: str
    rates: list[Rate]
    node: int = 0
    is_newest: bool = True


class HasState(Protocol):
    """A row, of which nothing else is looked at here."""

    state: dict[Any, Any]


@dataclass
class _Row:
    """How a row fares, by what the rates of all rows let expect, and its open drafts: ``row.state[model]``."""

    trials: float = 0.0
    hits: float = 0.0
    expected: float = 0.0
    drafts: list[_Open] = field(default_factory=list)

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


class AcceptanceModel:
    """Learns how often nodes are accepted once their parents were.

    An engine feeds it with every draft, whole, and with the tokens that come, whether a governor decides or not. Unions
    rank nodes by it, the governor weighs them, and what requests bring along is drafted as far as it says.

    Whether a node would have been accepted does not depend on its having been verified: under "match" a draft is
    accepted as far as it agrees with the text, and the text comes anyway. So drafts are held against the text that
    comes, whatever was cut from them before they were verified.

    Randomness: none.
    """

    def __init__(self) -> None:
        self._known: dict[Kind, Rate] = {}
        self._trust: dict[str, Rate] = defaultdict(lambda: Rate(1.0))  # of stated chances, by source
        self._now = 0  # drafts so far
        self._num_outcomes = 0
        self._wholes: dict[str, tuple[int, list[float]]] = {}  # by drafter: when they were worked out, rates by depth
        self._validated: dict[str, float] = {}  # by the name of what drafts, until it was compared
        self._first_hits: dict[str, dict[int, bool]] = defaultdict(dict)  # of these, by the token before
        for depth in range(1, KINDS + 1):
            self._known[GRAMMAR, depth, 0] = Rate(1.0, MEMORY / 2)

    # -- learning --------------------------------------------------------------------------------------------------

    def proposed(self, row: HasState, tree: DraftTree, drafter: str) -> None:
        """A draft was made for a row, whole: before anything is cut from it for what it costs.

        Args:
          drafter: name of what made it, as a whole.
        """
        if len(tree.tokens) > 1:
            self._now += 1
            known: _Row | None = row.state.get(self)
            if known is None:
                known = row.state[self] = _Row()
            for draft in known.drafts:
                draft.is_newest = False
            known.drafts.append(_Open(tree, drafter, self._rates(tree)))

    def came(self, row: HasState, tokens: Sequence[int], *, was_asked: bool = True) -> None:
        """These tokens have followed in the text of a row.

        Args:
          was_asked: whether a draft was wanted; else that the row fared badly counts less and less.
        """
        known: _Row | None = row.state.get(self)
        if known is None:
            return
        if not was_asked:
            known.fade()
        if not known.drafts:
            return
        for token in tokens:
            going_on = []
            for draft in known.drafts:
                if self._follow(known, draft, token):
                    going_on.append(draft)
            known.drafts = going_on

    def _follow(self, row: _Row, draft: _Open, token: int) -> bool:
        """Go one token on; whether there is more of the draft."""
        tree, parent, now, rates = draft.tree, draft.node, self._now, draft.rates
        children, scores, sources = tree.children[parent], tree.scores, tree.sources
        depth, hit = tree.depths[parent] + 1, tree.child(parent, token)
        if parent == 0 and self._validated:
            self._compare(tree, hit is not None)
        expected, above = 0.0, 1.0 if scores is None else scores[parent]
        for node in children:
            rate, is_hit = rates[node], node == hit
            expected += rate.hits / rate.trials
            rate.add(is_hit, now)
            if scores is not None and above > 0.0:
                trust = self._trust[tree.source if sources is None else sources[node]]
                trust.add(is_hit, now, min(scores[node] / above, 1.0))
        if sources is None or sources[children[0] if hit is None else hit] not in OF_REQUESTS:
            self._whole(draft.drafter, depth).add(hit is not None, now)
        self._num_outcomes += 1
        if draft.is_newest:
            row.trials = ROW_MEMORY * row.trials + 1.0
            row.hits = ROW_MEMORY * row.hits + (hit is not None)
            row.expected = ROW_MEMORY * row.expected + min(expected, 1.0)
        if hit is None:
            return False
        draft.node = hit
        return bool(tree.children[hit])

    def expect(self, source: str, depth: int, rate: float, num_trials: float) -> None:
        """Begin with a rate that was measured elsewhere, of first children of a drafter."""
        level = min(depth, KINDS)
        for likeness in (0, WHOLE):
            self._known[source, level, likeness] = Rate(rate, num_trials)

    # -- asking ----------------------------------------------------------------------------------------------------

    def rate(
        self, source: str, depth: int, score: float | None = None, row: HasState | None = None, *, rank: int = 0
    ) -> float:
        """How often a node is right once its parent was.

        Args:
          score: the drafter's own estimate of that; None where it has none.
          row: in which it is drafted; None for all rows together.
          rank: how many siblings come before it, where there are no scores.
        """
        likeness = min(rank, KINDS) if score is None else -1 - min(int(score * KINDS), KINDS - 1)
        kind = source, min(depth, KINDS), likeness
        rate = self._known.get(kind) or self._begin(kind, score)
        return min(rate.value * (1.0 if row is None else self.factor(row)), MOST_CERTAIN)

    def factor(self, row: HasState) -> float:
        """How much better or worse a row fares than others."""
        known: _Row | None = row.state.get(self)
        return 1.0 if known is None else known.factor

    def chances(self, tree: DraftTree, row: HasState | None = None, least: float = 0.0) -> list[float]:
        """The chance of every node of a draft to be accepted, 0 for those behind one that has less than ``least``."""
        known: _Row | None = None if row is None else row.state.get(self)
        drafts = [] if known is None else known.drafts
        rates = drafts[-1].rates if drafts and drafts[-1].tree is tree else self._rates(tree)
        of_row = of_deeper = 1.0 if known is None else known.factor
        if tree.scores is not None:  # deeper ones say by themselves how sure one can be
            of_deeper = 1.0
        chances = [1.0]
        for node, parent in enumerate(tree.parents[1:], 1):
            above = chances[parent]
            if above > least:
                rate = rates[node]
                certain = rate.hits / rate.trials * (of_deeper if parent else of_row)
                above *= certain if certain < MOST_CERTAIN else MOST_CERTAIN
            else:
                above = 0.0
            chances.append(above)
        return chances

    def best_nodes(self, row: HasState, tree: DraftTree, least: float = LITTLE) -> list[tuple[float, int]]:
        """Nodes of a draft and their chances, the likeliest first and each after its parent, down to a chance."""
        if len(tree.tokens) == 1:
            return []
        found = []
        for node, chance in enumerate(self.chances(tree, row, least)):
            if node and chance > least:
                found.append((chance, node))
        found.sort(key=itemgetter(0), reverse=True)
        return found

    def by_depth(self, row: HasState, depth: int, drafter: str) -> list[float]:
        """The chance that a whole draft is accepted to depth 1, 2, ... ``depth``, as far as that is worth a thought."""
        known: _Row | None = row.state.get(self)
        factor, chance, chances = 1.0 if known is None else known.factor, 1.0, []
        rates = self._rates_of_wholes(drafter)
        for level in range(depth):
            chance *= min(rates[min(level, KINDS - 1)] * factor, MOST_CERTAIN)
            if chance < LITTLE:
                break
            chances.append(chance)
        return chances

    @property
    def has_outcomes(self) -> bool:
        """Whether any draft was held against its text yet; else its rates are what was expected beforehand."""
        return self._num_outcomes > 0

    def at_depth(self, depth: int, drafter: str) -> float:
        """How often a draft that was right so far is right at this depth, too; over all rows."""
        return self._whole(drafter, depth).value

    # -- rates -----------------------------------------------------------------------------------------------------

    def _rates(self, tree: DraftTree) -> list[Rate]:
        """The rate of every node; any for the root."""
        known, scores, sources, source = self._known, tree.scores, tree.sources, tree.source
        parents, depths = tree.parents, tree.depths
        found, ranks = [_ROOT], [0] * len(parents)
        for node in range(1, len(parents)):
            parent, score, depth = parents[node], None, depths[node]
            if scores is None:
                rank = ranks[parent]
                ranks[parent] = rank + 1
                likeness = rank if rank < KINDS else KINDS
            else:
                above, own = scores[parent], scores[node]
                score = own / above if own < above else 1.0 if above > 0.0 else 0.0
                likeness = -1 - (int(score * KINDS) if score < 1.0 else KINDS - 1)
            kind = source if sources is None else sources[node], depth if depth < KINDS else KINDS, likeness
            found.append(known.get(kind) or self._begin(kind, score))
        return found

    def _begin(self, kind: Kind, score: float | None) -> Rate:
        """A new rate: that of the depth above, else what the drafter states, as far as that was right."""
        source, depth, likeness = kind
        above = self._known.get((source, depth - 1, likeness))
        if above is not None:
            prior = above.value
        elif score is not None:
            prior = max(min(self._trust[source].value, 1.0) * score, LATER_RATE)
        else:
            prior = FIRST_RATE if likeness == 0 else LATER_RATE
        rate = self._known[kind] = Rate(prior)
        return rate

    def _whole(self, drafter: str, depth: int) -> Rate:
        depth = depth if depth < KINDS else KINDS
        rate = self._known.get((drafter, depth, WHOLE))
        if rate is None:
            above = self._known.get((drafter, depth - 1, WHOLE))
            rate = self._known[drafter, depth, WHOLE] = Rate(FIRST_RATE if above is None else above.value)
        return rate

    def _rates_of_wholes(self, drafter: str) -> list[float]:
        """The rate of every depth, what is old given way; the same for all rows of a step."""
        worked_out, rates = self._wholes.get(drafter, (-1, []))
        if worked_out != self._num_outcomes:
            rate = self._whole(drafter, 1).value
            rates = [rate]
            for depth in range(2, KINDS + 1):
                rate = self._whole(drafter, depth).beside(rate, self._now)
                rates.append(rate)
            self._wholes[drafter] = self._num_outcomes, rates
        return rates

    # -- heads beside their validation -----------------------------------------------------------------------------

    def compare_with(self, validated: Mapping[str, float]) -> None:
        """Warn once of each head whose drafts are accepted far less often than when it was validated.

        Such a head was trained for something else: another target, another layer, other angles, another chat template.
        Only the first draft after a token counts: a text that repeats itself repeats the same rejection. Drafts that
        other drafters have a part in say nothing of a head alone and are left out.

        Args:
          validated: shares of drafts whose first token was accepted, see `DrafterFacts.validated_acceptance`.
        """
        self._validated.update(validated)

    def _compare(self, tree: DraftTree, is_hit: bool) -> None:
        """Take in the fate of the first token of a draft."""
        name, *others = [tree.source] if tree.sources is None else {tree.sources[node] for node in tree.children[0]}
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


_ROOT = Rate(1.0)


def stated(tree: DraftTree) -> list[float]:
    """The drafter's own estimate for every node, given its parent; by its rank among siblings where it has none."""
    found, ranks, scores = [1.0], [0] * len(tree.tokens), tree.scores
    for node, parent in enumerate(tree.parents[1:], 1):
        ranks[parent] += 1
        if scores is None:
            found.append(FIRST_RATE / ranks[parent])
        else:
            found.append(min(scores[node] / scores[parent], 1.0) if scores[parent] > 0.0 else 0.0)
    return found


def scored(tree: DraftTree) -> DraftTree:
    """A draft with scores: those of its drafter, or by the ranks of its nodes."""
    if tree.scores is not None or len(tree.tokens) == 1:
        return tree
    scores = [1.0]
    for parent, own in zip(tree.parents[1:], stated(tree)[1:], strict=True):
        scores.append(scores[parent] * own)
    return replace(tree, scores=tuple(scores))

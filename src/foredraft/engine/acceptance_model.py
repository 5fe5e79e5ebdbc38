"""Acceptance rates of drafted tokens: one model per engine, learned by comparing drafts with the output."""

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
"""Sources of drafts that belong to a request: the predicted output, tokens that the grammar forces, and guesses from
the last outcome of the same choice in the grammar."""

OF_REQUESTS = frozenset((PREDICTION, GRAMMAR, GUESSED))

KINDS = 8
"""Number of depths, of ranks among siblings, and of classes of a drafter's own estimate that are distinguished. Finer
classes occur too rarely to be learned within one answer (with 24 recorded texts per kind, 8 depths lose less than 12).
"""

WHOLE = KINDS + 1
"""Class of whole drafts, which counts whether any of the siblings at a depth is right."""

PRIOR_WEIGHT = 3.0
"""Number of outcomes for which a prior rate counts. After twice as many, a draft is judged by its own outcomes."""

FIRST_RATE = 0.6
LATER_RATE = 0.1
"""Prior rates of a first child and of any other child. The prior rates are high, so that drafts are tried at first."""

ROW_MEMORY = 0.9
"""Weight of an outcome of a row relative to the next outcome. Ten tokens are a sentence, and the next may repeat
nothing."""

ROW_PRIOR = 6.0
"""Number of outcomes for which the rates of all rows count in the rate of one row. Values of 10 to 40 predict outcomes
best (five methods, greedy and at temperature 1), but notice late that drafts have become good. With 3, rows like all
others were estimated at half or twice their rates (dev/log, 2026-11-25).
"""

LITTLE = 0.02
"""Number of tokens per row and step that is negligible, because it is below the variation of steps."""

NUM_COMPARED = 128
"""Number of different tokens after which a head has drafted when it is compared with its validation."""

FAR_BELOW = 0.2
"""Share of the validated rate that counts as far below it. A matching head keeps more even on text unlike its training:
on zoo:tiny 0.3 in the worst of 8 prompts (random letters, sampled). Heads with permuted weights keep 0 to 0.15 over all
prompts.
"""

MOST_CERTAIN = 1.0 - 1.0 / MEMORY

Kind = tuple[str, int, int]
"""Class of nodes with a common rate: the source, the depth, and the rank among siblings or the drafter's own estimate.
"""


class Rate:
    """Running mean of outcomes, mostly of whether a token was right, over about the newest `MEMORY` outcomes.

    Args:
      prior: rate before any outcome.
      num_trials: number of outcomes for which the prior counts.
    """

    __slots__ = ("hits", "last", "trials")

    def __init__(self, prior: float, num_trials: float = PRIOR_WEIGHT) -> None:
        self.trials = num_trials
        self.hits = num_trials * prior
        self.last = 0

    def add(self, outcome: float, now: int, weight: float = 1.0) -> None:
        """Count an outcome with the given number of trials as its weight."""
        self.last = now
        self.trials += weight
        self.hits += outcome
        if self.trials > MEMORY:
            self.trials *= 0.5
            self.hits *= 0.5

    @property
    def value(self) -> float:
        """Current rate."""
        return self.hits / self.trials

    def beside(self, other: float, now: int) -> float:
        """Blend the rate with another one, such as that of the level above. The older the outcomes of this rate are,
        the more the other rate counts.

        A depth that was bad and is not drafted any more is therefore tried again when drafts have become good.
        """
        weight = math.exp2((self.last - now) / MEMORY)
        return (weight * self.hits + PRIOR_WEIGHT * other) / (weight * self.trials + PRIOR_WEIGHT)


@dataclass
class _Open:
    """A draft that still agrees with the output and is not fully compared yet.

    Args:
      drafter: name of the drafter of the whole draft.
      rates: rate of each node.
      node: node of the last token of the output.
      is_newest: True for the newest draft of its row. Older drafts add nothing to the rate of the row.
    """

    tree: DraftTree
    drafter: str
    rates: list[Rate]
    node: int = 0
    is_newest: bool = True


class HasState(Protocol):
    """Any object with the ``state`` of a row; the model needs nothing else of a row."""

    state: dict[Any, Any]


@dataclass
class _Row:
    """Rate of a row relative to the rates of all rows, and its open drafts; stored as ``row.state[model]``."""

    trials: float = 0.0
    hits: float = 0.0
    expected: float = 0.0
    drafts: list[_Open] = field(default_factory=list)

    def fade(self) -> None:
        """Reduce the weight of earlier outcomes, in a step without a draft."""
        self.trials *= 1.0 - RATE
        self.hits *= 1.0 - RATE
        self.expected *= 1.0 - RATE

    @property
    def factor(self) -> float:
        """Factor by which the common rates are multiplied for this row."""
        if not self.trials:
            return 1.0
        expected = max(self.expected / self.trials, LITTLE)
        own = (self.hits + ROW_PRIOR * expected) / (self.trials + ROW_PRIOR)
        return own / expected


class AcceptanceModel:
    """Learns the probability that a node is accepted, given that its parent was.

    An engine reports every whole draft and all emitted tokens, with or without a governor. Drafters that merge drafts
    rank nodes by this model, and the governor computes expected gains with it. Drafts of requests (predictions,
    grammars) extend as far as the model predicts acceptance.

    A node need not be verified to learn whether it would have been accepted. Under "match" a draft is accepted as far
    as it agrees with the output, and the output does not depend on the draft. Whole drafts are compared with the
    output, including the parts that were cut before verification.

    Randomness: none.
    """

    def __init__(self) -> None:
        self._known: dict[Kind, Rate] = {}
        self._trust: dict[str, Rate] = defaultdict(lambda: Rate(1.0))  # reliability of a source's own scores
        self._now = 0  # drafts so far
        self._num_outcomes = 0
        self._wholes: dict[str, tuple[int, list[float]]] = {}  # by drafter: number of outcomes then, rates by depth
        self._validated: dict[str, float] = {}  # rates at validation, by drafting mode, until they are compared
        self._first_hits: dict[str, dict[int, bool]] = defaultdict(dict)  # by mode and previous token
        for depth in range(1, KINDS + 1):
            self._known[GRAMMAR, depth, 0] = Rate(1.0, MEMORY / 2)

    # -- learning --------------------------------------------------------------------------------------------------

    def proposed(self, row: HasState, tree: DraftTree, drafter: str) -> None:
        """Register the whole draft of a row, before anything is cut from it because of its cost.

        Args:
          drafter: name of the drafter of the whole draft.
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
        """Compare the open drafts of a row with the tokens that were emitted.

        Args:
          was_asked: False if no draft was requested. If no draft was requested, earlier outcomes of the row lose
            weight.
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
        """Compare a draft with the next token; return whether the draft continues after it."""
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
        """Start with a rate that was measured elsewhere, for first children of a drafter."""
        level = min(depth, KINDS)
        for likeness in (0, WHOLE):
            self._known[source, level, likeness] = Rate(rate, num_trials)

    # -- queries ---------------------------------------------------------------------------------------------------

    def rate(
        self, source: str, depth: int, score: float | None = None, row: HasState | None = None, *, rank: int = 0
    ) -> float:
        """Return the probability that a node is right, given that its parent was.

        Args:
          score: the drafter's own estimate of this probability; None if it has none.
          row: row of the draft; None for the average of all rows.
          rank: number of siblings before the node, used if there is no score.
        """
        likeness = min(rank, KINDS) if score is None else -1 - min(int(score * KINDS), KINDS - 1)
        kind = source, min(depth, KINDS), likeness
        rate = self._known.get(kind) or self._begin(kind, score)
        return min(rate.value * (1.0 if row is None else self.factor(row)), MOST_CERTAIN)

    def factor(self, row: HasState) -> float:
        """Acceptance rate of a row relative to the average of all rows."""
        known: _Row | None = row.state.get(self)
        return 1.0 if known is None else known.factor

    def chances(self, tree: DraftTree, row: HasState | None = None, least: float = 0.0) -> list[float]:
        """Return the acceptance probability of every node; 0 below a node whose probability is at most ``least``."""
        known: _Row | None = None if row is None else row.state.get(self)
        drafts = [] if known is None else known.drafts
        rates = drafts[-1].rates if drafts and drafts[-1].tree is tree else self._rates(tree)
        of_row = of_deeper = 1.0 if known is None else known.factor
        if tree.scores is not None:  # the scores of deeper nodes already reflect the row
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
        """Return pairs (acceptance probability, node) above ``least``, likeliest first, each after its parent."""
        if len(tree.tokens) == 1:
            return []
        found = []
        for node, chance in enumerate(self.chances(tree, row, least)):
            if node and chance > least:
                found.append((chance, node))
        found.sort(key=itemgetter(0), reverse=True)
        return found

    def by_depth(self, row: HasState, depth: int, drafter: str) -> list[float]:
        """Return the probabilities that a draft is accepted to depth 1, 2, ... ``depth``, without negligible ones."""
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
        """True if any draft was compared with the output yet. If not, all rates are priors."""
        return self._num_outcomes > 0

    def at_depth(self, depth: int, drafter: str) -> float:
        """Return the probability that a draft is right at this depth if it was right at all depths before, over all
        rows."""
        return self._whole(drafter, depth).value

    # -- rates -----------------------------------------------------------------------------------------------------

    def _rates(self, tree: DraftTree) -> list[Rate]:
        """Return the rate of every node; the entry of the root is not used."""
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
        """Make a new rate.

        The prior of an unknown rate is the rate of the depth above; without one, it is the drafter's score, scaled by
        its reliability.
        """
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
        """Return the rate of a whole draft at every depth, cached for all rows of a step; see `Rate.beside`."""
        worked_out, rates = self._wholes.get(drafter, (-1, []))
        if worked_out != self._num_outcomes:
            rate = self._whole(drafter, 1).value
            rates = [rate]
            for depth in range(2, KINDS + 1):
                rate = self._whole(drafter, depth).beside(rate, self._now)
                rates.append(rate)
            self._wholes[drafter] = self._num_outcomes, rates
        return rates

    # -- comparison of heads with their validation -----------------------------------------------------------------

    def compare_with(self, validated: Mapping[str, float]) -> None:
        """Warn once about each head whose drafts are accepted far less often than when it was validated.

        Such a head was trained for another target, other layers, other rotary angles or another chat template. Only the
        first draft after each token counts, because repetitive text repeats the same rejection. Drafts to which other
        drafters have contributed are ignored, since they show little about the head.

        Args:
          validated: share of drafts whose first token was accepted, by name; see `DrafterFacts.validated_acceptance`.
        """
        self._validated.update(validated)

    def _compare(self, tree: DraftTree, is_hit: bool) -> None:
        """Count whether the first token of a draft was right, and warn if the rate is far below the validated one."""
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
                "%s: the target accepted the first token of %.0f %% of the drafts after %d different tokens, compared "
                "with %.0f %% when the head was validated. The head may have been trained for another target, for "
                "other layers or rotary angles (draft_rope_theta), or for another chat template.",
                name,
                100 * share,
                len(hits),
                100 * validated,
            )


_ROOT = Rate(1.0)


def stated(tree: DraftTree) -> list[float]:
    """Return the drafter's estimate for every node, given its parent; without scores, an estimate from its rank."""
    found, ranks, scores = [1.0], [0] * len(tree.tokens), tree.scores
    for node, parent in enumerate(tree.parents[1:], 1):
        ranks[parent] += 1
        if scores is None:
            found.append(FIRST_RATE / ranks[parent])
        else:
            found.append(min(scores[node] / scores[parent], 1.0) if scores[parent] > 0.0 else 0.0)
    return found


def scored(tree: DraftTree) -> DraftTree:
    """Return a draft with scores: the drafter's own, or estimates from the ranks of its nodes."""
    if tree.scores is not None or len(tree.tokens) == 1:
        return tree
    scores = [1.0]
    for parent, own in zip(tree.parents[1:], stated(tree)[1:], strict=True):
        scores.append(scores[parent] * own)
    return replace(tree, scores=tuple(scores))

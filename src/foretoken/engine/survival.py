"""How likely the nodes of drafts are to be accepted, learned from the texts that came in their place."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from foretoken.engine.rates import MEMORY, PRIOR_WEIGHT, Luck, Rate
from foretoken.tree import DraftTree

DEEPEST = 12
"""Depths from which on nodes count as alike."""

RIGHT_DEPTH = 2
FARTHEST = 128
MOST_SIBLINGS = 8
NUM_BINS = 8
FIRST_RATE = 0.6
LATER_RATE = 0.1
"""Rates of a first and of any other child until there is experience: high, so that drafts are tried at first."""

LEAST_CHANCE = 0.02
MOST_CERTAIN = 0.99

Kind = tuple[str, int, int]
"""Nodes that count as alike: the drafter, the depth, and the rank among siblings or the drafter's own estimate."""


@dataclass
class _Open:
    """A draft whose fate is not known yet: the text has followed it so far.

    Args:
      node: that of the last token of the text.
      luck: of the row, for the draft that was made last; None for older ones.
    """

    tree: DraftTree
    node: int = 0
    luck: Luck | None = None


class Survival:
    """Learns how often nodes are accepted once their parents were.

    Whether a node would have been accepted does not depend on its having been verified: under "match" a draft is
    accepted as far as it agrees with the text, and the text comes anyway. So drafts are held against the text that
    comes, whatever was cut from them before they were verified.

    Randomness: none.
    """

    def __init__(self) -> None:
        self._known: dict[Kind, Rate] = {}
        self._depth_rates: dict[int, Rate] = {}
        self._open_of: dict[int, list[_Open]] = {}
        self._luck_of: dict[int, Luck] = {}
        self._now = 0  # drafts so far
        self._num_outcomes = 0
        self._stated = self._hits = PRIOR_WEIGHT  # outcomes of nodes with scores, expected by these and seen
        self.num_right = 0
        """Drafts that turned out to be right for two tokens, or for all they had."""
        self._rates_at = -1
        self._rates_now: list[float] = []

    # -- learning --------------------------------------------------------------------------------------------------

    def proposed(self, row_id: int, tree: DraftTree) -> None:
        """A draft was made for a row, whole: before anything is cut from it."""
        if len(tree) > 1:
            self._now += 1
            found = self._open_of.setdefault(row_id, [])
            for draft in found:
                draft.luck = None
            found.append(_Open(tree, luck=self._luck_of.setdefault(row_id, Luck())))

    @property
    def has_open_drafts(self) -> bool:
        """Whether the text has followed some draft so far."""
        return any(self._open_of.values())

    def came(self, row_id: int, tokens: Seq[int], *, fades: bool = True) -> None:
        """These tokens have followed in the text of a row; ``fades``: nothing was drafted where no draft is open."""
        drafts = self._open_of.get(row_id)
        if drafts:
            for token in tokens:
                drafts = [draft for draft in drafts if self._follow(draft, token)]
            self._open_of[row_id] = drafts
        elif fades and row_id in self._luck_of:
            self._luck_of[row_id].fade()

    def _follow(self, draft: _Open, token: int) -> bool:
        """Go one token on; whether there is more of the draft."""
        tree, parent = draft.tree, draft.node
        children = tree.children[parent]
        if not children:
            return False
        depth = tree.depths[parent] + 1
        hit = tree.child(parent, token)
        missed = 1.0
        for node, rate in self._rates(tree, parent, depth):
            missed *= 1.0 - rate.value
            rate.add(node == hit, self._now)
            if tree.scores is not None:
                self._stated += _stated(tree, node)
        if tree.scores is not None:
            self._hits += hit is not None
            if self._stated > MEMORY:
                self._stated *= 0.5
                self._hits *= 0.5
        self._depth_rate(depth).add(hit is not None, self._now)
        self._num_outcomes += 1
        if draft.luck is not None:
            draft.luck.add(hit is not None, 1.0 - missed)
        if hit is None:
            return False
        draft.node = hit
        goes_on = bool(tree.children[hit])
        self.num_right += depth == RIGHT_DEPTH or (depth < RIGHT_DEPTH and not goes_on)
        return goes_on

    def expect(self, source: str, depth: int, rate: float, num_trials: int) -> None:
        """Begin with a rate that was measured elsewhere, of first children of a drafter."""
        level = min(depth, DEEPEST)
        kind = (source, level, 0)
        for known in (self._known.setdefault(kind, Rate(rate)), self._depth_rate(level)):
            known.trials, known.hits = float(num_trials), rate * num_trials

    @property
    def num_rows(self) -> int:
        """Rows of which something is kept."""
        return len(self._luck_of)

    def keep_only(self, row_ids: Iterable[int]) -> None:
        """Drop what belongs to other rows."""
        for row_id in self._luck_of.keys() - set(row_ids):
            self.forget(row_id)

    def forget(self, row_id: int) -> None:
        """Drop what belongs to a row alone."""
        self._open_of.pop(row_id, None)
        self._luck_of.pop(row_id, None)

    # -- asking ----------------------------------------------------------------------------------------------------

    @property
    def trust(self) -> float:
        """How often a child of a node that was right is right itself, by what drafters estimate; 1 at most."""
        return min(self._hits / self._stated, 1.0)

    def factor(self, row_id: int) -> float:
        """How much better or worse a row fares than others."""
        luck = self._luck_of.get(row_id)
        return 1.0 if luck is None else luck.factor

    def by_depth(self, row_id: int, depth: int) -> list[float]:
        """The chance that a draft is accepted to depth 1, 2, ... ``depth``, as far as that is worth a thought."""
        factor, chance, chances = self.factor(row_id), 1.0, []
        for rate in self._depth_rates_now()[:depth]:
            chance *= min(rate * factor, MOST_CERTAIN)
            if chance < LEAST_CHANCE:
                break
            chances.append(chance)
        return chances

    def _depth_rates_now(self) -> list[float]:
        """The rate of every depth up to `FARTHEST`, what is old given way; the same for all rows of a step."""
        if self._rates_at != self._num_outcomes:
            self._rates_at = self._num_outcomes
            rate = self._depth_rate(1).value
            self._rates_now = [rate]
            for level in range(2, DEEPEST + 1):
                rate = self._depth_rate(level).beside(rate, self._now)
                self._rates_now.append(rate)
            self._rates_now += [rate] * (FARTHEST - DEEPEST)
        return self._rates_now

    @property
    def has_outcomes(self) -> bool:
        """Whether any draft was held against its text yet; else its rates are what was expected beforehand."""
        return self._num_outcomes > 0

    def at_depth(self, depth: int) -> float:
        """How often a draft that was right so far is right at this depth, too; over all rows."""
        return self._depth_rate(depth).value

    def best_nodes(self, row_id: int, tree: DraftTree, least: float) -> Iterator[tuple[float, int]]:
        """Nodes of a draft and their chances, the likeliest first and each after its parent, down to a chance."""
        factor = self.factor(row_id)
        heap: list[tuple[float, int]] = []
        found, chance = 0, 1.0
        while True:
            depth = tree.depths[found] + 1
            if depth == 2 and tree.scores is not None:  # these say by themselves how sure one can be further on
                factor = 1.0
            for node, rate in self._rates(tree, found, depth):
                certain = rate.hits / rate.trials * factor
                below = chance * (certain if certain < MOST_CERTAIN else MOST_CERTAIN)
                if below > least:
                    heapq.heappush(heap, (-below, node))
            if not heap:
                return
            negative, found = heapq.heappop(heap)
            chance = -negative
            yield chance, found

    # -- rates -----------------------------------------------------------------------------------------------------

    def _rates(self, tree: DraftTree, parent: int, depth: int) -> Iterator[tuple[int, Rate]]:
        """The children of a node, each with the rate of its kind."""
        level = min(depth, DEEPEST)
        has_scores = tree.scores is not None
        for rank, node in enumerate(tree.children[parent]):
            likeness = _eighth(tree, node) if has_scores else min(rank, MOST_SIBLINGS)
            kind = (tree.source_of(node), level, likeness)
            rate = self._known.get(kind)
            if rate is None:
                above = self._known.get((kind[0], level - 1, likeness))
                rate = self._known[kind] = Rate(_prior(tree, node, likeness) if above is None else above.value)
            yield node, rate

    def _depth_rate(self, depth: int) -> Rate:
        depth = min(depth, DEEPEST)
        rate = self._depth_rates.get(depth)
        if rate is None:
            above = self._depth_rates.get(depth - 1)
            rate = self._depth_rates[depth] = Rate(FIRST_RATE if above is None else above.value)
        return rate


def _eighth(tree: DraftTree, node: int) -> int:
    """The drafter's own estimate in eighths, as a negative number."""
    return -1 - min(int(_stated(tree, node) * NUM_BINS), NUM_BINS - 1)


def _prior(tree: DraftTree, node: int, likeness: int) -> float:
    if tree.scores is not None:
        return max(_stated(tree, node), LATER_RATE)
    return FIRST_RATE if likeness == 0 else LATER_RATE


def _stated(tree: DraftTree, node: int) -> float:
    """The drafter's own estimate for a node, given its parent."""
    assert tree.scores is not None
    above = tree.scores[tree.parents[node]]
    return min(1.0, max(0.0, tree.scores[node] / above)) if above > 0.0 else 0.0

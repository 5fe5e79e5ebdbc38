"""What the last decisions of a governor amount to, followed in the steps between two of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence as Seq
from operator import itemgetter
from typing import TYPE_CHECKING

from foretoken.engine.trimming import Chances, Worth, best_counts
from foretoken.tree import DraftTree

if TYPE_CHECKING:
    from foretoken.engine.budget import Budget

FOLLOWED = 0.5  # of the way to a score that was decided otherwise
DROPPED = 2.0  # by the best score of a draft that was dropped: half of the way there is above it
NOT_FAR = 0.5  # of the score from which on nodes are kept: what is drafted shows where lower ones should be
WIDEST = 256  # children of a node that are told apart


class Habit:
    """Drafts as deep as was decided last, cut as drafts like them were cut: a few operations per row.

    Of drafts with scores those nodes are kept that are worth it, if the scores are as right as those of late. Of drafts
    without, chains are cut to one length, and others to the nodes that stand where nodes were kept, by the ranks among
    siblings from the root on.

    Args:
      divisible: whether parts of a draft may be left out; else it is kept whole or not at all.
    """

    def __init__(self, *, divisible: bool = True) -> None:
        self.depth = 0
        self._is_divisible = divisible
        self._keeps_whole = True
        self._length = 0
        self._least = 0.0
        self._standings: set[int] = set()
        self._known: dict[tuple[int, ...], list[int]] = {}  # parents -> nodes that are kept, of trees without scores

    def adopt(self, trees: Seq[DraftTree], kept: Seq[DraftTree]) -> None:
        """Take over what was decided of drafts.

        Args:
          kept: what is verified of each.
        """
        for tree, part in zip(trees, kept, strict=True):
            if len(tree) > 1:
                self._keeps_whole = len(part) == len(tree)
                if tree.scores is not None:
                    self._adopt_scores(tree.scores, _nodes_of(tree, part))
                elif tree.is_chain:
                    self._length = max(self._length, len(part) - 1) if self._keeps_whole else len(part) - 1
                else:
                    self._adopt_standings(_standings(tree), _nodes_of(tree, part))

    def _adopt_scores(self, scores: Seq[float], nodes: set[int]) -> None:
        left = max((score for node, score in enumerate(scores) if node not in nodes), default=0.0)
        lowest = min((scores[node] for node in nodes if node), default=DROPPED * left)
        if self._least > lowest:
            self._least += FOLLOWED * (lowest - self._least)
        elif self._least <= left:
            self._least += FOLLOWED * (max(left, lowest) - self._least)

    def _adopt_standings(self, standings: Seq[int], nodes: set[int]) -> None:
        self._standings.difference_update(standings)
        self._standings.update(standings[node] for node in nodes)
        self._known.clear()

    @property
    def least(self) -> float:
        """A chance below which it is not worth drafting what follows a node."""
        return NOT_FAR * self._least

    def budgets(self, budgets: list[Budget]) -> list[Budget]:
        """What may be drafted for every row."""
        depth, least = self.depth, self.least
        if depth == sys.maxsize and not least:
            return budgets
        return [budget.within(depth, least) for budget in budgets]

    def cut(self, trees: Seq[DraftTree], worth: Worth, trust: float) -> list[DraftTree]:
        """The parts of drafts that are verified.

        Args:
          trust: what scores are multiplied by, once per level.
        """
        if self._is_divisible and any(tree.scores is not None and len(tree) > 1 for tree in trees):
            return self._worthy(trees, worth, trust)
        return [self._cut(tree) for tree in trees]

    def _worthy(self, trees: Seq[DraftTree], worth: Worth, trust: float) -> list[DraftTree]:
        """The parts that are worth verifying by their scores."""
        powers = [trust**depth for depth in range(max(tree.depth for tree in trees) + 1)]
        found = [_chances(tree, powers) for tree in trees]
        counts = best_counts(found, worth, are_chains=all(tree.is_chain for tree in trees))
        return [
            tree if count + 1 == len(tree) else tree.restricted(_closed(tree, sorted([0, *_nodes(nodes[:count])])))
            for tree, nodes, count in zip(trees, found, counts, strict=True)
        ]

    def _cut(self, tree: DraftTree) -> DraftTree:
        if len(tree) == 1:
            return tree
        if not self._is_divisible:
            return tree if self._keeps_whole else tree.restricted([0])
        if tree.is_chain:
            return tree if len(tree) <= self._length + 1 else tree.restricted(range(self._length + 1))
        nodes = self._known.get(tree.parents)
        if nodes is None:
            standings = self._standings
            wanted = [node for node, standing in enumerate(_standings(tree)) if standing in standings]
            nodes = self._known[tree.parents] = _closed(tree, wanted)
        return tree.restricted(nodes)


def _chances(tree: DraftTree, powers: Seq[float]) -> Chances:
    """Nodes with the chances that their scores say, the likeliest first."""
    if tree.scores is None:
        return []
    found = [(tree.scores[node] * powers[tree.depths[node]], node) for node in range(1, len(tree))]
    found.sort(key=itemgetter(0), reverse=True)
    return found


def _nodes(chances: Chances) -> list[int]:
    return [node for _, node in chances]


def _closed(tree: DraftTree, nodes: list[int]) -> list[int]:
    """These nodes, the root, and none whose parent is not among them."""
    found = {-1, *nodes}
    if nodes and nodes[0] == 0 and found.issuperset([tree.parents[node] for node in nodes]):
        return nodes
    kept, places = [0], {0}
    for node in nodes:
        if tree.parents[node] in places:
            kept.append(node)
            places.add(node)
    return kept


def _nodes_of(tree: DraftTree, part: DraftTree) -> set[int]:
    """The nodes of a tree that a part of it holds."""
    places = [0]
    for node in range(1, len(part)):
        place = tree.child(places[part.parents[node]], part.tokens[node])
        assert place is not None
        places.append(place)
    return set(places)


def _standings(tree: DraftTree) -> list[int]:
    """Where every node stands: its ranks from the root on, as the digits of a number.

    For parents (-1, 0, 0, 1, 1): 0, 1, 2, 257, 258.
    """
    standings, next_ranks = [0], [1]
    for parent in tree.parents[1:]:
        rank = next_ranks[parent]
        next_ranks[parent] = rank + 1
        standings.append(WIDEST * standings[parent] + rank)
        next_ranks.append(1)
    return standings

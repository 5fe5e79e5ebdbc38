"""How often nodes of a drafter are accepted, learned while it runs."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from foretoken.tree import DraftTree

NUM_BINS = 10
PRIOR_WEIGHT = 8.0  # observations that a drafter's own estimate, or the default, is worth
DEFAULT_RATE = 0.5  # of a node whose drafter says nothing
DEEPEST = 16


class Calibration:
    """Turns what a drafter thinks of its nodes into how often such nodes are accepted.

    A node's rate is the chance that it is accepted once its parent was; nodes are alike when they have the same depth
    (up to 16) and their rate as the drafter states it falls into the same tenth. Until there is experience the stated
    rate holds, a half where there is none.
    """

    def __init__(self) -> None:
        self._tried: dict[tuple[int, int], float] = {}
        self._accepted: dict[tuple[int, int], float] = {}

    def scores(self, tree: DraftTree) -> tuple[float, ...]:
        """Estimated chance of every node to be accepted, the root's 1; never more than its parent's."""
        scores = [1.0]
        for node in range(1, len(tree)):
            scores.append(scores[tree.parents[node]] * self._rate(tree, node))
        return tuple(scores)

    def observe(self, tree: DraftTree, path: Seq[int]) -> None:
        """Learn from a draft of which ``path``, root first, was accepted: its nodes and their siblings were tried."""
        accepted = set(path)
        for parent in path:
            for node in tree.children[parent]:
                kind = self._kind(tree, node)
                self._tried[kind] = self._tried.get(kind, 0.0) + 1.0
                self._accepted[kind] = self._accepted.get(kind, 0.0) + (node in accepted)

    def _rate(self, tree: DraftTree, node: int) -> float:
        kind = self._kind(tree, node)
        prior = PRIOR_WEIGHT * self._stated(tree, node)
        return (self._accepted.get(kind, 0.0) + prior) / (self._tried.get(kind, 0.0) + PRIOR_WEIGHT)

    def _kind(self, tree: DraftTree, node: int) -> tuple[int, int]:
        bin_ = min(int(self._stated(tree, node) * NUM_BINS), NUM_BINS - 1) if tree.scores is not None else -1
        return min(tree.depths[node], DEEPEST), bin_

    @staticmethod
    def _stated(tree: DraftTree, node: int) -> float:
        """The drafter's own estimate for a node, given its parent."""
        if tree.scores is None:
            return DEFAULT_RATE
        above = tree.scores[tree.parents[node]]
        return min(1.0, max(0.0, tree.scores[node] / above)) if above > 0.0 else 0.0

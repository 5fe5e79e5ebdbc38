"""Grow a draft tree best first out of what several sources know about the same text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush, heappushpop
from typing import Any, NamedTuple

from foredraft.tree import DraftTree

ESCAPE = 1.0
"""Weight of the unknown: a context that was seen n times counts it as one more observation."""


class Candidate(NamedTuple):
    """A token that a source has seen next.

    Args:
      score: the source's estimate of the chance that this token *and the path to it* come true.
      recency: larger is more recent; decides between equal scores.
      token: its id.
      place: where the source stands after it; of several sources, a root of each.
    """

    score: float
    recency: int
    token: int
    place: Any


Candidates = Callable[[Any, float], Iterable[Candidate]]
"""A source of continuations: for a place, the tokens that may follow with a score of at least a floor, each once.

Scores are products along the path, so they never grow on the way."""


class GrowthRoot(NamedTuple):
    """Place of a source at the end of the text. ``score`` is 1 unless the source is less sure of the whole."""

    candidates: Candidates
    place: Any
    score: float = 1.0


class TreeLimits(NamedTuple):
    """Limits of a tree.

    Args:
      max_nodes: root included.
      max_depth: of a node; the root has depth 0.
      max_branches: children of one node.
      min_score: of a node.
    """

    max_nodes: int
    max_depth: int
    max_branches: int = 1 << 30
    min_score: float = 0.0


def grow(pending: int, roots: Sequence[GrowthRoot], shape: TreeLimits, name: str = "") -> DraftTree:
    """The nodes with the highest scores, within the limits of ``shape``; parents stand before children.

    What several sources propose at one node is merged: the token gets the highest of its scores, each given
    relative to the path so far.

    Returns: a tree with scores. Exactness: lossless for any rule that takes deterministic drafts. Randomness: none.
    """
    max_nodes, max_depth, max_branches, min_score = shape
    tokens, parents, depths, scores = [pending], [-1], [0], [1.0]
    places: list[tuple[GrowthRoot, ...]] = [tuple(roots)]
    heap: list[tuple[float, int, int, int, Candidate]] = []
    best: list[float] = []  # scores of the best candidates so far, as many as there may be nodes: a heap
    newest = age = 0
    while True:
        if depths[newest] < max_depth:
            floor = max(min_score, best[0]) if len(best) == max_nodes - 1 else min_score
            found = _merged(places[newest], scores[newest], floor)
            if len(found) > max_branches:
                found = sorted(found, key=lambda one: (-one.score, -one.recency))[:max_branches]
            for one in found:
                age += 1
                heappush(heap, (-one.score, -one.recency, age, newest, one))
                (heappush if len(best) < max_nodes - 1 else heappushpop)(best, one.score)
        if not heap or len(tokens) >= max_nodes:
            return DraftTree(tuple(tokens), tuple(parents), scores=tuple(scores), source=name)
        _, _, _, parent, one = heappop(heap)
        newest = len(tokens)
        tokens.append(one.token)
        parents.append(parent)
        depths.append(depths[parent] + 1)
        scores.append(one.score)
        places.append(one.place)


_ROUNDING = 1 - 1e-9
"""Sources get a floor that is lower by this: scaling there and back must not lose what lies on it."""


def _merged(roots: Sequence[GrowthRoot], score: float, floor: float) -> Sequence[Candidate]:
    """Candidates of all sources with a score of ``floor`` or more, equal tokens as one.

    Their scores are those of the whole path, and their places are roots of every source.
    """
    merged: dict[int, Candidate] = {}
    for candidates, place, own in roots:
        factor = score / own
        for reached, recency, token, after in candidates(place, floor / factor * _ROUNDING):
            stands: tuple[GrowthRoot, ...] = (GrowthRoot(candidates, after, reached),)
            known = merged.get(token)
            if known is None:
                merged[token] = Candidate(reached * factor, recency, token, stands)
            elif reached * factor > known.score:
                merged[token] = Candidate(reached * factor, recency, token, (*known.place, *stands))
            else:
                merged[token] = known._replace(place=(*known.place, *stands))
    return [found for found in merged.values() if found.score >= floor]

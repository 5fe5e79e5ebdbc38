"""Grow a draft tree best first out of what several sources know about the same text."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from heapq import heappop, heappush
from typing import Any, NamedTuple, Protocol

from foretoken.engine.tree import DraftTree


class Candidate(NamedTuple):
    """A token that a source has seen next.

    Args:
      score: the source's estimate of the chance that this token *and the path to it* come true.
      recency: larger is more recent; decides between equal scores.
      token: its id.
      place: where the source stands after it.
    """

    score: float
    recency: int
    token: int
    place: Any


class Source(Protocol):
    """Knows continuations of one text: a place has candidates, each of which is a place again."""

    def candidates(self, place: Any) -> Iterable[Candidate]:
        """What may follow, each token once. Scores are products along the path, so they never grow on the way."""


class Root(NamedTuple):
    """Where a source stands at the end of the text. ``score`` is 1 unless the source is less sure of the whole."""

    source: Source
    place: Any
    score: float = 1.0


class Shape(NamedTuple):
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


def grow(pending: int, roots: Seq[Root], shape: Shape, name: str = "") -> DraftTree:
    """The nodes with the highest scores, within the limits of ``shape``; parents stand before children.

    What several sources propose at one node is merged: the token gets the highest of its scores, each given
    relative to the path so far.

    Returns: a tree with scores. Exactness: lossless for any rule that takes deterministic drafts. Randomness: none.
    """
    max_nodes, max_depth, max_branches, min_score = shape
    tokens, parents, depths, scores, branches = [pending], [-1], [0], [1.0], [0]
    places: list[tuple[Root, ...]] = [tuple(roots)]
    heap: list[tuple[float, int, int, int, int, tuple[Root, ...]]] = []
    newest = age = 0
    while True:
        if depths[newest] < max_depth:
            for candidate, stands in _merged(places[newest], scores[newest]):
                if candidate.score >= min_score:
                    age += 1
                    heappush(heap, (-candidate.score, -candidate.recency, age, newest, candidate.token, stands))
        while heap and branches[heap[0][3]] == max_branches:
            heappop(heap)
        if not heap or len(tokens) >= max_nodes:
            return DraftTree(tuple(tokens), tuple(parents), scores=tuple(scores), source=name)
        score, _, _, parent, token, stands = heappop(heap)
        newest = len(tokens)
        tokens.append(token)
        parents.append(parent)
        depths.append(depths[parent] + 1)
        scores.append(-score)
        branches.append(0)
        branches[parent] += 1
        places.append(stands)


def _merged(roots: Seq[Root], score: float) -> Iterable[tuple[Candidate, tuple[Root, ...]]]:
    """Candidates of all sources, equal tokens as one, with where every source stands after them."""
    if len(roots) == 1:
        source, place, own = roots[0]
        factor = score / own
        return [
            (Candidate(c.score * factor, c.recency, c.token, None), (Root(source, c.place, c.score),))
            for c in source.candidates(place)
        ]
    merged: dict[int, tuple[Candidate, tuple[Root, ...]]] = {}
    for source, place, own in roots:
        factor = score / own
        for found in source.candidates(place):
            candidate = Candidate(found.score * factor, found.recency, found.token, None)
            known = merged.get(found.token)
            stands: tuple[Root, ...] = (Root(source, found.place, found.score),)
            if known is not None:
                stands = (*known[1], *stands)
                candidate = max(candidate, known[0], key=lambda one: one.score)
            merged[found.token] = (candidate, stands)
    return merged.values()

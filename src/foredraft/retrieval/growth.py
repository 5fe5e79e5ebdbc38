"""Best-first growth of a draft tree from the candidates of several sources."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush, heappushpop
from typing import Any, NamedTuple

from foredraft.tree import DraftTree

ESCAPE = 1.0
"""Weight of unseen tokens: a context that was seen n times counts them as one more observation."""


class Candidate(NamedTuple):
    """A token that a source has seen next.

    Args:
      score: estimated chance that this token *and the path to it* are accepted.
      recency: number that is larger for more recent tokens; decides between equal scores.
      token: token id.
      place: position of the source after the token; for merged candidates, a root of each source.
    """

    score: float
    recency: int
    token: int
    place: Any


Candidates = Callable[[Any, float], Iterable[Candidate]]
"""A source of continuations: a function of a place and a floor that returns the tokens that may follow with at least
this score, each once.

Scores are products along the path, so they never increase with depth."""


class GrowthRoot(NamedTuple):
    """Place of a source at the end of the text. ``score`` is below 1 if the source is less reliable as a whole."""

    candidates: Candidates
    place: Any
    score: float = 1.0


class TreeLimits(NamedTuple):
    """Limits of a tree.

    Args:
      max_nodes: largest number of nodes, root included.
      max_depth: largest depth of a node; the root has depth 0.
      max_branches: largest number of children of a node.
      min_score: smallest score of a node.
    """

    max_nodes: int
    max_depth: int
    max_branches: int = 1 << 30
    min_score: float = 0.0


def grow(pending: int, roots: Sequence[GrowthRoot], shape: TreeLimits, name: str = "") -> DraftTree:
    """Return the tree of the nodes with the highest scores within the limits of ``shape``; parents come before
    children.

    Tokens that several sources propose at one node are merged. The token gets the highest of its scores, each relative
    to the path before it.

    Returns: a tree with scores. Exactness: lossless for any rule that supports deterministic drafts. Randomness: none.
    """
    max_nodes, max_depth, max_branches, min_score = shape
    tokens, parents, depths, scores = [pending], [-1], [0], [1.0]
    places: list[tuple[GrowthRoot, ...]] = [tuple(roots)]
    heap: list[tuple[float, int, int, int, Candidate]] = []
    best: list[float] = []  # heap of the best scores so far, at most as many as there may be nodes
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
"""Factor on the floor that sources receive, so that rounding loses no candidate whose score equals the floor."""


def _merged(roots: Sequence[GrowthRoot], score: float, floor: float) -> Sequence[Candidate]:
    """Return the candidates of all sources with a score of at least ``floor``, with equal tokens merged.

    Scores belong to the whole path. Places are tuples of roots, one for every source.
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

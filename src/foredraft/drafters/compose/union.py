"""Several drafters as one: their trees merged, most promising nodes first."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from foredraft.config.drafting import node_limit
from foredraft.config.method import Method
from foredraft.drafters import make_drafter
from foredraft.drafters.parts.composite import CompositeDrafter, CompositeOptions
from foredraft.engine.drafter import DrafterFacts
from foredraft.errors import ConfigError
from foredraft.tree import DraftTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foredraft.drafters.context import DrafterContext
    from foredraft.engine.drafter import Drafter


@dataclass(frozen=True, kw_only=True)
class UnionOptions(CompositeOptions):
    """Keys of a union; "a+b" is the union of a and b."""

    method: ClassVar[str] = "union"
    drafts_trees: ClassVar[bool] = True
    max_draft_nodes: int = node_limit(32)


class UnionDrafter(CompositeDrafter):
    """Merges the trees of all parts under one node budget, most promising nodes first.

    A node that several parts propose counts with the best of their calibrated scores.

    Args:
      max_nodes: of the merged tree, root included.

    Exactness: lossless under "match", which takes any tree. Randomness: of the parts.
    """

    facts = DrafterFacts("union")

    def __init__(self, parts: Sequence[Drafter], max_nodes: int = UnionOptions.max_draft_nodes) -> None:
        super().__init__(parts)
        if max_nodes < 2:
            raise ConfigError(f"max_draft_nodes is {max_nodes}; a union needs 2 or more")
        self._max_nodes = max_nodes

    def _combined(self, trees: Sequence[DraftTree]) -> DraftTree:
        found = [(place, tree) for place, tree in enumerate(trees) if len(tree) > 1]
        if len(found) < 2:
            return found[0][1] if found else trees[0]
        scores = [self._calibrations[place].scores(tree) for place, tree in found]
        return merged([tree for _, tree in found], scores, self._max_nodes, self.name)


def merged(
    trees: Sequence[DraftTree], scores: Sequence[Sequence[float]], max_nodes: int, source: str = ""
) -> DraftTree:
    """The best nodes of several trees with one root, as one tree.

    Args:
      scores: per tree and node, at most the score of its parent; a node of several trees has the largest.
      max_nodes: root included.

    Returns: a tree whose nodes name the drafter that gave them their score, its root the whole.
    """
    all_tokens, scored, named = [trees[0].tokens[0]], [1.0], [source]  # by node of all trees together
    children: list[list[int]] = [[]]
    place_of: dict[tuple[int, int], int] = {}  # parent and token -> node
    for tree, tree_scores in zip(trees, scores, strict=True):
        places = [0]
        for node in range(1, len(tree)):
            above, token, score = places[tree.parents[node]], tree.tokens[node], max(0.0, tree_scores[node])
            place = place_of.get((above, token))
            if place is None:
                place = place_of[above, token] = len(all_tokens)
                all_tokens.append(token)
                scored.append(score)
                named.append(tree.source_of(node))
                children[above].append(place)
                children.append([])
            elif score > scored[place]:
                scored[place], named[place] = score, tree.source_of(node)
            places.append(place)
    tokens, parents, kept = [all_tokens[0]], [-1], [0]
    heap: list[tuple[float, int, int, int]] = []
    opened = depth = 0
    while True:
        for place in children[opened]:
            heapq.heappush(heap, (-scored[place], depth + 1, place, len(tokens) - 1))
        if not heap or len(tokens) >= max_nodes:
            break
        _, depth, opened, above = heapq.heappop(heap)
        tokens.append(all_tokens[opened])
        parents.append(above)
        kept.append(opened)
    kept_scores, sources = tuple(scored[place] for place in kept), tuple(named[place] for place in kept)
    return DraftTree(tuple(tokens), tuple(parents), scores=kept_scores, source=source, sources=sources)


def build(options: UnionOptions, context: DrafterContext) -> UnionDrafter:
    """Makes the parts."""
    context.check_trees(options.method)
    return UnionDrafter([make_drafter(part, context) for part in options.drafters], options.max_draft_nodes)


METHOD = Method(
    UnionOptions,
    build,
    summary="with several methods at once, their trees merged",
    sign="+",
    sample={"drafters": ("token_recycling", "ngram")},
)

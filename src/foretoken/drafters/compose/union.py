"""Several drafters as one: their trees merged, most promising nodes first."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from foretoken.config.composite import CompositeOptions
from foretoken.config.drafting import node_limit
from foretoken.config.method import Method
from foretoken.drafters.materials import make_drafter
from foretoken.drafters.parts.composite import CompositeDrafter
from foretoken.errors import ConfigError
from foretoken.tree import DraftTree

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from foretoken.drafters.materials import Materials
    from foretoken.engine.drafter import Budget, Drafter
    from foretoken.engine.sequence import Sequence


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

    name = "union"

    def __init__(self, parts: Seq[Drafter], max_nodes: int = UnionOptions.max_draft_nodes) -> None:
        super().__init__(parts)
        if max_nodes < 2:
            raise ConfigError(f"max_draft_nodes is {max_nodes}; a union needs 2 or more")
        self._max_nodes = max_nodes

    def _ask(self, rows: Seq[Sequence], budgets: Seq[Budget]) -> list[list[DraftTree]]:
        by_part = [part.propose(rows, budgets) for part in self.parts]
        return [list(trees) for trees in zip(*by_part, strict=True)]

    def _combined(self, trees: Seq[DraftTree]) -> DraftTree:
        scores = [calibration.scores(tree) for calibration, tree in zip(self._calibrations, trees, strict=True)]
        return merged(trees, scores, self._max_nodes, self.name)


def merged(trees: Seq[DraftTree], scores: Seq[Seq[float]], max_nodes: int, source: str = "") -> DraftTree:
    """The best nodes of several trees with one root, as one tree.

    Args:
      scores: per tree and node, at most the score of its parent; a node of several trees has the largest.
      max_nodes: root included.

    Returns: a tree whose nodes name the drafter that gave them their score, its root the whole.
    """
    best = _best_scores(trees, scores)
    tokens, parents, kept_scores, sources = [trees[0].tokens[0]], [-1], [1.0], [source]
    index_of: dict[tuple[int, ...], int] = {(): 0}
    heap: list[tuple[float, int, tuple[int, ...]]] = []
    children: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for path in best:
        children.setdefault(path[:-1], []).append(path)
    opened: tuple[int, ...] = ()
    while True:
        for path in children.get(opened, ()):
            heapq.heappush(heap, (-best[path][0], len(path), path))
        if not heap or len(tokens) >= max_nodes:
            break
        negative, _, opened = heapq.heappop(heap)
        index_of[opened] = len(tokens)
        tokens.append(opened[-1])
        parents.append(index_of[opened[:-1]])
        kept_scores.append(-negative)
        sources.append(best[opened][1])
    return DraftTree(tuple(tokens), tuple(parents), scores=tuple(kept_scores), source=source, sources=tuple(sources))


def _best_scores(trees: Seq[DraftTree], scores: Seq[Seq[float]]) -> dict[tuple[int, ...], tuple[float, str]]:
    """The largest score of every path of tokens that any tree holds, and whose it is; of equal ones the first."""
    best: dict[tuple[int, ...], tuple[float, str]] = {}
    for tree, tree_scores in zip(trees, scores, strict=True):
        paths: list[tuple[int, ...]] = [()]
        for node in range(1, len(tree)):
            path = (*paths[tree.parents[node]], tree.tokens[node])
            paths.append(path)
            if path not in best or tree_scores[node] > best[path][0]:
                best[path] = max(0.0, tree_scores[node]), tree.source_of(node)
    return best


def build(options: UnionOptions, materials: Materials) -> UnionDrafter:
    """Makes the parts."""
    materials.check_trees(options.method)
    return UnionDrafter([make_drafter(part, materials) for part in options.drafters], options.max_draft_nodes)


METHOD = Method(
    UnionOptions,
    build,
    summary="with several methods at once, their trees merged",
    sign="+",
    sample={"drafters": ("token_recycling", "ngram")},
)

"""Which nodes of drafts are worth verifying."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from operator import itemgetter
from typing import TYPE_CHECKING, TypeAlias

from foretoken.engine.survival import LEAST_CHANCE
from foretoken.tree import DraftTree

if TYPE_CHECKING:
    from foretoken.engine.sequence import Sequence
    from foretoken.engine.survival import Survival

NumNodes: TypeAlias = Callable[[Seq[int], bool], int]
"""The number of nodes that a forward runs, padding included, by the sizes of its drafts and whether all are chains."""

Worth: TypeAlias = Callable[[Seq[int], bool], float]
"""The tokens that the time of verifying drafts of these sizes would make otherwise, by the same arguments."""

Chances: TypeAlias = list[tuple[float, int]]
"""Nodes of a draft with their chances to be accepted, the likeliest first."""

MEMORY = 0.9
LEAST_GAIN = 0.02  # tokens per step, below which it is not asked who has gained them
LATE = 0.9  # of the most tokens that a row has left: who has fewer is ahead


class Trimming:
    """Cuts the drafts of a step to the nodes whose chance is larger than the tokens that their time is worth.

    Args:
      survival: knows the chances of nodes.

    Source: for rates that fall with the rank, the n nodes with the largest products along their path are the best tree
    of n nodes (Sequoia, Chen et al. 2024, arXiv:2402.12374, finds the same one by dynamic programming).
    Exactness: for the rule "match". Randomness: none.
    """

    def __init__(self, survival: Survival) -> None:
        self._survival = survival
        self._widths: dict[int, float] = {}  # nodes per row that are kept at a depth
        self._coverage: dict[int, float] = {}  # share of the chance of a level that the kept nodes have

    @property
    def has_cut_trees(self) -> bool:
        """Whether there were drafts that branched."""
        return bool(self._widths)

    def width(self, level: int) -> float:
        """How many nodes per row are verified at a depth."""
        return self._widths.get(level, 1.0)

    def coverage(self, level: int) -> float:
        """How much of the chance that some node of a depth is right belongs to those that are verified."""
        return self._coverage.get(level, 1.0)

    def whole_or_none(self, rows: Seq[Sequence], trees: Seq[DraftTree], worth: Worth) -> list[DraftTree]:
        """All drafts as they are where that pays, else none."""
        gained = sum(sum(self._survival.by_depth(row.id, tree.depth)) for row, tree in zip(rows, trees, strict=True))
        if gained > worth([len(tree) for tree in trees], False):
            return list(trees)
        return [DraftTree.root(tree.tokens[0], tree.source) for tree in trees]

    def best(self, rows: Seq[Sequence], trees: Seq[DraftTree], worth: Worth, weights: Seq[float]) -> list[DraftTree]:
        """The best part of every draft.

        Args:
          weights: how much a token of each row counts.
        """
        are_chains = all(tree.is_chain for tree in trees)
        found = self._found(rows, trees, weights)
        counts = best_counts(found, worth, are_chains=are_chains)
        kept = [nodes[:count] for nodes, count in zip(found, counts, strict=True)]
        cut = [
            tree if len(nodes) + 1 == len(tree) else tree.restricted([0, *sorted(node for _, node in nodes)])
            for tree, nodes in zip(trees, kept, strict=True)
        ]
        if not are_chains:
            self._note_shape(rows, trees, kept)
        return cut

    def _found(self, rows: Seq[Sequence], trees: Seq[DraftTree], weights: Seq[float]) -> list[Chances]:
        """The nodes of every draft that are worth a thought, with what they are likely to bring."""
        return [
            [(weight * chance, node) for chance, node in self._survival.best_nodes(row.id, tree, LEAST_CHANCE)]
            for row, tree, weight in zip(rows, trees, weights, strict=True)
        ]

    def _note_shape(self, rows: Seq[Sequence], trees: Seq[DraftTree], kept: Seq[Chances]) -> None:
        """Remember how wide trees are once they are cut, and how much of the chance of a level the rest has."""
        widths: dict[int, float] = {}
        covered: dict[int, float] = {}
        whole: dict[int, float] = {}
        for row, tree, nodes in zip(rows, trees, kept, strict=True):
            for level, chance in enumerate(self._survival.by_depth(row.id, tree.depth), 1):
                whole[level] = whole.get(level, 0.0) + chance
            for chance, node in nodes:
                level = tree.depths[node]
                widths[level] = widths.get(level, 0.0) + 1.0 / len(rows)
                covered[level] = covered.get(level, 0.0) + chance
        for level, width in widths.items():
            share = min(covered[level] / whole[level], 1.0) if whole.get(level) else 1.0
            self._widths[level] = _moved(self._widths.get(level, width), max(width, 1.0))
            self._coverage[level] = _moved(self._coverage.get(level, share), share)


def weights_of(num_left: Seq[int], share: float, paces: Seq[float] = ()) -> list[float]:
    """How much a token of every row counts where no request waits for the place of a row that ends.

    The batch takes as long as the row that ends last. One that is ahead of it ends sooner by its tokens, which makes
    later steps cheaper only by what a row costs in them.

    Args:
      num_left: tokens that every row has left, at most.
      share: of the time of a step that a step with one row fewer takes.
      paces: tokens per step of rows so far: what the slowest has not gained, the batch has not gained.
    """
    ahead = min(max(len(num_left) * (1.0 - share), 0.0), 1.0)
    late = LATE * max(num_left)
    gained = sum(paces) / len(paces) - 1.0 if paces else 0.0
    common = min((min(paces) - 1.0) / gained, 1.0) if gained > LEAST_GAIN else 1.0
    return [max(common, ahead) if count >= late else ahead for count in num_left]


def best_counts(found: Seq[Chances], worth: Worth, *, are_chains: bool = False) -> list[int]:
    """How many of the likeliest nodes of every row pay, the root not counted."""
    if len(found) == 1:
        ranked = [(chance, 0) for chance, _ in found[0]]
    else:
        ranked = [(chance, row) for row, nodes in enumerate(found) for chance, _ in nodes]
        ranked.sort(key=itemgetter(0), reverse=True)
    best_value, best, gained, most = 0.0, 0, 0.0, sum([chance for chance, _ in ranked])
    others = [1] * (len(found) - 1)
    for count, (chance, _) in enumerate(ranked, 1):
        gained += chance
        price = worth([count + 1, *others], are_chains)
        if gained - price > best_value:
            best_value, best = gained - price, count
        if most - price <= best_value:  # what all others could gain is less than what this many cost
            break
    counts = [0] * len(found)
    for _, row in ranked[:best]:
        counts[row] += 1
    return counts


def _moved(average: float, value: float) -> float:
    return MEMORY * average + (1.0 - MEMORY) * value

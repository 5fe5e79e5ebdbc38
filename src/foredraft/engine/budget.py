"""How much of a draft is worth making, what limits that, what of it is worth verifying, and what every limit has cut
off in the end."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple, Self, TypeAlias

if TYPE_CHECKING:
    from foredraft.tree import DraftTree

NOTHING_FOUND = "nothing_found"
"""Why a step has no draft whose drafter was asked and proposed nothing. All other causes keep it from drafting."""

CAUSES: Mapping[str, str] = {
    "governor": "the governor",
    "bits": "the promise of bits",
    "chains": "a model or rule that verifies chains only",
    "memory": "the limit of memory",
    "budget": "the end of the text's budget",
    "policy": "the length policy",
    "context": "the context of the draft model",
    "request": "the request",
    "doubt": "a step that gave no token",
    "fault": "a fault of the drafter",
}
"""What keeps tokens from being drafted or verified, and how it is called in messages."""


class DraftSize(int):
    """How much may be drafted for one row in one step. As a number it is the depth.

    Args:
      depth: tokens on one path, the pending one not counted; 0 for no draft.
      nodes: of the whole draft, root included.
      chains_only: whether only the continuation of first children will be verified.
      least: chance of a node, below which neither it nor what follows it will be verified; drafters may ignore it.

    Attributes:
      arm: number of the way in which a drafter of several is to draft (`DrafterFacts.arms`); None for its own choice.
    """

    nodes: int
    chains_only: bool
    least: float
    arm: int | None = None

    def __new__(cls, depth: int, nodes: int = sys.maxsize, chains_only: bool = False, least: float = 0.0) -> Self:
        self = super().__new__(cls, depth)
        self.nodes, self.chains_only, self.least = nodes, chains_only, least
        return self

    def __repr__(self) -> str:
        return f"DraftSize(depth={self.depth}, nodes={self.nodes}, chains_only={self.chains_only}, least={self.least})"

    @property
    def depth(self) -> int:
        """Tokens on one path."""
        return int(self)

    @classmethod
    def of(cls, budget: int) -> DraftSize:
        """The budget itself, or one that limits the depth alone."""
        return budget if isinstance(budget, DraftSize) else cls(budget)

    def within(self, depth: int, least: float) -> DraftSize:
        """As much of it as a governor wants."""
        return DraftSize(min(self.depth, depth), self.nodes, self.chains_only, least)

    def width(self, num_branches: int) -> int:
        """How many of the wanted siblings are worth drafting."""
        return 1 if self.chains_only else num_branches

    def max_nodes(self, limit: int | None = None) -> int:
        """Nodes of the draft, within a limit of the drafter's own."""
        return self.nodes if limit is None else min(self.nodes, limit)

    def cut(self, tree: DraftTree) -> DraftTree:
        """Cut a draft to the budget; if it has too many nodes, the first ones stay."""
        if len(tree) == 1:
            return tree
        tree = (tree.main_chain() if self.chains_only else tree).cut(self.depth)
        return tree if len(tree) <= self.nodes else tree.restricted(range(max(1, self.nodes)))


class Limits(NamedTuple):
    """Budget of a row, and the causes (`CAUSES`) of its bounds.

    Args:
      budget: as much as all of them allow.
      depth: the cause of its depth.
      nodes: of its number of nodes.
    """

    budget: DraftSize
    depth: str
    nodes: str = "memory"

    def stages(self, budget: DraftSize, draft: DraftTree) -> Iterator[tuple[str, int]]:
        """Tokens that are left of a draft within a budget, cause by cause."""
        if budget.chains_only:
            draft = draft.main_chain()
            yield "chains", len(draft) - 1
        yield self.depth if draft.depth > budget.depth else self.nodes, len(budget.cut(draft)) - 1

    def why_nothing(self, budget: DraftSize, draft: DraftTree) -> str:
        """The cause of an empty draft."""
        if budget.depth == 0:
            return self.depth
        if budget.nodes <= 1:
            return self.nodes
        return draft.plan.cause if draft.plan is not None and draft.plan.gamma == 0 else NOTHING_FOUND


def describe_cuts(tokens: Counter[str], steps: Counter[str]) -> str:
    """Description of cuts for people, the cause of most first; empty where nothing was cut.

    Args:
      tokens: drafted tokens that were left out, by cause.
      steps: steps without a draft, by cause; those of `NOTHING_FOUND` are not described.

    Example:
        >>> describe_cuts(Counter(governor=8), Counter(governor=2, nothing_found=1))
        'the governor cut 8 drafted tokens and left 2 steps without a draft'
    """
    described = []
    for cause in sorted(CAUSES, key=lambda cause: (-steps[cause], -tokens[cause])):
        parts = [f"cut {counted(tokens[cause], 'drafted token')}"] if tokens[cause] else []
        parts += [f"left {counted(steps[cause], 'step')} without a draft"] if steps[cause] else []
        if parts:
            described.append(f"{CAUSES[cause]} {' and '.join(parts)}")
    return ", ".join(described)


def counted(number: int, noun: str) -> str:
    """``1 step``, ``2,000 steps``, ``2 guesses``."""
    plural = "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{'' if number == 1 else plural}"


Worth: TypeAlias = Callable[[int, bool], float]
"""The tokens that the time of verifying drafts of so many nodes would make otherwise; whether all are chains."""

Chances: TypeAlias = list[tuple[float, int]]
"""Nodes of a draft with their chances to be accepted, the likeliest first."""


APART = 0.1
"""Of the steps that are left to a batch: a row that is ahead by so many ends last 1/e as often as the last."""


def weights_of(num_left: Sequence[float], share: float) -> list[float]:
    """How much a token of every row counts where no request waits for the place of a row that ends.

    The batch takes as long as the row that ends last. Tokens of the others make later steps cheaper only by what a row
    costs in them. So of a step, what rows cost is shared by all of them, and the rest goes to those that may be last;
    of k rows that may be, a kth of it: what rows gain varies, and the one that gains least is the last. That tells what
    batches of 8 recorded texts gain to 1.6 % of 64 steps and 1.1 % of 200 (dev/log, 2026-11-27).

    Args:
      num_left: steps that every row is expected to take at its pace so far.
      share: of the time of a step that a step with one row fewer takes.
    """
    most, count = max(num_left), len(num_left)
    ahead = min(max(count * (1.0 - share), 0.0), 1.0)
    lasts = [math.exp((left - most) / (APART * most)) for left in num_left]
    total, squares = sum(lasts), sum([last * last for last in lasts])
    rest = (1.0 - ahead) * count * squares / total**3  # a kth, where total**2 / squares rows may be last
    return [ahead + rest * last for last in lasts]


def best_counts(found: Sequence[Chances], worth: Worth, *, are_chains: bool = False) -> tuple[list[int], float]:
    """How many of the likeliest nodes of every row pay, the root not counted; and the tokens that they gain."""
    ranked = found[0]
    if len(found) > 1:
        ranked = [(chance, row) for row, nodes in enumerate(found) for chance, _ in nodes]
        ranked.sort(key=itemgetter(0), reverse=True)
    best_value, best, gained, most = 0.0, 0, 0.0, sum([chance for chance, _ in ranked])
    for size, (chance, _) in enumerate(ranked, len(found) + 1):
        gained += chance
        price = worth(size, are_chains)
        if gained - price > best_value:
            best_value, best = gained - price, size - len(found)
        if most - price <= best_value:  # what all others could gain is less than what this many cost
            break
    if len(found) == 1:
        return [best], best_value
    counts = [0] * len(found)
    for _, row in ranked[:best]:
        counts[row] += 1
    return counts, best_value


class Habit:
    """Drafts as deep as was decided last, cut as drafts like them were cut: a few operations per row.

    Of drafts without scores, chains are cut to one length, the mean of what was kept, and others to the nodes that
    stand where nodes were kept, by the ranks among siblings from the root on. Those that must not be cut are kept whole
    or not at all.
    """

    def __init__(self) -> None:
        self.depth = 0
        self._keeps_whole = True
        self._length = 0
        self.least = 0.0
        """A chance below which it is not worth drafting what follows a node: half of what one more node costs."""
        self._standings: set[int] = set()
        self._known: dict[tuple[int, ...], list[int]] = {}  # parents -> nodes that are kept, of trees without scores

    def adopt(self, trees: Sequence[DraftTree], kept: Sequence[DraftTree], worth: Worth) -> None:
        """Take over what was decided of drafts.

        Args:
          kept: what is verified of each.
          worth: by which that was decided.
        """
        if any(tree.scores is not None or tree.is_whole for tree in trees):
            size, are_chains = sum(map(len, kept)), all(tree.is_chain for tree in trees)
            one_more = worth(size + 1, are_chains) - worth(size, are_chains)
            self.least = max(one_more, 0.0) / 2
        lengths, is_cut = [], False  # of chains
        for tree, part in zip(trees, kept, strict=True):
            if len(tree) == 1:
                continue
            if tree.is_whole:
                self._keeps_whole = len(part) == len(tree)
            elif tree.scores is None and tree.is_chain:
                lengths.append(len(part) - 1)
                is_cut = is_cut or len(part) < len(tree)
            elif tree.scores is None:
                standings = _standings(tree)
                self._standings.difference_update(standings)
                self._standings.update(standings[node] for node in _nodes_of(tree, part))
                self._known.clear()
        if is_cut:  # one length for all rows: that of the last would be any
            self._length = round(sum(lengths) / len(lengths))
        elif lengths:
            self._length = max(self._length, *lengths)

    def budgets(self, budgets: list[DraftSize]) -> list[DraftSize]:
        """What may be drafted for every row."""
        depth, least = self.depth, self.least
        if depth == sys.maxsize and not least:
            return budgets
        return [budget.within(depth, least) for budget in budgets]

    def cut(self, trees: Sequence[DraftTree]) -> list[DraftTree]:
        """The parts of drafts that are verified."""
        return [self._cut(tree) for tree in trees]

    def _cut(self, tree: DraftTree) -> DraftTree:
        if len(tree) == 1:
            return tree
        if tree.is_whole:
            return tree if self._keeps_whole else tree.restricted([0])
        if tree.is_chain:
            return tree if len(tree) <= self._length + 1 else tree.restricted(range(self._length + 1))
        nodes = self._known.get(tree.parents)
        if nodes is None:
            standings = self._standings
            wanted = [node for node, standing in enumerate(_standings(tree)) if standing in standings]
            nodes = self._known[tree.parents] = _closed(tree, wanted)
        return tree.restricted(nodes)


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
        standings.append(256 * standings[parent] + rank)
        next_ranks.append(1)
    return standings

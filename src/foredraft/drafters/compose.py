"""Combinations of drafters: the union of their trees, the first draft with enough expected tokens, or a choice by
measured time."""

from __future__ import annotations

import heapq
import logging
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from math import inf

from foredraft.drafters import make_drafter
from foredraft.drafters.context import DrafterContext
from foredraft.engine.acceptance_model import scored, stated
from foredraft.engine.drafter import (
    Drafter,
    DrafterFacts,
    DraftSize,
    StepResult,
    WrappingDrafter,
    listens,
    own_result,
)
from foredraft.engine.row import Row
from foredraft.errors import ConfigError
from foredraft.methods.compose import AutoOptions, FirstOptions, UnionOptions
from foredraft.tree import DraftPlan, DraftTree

logger = logging.getLogger("foredraft")

ENOUGH = 2.0
"""Expected accepted tokens of a draft from which later free drafters are not called for the row."""


class CompositeDrafter(WrappingDrafter):
    """Drafter that combines several drafters and gives each one the outcome of its own proposals.

    A part receives the result of a step as if it had proposed the verified nodes of its own tree and nothing else. The
    tree of a part is cut to these nodes, the accepted path ends where that tree ends, and node features are those of
    the part's own nodes. Features of committed tokens include all tokens, whichever part proposed them.

    If some parts are free and others are not, there are two ways to draft: with the free parts only, or with all parts.
    Measured time chooses between the two ways. The engine's `AcceptanceModel` estimates the acceptance probability of
    nodes.

    Args:
      parts: two or more drafters, the most trusted first.
      ways: for each way to draft, the indices of the parts that draft together.
      arm: index of the way that is used when no governor chooses; -1 for the last one.

    Raises: ConfigError for fewer than two parts.
    """

    sign = "+"  # between the names of parts

    def __init__(self, parts: Sequence[Drafter], ways: Sequence[tuple[int, ...]] = (), arm: int = -1) -> None:
        if len(parts) < 2:
            raise ConfigError(f"{self.name} combines two or more drafters, and it got {len(parts)}; add drafters")
        super().__init__(parts)
        free, everything = _free(parts), tuple(range(len(parts)))
        self._ways = ways or ([free, everything] if 0 < len(free) < len(everything) else [everything])
        titles = tuple(self.sign.join(self.parts[place].name for place in way) for way in self._ways)
        self.facts = replace(self.facts, arms=titles if len(titles) > 1 else (), arm=range(len(titles))[arm])

    def propose(self, rows: Sequence[Row], budgets: Sequence[DraftSize]) -> list[DraftTree]:
        by_part: list[list[DraftTree]] = []
        chosen = getattr(budgets[0], "arm", None) if budgets else None
        way = self._ways[self.facts.arm if chosen is None else chosen]
        if chosen is not None:  # a composite part uses its own default way
            budgets = [DraftSize(size, size.nodes, size.chains_only, size.least) for size in budgets]
        for place, part in enumerate(self.parts):
            is_asked = place in way
            allowed = self._budgets(place, rows, by_part, budgets) if is_asked else [DraftSize(0)] * len(budgets)
            by_part.append([scored(tree) for tree in part.propose(rows, allowed)])  # the merged tree has scores
        proposed = [list(trees) for trees in zip(*by_part, strict=True)]
        for row, trees in zip(rows, proposed, strict=True):
            row.state[self] = trees
        return [
            self._combined(row, trees).planned(_last_plan(trees)) for row, trees in zip(rows, proposed, strict=True)
        ]

    def _budgets(
        self, place: int, rows: Sequence[Row], by_part: Sequence[Sequence[DraftTree]], budgets: Sequence[DraftSize]
    ) -> Sequence[DraftSize]:
        """Return the draft size of a part for every row, given what the earlier parts have proposed."""
        return budgets

    @abstractmethod
    def _combined(self, row: Row, trees: Sequence[DraftTree]) -> DraftTree:
        """Combine the trees of the parts into one tree for a row."""

    def observe(self, rows: Sequence[Row], results: Sequence[StepResult]) -> None:
        proposed: list[list[DraftTree]] = [row.state[self] for row in rows]
        for place, part in enumerate(self.parts):
            if listens(part):
                own = [own_result(trees[place], result) for trees, result in zip(proposed, results, strict=True)]
                part.observe(rows, own)


def _free(parts: Sequence[Drafter]) -> tuple[int, ...]:
    """Return the indices of the parts that cost next to nothing."""
    return tuple(place for place, part in enumerate(parts) if part.facts.is_free)


def _lacking(
    rows: Sequence[Row], by_part: Sequence[Sequence[DraftTree]], budgets: Sequence[DraftSize], enough: float
) -> list[DraftSize]:
    """Return the draft sizes, set to 0 for rows where an earlier part already expects ``enough`` accepted tokens."""
    found = []
    for place, (row, budget) in enumerate(zip(rows, budgets, strict=True)):
        drafts = [trees[place] for trees in by_part if len(trees[place]) > 1]
        has_enough = any(sum(row.acceptance.chances(tree, row)[1:]) >= enough for tree in drafts)
        found.append(DraftSize(0) if has_enough else budget)
    return found


def _last_plan(trees: Sequence[DraftTree]) -> DraftPlan | None:
    """Return the plan of the last part that made one with its length policy."""
    plans = (tree.plan for tree in reversed(trees))
    return next((plan for plan in plans if plan is not None and plan.cause == "policy"), None)


# -- first drafter that expects enough ---------------------------------------------------------------------------------


class FirstDrafter(CompositeDrafter):
    """Drafter that uses the draft of the first part that expects enough accepted tokens; the last part needs no
    minimum.

    Later parts do not draft for that row, so a cheap drafter saves the forward passes of an expensive one.

    Args:
      min_expected: expected accepted tokens that a draft needs, estimated from the outcomes of similar drafts.

    Exactness: that of the parts. The choice of a part depends on drafts, so rules other than "match" are refused.
    Randomness: that of the parts.
    """

    facts = DrafterFacts("first")
    sign = ">"

    def __init__(self, parts: Sequence[Drafter], min_expected: float = FirstOptions.min_expected_tokens) -> None:
        super().__init__(parts)
        self._min_expected = min_expected

    def _budgets(
        self, place: int, rows: Sequence[Row], by_part: Sequence[Sequence[DraftTree]], budgets: Sequence[DraftSize]
    ) -> Sequence[DraftSize]:
        return _lacking(rows, by_part, budgets, self._min_expected)

    def _combined(self, row: Row, trees: Sequence[DraftTree]) -> DraftTree:
        """Return the last draft that is not empty; no part after one that expects enough has drafted."""
        return next((tree for tree in reversed(trees) if tree.num_draft_tokens), trees[-1])


def first(options: FirstOptions, context: DrafterContext) -> FirstDrafter:
    """Make the parts and combine them."""
    return FirstDrafter([make_drafter(part, context) for part in options.drafters], options.min_expected_tokens)


# -- union of trees ----------------------------------------------------------------------------------------------------


class UnionDrafter(CompositeDrafter):
    """Drafter that merges the trees of all parts within one node limit, most promising nodes first.

    The acceptance probability of a node that several parts propose is the largest of their estimates.

    Args:
      max_nodes: largest number of nodes of the merged tree, root included.
      ways, arm: see `CompositeDrafter`.
      enough: expected accepted tokens of a draft from which later free parts are not called for the row.

    Exactness: lossless under "match", which accepts any tree. Randomness: that of the parts.
    """

    facts = DrafterFacts("union")

    def __init__(
        self,
        parts: Sequence[Drafter],
        max_nodes: int = UnionOptions.max_draft_nodes,
        *,
        ways: Sequence[tuple[int, ...]] = (),
        arm: int = -1,
        enough: float = inf,
    ) -> None:
        super().__init__(parts, ways, arm)
        self._enough = enough
        if max_nodes < 2:
            raise ConfigError(f"max_draft_nodes is {max_nodes}; a union needs 2 or more, the root included")
        self._max_nodes = max_nodes

    def _budgets(
        self, place: int, rows: Sequence[Row], by_part: Sequence[Sequence[DraftTree]], budgets: Sequence[DraftSize]
    ) -> Sequence[DraftSize]:
        is_later = place in (free := _free(self.parts)) and place != free[0]
        return _lacking(rows, by_part, budgets, self._enough) if is_later and self._enough < inf else budgets

    def _combined(self, row: Row, trees: Sequence[DraftTree]) -> DraftTree:
        found = [tree for tree in trees if len(tree) > 1]
        if len(found) < 2:
            return found[0] if found else trees[0]
        return merged(found, [row.acceptance.chances(tree, row) for tree in found], self._max_nodes, self.name)


def merged(
    trees: Sequence[DraftTree], chances: Sequence[Sequence[float]], max_nodes: int, source: str = ""
) -> DraftTree:
    """Merge several trees with the same root into one tree of the best nodes.

    Args:
      trees: trees of one row.
      chances: acceptance probability per tree and node, at most that of the node's parent. A node of several trees
        gets the largest of them.
      max_nodes: largest number of nodes, root included.
      source: name of the root's drafter.

    Returns: a tree in which each node carries the name of the drafter with the largest acceptance probability, and
    that drafter's own estimate of it.
    """
    all_tokens, ranked, named, own = [trees[0].tokens[0]], [1.0], [source], [1.0]  # per node of the union
    children: list[list[int]] = [[]]
    place_of: dict[tuple[int, int], int] = {}  # parent and token -> node
    for tree, tree_chances in zip(trees, chances, strict=True):
        places, estimates = [0], stated(tree)
        for node in range(1, len(tree)):
            above, token, chance = places[tree.parents[node]], tree.tokens[node], tree_chances[node]
            place = place_of.get((above, token))
            if place is None:
                place = place_of[above, token] = len(all_tokens)
                all_tokens.append(token)
                ranked.append(chance)
                named.append(tree.source_of(node))
                own.append(estimates[node])
                children[above].append(place)
                children.append([])
            elif chance > ranked[place]:
                ranked[place], named[place], own[place] = chance, tree.source_of(node), estimates[node]
            places.append(place)
    tokens, parents, kept, scores = [all_tokens[0]], [-1], [0], [1.0]
    heap: list[tuple[float, int, int, int]] = []
    opened = depth = 0
    while True:
        for place in children[opened]:
            heapq.heappush(heap, (-ranked[place], depth + 1, place, len(tokens) - 1))
        if not heap or len(tokens) >= max_nodes:
            break
        _, depth, opened, above = heapq.heappop(heap)
        tokens.append(all_tokens[opened])
        parents.append(above)
        kept.append(opened)
        scores.append(scores[above] * min(own[opened], 1.0))
    sources = tuple(named[place] for place in kept)
    return DraftTree(tuple(tokens), tuple(parents), scores=tuple(scores), source=source, sources=sources)


def union(options: UnionOptions, context: DrafterContext) -> UnionDrafter:
    """Make the parts and combine them."""
    context.check_trees(options.method)
    return UnionDrafter([make_drafter(part, context) for part in options.drafters], options.max_draft_nodes)


# -- choice by measured time -------------------------------------------------------------------------------------------


def auto_drafter(parts: Sequence[Drafter], max_nodes: int = AutoOptions.max_draft_nodes) -> UnionDrafter:
    """Make a drafter that uses all parts without a model, and at most one other part: the one with the least time per
    token.

    Proposals of the parts without a model are merged with those of the chosen part. The most promising nodes come
    first. The tree is cut to the nodes that are worth verifying. A part without a model, except the first one, does not
    draft for a row whose draft already expects `ENOUGH` tokens. The governor chooses among `DrafterFacts.arms`, so the
    choice depends on time.

    Args:
      parts: drafters to choose from.
      max_nodes: largest number of nodes of the merged tree, root included.
    """
    free = _free(parts)
    others = [(*free, place) for place in range(len(parts)) if place not in free]
    drafter = UnionDrafter(parts, max_nodes, ways=[free, *others] if free else others, arm=0, enough=ENOUGH)
    drafter.facts = replace(drafter.facts, name="auto")
    return drafter


def auto(options: AutoOptions, context: DrafterContext) -> Drafter:
    """Make the parts; if the target can only verify chains, parts that draft trees are skipped with a log message.

    A single remaining part drafts alone.
    """
    chosen = [part for part in options.drafters if context.target.supports_trees or not part.definition.drafts_trees]
    for part in options.drafters:
        if part not in chosen:
            logger.info(
                "auto drafts without %s, because it drafts trees and %s can only verify chains.",
                part.title,
                context.target.name,
            )
    if not chosen:
        context.check_trees("auto")
    parts = [make_drafter(part, context) for part in chosen]
    return parts[0] if len(parts) == 1 else auto_drafter(parts, options.max_draft_nodes)

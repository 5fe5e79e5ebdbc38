"""Several drafters as one: their trees merged, the first of them that expects enough, or those that measured time
chooses."""

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
"""Tokens that drafts of free parts must promise for later ones not to be asked."""


class CompositeDrafter(WrappingDrafter):
    """Asks several drafters, and tells each the outcome of its own proposals.

    A part sees a step as if it had proposed those of its nodes that were verified: its tree is cut to them, the
    accepted path ends where its tree does, and features of nodes are those of its own. Features of the text are those
    of all that was committed, whoever proposed it.

    Where some parts are free and others are not, there are two ways to draft, with the free ones alone or with all, of
    which measured time chooses. How likely nodes are to be right is asked of the engine's `AcceptanceModel`.

    Args:
      parts: two or more drafters, most trusted first.
      ways: places of the parts that draft together, way by way.
      arm: number of the way that is taken where nobody chooses; -1 for the last one.

    Raises: ConfigError for fewer than two.
    """

    sign = "+"  # between the names of parts

    def __init__(self, parts: Sequence[Drafter], ways: Sequence[tuple[int, ...]] = (), arm: int = -1) -> None:
        if len(parts) < 2:
            raise ConfigError(f"{self.name} combines drafters but got {len(parts)}; give two or more")
        super().__init__(parts)
        free, everything = _free(parts), tuple(range(len(parts)))
        self._ways = ways or ([free, everything] if 0 < len(free) < len(everything) else [everything])
        titles = tuple(self.sign.join(self.parts[place].name for place in way) for way in self._ways)
        self.facts = replace(self.facts, arms=titles if len(titles) > 1 else (), arm=range(len(titles))[arm])

    def propose(self, rows: Sequence[Row], budgets: Sequence[DraftSize]) -> list[DraftTree]:
        by_part: list[list[DraftTree]] = []
        chosen = getattr(budgets[0], "arm", None) if budgets else None
        way = self._ways[self.facts.arm if chosen is None else chosen]
        if chosen is not None:  # composites among the parts choose for themselves
            budgets = [DraftSize(size, size.nodes, size.chains_only, size.least) for size in budgets]
        for place, part in enumerate(self.parts):
            is_asked = place in way
            allowed = self._budgets(place, rows, by_part, budgets) if is_asked else [DraftSize(0)] * len(budgets)
            by_part.append([scored(tree) for tree in part.propose(rows, allowed)])  # as the merged tree is
        proposed = [list(trees) for trees in zip(*by_part, strict=True)]
        for row, trees in zip(rows, proposed, strict=True):
            row.state[self] = trees
        return [
            self._combined(row, trees).planned(_last_plan(trees)) for row, trees in zip(rows, proposed, strict=True)
        ]

    def _budgets(
        self, place: int, rows: Sequence[Row], by_part: Sequence[Sequence[DraftTree]], budgets: Sequence[DraftSize]
    ) -> Sequence[DraftSize]:
        """Sizes that a part may draft for every row, by what the parts before it have proposed."""
        return budgets

    @abstractmethod
    def _combined(self, row: Row, trees: Sequence[DraftTree]) -> DraftTree:
        """One tree for a row, of the trees of the parts."""

    def observe(self, rows: Sequence[Row], results: Sequence[StepResult]) -> None:
        proposed: list[list[DraftTree]] = [row.state[self] for row in rows]
        for place, part in enumerate(self.parts):
            if listens(part):
                own = [own_result(trees[place], result) for trees, result in zip(proposed, results, strict=True)]
                part.observe(rows, own)


def _free(parts: Sequence[Drafter]) -> tuple[int, ...]:
    """Places of the parts that cost next to nothing."""
    return tuple(place for place, part in enumerate(parts) if part.facts.is_free)


def _lacking(
    rows: Sequence[Row], by_part: Sequence[Sequence[DraftTree]], budgets: Sequence[DraftSize], enough: float
) -> list[DraftSize]:
    """The budgets of rows for which no part so far has promised so many accepted tokens, nothing for the others."""
    found = []
    for place, (row, budget) in enumerate(zip(rows, budgets, strict=True)):
        drafts = [trees[place] for trees in by_part if len(trees[place]) > 1]
        has_enough = any(sum(row.acceptance.chances(tree, row)[1:]) >= enough for tree in drafts)
        found.append(DraftSize(0) if has_enough else budget)
    return found


def _last_plan(trees: Sequence[DraftTree]) -> DraftPlan | None:
    """The plan of the last part whose policy has made one."""
    plans = (tree.plan for tree in reversed(trees))
    return next((plan for plan in plans if plan is not None and plan.cause == "policy"), None)


# -- the first that expects enough -------------------------------------------------------------------------------------


class FirstDrafter(CompositeDrafter):
    """Takes the draft of the first part that expects enough of it; the last part is taken as it is.

    Later parts are not asked for that row, so a cheap drafter saves the forwards of an expensive one.

    Args:
      min_expected: accepted tokens that a draft must promise, by what became of drafts like it.

    Exactness: as of the parts; the choice between them looks at drafts, so rules other than "match" are refused.
    Randomness: of the parts.
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
        """The last draft there is: no part after one that promised enough was asked."""
        return next((tree for tree in reversed(trees) if tree.num_draft_tokens), trees[-1])


def first(options: FirstOptions, context: DrafterContext) -> FirstDrafter:
    """Makes the parts."""
    return FirstDrafter([make_drafter(part, context) for part in options.drafters], options.min_expected_tokens)


# -- their trees merged ------------------------------------------------------------------------------------------------


class UnionDrafter(CompositeDrafter):
    """Merges the trees of all parts under one node budget, most promising nodes first.

    A node that several parts propose counts with the best of its chances.

    Args:
      max_nodes: of the merged tree, root included.
      ways, arm: see `CompositeDrafter`.
      enough: accepted tokens that the draft so far must promise for later free parts not to be asked for a row.

    Exactness: lossless under "match", which takes any tree. Randomness: of the parts.
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
            raise ConfigError(f"max_draft_nodes is {max_nodes}; a union needs 2 or more")
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
    """The best nodes of several trees with one root, as one tree.

    Args:
      chances: per tree and node, at most that of its parent; a node of several trees has the largest.
      max_nodes: root included.

    Returns: a tree whose nodes name the drafter that gave them their chance, with its own estimate of it; the root
      names the whole.
    """
    all_tokens, ranked, named, own = [trees[0].tokens[0]], [1.0], [source], [1.0]  # by node of all trees together
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
    """Makes the parts."""
    context.check_trees(options.method)
    return UnionDrafter([make_drafter(part, context) for part in options.drafters], options.max_draft_nodes)


# -- those that measured time chooses ----------------------------------------------------------------------------------


def auto_drafter(parts: Sequence[Drafter], max_nodes: int = AutoOptions.max_draft_nodes) -> UnionDrafter:
    """Drafts with what is free, and with at most one of the others: the one whose tokens took the least time.

    Proposals of free parts are merged with those of the part that is chosen, most promising nodes first, and cut to
    the nodes that are worth verifying. A free part after the first is not asked for a row where the draft so far
    promises enough. The governor chooses (`DrafterFacts.arms`); the choice depends on time.

    Args:
      max_nodes: of the merged tree, root included.
    """
    free = _free(parts)
    others = [(*free, place) for place in range(len(parts)) if place not in free]
    drafter = UnionDrafter(parts, max_nodes, ways=[free, *others] if free else others, arm=0, enough=ENOUGH)
    drafter.facts = replace(drafter.facts, name="auto")
    return drafter


def auto(options: AutoOptions, context: DrafterContext) -> Drafter:
    """Makes the parts; where only chains can be verified, those that draft trees are left out, and that is said.

    Where one part is left there is nothing to choose, and it drafts alone.
    """
    chosen = [part for part in options.drafters if context.target.supports_trees or not part.definition.drafts_trees]
    for part in options.drafters:
        if part not in chosen:
            logger.info("auto drafts without %s: %s verifies chains only.", part.title, context.target.name)
    if not chosen:
        context.check_trees("auto")
    parts = [make_drafter(part, context) for part in chosen]
    return parts[0] if len(parts) == 1 else auto_drafter(parts, options.max_draft_nodes)

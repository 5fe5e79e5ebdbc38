"""Drafts that requests bring along, beside those of the drafter: what they predict, and what a grammar forces."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import TYPE_CHECKING

from foretoken.engine.drafter import Budget, Drafter, StepResult, WrappingDrafter, own_result
from foretoken.engine.prediction import PREDICTION
from foretoken.tree import DraftTree

if TYPE_CHECKING:
    from foretoken.config.acceptance import AcceptanceRule
    from foretoken.engine.sequence import Sequence


GRAMMAR = "grammar"
"""Name of what proposed tokens that the grammar forces."""

GUESSED = "grammar_guess"
"""Name of what proposed tokens that came of the same choice of the grammar before, and what those force."""

EXPECTED = 0.9
"""Chance of a predicted token after right ones, where the drafter says those of its own."""


class JoiningDrafter(WrappingDrafter):
    """A drafter, and beside it what rows draft by themselves (`SamplingParams.prediction`).

    Both are one tree, in which the drafter's nodes come last; where rules look at the laws that drafts are from, or
    only chains are verified, what the row drafts takes the place of the drafter's. Nodes that the grammar of a row does
    not allow are left out, but for drafts that are samples, which must not be chosen from. The drafter sees the outcome
    of its own proposals.

    Args:
      drafter: of all rows.
      rule: how drafts are accepted.

    Exactness: as of the drafter; what a row drafts depends on its text alone.
    """

    def __init__(self, drafter: Drafter, rule: AcceptanceRule) -> None:
        super().__init__([drafter])
        self.name = drafter.name
        self._drafter = drafter
        self._rule = rule
        self._proposed: dict[int, DraftTree] = {}  # by the drafter, for rows whose drafts were changed

    def recall(self, row: Sequence, memory: object, num_tokens: int) -> int:
        return self._drafter.recall(row, memory, num_tokens)

    def propose(self, rows: Seq[Sequence], budgets: Seq[Budget]) -> list[DraftTree]:
        trees = list(self._drafter.propose(rows, budgets))
        for place, (row, tree, budget) in enumerate(zip(rows, trees, budgets, strict=True)):
            matching = row.law.matching
            if row.prediction is None and matching is None:
                continue
            self._proposed[row.id] = tree
            if row.prediction is not None and (predicted := row.prediction.draft(row.token_ids, budget)):
                tree = self._joined(predicted, tree, budget)
            trees[place] = matching.legal(tree) if matching is not None and tree.probs is None else tree
        return trees

    def _joined(self, predicted: Seq[int], tree: DraftTree, budget: Budget) -> DraftTree:
        chain = DraftTree.chain(tree.tokens[0], predicted, source=PREDICTION)
        if len(tree) == 1 or budget.chains_only or not self._rule.keeps_tokens:
            return chain.planned(tree.plan)
        if tree.scores is not None:
            chain = replace(chain, scores=tuple(EXPECTED**depth for depth in range(len(chain))))
        return chain.joined(tree, budget.nodes)

    def observe(self, rows: Seq[Sequence], results: Seq[StepResult]) -> None:
        if not self._drafter.observes:
            return
        self._drafter.observe(
            rows,
            [
                own_result(self._proposed[row.id], result) if row.id in self._proposed else result
                for row, result in zip(rows, results, strict=True)
            ],
        )

    def keep(self, row: Sequence) -> object:
        return self._drafter.keep(row)

    def forget(self, rows: Seq[Sequence]) -> None:
        super().forget(rows)
        for row in rows:
            self._proposed.pop(row.id, None)


def with_forced(row: Sequence, tree: DraftTree, budget: Budget, rule: AcceptanceRule) -> DraftTree:
    """A draft with the tokens that the grammar of its row forces: they are right, whatever is measured of drafts.

    Beyond them come a few that the grammar's choices led to before, where a row has seen that these are mostly right.

    Args:
      tree: legal already, so that it goes along with what is forced as far as it reaches.
      budget: that the row has, before a governor's decision.
    """
    matching = row.law.matching
    if matching is None or not budget.depth:
        return tree
    forced = matching.forced()
    may_guess = rule.keeps_tokens and (len(tree) == 1 or not budget.chains_only)
    guessed = matching.guessed(budget.depth, forced) if may_guess else ()
    if not forced and not guessed:
        return tree
    chain = DraftTree.chain(tree.tokens[0], (*forced, *guessed), source=GRAMMAR)
    if guessed:
        chain = replace(chain, sources=(GRAMMAR,) * (len(forced) + 1) + (GUESSED,) * len(guessed))
    if tree.scores is not None:
        chances = [EXPECTED**place for place in range(1, len(guessed) + 1)]
        chain = replace(chain, scores=(1.0,) * (len(forced) + 1) + tuple(chances))
    chain = budget.cut(chain)
    return chain.joined(tree, budget.nodes) if rule.keeps_tokens else chain.planned(tree.plan)

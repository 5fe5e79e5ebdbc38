"""Drafts for a step: how much may be drafted for every row, and what of it is verified."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from foretoken.engine.drafter import Drafter
from foretoken.engine.guarding import GuardedDrafter, check_draft
from foretoken.engine.limits import count_cuts, limits_of

if TYPE_CHECKING:
    from foretoken.engine.batch import Member
    from foretoken.engine.forwards import Forwards
    from foretoken.engine.governing import Governing
    from foretoken.model.lm import CausalLM
    from foretoken.tree import DraftTree


class Proposing:
    """Asks a drafter for the drafts of a step.

    Args:
      drafter: proposes.
      target: whose vocabulary drafts are of.
      forwards: know which drafts they verify.
      governing: decides how much is drafted and verified of what may be.
    """

    def __init__(self, drafter: Drafter, target: CausalLM, forwards: Forwards, governing: Governing) -> None:
        self._drafter = drafter
        self._is_checked = isinstance(drafter, GuardedDrafter)
        self._target = target
        self._forwards = forwards
        self._governing = governing

    def step(self, members: Seq[Member], max_nodes: int) -> list[DraftTree]:
        """One draft per member, cut to what its row may still emit, and to so many nodes.

        Raises: TreeError for a draft that does not start with the pending token, or leaves the vocabulary.
        """
        rows = [member.row for member in members]
        limits = limits_of(members, self._forwards, max_nodes)
        budgets = self._governing.budgets(rows, [limit.budget for limit in limits])
        proposed = self._drafter.propose(rows, budgets)
        if not self._is_checked:  # by the guard
            for row, tree in zip(rows, proposed, strict=True):
                check_draft(tree, row, self._target.vocab_size)
        within = [budget.cut(tree) for budget, tree in zip(budgets, proposed, strict=True)]
        trees = self._governing.trimmed(rows, within)
        count_cuts(rows, limits, budgets, proposed, trees)
        return trees

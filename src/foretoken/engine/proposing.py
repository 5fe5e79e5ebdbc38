"""Drafts for a step: how much may be drafted for every row, and what of it is verified."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from foretoken.engine.drafter import Budget, Drafter
from foretoken.engine.forwards import NO_LIMIT
from foretoken.engine.guarding import GuardedDrafter, check_draft

if TYPE_CHECKING:
    from foretoken.config.engine import EngineConfig
    from foretoken.engine.batch import Member
    from foretoken.engine.forwards import Forwards
    from foretoken.engine.governing import Governing
    from foretoken.model.lm import CausalLM
    from foretoken.tree import DraftTree


class Proposing:
    """Asks a drafter for the drafts of a step.

    Args:
      drafter: proposes.
      target: verifies, trees or chains only.
      forwards: knows the longest chain that one of them may hold.
      config: of the engine.
      governing: decides how much is drafted and verified of what may be.
    """

    def __init__(
        self, drafter: Drafter, target: CausalLM, forwards: Forwards, config: EngineConfig, governing: Governing
    ) -> None:
        self._drafter = drafter
        self._is_checked = isinstance(drafter, GuardedDrafter)
        self._target = target
        self._forwards = forwards
        self._config = config
        self._governing = governing

    def step(self, members: Seq[Member], max_nodes: int) -> list[DraftTree]:
        """One draft per member, cut to what its row may still emit, and to so many nodes.

        Raises: TreeError for a draft that does not start with the pending token, or leaves the vocabulary.
        """
        longest = self._forwards.longest_chain
        budgets = self._budgets(members, longest if self._config.is_strict else NO_LIMIT, max_nodes)
        rows = [member.row for member in members]
        budgets = self._governing.budgets(rows, budgets)
        trees = []
        for row, tree, budget in zip(rows, self._drafter.propose(rows, budgets), budgets, strict=True):
            if not self._is_checked:  # by the guard
                check_draft(tree, row, self._target.vocab_size)
            trees.append(budget.cut(tree))
        return self._governing.trimmed(rows, trees)

    def _budgets(self, members: Seq[Member], limit: int, max_nodes: int) -> list[Budget]:
        """Accepted tokens and the bonus together fit what is left of a row; a row in doubt runs without a draft."""
        chains_only = self._config.is_strict or not self._config.rule.takes_trees or not self._target.supports_trees
        depths = [0 if member.is_in_doubt else min(member.row.num_remaining_tokens - 1, limit) for member in members]
        return [Budget(min(depth, max_nodes - 1), max_nodes, chains_only) for depth in depths]

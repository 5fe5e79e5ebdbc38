"""Limits of the drafts of a step, row by row, and counts of what every limit has cut off in the end."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, NamedTuple

from foretoken.engine.budget import Budget
from foretoken.engine.cuts import NO_TOKENS, NOTHING_FOUND

if TYPE_CHECKING:
    from foretoken.engine.forwards import Forwards
    from foretoken.engine.sequence import Sequence
    from foretoken.tree import DraftTree


class Limits(NamedTuple):
    """Budget of a row, and the causes (`foretoken.engine.cuts.CAUSES`) of its bounds.

    Args:
      budget: as much as all of them allow.
      depth: the cause of its depth.
      nodes: of its number of nodes.
      shape: of its being for chains only, where it is.
    """

    budget: Budget
    depth: str
    nodes: str = "memory"
    shape: str = "chains"


def limits_of(rows: Seq[Sequence], forwards: Forwards, max_nodes: int) -> list[Limits]:
    """Limits of every row: accepted tokens and the bonus together fit what is left of it.

    A row in doubt runs without a draft.
    """
    shape = "bits" if forwards.has_one_shape else "chains"
    nodes, of_nodes = (max_nodes, "memory") if max_nodes < forwards.max_nodes else (forwards.max_nodes, "bits")
    found = []
    for row in rows:
        depth, cause = row.num_remaining_tokens - 1, "budget"
        if nodes - 1 < depth:
            depth, cause = nodes - 1, of_nodes
        if row.is_in_doubt:
            depth, cause = 0, "doubt"
        found.append(Limits(Budget(depth, nodes, not forwards.takes_trees), cause, of_nodes, shape))
    return found


def count_cuts(row: Sequence, limits: Limits, budget: Budget, draft: DraftTree, tree: DraftTree) -> None:
    """Count what was cut from the draft of a row, or why it has none.

    Args:
      budget: as much of that of ``limits`` as the governor has left, which the drafter was given.
      tree: what is verified of the draft.
    """
    cuts = row.stats.cuts
    if len(tree) == len(draft) > 1:
        cuts.latest, cuts.latest_tokens = "", NO_TOKENS
        return
    if budget != limits.budget:
        limits = limits._replace(depth="governor")
    if len(draft) > 1:
        cuts.record("", len(draft) - 1, [*_stages(limits, budget, draft), ("governor", len(tree) - 1)])
    else:
        cuts.record(_why_nothing(row, limits, budget, draft), 0)


def _stages(limits: Limits, budget: Budget, draft: DraftTree) -> Iterator[tuple[str, int]]:
    """Tokens that are left of a draft, limit by limit."""
    if budget.chains_only:
        draft = draft.main_chain()
        yield limits.shape, len(draft) - 1
    yield limits.depth if draft.depth > budget.depth else limits.nodes, len(budget.cut(draft)) - 1


def _why_nothing(row: Sequence, limits: Limits, budget: Budget, draft: DraftTree) -> str:
    if row.stats.drafter_error:
        return "fault"
    if budget.depth == 0:
        return limits.depth
    if budget.nodes <= 1:
        return limits.nodes
    return "policy" if draft.plan is not None and draft.plan.gamma == 0 else NOTHING_FOUND

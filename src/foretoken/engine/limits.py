"""What limits the drafts of a step, row by row, and what every limit has cut off in the end."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, NamedTuple

from foretoken.engine.budget import Budget
from foretoken.engine.cuts import NO_TOKENS, NOTHING_FOUND

if TYPE_CHECKING:
    from foretoken.engine.batch import Member
    from foretoken.engine.forwards import Forwards
    from foretoken.engine.sequence import Sequence
    from foretoken.tree import DraftTree


class Limits(NamedTuple):
    """What may be drafted for a row, and the causes (`foretoken.engine.cuts.CAUSES`) of that.

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


def limits_of(members: Seq[Member], forwards: Forwards, max_nodes: int) -> list[Limits]:
    """The limits of every row.

    Accepted tokens and the bonus together fit what is left of a row; a row in doubt runs without a draft.

    Args:
      forwards: know which drafts the promise covers, and which the rule of acceptance and the model take.
      max_nodes: that the memory has room for.
    """
    shape = "bits" if forwards.has_one_shape else "chains"
    nodes, of_nodes = (max_nodes, "memory") if max_nodes < forwards.max_nodes else (forwards.max_nodes, "bits")
    found = []
    for member in members:
        depth, cause = member.row.num_remaining_tokens - 1, "budget"
        if nodes - 1 < depth:
            depth, cause = nodes - 1, of_nodes
        if member.is_in_doubt:
            depth, cause = 0, "doubt"
        found.append(Limits(Budget(depth, nodes, not forwards.takes_trees), cause, of_nodes, shape))
    return found


def count_cuts(
    rows: Seq[Sequence],
    limits: Seq[Limits],
    budgets: Seq[Budget],
    proposed: Seq[DraftTree],
    verified: Seq[DraftTree],
) -> None:
    """Count for every row what was cut from its draft, or why it has none.

    Args:
      budgets: that the governor has left of those in ``limits``, and the drafter was given.
      proposed: by the drafter.
      verified: what the governor has left.
    """
    for row, limit, budget, draft, kept in zip(rows, limits, budgets, proposed, verified, strict=True):
        cuts = row.stats.cuts
        if len(kept) == len(draft) > 1:
            cuts.latest, cuts.latest_tokens = "", NO_TOKENS
            continue
        if budget != limit.budget:
            limit = limit._replace(depth="governor")
        if len(draft) == 1:
            cuts.record(_why_nothing(row, limit, budget, draft), 0)
        else:
            stages = [*_stages(limit, budget, draft), ("governor", len(kept) - 1)]
            cuts.record("", len(draft) - 1, stages)


def _stages(limits: Limits, budget: Budget, draft: DraftTree) -> Iterator[tuple[str, int]]:
    """What is left of a draft, limit by limit."""
    if budget.chains_only:
        draft = draft.main_chain()
        yield limits.shape, len(draft) - 1
    yield limits.depth if draft.depth > budget.depth else limits.nodes, len(budget.cut(draft)) - 1


def _why_nothing(row: Sequence, limits: Limits, budget: Budget, tree: DraftTree) -> str:
    if row.stats.drafter_error:
        return "fault"
    if budget.depth == 0:
        return limits.depth
    if budget.nodes <= 1:
        return limits.nodes
    return "policy" if tree.plan is not None and tree.plan.gamma == 0 else NOTHING_FOUND

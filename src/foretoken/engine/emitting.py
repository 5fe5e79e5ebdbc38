"""The tokens that a step adds to a row: the accepted ones and the bonus, cut where the row ends."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from foretoken.engine.outputs import Emitted, RowOutput
from foretoken.errors import ForetokenError
from foretoken.law.sampling import failure

if TYPE_CHECKING:
    import torch

    from foretoken.accept.rules import Verdict
    from foretoken.config.engine import EngineConfig
    from foretoken.engine.batch import Member
    from foretoken.engine.stopping import Finish, StopChecker
    from foretoken.tree import DraftTree


def emit(member: Member, tree: DraftTree, verdict: Verdict, logits: torch.Tensor, config: EngineConfig) -> RowOutput:
    """Append what was decided to a row, count it, and end the row where it ends.

    A drafted token that the model cannot digest harms the nodes beside it, since 0 * NaN is NaN in every masked
    sum. So a failure alongside drafts only puts the row in doubt: its next step goes without any.

    Args:
      logits: (N, V), of the nodes of the tree.
    """
    row = member.row
    row.num_steps += 1
    has_failed = verdict.next_token < 0
    member.is_in_doubt = has_failed and tree.num_draft_tokens > 0
    error = failure(logits[verdict.path[-1]], row.law) if has_failed and not member.is_in_doubt else None
    decided = [tree.tokens[node] for node in verdict.path[1:]] + ([] if has_failed else [verdict.next_token])
    try:
        tokens, finish = _until_the_end(member.checker, decided)
    except Exception as fault:  # of a tokenizer, while stop strings are looked for
        if isinstance(fault, MemoryError) or not config.contains_faults:
            raise
        tokens, finish, error, member.is_in_doubt = [], None, fault, False
    accepted = verdict.path[1 : len(tokens) + 1]
    chosen_at = Emitted(row, tree, verdict.path[: len(tokens)], logits)
    output = RowOutput(
        row,
        tuple(tokens),
        len(accepted),
        logprobs=chosen_at.logprobs(tokens),
        error=None if finish is not None else error,
        scores=chosen_at.scores() if config.output_scores else None,
        logits=chosen_at.logits() if config.output_logits else None,
    )
    row.record(tree, accepted, len(tokens))
    row.extend(tokens)
    if finish is not None:
        row.finish_reason, row.stop_reason = finish.reason, finish.cause
    elif error is not None:
        row.finish_reason, row.stop_reason = "error", told(error)
    return output


def told(error: Exception) -> str:
    """An error as the result of a row tells it: ours speak for themselves, others with their type."""
    return str(error) if isinstance(error, ForetokenError) else f"{type(error).__name__}: {error}"


def _until_the_end(checker: StopChecker, tokens: Seq[int]) -> tuple[list[int], Finish | None]:
    """The tokens up to the one that ends the row, that included, and why it ends."""
    for length, token in enumerate(tokens, 1):
        finish = checker.check(token)
        if finish is not None:
            return list(tokens[:length]), finish
    return list(tokens), None

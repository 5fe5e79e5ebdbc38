"""The tokens that a step adds to a row: the accepted ones and the bonus, cut where the row ends."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from foretoken.engine.outputs import Emitted, RowOutput
from foretoken.law.faults import is_fatal, told
from foretoken.law.sampling import failure

if TYPE_CHECKING:
    from foretoken.accept.rules import Verdict
    from foretoken.config.engine import EngineConfig
    from foretoken.engine.batch import Member
    from foretoken.engine.stopping import Finish, StopChecker
    from foretoken.model.nodes import Logits
    from foretoken.tree import DraftTree


def emit(
    member: Member, tree: DraftTree, verdict: Verdict, logits: Logits, place: int, config: EngineConfig
) -> RowOutput:
    """Append what was decided to a row, count it, and end the row where it ends.

    A drafted token that the model cannot digest harms the nodes beside it, since 0 * NaN is NaN in every masked
    sum, and so does what a drafter has left in the cache. So a failure puts the row in doubt at first: its next step
    goes without a draft, over clean columns, and only if that fails, too, the row does.

    Args:
      logits: of the nodes of all rows.
      place: of this row among them.
    """
    row = member.row
    row.num_steps += 1
    has_failed = verdict.next_token < 0
    member.is_in_doubt = has_failed and not member.is_in_doubt
    error = failure(logits[place][verdict.path[-1]], row.law) if has_failed and not member.is_in_doubt else None
    decided = [tree.tokens[node] for node in verdict.path[1:]] + ([] if has_failed else [verdict.next_token])
    tokens, finish, fault = _until_the_end(member.checker, decided)
    if fault is not None:
        if is_fatal(fault) or not config.contains_faults:
            raise fault
        error, member.is_in_doubt = fault, False
    accepted = verdict.path[1 : len(tokens) + 1]
    if finish is not None:
        error = None
    if row.params.logprobs is None and not config.output_scores and not config.output_logits:
        output = RowOutput(row, tuple(tokens), len(accepted), error=error)
    else:
        chosen_at = Emitted(row, tree, verdict.path[: len(tokens)], logits[place])
        output = RowOutput(
            row,
            tuple(tokens),
            len(accepted),
            logprobs=chosen_at.logprobs(tokens),
            error=error,
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


def _until_the_end(checker: StopChecker, tokens: Seq[int]) -> tuple[list[int], Finish | None, Exception | None]:
    """The tokens up to the one that ends the row, that included, and why it ends.

    Or those before the one whose text cannot be read, and what the tokenizer has raised: as many as plain decoding has.
    """
    for length, token in enumerate(tokens, 1):
        try:
            finish = checker.check(token)
        except Exception as fault:
            return list(tokens[: length - 1]), None, fault
        if finish is not None:
            return list(tokens[:length]), finish, None
    return list(tokens), None, None

"""Verbs of a step over rows that decode: propose drafts within limits, emit what was accepted, tell the drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from foredraft.engine.drafter import StepResult
from foredraft.engine.drafts import with_forced
from foredraft.engine.outputs import RowOutput, logprobs_of
from foredraft.errors import as_exception, is_fatal, told
from foredraft.sampling import distribution
from foredraft.tree import DraftTree

if TYPE_CHECKING:
    from foredraft.accept.rules import Verdict
    from foredraft.config.engine import EngineConfig
    from foredraft.engine.drafts import Drafts
    from foredraft.engine.features import Features
    from foredraft.engine.forwards import Forwards
    from foredraft.engine.governing import Governing
    from foredraft.engine.row import Row
    from foredraft.engine.stopping import Finish, StopChecker
    from foredraft.model.nodes import Logits

# -- propose -------------------------------------------------------------------------------------------------------


def propose(
    rows: Sequence[Row], drafts: Drafts, forwards: Forwards, governing: Governing, max_nodes: int
) -> list[DraftTree]:
    """One draft per row, as much of it as is verified.

    Drafts are limited here and nowhere else: by what a row may still emit, by what forwards can verify, by memory, and
    by what pays. The drafter is given what is left as a budget to aim at.

    Args:
      forwards: know what may be drafted for a row.
      governing: decides how much is drafted and verified of what may be.
      max_nodes: that the memory has room for.
    """
    limits = forwards.limits(rows, max_nodes)
    budgets = governing.budgets(rows, [limit.budget for limit in limits])
    proposed = drafts.propose(rows, budgets)
    trees = governing.trimmed(rows, [budget.cut(draft) for budget, draft in zip(budgets, proposed, strict=True)])
    found = []
    for row, limit, budget, draft, tree in zip(rows, limits, budgets, proposed, trees, strict=True):
        verified = with_forced(row, tree, limit.budget, forwards.rule, len(rows))
        if len(tree) > 1 or verified is tree:
            row.stats.count_cuts(limit, budget, draft, tree)
        found.append(verified)
    return found


def undrafted(row: Row) -> DraftTree:
    """The draft of a row that goes without the drafter: none."""
    row.stats.num_undrafted_steps["governor"] += 1
    return DraftTree.root(row.pending)


# -- emit ----------------------------------------------------------------------------------------------------------


def emit(
    rows: Sequence[Row], trees: Sequence[DraftTree], verdicts: Sequence[Verdict], logits: Logits, config: EngineConfig
) -> list[RowOutput]:
    """Append what was decided to every row; the outputs of the step."""
    return [
        emit_row(row, tree, verdict, logits, i, config)
        for i, (row, tree, verdict) in enumerate(zip(rows, trees, verdicts, strict=True))
    ]


def emit_row(
    row: Row, tree: DraftTree, verdict: Verdict, logits: Logits, place: int, config: EngineConfig
) -> RowOutput:
    """Append the accepted tokens and the bonus to a row, count them, and end the row where it ends.

    A drafted token that the model cannot digest harms the nodes beside it, since 0 * NaN is NaN in every masked
    sum, and so does what a drafter has left in the cache. So a failure puts the row in doubt at first: its next step
    goes without a draft, over clean columns, and only if that fails, too, the row does.

    Args:
      logits: of the nodes of all rows.
      place: of this row among them.
    """
    row.num_steps += 1
    has_failed = verdict.next_token < 0
    row.is_in_doubt = has_failed and not row.is_in_doubt
    is_lost = has_failed and not row.is_in_doubt
    error = distribution.failure(logits[place][verdict.path[-1]], row.sampler) if is_lost else None
    decided = [tree.tokens[node] for node in verdict.path[1:]] + ([] if has_failed else [verdict.next_token])
    tokens, finish, fault = _until_the_end(row.checker, decided)
    if fault is not None:
        if is_fatal(fault) or not config.contains_faults:
            raise fault
        error, row.is_in_doubt = as_exception(fault), False
    accepted = verdict.path[1 : len(tokens) + 1]
    if finish is not None:
        error = None
    sources = tuple([tree.source_of(node) for node in accepted])
    output = RowOutput(row, tuple(tokens), len(accepted), error=error, sources=sources, tree=tree)
    if row.params.logprobs is not None or config.output_scores or config.output_logits:
        nodes = list(verdict.path[: len(tokens)])
        paths, chosen_from = [tree.path_tokens(node) for node in nodes], logits[place][nodes]
        output = replace(
            output,
            logprobs=logprobs_of(row, tokens, chosen_from, paths),
            scores=distribution.scores(chosen_from, [row.sampler] * len(nodes), paths)
            if config.output_scores
            else None,
            logits=chosen_from.float() if config.output_logits else None,
        )
    row.record(tree, accepted, len(tokens))
    row.extend(tokens)
    if finish is not None:
        row.finish_reason, row.stop_reason = finish.reason, finish.cause
    elif error is not None:
        row.finish_reason, row.stop_reason = "error", told(error)
    return output


def _until_the_end(
    checker: StopChecker, tokens: Sequence[int]
) -> tuple[list[int], Finish | None, BaseException | None]:
    """The tokens up to the one that ends the row, that included, and why it ends.

    Or those before the one whose text cannot be read, and what the tokenizer has raised: as many as plain decoding has.
    """
    for length, token in enumerate(tokens, 1):
        try:
            finish = checker.check(token)
        except BaseException as fault:
            return list(tokens[: length - 1]), None, fault
        if finish is not None:
            return list(tokens[:length]), finish, None
    return list(tokens), None, None


# -- observe -------------------------------------------------------------------------------------------------------


def observe(
    drafts: Drafts,
    trees: Sequence[DraftTree],
    paths: Sequence[tuple[int, ...]],
    outputs: Sequence[RowOutput],
    features: Sequence[Features],
) -> None:
    """Tell the drafter of the rows that go on: what was accepted of their drafts, and what the target computed."""
    going_on = [i for i, output in enumerate(outputs) if output.token_ids and not output.row.is_finished]
    results = [StepResult(trees[i], paths[i], outputs[i].token_ids, features[i]) for i in going_on]
    drafts.observe([outputs[i].row for i in going_on], results)

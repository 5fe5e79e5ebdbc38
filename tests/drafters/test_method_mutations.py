"""Faults particular to one method of drafting: each makes a named test of the suite fail, one for each claim.

Of tests that compare with a reference, by properties or in the engine, and so might hold whatever is wrong; literal
values speak for themselves. Verification protects the tokens from most of these faults (`always-wrong` in
`test_drafters.py`): they cost steps, memory or privacy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_composition
import test_datastore_resume
import test_drafter_state
import test_drafters
import test_lookahead
import test_ngram
import test_self_draft
import test_suffix
import test_swift
import test_token_recycling

from foredraft.drafters.compose import CompositeDrafter
from foredraft.drafters.iterate.jacobi import JacobiDrafter
from foredraft.drafters.iterate.lookahead import GuessWindow, LookaheadDrafter
from foredraft.drafters.lookup import ngram
from foredraft.drafters.lookup.ngram import SuffixIndex
from foredraft.drafters.lookup.suffix import SuffixDrafter
from foredraft.drafters.lookup.token_recycling import TokenRecyclingDrafter
from foredraft.drafters.parts.adjacency import AdjacencyMatrix
from foredraft.drafters.parts.self_draft import SelfDrafter
from foredraft.engine.acceptance_model import AcceptanceModel, scored
from foredraft.engine.drafter import DraftSize, Features
from foredraft.model import reduced
from foredraft.model.cache.ragged import KVCache
from foredraft.model.lm import CausalLM
from foredraft.retrieval.automaton import SuffixAutomaton
from foredraft.retrieval.build import State
from foredraft.retrieval.suffix_tree import SuffixTree
from foredraft.tree import DraftTree
from mutants import (
    Altered,
    Call,
    Mutant,
    keeps_rows,
    one_state_for_all,
    only_once,
    replaced,
    skipped,
    told,
    with_arguments,
    with_result,
    wrapped,
)


def _all_like_the_first(call: Call) -> dict[str, Any]:
    return {"rows": [Altered(call.rows[0], id=row.id, state=row.state) for row in call.rows]}


_NEIGHBOURS = test_drafters.test_neighbours_and_predecessors_change_no_draft
ROWS = (
    Mutant(
        "suffix keeps rows that have ended",
        keeps_rows(SuffixDrafter),
        test_drafters.test_nothing_is_left_of_rows_that_have_ended,
        ("suffix",),
    ),
    Mutant("all rows share one state of lookahead", one_state_for_all(LookaheadDrafter), _NEIGHBOURS, ("lookahead",)),
    Mutant(
        "a copy of a matrix is the matrix itself",
        replaced(AdjacencyMatrix, "copy", lambda matrix: matrix),
        _NEIGHBOURS,
        ("token-recycling-vocabulary",),
    ),
    Mutant(
        "ngram-tree reads the prompt and nothing behind it",
        only_once(SuffixIndex, "extend"),
        test_drafter_state.test_a_text_that_grew_is_drafted_for_like_one_that_was_given,
        ("ngram-tree",),
    ),
    Mutant(
        "rows that start together guess like the first of them",
        with_arguments(JacobiDrafter, "start", _all_like_the_first),
        test_drafters.test_rows_that_start_together_are_told_apart,
        ("jacobi-from-prompt",),
    ),
)


def _keys_of_the_right(ngrams: list[tuple[int, ...]], _: Call) -> list[tuple[int, ...]]:
    return [(right[0], *own[1:]) for own, right in zip(ngrams, [*ngrams[1:], *ngrams[:1]], strict=True)]


class OfOtherNodes(Features):
    """Candidates one place further on, the last ones at the first; so for choices, the other way round."""

    def __init__(self, features: Features) -> None:
        self._features = features

    def top_ids(self, k: int, nodes: Sequence[int]) -> Any:
        return self._features.top_ids(k, nodes).roll(1, 0)

    @property
    def choices(self) -> tuple[int, ...]:
        choices = self._features.choices
        return (*choices[-1:], *choices[:-1])


LOOKUPS = (
    Mutant(
        "n-grams of the window have the keys of their right neighbours",
        with_result(GuessWindow, "advance", _keys_of_the_right),
        test_lookahead.test_window_pool_and_steps_equal_a_naive_reference,
        (5, 4, 3, True),
    ),
    Mutant(
        "the window never rests",
        with_arguments(LookaheadDrafter, "propose_row", lambda call: {"budget": DraftSize(call.budget)}),
        test_lookahead.test_a_window_rests_where_it_costs_more_than_it_brings,
    ),
    Mutant(
        "ngram copies from one token too early",
        with_arguments(ngram, "continuation", lambda call: {"start": call.start - 1}),
        test_ngram.test_draft_equals_the_scan,
    ),
    Mutant(
        "strings that end in other places share one state",
        replaced(SuffixAutomaton, "_split", lambda automaton, state, token, known: known),
        test_suffix.test_candidates_are_counted_in_all_contexts,
    ),
    Mutant(
        "outputs that were forgotten still count",
        skipped(SuffixTree, "remove"),
        test_suffix.test_the_history_counts_what_it_keeps,
    ),
    Mutant(
        "every node has the candidates of the node before it",
        told(TokenRecyclingDrafter, lambda result: replace(result, features=OfOtherNodes(result.features))),
        test_token_recycling.test_rows_are_the_targets_candidates_along_prompt_and_tree,
    ),
    Mutant(
        "all requests share one matrix, asked or not",
        with_arguments(TokenRecyclingDrafter, "__init__", lambda call: {"options": replace(call.options, shared=True)}),
        test_drafter_state.test_nothing_passes_from_one_call_to_the_next_unless_asked,
        ("token_recycling",),
    ),
)


def _told_of_everything(observe: Any) -> Any:
    """The merged tree goes to every part as if all of it were its own."""

    def wrong(composed: CompositeDrafter, rows: Sequence[Any], results: Sequence[Any]) -> None:
        for part in composed.parts:
            part.observe(rows, results)

    return wrong


_TOLD = test_composition.test_every_part_is_told_about_its_own_nodes
_RANKS = test_composition.test_a_union_ranks_nodes_by_what_became_of_nodes_like_them
COMPOSITION = (
    Mutant("parts are told about the nodes of all", wrapped(CompositeDrafter, "observe", _told_of_everything), _TOLD),
    Mutant(
        "parts get the choices of other nodes",
        told(CompositeDrafter, lambda result: replace(result, features=OfOtherNodes(result.features))),
        _TOLD,
    ),
    Mutant("nobody learns what a part is worth", skipped(AcceptanceModel, "came"), _RANKS, (0.9, 0.4)),
    Mutant(
        "parts are believed what they state",
        with_result(AcceptanceModel, "chances", lambda chances, call: list(scored(call.tree).scores or chances)),
        _RANKS,
        (0.9, 0.4),
    ),
)


def _passing_over(propose: Any) -> Any:
    """Rows that may not draft are left out, and the others are looked for where they would lie without them."""

    def wrong(drafter: SelfDrafter, rows: Sequence[Any], budgets: Sequence[int]) -> list[DraftTree]:
        some = [i for i, budget in enumerate(budgets) if budget > 0]
        moved = [Altered(rows[i], slot=place) for place, i in enumerate(some)]
        trees = dict(zip(some, propose(drafter, moved, [budgets[i] for i in some]), strict=True))
        return [trees.get(i) or DraftTree.root(row.pending, drafter.name) for i, row in enumerate(rows)]

    return wrong


def _of_the_token_before(variant: CausalLM, _: Call) -> CausalLM:
    forward = variant.forward
    variant.forward = lambda *given, **others: forward(*given, **others).roll(1, dims=1)
    return variant


SELF_DRAFTING = (
    Mutant(
        "rows behind one that may not draft take its place",
        wrapped(SelfDrafter, "propose", _passing_over),
        test_self_draft.test_a_row_that_may_not_draft_takes_nobodys_place,
        (1,),
    ),
    Mutant(
        "a text is scored by what is said behind the tokens before",
        with_result(CausalLM, "variant", _of_the_token_before),
        test_swift.test_the_score_is_the_share_of_tokens_that_the_set_would_have_drafted,
    ),
    Mutant(
        "the target itself is edited",
        replaced(reduced, "shadow", lambda model: model),
        test_self_draft.test_the_users_model_and_its_other_users_see_nothing,
    ),
    Mutant(
        "a search puts nothing back into the cache of the target",
        with_arguments(KVCache, "kept", lambda call: {"last_column": call.first_column}),
        test_swift.test_searching_changes_no_token,
        (32,),
    ),
)


def _all_bytes(state: State | None, call: Call) -> State | None:
    if state is None:
        return None
    return replace(state, open_bytes=max(call.folder.glob("shard-*.tokens")).stat().st_size)


BUILDING = Mutant(
    "tokens behind the last checkpoint stay",
    with_result(State, "read", _all_bytes),
    test_datastore_resume.test_tokens_behind_the_last_checkpoint_are_cut_off,
    (41, "tmp_path", "monkeypatch"),
)

MUTANTS = (*ROWS, *LOOKUPS, *COMPOSITION, *SELF_DRAFTING, BUILDING)


@pytest.mark.parametrize("mutant", [pytest.param(each, id=each.name) for each in MUTANTS])
def test_a_fault_of_a_method_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    """By an assertion of the test that the table names, and of no other kind of error."""
    with pytest.MonkeyPatch.context() as patch:
        mutant.apply(patch)
        try:
            mutant.test(patch, tmp_path)
        except AssertionError:
            return
    pytest.fail(f"{mutant.caught_by.__name__} does not notice that {mutant.name}")

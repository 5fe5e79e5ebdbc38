"""Faults particular to one method of drafting: each makes a named test of the suite fail.

Of tests that compare with a reference, by properties or in the engine, and so might hold whatever is wrong; literal
values speak for themselves. Verification protects the tokens from all of these faults (`always-wrong` in
`test_drafters.py`): they cost steps, memory or privacy. Faults that reach the target's cache are in
`selfdraft/test_self_draft_mutations.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import test_auto
import test_composition
import test_datastore_resume
import test_drafter_state
import test_drafters
import test_lookahead
import test_nasd
import test_ngram
import test_self_draft
import test_self_draft_state
import test_suffix
import test_swift
import test_token_recycling

from foredraft.drafters import compose
from foredraft.drafters.compose import CompositeDrafter, FirstDrafter, UnionDrafter
from foredraft.drafters.iterate.jacobi import JacobiDrafter
from foredraft.drafters.iterate.lookahead import GuessWindow, LookaheadDrafter
from foredraft.drafters.lookup import ngram, token_recycling
from foredraft.drafters.lookup.nasd import NasdDrafter
from foredraft.drafters.lookup.ngram import NGramDrafter, SuffixIndex
from foredraft.drafters.lookup.rest import RestDrafter
from foredraft.drafters.lookup.suffix import SuffixDrafter
from foredraft.drafters.lookup.token_recycling import TokenRecyclingDrafter
from foredraft.drafters.parts.adjacency import AdjacencyMatrix
from foredraft.drafters.parts.layer_set import LayerSet
from foredraft.drafters.parts.self_draft import SelfDrafter
from foredraft.drafters.selfdraft import layer_skip
from foredraft.engine.acceptance_model import AcceptanceModel, Rate, scored
from foredraft.engine.drafter import DraftSize, Features, StepResult
from foredraft.model.cache.ragged import KVCache
from foredraft.model.lm import CausalLM
from foredraft.model.sublayers import SkippableLayers
from foredraft.retrieval import suffix_tree
from foredraft.retrieval.automaton import SuffixAutomaton
from foredraft.retrieval.build import State
from foredraft.retrieval.suffix_tree import SuffixTree
from foredraft.sampling import distribution
from foredraft.tree import DraftTree
from mutants import (
    Altered,
    Apply,
    Call,
    Mutant,
    arguments_changed,
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

# -- rows ----------------------------------------------------------------------------------------------------------


def _all_like_the_first(call: Call) -> dict[str, Any]:
    return {"rows": [Altered(call.rows[0], id=row.id, state=row.state) for row in call.rows]}


_NEIGHBOURS = test_drafters.test_neighbours_and_predecessors_change_no_draft
_LEFT = test_drafters.test_nothing_is_left_of_rows_that_have_ended
_GREW = test_drafter_state.test_a_text_that_grew_is_drafted_for_like_one_that_was_given
_TOGETHER = test_drafters.test_rows_that_start_together_are_told_apart
OF_ROWS: dict[str, type] = {
    "ngram-tree": NGramDrafter,
    "nasd-tree": NasdDrafter,
    "jacobi": JacobiDrafter,
    "lookahead": LookaheadDrafter,
    "suffix": SuffixDrafter,
    "rest": RestDrafter,
    "token-recycling": TokenRecyclingDrafter,
}
ROWS = (
    *(Mutant(f"{name} keeps rows that have ended", keeps_rows(cls), _LEFT, (name,)) for name, cls in OF_ROWS.items()),
    Mutant("a composition keeps rows that have ended", keeps_rows(CompositeDrafter), _LEFT, ("union",)),
    *(
        Mutant(f"all rows share one state of {name}", one_state_for_all(OF_ROWS[name]), _NEIGHBOURS, (name,))
        for name in ("lookahead", "suffix", "rest")
    ),
    *(
        Mutant(f"{name} reads the prompt and nothing behind it", only_once(index, "extend"), _GREW, (name,))
        for name, index in (("ngram-tree", SuffixIndex), ("suffix", SuffixAutomaton), ("rest", SuffixAutomaton))
    ),
    Mutant(
        "rows that start together guess like the first of them",
        with_arguments(JacobiDrafter, "start", _all_like_the_first),
        _TOGETHER,
        ("jacobi-from-prompt",),
    ),
)

# -- lookups and lookahead -----------------------------------------------------------------------------------------


def _last_emitted(result: StepResult) -> StepResult:
    """As if the step had emitted one token."""
    return replace(result, emitted=result.emitted[-1:])


def _keys_of_the_right(ngrams: list[tuple[int, ...]], _: Call) -> list[tuple[int, ...]]:
    return [(right[0], *own[1:]) for own, right in zip(ngrams, [*ngrams[1:], *ngrams[:1]], strict=True)]


def _as_when_it_rested(call: Call) -> dict[str, Any]:
    if call.budget.arm == 0:
        vars(call.self)["last"] = call.budget
    return {"budget": vars(call.self).get("last", call.budget)}


_NAIVE = test_lookahead.test_window_pool_and_steps_equal_a_naive_reference
_WIDE = (5, 4, 3)
LOOKAHEAD = (
    Mutant(
        "n-grams of the window have the keys of their right neighbours",
        with_result(GuessWindow, "advance", _keys_of_the_right),
        _NAIVE,
        (*_WIDE, True),
    ),
    Mutant(
        "the window goes on with what was drafted instead of what was chosen",
        with_arguments(GuessWindow, "advance", lambda call: {"choices": call.tree.tokens}),
        _NAIVE,
        (*_WIDE, False),
    ),
    Mutant(
        "n-grams of the window do not reach the pool",
        with_result(GuessWindow, "advance", lambda ngrams, call: []),
        _NAIVE,
        (*_WIDE, False),
    ),
    Mutant(
        "only the last emitted token completes n-grams", told(LookaheadDrafter, _last_emitted), _NAIVE, (*_WIDE, True)
    ),
    Mutant(
        "the window never rests",
        with_arguments(LookaheadDrafter, "propose_row", lambda call: {"budget": DraftSize(call.budget)}),
        test_lookahead.test_a_window_rests_where_it_costs_more_than_it_brings,
    ),
    Mutant(
        "a window that has rested does not come back",
        with_arguments(LookaheadDrafter, "propose_row", _as_when_it_rested),
        test_lookahead.test_guesses_go_on_while_the_window_rests,
    ),
)
_REMEMBERED = test_suffix.test_the_history_counts_what_it_keeps
LOOKUP = (
    Mutant(
        "ngram copies from one token too early",
        with_arguments(ngram, "continuation", lambda call: {"start": call.start - 1}),
        test_ngram.test_draft_equals_the_scan,
    ),
    Mutant(
        "nasd counts only the last emitted token",
        told(NasdDrafter, _last_emitted),
        test_nasd.test_a_text_that_grew_equals_a_text_that_was_given,
    ),
    Mutant(
        "strings that end in other places share one state",
        replaced(SuffixAutomaton, "_split", lambda automaton, state, token, known: known),
        test_suffix.test_every_short_string_is_counted,
    ),
    Mutant(
        "the end of the text matches itself",
        with_result(
            SuffixAutomaton,
            "match",
            lambda place, call: place and place._replace(length=min(call.self.num_tokens, call.self.max_length - 1)),
        ),
        test_suffix.test_the_match_is_the_longest_end_that_occurred_before,
    ),
    # the next two leave something in the tree of the history, which is nowhere else to be seen
    Mutant(
        "the history keeps splits that nothing needs any more",
        replaced(suffix_tree, "_merge_only_child", lambda node: None),
        _REMEMBERED,
    ),
    Mutant("outputs that were forgotten still count", skipped(SuffixTree, "remove"), _REMEMBERED),
)


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


_ROWS = test_token_recycling.test_rows_are_the_targets_candidates_along_prompt_and_tree
_FILLED = test_token_recycling.test_the_tree_is_filled_breadth_first_with_what_is_known
TOKEN_RECYCLING = (
    Mutant(
        "a copy of a matrix is the matrix itself",
        replaced(AdjacencyMatrix, "copy", lambda matrix: matrix),
        test_drafter_state.test_a_request_leaves_what_requests_start_from_as_it_was,
    ),
    Mutant(
        "every node has the candidates of the node before it",
        told(TokenRecyclingDrafter, lambda result: replace(result, features=OfOtherNodes(result.features))),
        _ROWS,
    ),
    Mutant("nothing is learned from steps", skipped(TokenRecyclingDrafter, "observe"), _ROWS),
    Mutant("the text of the prompt is not learned", skipped(AdjacencyMatrix, "add_text"), _ROWS),
    Mutant(
        "all requests share one matrix, asked or not",
        with_arguments(TokenRecyclingDrafter, "__init__", lambda call: {"options": replace(call.options, shared=True)}),
        test_token_recycling.test_nothing_passes_from_one_request_to_another_unless_asked,
        ("prompt",),
    ),
    Mutant(
        "token 0 follows where no successor is known",
        with_result(AdjacencyMatrix, "after", lambda found, call: found or [0]),
        _FILLED,
    ),
    Mutant(
        "a static tree is filled one level too deep",
        with_arguments(token_recycling, "filled", lambda call: {"max_depth": call.max_depth + 1}),
        _FILLED,
    ),
)

# -- composition ---------------------------------------------------------------------------------------------------


def _read_by_all(read: Any) -> Any:
    def wrong(composed: CompositeDrafter, rows: Sequence[Any], chunks: Sequence[Any]) -> None:
        for part in composed.parts:
            part.start(rows, chunks)

    return wrong


def _of_its_own_nodes(result: StepResult, call: Call) -> StepResult:
    """Features of the text are those of the part's own accepted nodes, of the root where there are too few."""
    return replace(result, text_features=result.features.at([*result.path, *[0] * len(result.emitted)]))


def _told_of_everything(observe: Any) -> Any:
    """The merged tree goes to every part as if all of it were its own."""

    def wrong(composed: CompositeDrafter, rows: Sequence[Any], results: Sequence[StepResult]) -> None:
        for part in composed.parts:
            part.observe(rows, results)

    return wrong


def _with_chances(tree: DraftTree, call: Call) -> DraftTree:
    """What nodes were ranked by as what is stated of them."""
    chances: dict[tuple[int, ...], float] = {}
    for own, of_nodes in zip(call.trees, call.chances, strict=True):
        for node, chance in enumerate(of_nodes):
            chances[own.path_tokens(node)] = max(chance, chances.get(own.path_tokens(node), 0.0))
    return replace(tree, scores=tuple(chances[tree.path_tokens(node)] for node in range(len(tree))))


_TOLD = test_composition.test_every_part_is_told_about_its_own_nodes
_RANKS = test_composition.test_a_union_ranks_nodes_by_what_became_of_nodes_like_them
_BELIEVES = test_drafter_state.test_a_composition_learns_whom_to_believe
COMPOSITION = (
    Mutant("parts are told about the nodes of all", wrapped(CompositeDrafter, "observe", _told_of_everything), _TOLD),
    Mutant(
        "parts are told that nothing was accepted",
        told(
            CompositeDrafter,
            lambda result: replace(result, path=result.path[:1], text_features=result.committed),
        ),
        _TOLD,
    ),
    Mutant(
        "parts get the choices of other nodes",
        told(CompositeDrafter, lambda result: replace(result, features=OfOtherNodes(result.features))),
        _TOLD,
    ),
    Mutant(
        "a part that asked for accepted tokens gets features of its own nodes",
        with_result(compose, "own_result", _of_its_own_nodes),
        test_drafter_state.test_a_part_gets_features_of_what_was_emitted_whoever_drafted_it,
    ),
    Mutant(
        "a merged tree has one node too many",
        with_arguments(compose, "merged", lambda call: {"max_nodes": call.max_nodes + 1}),
        test_composition.test_a_merged_tree_holds_the_best_paths_of_all,
    ),
    Mutant(
        "a part reads a prompt unasked",
        wrapped(CompositeDrafter, "start", _read_by_all),
        test_composition.test_parts_read_prompts_if_they_want_to_and_are_asked_what_to_keep,
    ),
    Mutant("nobody learns what a part is worth", skipped(AcceptanceModel, "came"), _BELIEVES),
    Mutant(
        "parts are believed what they state",
        with_result(AcceptanceModel, "chances", lambda chances, call: list(scored(call.tree).scores or chances)),
        _RANKS,
        (0.9, 0.4),
    ),
    Mutant(
        "nodes of parts that state nothing are not known again once they are merged",
        replaced(compose, "scored", lambda tree: tree),
        _RANKS,
        (None, 0.4),
    ),
    Mutant(
        "merged trees state how often nodes are right instead of what parts state",
        with_result(compose, "merged", _with_chances),
        _RANKS,
        (0.9, 0.4),
    ),
    Mutant(
        "the way that was chosen is not followed",
        with_arguments(UnionDrafter, "propose", lambda call: {"budgets": [DraftSize(size) for size in call.budgets]}),
        test_auto.test_only_the_parts_of_the_arm_are_asked_and_their_drafts_merged,
    ),
    Mutant(
        "later parts of auto are always asked",
        replaced(UnionDrafter, "_budgets", lambda *call: call[-1]),
        test_auto.test_a_part_is_not_asked_where_another_promises_enough,
    ),
    Mutant(
        "the first draft is always enough",
        with_arguments(FirstDrafter, "__init__", lambda call: {"min_expected": 0.0}),
        _BELIEVES,
    ),
    Mutant(
        "whatever was drafted counts as accepted",
        with_arguments(Rate, "add", lambda call: {"outcome": 1.0}),
        _BELIEVES,
    ),
)

# -- self-drafting -------------------------------------------------------------------------------------------------


def _scores_with_other_noise(patch: pytest.MonkeyPatch) -> None:
    """In the search for a layer set only: everybody else draws with the noise of the true positions."""
    other = arguments_changed(lambda call: {"positions": [place - 1 for place in call.positions]})
    patch.setattr(
        layer_skip, "distribution", SimpleNamespace(argmax=distribution.argmax, choose=other(distribution.choose))
    )


def _variants(
    nodes: Callable[[Any], Any] = lambda nodes: nodes,
    logits: Callable[[Any], Any] = lambda logits: logits,
    **options: Any,
) -> Apply:
    """Variants of a model run over other nodes than they are given, with other options, or give other logits."""

    def spoiled(variant: CausalLM, _: Call) -> CausalLM:
        forward = variant.forward
        variant.forward = lambda given, cache, **others: logits(forward(nodes(given), cache, **{**others, **options}))
        return variant

    return with_result(CausalLM, "variant", spoiled)


def _passing_over(propose: Any) -> Any:
    """Rows that may not draft are left out, and the others are looked for where they would lie without them."""

    def wrong(drafter: SelfDrafter, rows: Sequence[Any], budgets: Sequence[int]) -> list[DraftTree]:
        some = [i for i, budget in enumerate(budgets) if budget > 0]
        moved = [Altered(rows[i], slot=place) for place, i in enumerate(some)]
        trees = dict(zip(some, propose(drafter, moved, [budgets[i] for i in some]), strict=True))
        return [trees.get(i) or DraftTree.root(row.pending, drafter.name) for i, row in enumerate(rows)]

    return wrong


def _of_the_first_row(call: Call) -> dict[str, Any]:
    """As many of its columns as there are."""
    length = call.self.lengths[0]
    return {"row": 0, "first_column": min(call.first_column, length), "last_column": min(call.last_column, length)}


_FAULTLESS = test_self_draft_state.test_the_search_scores_the_target_itself_as_faultless
SELF_DRAFTING = (
    Mutant(
        "drafted nodes stand one position too late",
        _variants(nodes=lambda nodes: replace(nodes, depths=nodes.depths + 1)),
        test_self_draft_state.test_a_variant_that_leaves_nothing_out_is_always_right,
        ("llama", 3),
    ),
    Mutant(
        "rows behind one that may not draft take its place",
        wrapped(SelfDrafter, "propose", _passing_over),
        test_self_draft_state.test_a_row_that_may_not_draft_takes_nobodys_place,
        (1,),
    ),
    Mutant(
        "early exit runs one layer too many",
        with_result(
            LayerSet, "exit_at", lambda found, call: replace(found, attention=found.attention[1:], mlp=found.mlp[1:])
        ),
        test_self_draft.test_early_exit_is_the_model_without_its_last_layers,
        ("eager",),
    ),
    Mutant(
        "attention is left out where the MLP should be",
        with_arguments(SkippableLayers, "leave_out", lambda call: {"attention": call.mlp, "mlp": call.attention}),
        test_self_draft.test_a_skipped_branch_adds_nothing,
        ("llama", "attention"),
    ),
    Mutant(
        "nothing is left out",
        skipped(SkippableLayers, "leave_out"),
        test_self_draft_state.test_four_bit_weights_and_a_layer_set_work_together,
    ),
    Mutant(
        "a text is scored by what is said behind the tokens before",
        _variants(logits=lambda logits: logits.roll(1, dims=1)),
        test_swift.test_the_score_is_the_share_of_tokens_that_the_set_would_have_drafted,
    ),
    Mutant("a sampled text is scored with the noise of other positions", _scores_with_other_noise, _FAULTLESS),
    Mutant(
        "columns of the first row are saved, whichever is scored",
        with_arguments(KVCache, "kept", _of_the_first_row),
        _FAULTLESS,
    ),
    Mutant("the first row is scored, whichever was meant", _variants(first_row=0), _FAULTLESS),
)

# -- building a datastore ------------------------------------------------------------------------------------------


def _all_bytes(state: State | None, call: Call) -> State | None:
    if state is None:
        return None
    return replace(state, open_bytes=max(call.folder.glob("shard-*.tokens")).stat().st_size)


_CUT = test_datastore_resume.test_tokens_behind_the_last_checkpoint_are_cut_off
BUILDING = (
    Mutant(
        "tokens behind the last checkpoint stay",
        with_result(State, "read", _all_bytes),
        _CUT,
        (41, "tmp_path", "monkeypatch"),
    ),
    Mutant(
        "a build goes on with the first piece of its file",
        with_result(State, "read", lambda state, call: state and replace(state, piece=0)),
        _CUT,
        (41, "tmp_path", "monkeypatch"),
    ),
)

MUTANTS = (*ROWS, *LOOKAHEAD, *LOOKUP, *TOKEN_RECYCLING, *COMPOSITION, *SELF_DRAFTING, *BUILDING)
ONE_OF_A_CLAIM = (
    "suffix keeps rows that have ended",
    "all rows share one state of lookahead",
    "ngram-tree reads the prompt and nothing behind it",
    "rows that start together guess like the first of them",
    "n-grams of the window have the keys of their right neighbours",
    "the window never rests",
    "ngram copies from one token too early",
    "strings that end in other places share one state",
    "outputs that were forgotten still count",
    "every node has the candidates of the node before it",
    "all requests share one matrix, asked or not",
    "parts are told about the nodes of all",
    "nobody learns what a part is worth",
    "parts are believed what they state",
    "rows behind one that may not draft take its place",
    "a text is scored by what is said behind the tokens before",
    "tokens behind the last checkpoint stay",
)
"""The other mutants run in the whole matrix."""


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(each, id=each.name, marks=() if each.name in ONE_OF_A_CLAIM else pytest.mark.full)
        for each in MUTANTS
    ],
)
def test_a_fault_of_a_method_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    """By an assertion of the test that the table names, and of no other kind of error."""
    with pytest.MonkeyPatch.context() as patch:
        mutant.apply(patch)
        try:
            mutant.test(patch, tmp_path)
        except AssertionError:
            return
    pytest.fail(f"{mutant.caught_by.__name__} does not notice that {mutant.name}")

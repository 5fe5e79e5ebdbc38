"""Faults particular to one method of drafting, each with the test that catches it.

Verification protects the tokens from all of them: they cost steps, memory or privacy. Faults that reach the target's
cache are in `drafters/selfdraft/test_self_draft_mutations.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import test_composition
import test_datastore_resume
import test_drafter_state
import test_jacobi
import test_lookahead
import test_nasd
import test_ngram
import test_self_draft
import test_self_draft_state
import test_suffix
import test_swift
import test_token_recycling

from foretoken.drafters.compose import union
from foretoken.drafters.compose.first import FirstDrafter
from foretoken.drafters.iterate.jacobi import Guesses, JacobiDrafter
from foretoken.drafters.iterate.lookahead import LookaheadDrafter, NgramPool, Window
from foretoken.drafters.lookup import ngram, token_recycling
from foretoken.drafters.lookup.nasd import RUNNER_UP_WEIGHT, NasdDrafter, NGramStorage, Successors
from foretoken.drafters.lookup.ngram import NGramDrafter, SuffixIndex
from foretoken.drafters.lookup.rest import RestDrafter
from foretoken.drafters.lookup.suffix import SuffixDrafter
from foretoken.drafters.lookup.token_recycling import TokenRecyclingDrafter
from foretoken.drafters.parts import composite
from foretoken.drafters.parts.adjacency import AdjacencyMatrix
from foretoken.drafters.parts.composite import Calibration, CompositeDrafter
from foretoken.drafters.parts.draft import GrowingDraft
from foretoken.drafters.parts.guesses import PromptTokens
from foretoken.drafters.parts.layer_set import LayerSet
from foretoken.drafters.selfdraft import layer_skip
from foretoken.drafters.selfdraft.layer_skip import LayerSkipDrafter
from foretoken.engine.drafter import Features, StepResult
from foretoken.law import sampling
from foretoken.model import quantize
from foretoken.model.cache.ragged import KVCache
from foretoken.model.lm import CausalLM
from foretoken.model.sublayers import SkippableLayers
from foretoken.retrieval import suffix_tree
from foretoken.retrieval.automaton import SuffixAutomaton
from foretoken.retrieval.datastore import Datastore
from foretoken.retrieval.history import OutputHistory
from foretoken.retrieval.resuming import State
from foretoken.retrieval.suffix_tree import SuffixTree
from foretoken.tree import DraftTree
from mutants import (
    Altered,
    Apply,
    Call,
    Mutant,
    arguments_changed,
    forgetful_of_ends,
    keeping,
    one_state_for_all,
    only_once,
    replaced,
    skipped,
    told,
    with_arguments,
    with_result,
    wrapped,
)

_NEIGHBOURS = test_drafter_state.test_neighbours_and_predecessors_change_no_draft
_LEFT = test_drafter_state.test_nothing_is_left_of_rows_that_have_ended
_GREW = test_drafter_state.test_a_text_that_grew_is_drafted_for_like_one_that_was_given


def _last_emitted(result: StepResult) -> StepResult:
    """As if the step had emitted one token."""
    return replace(result, emitted=result.emitted[-1:])


# -- jacobi --------------------------------------------------------------------------------------------------------


def _first_repeated(tokens: list[int], _: Call) -> list[int]:
    """2 1 1 1 becomes 2 1 2 2."""
    last = len(tokens) - 1
    while last > 0 and tokens[last - 1] == tokens[last]:
        last -= 1
    return [*tokens[: last + 1], *tokens[:1] * (len(tokens) - last - 1)]


def _all_like_the_first(call: Call) -> dict[str, Any]:
    return {"rows": [Altered(call.rows[0], id=row.id) for row in call.rows]}


_REFRESHED = test_jacobi.test_guesses_are_refreshed_from_the_choices_behind_what_was_emitted
JACOBI = keeping(
    "jacobi",
    Mutant(
        "what was emitted stays a guess",
        with_arguments(Guesses, "refresh", lambda call: {"num_emitted": 0}),
        _REFRESHED,
    ),
    Mutant(
        "the last emitted token stays a guess",
        with_arguments(Guesses, "refresh", lambda call: {"num_emitted": call.num_emitted - 1}),
        _REFRESHED,
    ),
    Mutant(
        "the choices of the target are not taken over",
        with_arguments(Guesses, "refresh", lambda call: {"choices": ()}),
        _REFRESHED,
    ),
    Mutant(
        "guesses behind the last choice are lost",
        with_arguments(Guesses, "refresh", lambda call: {"choices": [*call.choices, -1]}),
        _REFRESHED,
    ),
    Mutant(
        "token 0 is guessed where the target has no distribution",
        with_arguments(Guesses, "refresh", lambda call: {"choices": [max(token, 0) for token in call.choices]}),
        _REFRESHED,
        keeps_tokens="",
    ),
    Mutant(
        "new guesses repeat the first one instead of the last",
        with_result(Guesses, "first", _first_repeated),
        _REFRESHED,
    ),
    Mutant(
        "rows that start together guess like the first of them",
        with_arguments(JacobiDrafter, "start", _all_like_the_first),
        test_drafter_state.test_rows_that_start_together_are_told_apart,
        ("jacobi-from-prompt",),
    ),
    Mutant("jacobi keeps rows that have ended", forgetful_of_ends(JacobiDrafter), _LEFT, ("jacobi",)),
    Mutant(
        "the first token drawn from a prompt is drawn ever again",
        only_once(PromptTokens, "next"),
        test_jacobi.test_initial_guesses_from_the_prompt_are_its_tokens_and_repeatable,
        keeps_tokens="lookahead",
    ),
)

# -- lookahead -----------------------------------------------------------------------------------------------------


def _loses_the_last_column(of_full_window: bool) -> Apply:
    """Levels move up by losing their last column instead of the first: the first level of a full window, or all but
    the first and the newest one while it fills."""

    def make(advance: Any) -> Any:
        def wrong(window: Window, tree: DraftTree, choices: Sequence[int]) -> list[tuple[int, ...]]:
            before = [list(level) for level in window.levels]
            ngrams: list[tuple[int, ...]] = advance(window, tree, choices)
            after = window.levels
            is_full = len(after) == len(before)
            if is_full and of_full_window:
                after[0][:] = before[1][:-1]
            if not is_full and not of_full_window:
                for level, old in zip(after[1:], before[1:], strict=False):
                    level[:] = old[:-1]
            return ngrams

        return wrong

    return wrapped(Window, "advance", make)


def _keys_of_the_right(ngrams: list[tuple[int, ...]], _: Call) -> list[tuple[int, ...]]:
    return [(right[0], *own[1:]) for own, right in zip(ngrams, [*ngrams[1:], *ngrams[:1]], strict=True)]


def _middles_of_the_left(ngrams: list[tuple[int, ...]], _: Call) -> list[tuple[int, ...]]:
    lefts = [*ngrams[-1:], *ngrams[:-1]]
    return [(own[0], *left[1:-1], own[-1]) for own, left in zip(ngrams, lefts, strict=True)]


def _never_forgets_the_oldest(add: Any) -> Any:
    """Where the pool is full, what is new is what leaves it."""

    def wrong(pool: NgramPool, token: int, continuation: tuple[int, ...], *, is_read: bool = True) -> None:
        before = pool.continuations(token)
        add(pool, token, continuation, is_read=is_read)
        if set(before) - set(pool.continuations(token)):
            for one in reversed(before):
                add(pool, token, one, is_read=is_read)

    return wrong


def _loses_equal_siblings(child: Any) -> Any:
    """A node that is there already is taken for one that lies too deep."""

    def wrong(draft: GrowingDraft, parent: int | None, token: int) -> int | None:
        size = len(draft.tokens)
        node: int | None = child(draft, parent, token)
        return node if len(draft.tokens) > size else None

    return wrong


_NAIVE = test_lookahead.test_window_pool_and_steps_equal_a_naive_reference
_WIDE = (5, 4, 3)
_POOL = test_lookahead.test_the_pool_keeps_the_most_recent
LOOKAHEAD = keeping(
    "lookahead",
    Mutant(
        "the first level of a full window loses its last column",
        _loses_the_last_column(of_full_window=True),
        _NAIVE,
        (*_WIDE, True),
    ),
    Mutant(
        "levels of a window that fills lose their last column",
        _loses_the_last_column(of_full_window=False),
        _NAIVE,
        (*_WIDE, True),
    ),
    Mutant(
        "n-grams of the window have the keys of their right neighbours",
        with_result(Window, "advance", _keys_of_the_right),
        _NAIVE,
        (*_WIDE, True),
    ),
    Mutant(
        "the window goes on with what was drafted instead of what was chosen",
        with_arguments(Window, "advance", lambda call: {"choices": call.tree.tokens}),
        _NAIVE,
        (*_WIDE, False),
    ),
    Mutant(
        "n-grams of the window are mixed with their left neighbours",
        with_result(Window, "advance", _middles_of_the_left),
        _NAIVE,
        (*_WIDE, False),
    ),
    Mutant(
        "tokens that end a text are guessed",
        with_arguments(Window, "__init__", lambda call: {"ends": frozenset()}),
        test_lookahead.test_ends_and_failures_are_never_guessed,
    ),
    Mutant(
        "n-grams of the window do not reach the pool",
        with_result(Window, "advance", lambda ngrams, call: []),
        _NAIVE,
        (*_WIDE, False),
    ),
    Mutant(
        "only the last emitted token completes n-grams", told(LookaheadDrafter, _last_emitted), _NAIVE, (*_WIDE, True)
    ),
    Mutant(
        "the pool is asked about another token than the pending one",
        with_arguments(NgramPool, "continuations", lambda call: {"token": call.token + 1}),
        test_drafter_state.test_lookahead_proposes_what_followed_the_pending_token,
    ),
    Mutant("all rows share one window and one pool", one_state_for_all(LookaheadDrafter), _NEIGHBOURS, ("lookahead",)),
    Mutant("lookahead keeps rows that have ended", forgetful_of_ends(LookaheadDrafter), _LEFT, ("lookahead",)),
    Mutant(
        "what is seen again does not become the most recent",
        skipped(NgramPool, "add", lambda call: call.continuation in call.self.continuations(call.token)),
        _POOL,
    ),
    Mutant(
        "the pool keeps one n-gram too few",
        with_arguments(NgramPool, "__init__", lambda call: {"limit": call.limit - 1}),
        _POOL,
    ),
    Mutant("a full pool takes in nothing new", wrapped(NgramPool, "add", _never_forgets_the_oldest), _POOL),
    Mutant(
        "n-grams of the old text are learned again",
        with_arguments(NgramPool, "add_text", lambda call: {"first": 0}),
        _POOL,
    ),
    Mutant(
        "the oldest n-gram comes first", with_result(NgramPool, "continuations", lambda found, call: found[::-1]), _POOL
    ),
    Mutant(
        "a draft grows one level too deep",
        with_arguments(GrowingDraft, "__init__", lambda call: {"cap": call.cap + 1}),
        test_lookahead.test_columns_beyond_a_cut_give_no_ngram_and_start_anew,
        keeps_tokens="",
    ),
    Mutant(
        "a cell whose node is there already ends its column",
        wrapped(GrowingDraft, "child", _loses_equal_siblings),
        _NAIVE,
        (*_WIDE, True),
    ),
    Mutant(
        "a path has one node too many",
        with_arguments(GrowingDraft, "add_path", lambda call: {"max_nodes": call.max_nodes + 1}),
        test_drafter_state.test_a_path_ends_where_the_nodes_do,
    ),
)

# -- rest ----------------------------------------------------------------------------------------------------------

_READS = test_drafter_state.test_rest_reads_what_followed_the_end_of_the_text
REST = keeping(
    "rest",
    Mutant(
        "the datastore is asked about the text before the pending token",
        with_arguments(Datastore, "query", lambda call: {"context": call.context[:-1]}),
        _READS,
    ),
    Mutant(
        "rest ignores its budget",
        with_arguments(RestDrafter, "propose", lambda call: {"budgets": [99] * len(call.rows)}),
        _READS,
        keeps_tokens="",
    ),
    Mutant(
        "the datastore is never asked",
        with_result(Datastore, "query", lambda match, call: None),
        test_drafter_state.test_rest_merges_the_datastore_with_the_text,
    ),
    Mutant("rest reads the prompt and nothing behind it", only_once(SuffixAutomaton, "extend"), _GREW, ("rest",)),
    Mutant("all rows share one text of rest", one_state_for_all(RestDrafter), _NEIGHBOURS, ("rest",)),
    Mutant("rest keeps rows that have ended", forgetful_of_ends(RestDrafter), _LEFT, ("rest",)),
)

# -- suffix --------------------------------------------------------------------------------------------------------


def _counting_anew(split: Any) -> Any:
    def wrong(automaton: SuffixAutomaton, *args: Any) -> Any:
        clone = split(automaton, *args)
        automaton._count[clone] = 0
        return clone

    return wrong


def _with_prompts(call: Call) -> dict[str, Any]:
    return {"rows": [Altered(row, output_ids=row.token_ids) for row in call.rows]}


_COUNTED = test_suffix.test_every_short_string_is_counted
_REMEMBERED = test_suffix.test_the_history_counts_what_it_keeps
_BOUNDED = test_suffix.test_the_history_is_bounded_and_forgets_the_least_recently_used
SUFFIX = keeping(
    "suffix",
    Mutant("suffix reads the prompt and nothing behind it", only_once(SuffixAutomaton, "extend"), _GREW, ("suffix",)),
    Mutant(
        "a match is worth as many drafted tokens as it has, whatever the factor",
        with_arguments(SuffixDrafter, "__init__", lambda call: {"max_spec_factor": 1.0}),
        test_suffix.test_a_match_of_n_tokens_is_worth_so_many_drafted_ones,
    ),
    Mutant(
        "the history learns prompts too",
        with_arguments(SuffixDrafter, "forget", _with_prompts),
        test_suffix.test_shared_requests_learn_from_outputs_and_not_from_prompts,
        keeps_tokens="suffix-shared",
    ),
    Mutant("suffix keeps rows that have ended", forgetful_of_ends(SuffixDrafter), _LEFT, ("suffix",)),
    Mutant(
        "an output whose continuation was accepted does not count as used",
        told(SuffixDrafter, lambda result: replace(result, path=result.path[:1])),
        test_drafter_state.test_an_output_that_was_right_is_forgotten_later,
        keeps_tokens="suffix-shared",
    ),
    Mutant("all rows share one text of suffix", one_state_for_all(SuffixDrafter), _NEIGHBOURS, ("suffix",)),
    # the next two are steps of the algorithm itself, which shows outside in nothing but its counts
    Mutant(
        "strings that end in other places share one state",
        replaced(SuffixAutomaton, "_split", lambda automaton, state, token, known: known),
        _COUNTED,
    ),
    Mutant("a state that is split off counts anew", wrapped(SuffixAutomaton, "_split", _counting_anew), _COUNTED),
    Mutant(
        "nobody notes when a string was seen last",
        with_result(SuffixAutomaton, "candidates", lambda found, call: [one._replace(recency=0) for one in found]),
        test_suffix.test_of_equal_successors_the_latest_comes_first,
    ),
    Mutant(
        "the end of the text matches itself",
        with_result(
            SuffixAutomaton,
            "match",
            lambda place, call: place and place._replace(length=min(call.self.num_tokens, call.self.max_length - 1)),
        ),
        test_suffix.test_the_match_is_the_longest_end_that_occurred_before,
        keeps_tokens="",
    ),
    # the next two leave something in the tree of the history, which is nowhere else to be seen
    Mutant(
        "the history keeps splits that nothing needs any more",
        replaced(suffix_tree, "_merge_only_child", lambda node: None),
        _REMEMBERED,
        keeps_tokens="suffix-shared",
    ),
    Mutant(
        "outputs that were forgotten still count",
        skipped(SuffixTree, "remove"),
        _REMEMBERED,
        keeps_tokens="suffix-shared",
    ),
    Mutant(
        "the history believes that it holds a token more than it does",
        with_result(OutputHistory, "num_tokens", lambda count, call: count + 1),
        _BOUNDED,
        keeps_tokens="suffix-shared",
    ),
    Mutant("use does not keep an output", skipped(OutputHistory, "touch"), _BOUNDED, keeps_tokens="suffix-shared"),
    Mutant(
        "a place in the history is trusted whatever was added meanwhile",
        with_arguments(
            OutputHistory, "candidates", lambda call: {"spot": call.spot._replace(version=call.self.num_added)}
        ),
        test_drafter_state.test_a_place_in_the_history_outlives_what_is_added_meanwhile,
        keeps_tokens="suffix-shared",
    ),
)

# -- token recycling -----------------------------------------------------------------------------------------------


def _oldest_first(add_text: Any) -> Any:
    def wrong(matrix: AdjacencyMatrix, tokens: Sequence[int]) -> None:
        for pair in reversed(list(pairwise(tokens))):
            add_text(matrix, pair)

    return wrong


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
_EQUAL = test_token_recycling.test_of_equal_tokens_the_accepted_node_counts
_PASSES = test_token_recycling.test_nothing_passes_from_one_request_to_another_unless_asked
_FILLED = test_token_recycling.test_the_tree_is_filled_breadth_first_with_what_is_known
TOKEN_RECYCLING = keeping(
    "token-recycling",
    Mutant(
        "of equal tokens the last node counts, accepted or not",
        with_result(token_recycling, "last_of_all", lambda order, call: sorted(order)),
        _EQUAL,
    ),
    Mutant(
        "candidates stand in the reverse order of their tokens",
        with_arguments(AdjacencyMatrix, "update", lambda call: {"top_ids": call.top_ids[::-1]}),
        _EQUAL,
    ),
    Mutant(
        "the oldest successor in a text comes first",
        wrapped(AdjacencyMatrix, "add_text", _oldest_first),
        test_token_recycling.test_a_text_goes_before_what_is_known,
    ),
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
    Mutant(
        "candidates of the prompt stand behind other tokens",
        with_arguments(
            TokenRecyclingDrafter,
            "read",
            lambda call: {"chunks": [replace(chunk, features=OfOtherNodes(chunk.features)) for chunk in call.chunks]},
        ),
        test_drafter_state.test_candidates_of_the_prompt_stand_behind_their_tokens,
    ),
    Mutant("the text of the prompt is not learned", skipped(AdjacencyMatrix, "add_text"), _ROWS),
    Mutant(
        "all requests share one matrix, asked or not",
        with_arguments(TokenRecyclingDrafter, "__init__", lambda call: {"shared": True}),
        _PASSES,
        ("prompt",),
    ),
    Mutant("token recycling keeps rows that have ended", forgetful_of_ends(TokenRecyclingDrafter), _PASSES, ("empty",)),
    Mutant(
        "token 0 follows where no successor is known",
        with_result(AdjacencyMatrix, "after", lambda found, call: found or [0]),
        _FILLED,
    ),
    Mutant(
        "a static tree is filled one level too deep",
        with_arguments(token_recycling, "filled", lambda call: {"max_depth": call.max_depth + 1}),
        _FILLED,
        keeps_tokens="",
    ),
)

# -- ngram ---------------------------------------------------------------------------------------------------------


def _ranked(
    orders: Callable[[Sequence[int]], list[int]] = lambda orders: sorted(orders, reverse=True),
    pick: Callable[[list[Any]], list[Any]] = lambda found: found,
) -> Apply:
    """Continuations in another order: of suffixes by length, and of each one's occurrences, given most recent first."""

    def make(original: Any) -> Any:
        class Ranked(original):  # type: ignore[misc]
            def __init__(self, lengths: Sequence[int], **options: Any) -> None:
                super().__init__(lengths, **options)
                self.parts = [original([length], **options) for length in orders(lengths)]

            def extend(self, tokens: Sequence[int]) -> None:
                for part in self.parts:
                    part.extend(tokens)

            def continuations(self, tokens: Sequence[int], length: int, limit: int) -> list[tuple[int, ...]]:
                found = [one for part in self.parts for one in pick(part.continuations(tokens, length, 99))]
                return list(dict.fromkeys(found))[:limit]

        return Ranked

    return wrapped(ngram, "SuffixIndex", make)


def _blind_across_steps(extend: Any) -> Any:
    """N-grams that begin in one step and end in another are never seen."""
    known: WeakKeyDictionary[SuffixIndex, int] = WeakKeyDictionary()

    def wrong(index: SuffixIndex, tokens: Sequence[int]) -> None:
        first = known.get(index, 0)
        known[index] = len(tokens)
        extend(index, [-1] * first + list(tokens[first:]))

    return wrong


_NGRAM_GREW = test_ngram.test_a_text_that_grew_equals_a_text_that_was_given
_SCAN = test_ngram.test_draft_equals_the_scan
NGRAM = keeping(
    "ngram",
    Mutant("ngram reads the prompt and nothing behind it", only_once(SuffixIndex, "extend"), _NGRAM_GREW),
    Mutant(
        "ngram keeps rows that have ended",
        forgetful_of_ends(NGramDrafter),
        test_ngram.test_rows_are_apart_and_leave_nothing_behind,
    ),
    Mutant(
        "n-grams across the end of a step are not seen",
        wrapped(SuffixIndex, "extend", _blind_across_steps),
        _NGRAM_GREW,
    ),
    Mutant("the shortest suffix comes first", _ranked(orders=sorted), _SCAN),
    Mutant("only the latest occurrence of a suffix is known", _ranked(pick=lambda found: found[:1]), _SCAN),
    Mutant("the earliest occurrence of a suffix comes first", _ranked(pick=lambda found: found[::-1]), _SCAN),
    Mutant(
        "a copy begins one token too early",
        with_arguments(ngram, "continuation", lambda call: {"start": call.start - 1}),
        _SCAN,
    ),
)

# -- nasd ----------------------------------------------------------------------------------------------------------


def _following_the_newest(successors: Any) -> Any:
    """What a node follows is read off the node that was looked at before it, not off its parent."""
    before: WeakKeyDictionary[NGramStorage, tuple[int, ...]] = WeakKeyDictionary()

    def wrong(storage: NGramStorage, tokens: Sequence[int]) -> Any:
        mixed = (*before.get(storage, tokens[:-1]), tokens[-1])[-len(tokens) :]
        before[storage] = mixed
        return successors(storage, mixed)

    return wrong


def _counting_twice(add: Any) -> Any:
    """What was observed counts as a runner-up besides, as which the target always ranks what it says greedily."""

    def wrong(successors: Successors, token: int, weight: float) -> None:
        if weight > RUNNER_UP_WEIGHT:
            add(successors, token, RUNNER_UP_WEIGHT)
        add(successors, token, weight)

    return wrong


_NASD_GREW = test_nasd.test_a_text_that_grew_equals_a_text_that_was_given
NASD = keeping(
    "nasd",
    Mutant("only the last emitted token counts", told(NasdDrafter, _last_emitted), _NASD_GREW),
    Mutant(
        "nasd keeps rows that have ended",
        forgetful_of_ends(NasdDrafter),
        test_nasd.test_rows_are_apart_and_leave_nothing_behind,
    ),
    Mutant(
        "runners-up are learned one place too late",
        with_arguments(NGramStorage, "extend", lambda call: {"ranked": [*call.ranked[-1:], *call.ranked[:-1]]}),
        test_drafter_state.test_runners_up_are_learned_in_their_places,
    ),
    Mutant(
        "the chosen token counts as a runner-up too",
        wrapped(Successors, "add", _counting_twice),
        test_nasd.test_the_chosen_token_is_not_counted_as_a_runner_up,
    ),
    Mutant(
        "a node of a tree follows the node before it and not its parent",
        wrapped(NGramStorage, "successors", _following_the_newest),
        test_drafter_state.test_every_node_of_a_tree_of_counts_follows_its_own_path,
    ),
)

# -- composition ---------------------------------------------------------------------------------------------------

Trees = Sequence[DraftTree]
Scores = Sequence[Sequence[float]]


def _read_by_all(read: Any) -> Any:
    def wrong(composed: CompositeDrafter, rows: Sequence[Any], chunks: Sequence[Any]) -> None:
        for part in composed.parts:
            part.read(rows, chunks)

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


def _of_the_last_part(call: Call) -> dict[str, Any]:
    """Every node has the score that the last part which knows it gives."""
    last = {
        tree.path_tokens(node): score
        for tree, own in zip(call.trees, call.scores, strict=True)
        for node, score in enumerate(own)
    }
    return {"scores": [[last[tree.path_tokens(node)] for node in range(len(tree))] for tree in call.trees]}


def _worst_first(merged: Any) -> Any:
    def wrong(trees: Trees, scores: Scores, max_nodes: int, source: str = "") -> DraftTree:
        whole = merged(trees, scores, sum(map(len, trees)), source)
        score_of = {whole.path_tokens(node): score for node, score in enumerate(whole.scores)}
        worst = merged(trees, [[1.0 - score for score in own] for own in scores], max_nodes, source)
        return replace(worst, scores=tuple(score_of[worst.path_tokens(node)] for node in range(len(worst))))

    return wrong


def _without_parents(scores: tuple[float, ...], call: Call) -> tuple[float, ...]:
    above = [scores[parent] for parent in call.tree.parents[1:]]
    return (1.0, *(own / up if up else 0.0 for own, up in zip(scores[1:], above, strict=True)))


_TOLD = test_composition.test_every_part_is_told_about_its_own_nodes
_BEST = test_composition.test_a_merged_tree_holds_the_best_paths_of_all
_PARTS = test_composition.test_parts_read_prompts_if_they_want_to_and_are_asked_what_to_keep
_BELIEVES = test_drafter_state.test_a_composition_learns_whom_to_believe
COMPOSITION = keeping(
    "union",
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
        with_result(composite, "own_result", _of_its_own_nodes),
        test_drafter_state.test_a_part_gets_features_of_what_was_emitted_whoever_drafted_it,
    ),
    Mutant(
        "the last part that knows a node decides on its score",
        with_arguments(union, "merged", _of_the_last_part),
        _BEST,
    ),
    Mutant(
        "a merged tree has one node too many",
        with_arguments(union, "merged", lambda call: {"max_nodes": call.max_nodes + 1}),
        _BEST,
    ),
    Mutant("the least promising nodes come first", wrapped(union, "merged", _worst_first), _BEST),
    Mutant("a part reads a prompt unasked", wrapped(CompositeDrafter, "read", _read_by_all), _PARTS, keeps_tokens=""),
    Mutant("nobody learns what a part is worth", skipped(Calibration, "observe"), _BELIEVES),
    Mutant("a composition keeps rows that have ended", forgetful_of_ends(CompositeDrafter), _LEFT, ("union",)),
    Mutant(
        "no draft is ever enough",
        with_arguments(FirstDrafter, "__init__", lambda call: {"min_expected": float("inf")}),
        test_composition.test_a_dear_drafter_is_not_asked_where_a_cheap_one_knows_enough,
        keeps_tokens="first",
    ),
    Mutant(
        "the first draft is always enough",
        with_arguments(FirstDrafter, "__init__", lambda call: {"min_expected": 0.0}),
        _BELIEVES,
        keeps_tokens="first",
    ),
    Mutant(
        "whatever was drafted counts as accepted",
        with_arguments(Calibration, "observe", lambda call: {"path": range(len(call.tree))}),
        _BELIEVES,
    ),
    Mutant(
        "the score of a node leaves its parent out",
        with_result(Calibration, "scores", _without_parents),
        test_composition.test_calibration_moves_from_what_is_stated_to_what_happens,
    ),
)


def _scores_with_other_noise(patch: pytest.MonkeyPatch) -> None:
    """In the search for a layer set only: everybody else draws with the noise of the true positions."""
    other = arguments_changed(lambda call: {"positions": [place - 1 for place in call.positions]})
    patch.setattr(layer_skip, "sampling", SimpleNamespace(argmax=sampling.argmax, choose=other(sampling.choose)))


# -- self-drafting -------------------------------------------------------------------------------------------------


def _variants(
    nodes: Callable[[Any], Any] = lambda nodes: nodes,
    logits: Callable[[Any], Any] = lambda logits: logits,
    **options: Any,
) -> Apply:
    """Variants of a model run over other nodes than they are given, with other options, or give other logits."""

    def spoiled(variant: CausalLM, _: Call) -> CausalLM:
        forward = variant.forward
        variant.forward = lambda given, cache, **others: logits(  # type: ignore[method-assign]
            forward(nodes(given), cache, **{**others, **options})
        )
        return variant

    return with_result(CausalLM, "variant", spoiled)


def _passing_over(propose: Any) -> Any:
    """Rows that may not draft are left out, and the others move up in the batch."""

    def wrong(drafter: LayerSkipDrafter, rows: Sequence[Any], budgets: Sequence[int]) -> list[DraftTree]:
        some = [i for i, budget in enumerate(budgets) if budget > 0]
        trees = dict(zip(some, propose(drafter, [rows[i] for i in some], [budgets[i] for i in some]), strict=True))
        return [trees.get(i) or DraftTree.root(row.pending, drafter.name) for i, row in enumerate(rows)]

    return wrong


def _putting_nothing_back(leave_out: Any) -> Any:
    """What was left out once stays out."""
    gone: WeakKeyDictionary[SkippableLayers, tuple[set[int], set[int]]] = WeakKeyDictionary()

    def wrong(layers: SkippableLayers, attention: Sequence[int], mlp: Sequence[int]) -> None:
        without_attention, without_mlp = gone.setdefault(layers, (set(), set()))
        without_attention.update(attention)
        without_mlp.update(mlp)
        leave_out(layers, without_attention, without_mlp)

    return wrong


def _never_going_back(leave_out: Any) -> Any:
    """A set that was in use before is not taken into use again."""
    used: WeakKeyDictionary[SkippableLayers, set[Any]] = WeakKeyDictionary()

    def wrong(layers: SkippableLayers, attention: Sequence[int], mlp: Sequence[int]) -> None:
        layer_set = (tuple(attention), tuple(mlp))
        if layer_set not in used.setdefault(layers, set()):
            leave_out(layers, *layer_set)
        used[layers].add(layer_set)

    return wrong


def _of_the_first_row(call: Call) -> dict[str, Any]:
    """As many of its columns as there are."""
    length = call.self.lengths[0]
    return {"row": 0, "first_column": min(call.first_column, length), "last_column": min(call.last_column, length)}


_RIGHT = test_self_draft_state.test_a_variant_that_leaves_nothing_out_is_always_right
_FAULTLESS = test_self_draft_state.test_the_search_scores_the_target_itself_as_faultless
SELF_DRAFTING = keeping(
    "swift",
    Mutant(
        "drafted nodes stand one position too late",
        _variants(nodes=lambda nodes: replace(nodes, depths=nodes.depths + 1)),
        _RIGHT,
        ("llama", 3),
        keeps_tokens="layer-skip-tree",
    ),
    Mutant(
        "rows behind one that may not draft take its place",
        wrapped(LayerSkipDrafter, "propose", _passing_over),
        test_self_draft_state.test_a_row_that_may_not_draft_takes_nobodys_place,
        (1,),
        keeps_tokens="layer-skip-tree",
    ),
    Mutant(
        "early exit runs one layer too many",
        with_result(
            LayerSet, "exit_at", lambda found, call: replace(found, attention=found.attention[1:], mlp=found.mlp[1:])
        ),
        test_self_draft.test_early_exit_is_the_model_without_its_last_layers,
        ("eager",),
        keeps_tokens="",
    ),
    Mutant(
        "attention is left out where the MLP should be",
        with_arguments(SkippableLayers, "leave_out", lambda call: {"attention": call.mlp, "mlp": call.attention}),
        test_self_draft.test_a_skipped_branch_adds_nothing,
        ("llama", "attention"),
        keeps_tokens="layer-skip-tree",
    ),
    Mutant(
        "what was left out is not put back",
        wrapped(SkippableLayers, "leave_out", _putting_nothing_back),
        test_self_draft_state.test_what_was_left_out_is_put_back_before_something_else_is,
    ),
    Mutant(
        "nothing is left out",
        skipped(SkippableLayers, "leave_out"),
        test_self_draft_state.test_four_bit_weights_and_a_layer_set_work_together,
        keeps_tokens="quantized",
    ),
    Mutant(
        "no weight is quantised",
        replaced(quantize, "quantize_linears", lambda *args, **options: 0),
        test_self_draft.test_the_output_embedding_keeps_its_weights_unless_asked,
        keeps_tokens="quantized",
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
    Mutant(
        "drafting goes on with the set that was tried last",
        wrapped(SkippableLayers, "leave_out", _never_going_back),
        test_self_draft_state.test_drafting_goes_on_with_the_best_set_after_a_trial,
    ),
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

MUTANTS = {
    "building": BUILDING,
    "jacobi": JACOBI,
    "lookahead": LOOKAHEAD,
    "rest": REST,
    "suffix": SUFFIX,
    "token_recycling": TOKEN_RECYCLING,
    "ngram": NGRAM,
    "nasd": NASD,
    "composition": COMPOSITION,
    "self_drafting": SELF_DRAFTING,
}

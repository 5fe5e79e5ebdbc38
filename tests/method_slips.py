"""Faults particular to one method of drafting, each with the test that catches it.

Verification protects the tokens from all of them: they cost steps, memory or privacy. Faults that reach the target's
cache are in `integration/test_self_draft_mutations.py`.
"""

from __future__ import annotations

from foretoken.drafters import composition, layer_skip, ngram, ngram_pool, quantized_self, token_recycling
from foretoken.drafters.adjacency import AdjacencyMatrix
from foretoken.drafters.calibration import Calibration
from foretoken.drafters.composition import CompositeDrafter, FirstDrafter
from foretoken.drafters.guesses import PromptTokens
from foretoken.drafters.jacobi import Guesses, JacobiDrafter
from foretoken.drafters.layer_skip import LayerSet
from foretoken.drafters.lookahead import LookaheadDrafter, Window
from foretoken.drafters.nasd import NasdDrafter, NGramStorage
from foretoken.drafters.ngram import NGramDrafter
from foretoken.drafters.rest import RestDrafter
from foretoken.drafters.self_draft import SelfDrafter
from foretoken.drafters.suffix import SuffixDrafter
from foretoken.drafters.swift import SwiftDrafter
from foretoken.drafters.token_recycling import TokenRecyclingDrafter
from foretoken.drafters.treeshape import TreeShape
from foretoken.drafters.trie import Trie
from foretoken.engine.errors import ShapeError, TreeError
from foretoken.engine.sublayers import SkippableLayers
from foretoken.retrieval import build as building
from foretoken.retrieval.automaton import SuffixAutomaton
from foretoken.retrieval.history import OutputHistory
from integration import test_self_draft, test_self_draft_state, test_swift
from slips import Slip
from unit import (
    test_composition,
    test_datastore_resume,
    test_drafter_state,
    test_jacobi,
    test_lookahead,
    test_nasd,
    test_ngram,
    test_suffix,
    test_token_recycling,
)

_REFRESHED = test_jacobi.test_guesses_are_refreshed_from_the_choices_behind_what_was_emitted
_NEIGHBOURS = test_drafter_state.test_neighbours_and_predecessors_change_no_draft
_TOGETHER = test_drafter_state.test_rows_that_start_together_are_told_apart
_LEFT = test_drafter_state.test_nothing_is_left_of_rows_that_have_ended
_GREW = test_drafter_state.test_a_text_that_grew_is_drafted_for_like_one_that_was_given

JACOBI = (
    Slip(Guesses.refresh, "[num_emitted:]", "", _REFRESHED, keeps_tokens="jacobi"),
    Slip(Guesses.refresh, "[num_emitted:]", "[num_emitted - 1 :]", _REFRESHED, keeps_tokens="jacobi"),
    Slip(
        Guesses.refresh, "[*choices, *self._tokens[len(choices) :]]", "self._tokens", _REFRESHED, keeps_tokens="jacobi"
    ),
    Slip(Guesses.refresh, "self._tokens[len(choices) :]", "()", _REFRESHED, keeps_tokens="jacobi"),
    Slip(Guesses.refresh, "tokens[: tokens.index(-1)] if -1 in tokens else tokens", "tokens", _REFRESHED),
    Slip(Guesses._initial, "self._tokens[-1] if self._tokens else", "", _REFRESHED, keeps_tokens="jacobi"),
    Slip(
        JacobiDrafter.start,
        "Guesses(row,",
        "Guesses(rows[0],",
        _TOGETHER,
        ("jacobi-from-prompt",),
        keeps_tokens="jacobi",
    ),
    Slip(JacobiDrafter.forget, "self._guesses_of.pop(row.id, None)", "pass", _LEFT, ("jacobi",), keeps_tokens="jacobi"),
    Slip(
        PromptTokens.next,
        "next(self._draws)",
        "0",
        test_jacobi.test_initial_guesses_from_the_prompt_are_its_tokens_and_repeatable,
        keeps_tokens="lookahead",
    ),
)

_NAIVE = test_lookahead.test_window_pool_and_steps_equal_a_naive_reference
_WIDE = (5, 4, 3)
_POOL = test_lookahead.test_the_pool_keeps_the_most_recent
LOOKAHEAD = (
    Slip(
        Window._shift,
        "self._first = first[1:]",
        "self._first = first[:-1]",
        _NAIVE,
        (*_WIDE, True),
        keeps_tokens="lookahead",
    ),
    Slip(
        Window._shift,
        "[level[1:] for level in",
        "[level[:-1] for level in",
        _NAIVE,
        (*_WIDE, True),
        keeps_tokens="lookahead",
    ),
    Slip(
        Window.advance,
        "[tree.tokens[0], *self._first]",
        "[*self._first, tree.tokens[0]]",
        _NAIVE,
        (*_WIDE, True),
        keeps_tokens="lookahead",
    ),
    Slip(
        Window.advance,
        "else choices[node]) for",
        "else tree.tokens[node]) for",
        _NAIVE,
        (*_WIDE, False),
        keeps_tokens="lookahead",
    ),
    Slip(
        Window.advance,
        "level[column] for level",
        "level[column - 1] for level",
        _NAIVE,
        (*_WIDE, False),
        keeps_tokens="lookahead",
    ),
    Slip(
        Window._guess,
        " or token in self._ends",
        "",
        test_lookahead.test_ends_and_failures_are_never_guessed,
        keeps_tokens="lookahead",
    ),
    Slip(
        LookaheadDrafter.observe,
        "self._pool_of[row.id].add(ngram[0], ngram[1:])",
        "pass",
        _NAIVE,
        (*_WIDE, False),
        keeps_tokens="lookahead",
    ),
    Slip(LookaheadDrafter.observe, "len(result.emitted)", "1", _NAIVE, (*_WIDE, True), keeps_tokens="lookahead"),
    Slip(
        LookaheadDrafter.propose_row,
        ".continuations(row.pending)",
        ".continuations(row.token_ids[0])",
        test_drafter_state.test_lookahead_proposes_what_followed_the_pending_token,
        keeps_tokens="lookahead",
    ),
    Slip(
        LookaheadDrafter.start,
        "self._pool_of[row.id] = ",
        "self._pool_of[row.id] = self._pool_of.get(row.id - 2) or ",
        _NEIGHBOURS,
        ("lookahead",),
        keeps_tokens="lookahead",
    ),
    Slip(
        LookaheadDrafter.forget,
        "self._pool_of.pop(row.id, None)",
        "pass",
        _LEFT,
        ("lookahead",),
        keeps_tokens="lookahead",
    ),
    Slip(ngram_pool.NgramPool.add, "known.pop(continuation, None)", "pass", _POOL, keeps_tokens="lookahead"),
    Slip(ngram_pool.NgramPool.add, "> self._limit", ">= self._limit", _POOL, keeps_tokens="lookahead"),
    Slip(ngram_pool.NgramPool.add, "del known[next(iter(known))]", "known.popitem()", _POOL, keeps_tokens="lookahead"),
    Slip(ngram_pool.NgramPool.add_text, "max(first, self._length)", "self._length", _POOL, keeps_tokens="lookahead"),
    Slip(ngram_pool.NgramPool.continuations, "reversed(", "iter(", _POOL, keeps_tokens="lookahead"),
    Slip(
        Trie.add,
        ">= self._max_depth",
        "> self._max_depth",
        test_lookahead.test_columns_beyond_a_cut_give_no_ngram_and_start_anew,
    ),
    Slip(
        Trie.add,
        "self._child_of.get((parent, token))",
        "None",
        test_lookahead.test_equal_siblings_merge_and_every_cell_keeps_its_node,
        raises=TreeError,
    ),
    Slip(
        Trie.add_path,
        "len(self) >= max_nodes",
        "len(self) > max_nodes",
        test_drafter_state.test_a_path_ends_where_the_nodes_do,
        keeps_tokens="lookahead",
    ),
)

_READS = test_drafter_state.test_rest_reads_what_followed_the_end_of_the_text
_MERGES = test_drafter_state.test_rest_merges_the_datastore_with_the_text
REST = (
    Slip(
        RestDrafter._retrieved,
        "row.token_ids[-self.lookup.match_max :]",
        "row.token_ids[-self.lookup.match_max : -1]",
        _READS,
        keeps_tokens="rest",
    ),
    Slip(
        RestDrafter.propose_row, "self.length_policy.length(row, budget)", "self.length_policy.length(row, 99)", _READS
    ),
    Slip(RestDrafter.propose_row, "[own, Root(Children.of_tree(retrieved), 0)]", "[own]", _MERGES, keeps_tokens="rest"),
    Slip(RestDrafter._own_text, "text.extend(row.token_ids)", "pass", _GREW, ("rest",), keeps_tokens="rest"),
    Slip(
        RestDrafter.start,
        "self._text_of[row.id] = ",
        "self._text_of[row.id] = self._text_of.get(row.id - 2) or ",
        _NEIGHBOURS,
        ("rest",),
        keeps_tokens="rest",
    ),
    Slip(RestDrafter.forget, "self._text_of.pop(row.id, None)", "pass", _LEFT, ("rest",), keeps_tokens="rest"),
)

_COUNTED = test_suffix.test_every_short_string_is_counted
SUFFIX = (
    Slip(SuffixDrafter.propose_row, "text.extend(row.token_ids)", "pass", _GREW, ("suffix",), keeps_tokens="suffix"),
    Slip(
        SuffixDrafter.propose_row,
        "int(longest * self._factor)",
        "longest",
        test_suffix.test_a_match_of_n_tokens_is_worth_so_many_drafted_ones,
        keeps_tokens="suffix",
    ),
    Slip(
        SuffixDrafter.forget,
        "self.history.add(row.output_ids)",
        "self.history.add(row.token_ids)",
        test_suffix.test_shared_requests_learn_from_outputs_and_not_from_prompts,
        keeps_tokens="suffix-shared",
    ),
    Slip(SuffixDrafter.forget, "self._text_of.pop(row.id, None)", "pass", _LEFT, ("suffix",), keeps_tokens="suffix"),
    Slip(
        SuffixDrafter.observe,
        "self.history.touch(spot)",
        "pass",
        test_drafter_state.test_an_output_that_was_right_is_forgotten_later,
        keeps_tokens="suffix-shared",
    ),
    Slip(
        SuffixDrafter.start,
        "text = self._text_of[row.id] = ",
        "text = self._text_of[row.id] = self._text_of.get(row.id - 2) or ",
        _NEIGHBOURS,
        ("suffix",),
        keeps_tokens="suffix",
    ),
    Slip(SuffixAutomaton._append, "known = self._split(state, token, known)", "pass", _COUNTED, keeps_tokens="suffix"),
    Slip(SuffixAutomaton._count_suffixes, "recent[state] = self.num_tokens", "pass", _COUNTED, keeps_tokens="suffix"),
    Slip(SuffixAutomaton._split, "self._count[known]", "0", _COUNTED, keeps_tokens="suffix"),
    Slip(
        SuffixAutomaton.match,
        "self._link[self._last]",
        "self._last",
        test_suffix.test_the_match_is_the_longest_end_that_occurred_before,
    ),
    Slip(
        OutputHistory._remove,
        "_merge_only_child(node)",
        "pass",
        test_suffix.test_the_history_counts_what_it_keeps,
        keeps_tokens="suffix-shared",
    ),
    Slip(
        OutputHistory._remove,
        "child.count -= 1",
        "child.count -= 0",
        test_suffix.test_the_history_counts_what_it_keeps,
        keeps_tokens="suffix-shared",
    ),
    Slip(
        OutputHistory._forget_one,
        "self._num_bytes -= len(data)",
        "pass",
        test_suffix.test_the_history_is_bounded_and_forgets_the_least_recently_used,
        keeps_tokens="suffix-shared",
        raises=KeyError,
    ),
    Slip(
        OutputHistory.touch,
        "self._outputs.move_to_end(spot.node.owner)",
        "pass",
        test_suffix.test_the_history_is_bounded_and_forgets_the_least_recently_used,
        keeps_tokens="suffix-shared",
    ),
    Slip(
        OutputHistory.candidates,
        "spot if spot.version == self._version else self._walk(spot.string, spot.score)",
        "spot",
        test_drafter_state.test_a_place_in_the_history_outlives_what_is_added_meanwhile,
        keeps_tokens="suffix-shared",
    ),
)

_ROWS = test_token_recycling.test_rows_are_the_targets_candidates_along_prompt_and_tree
_EQUAL = test_token_recycling.test_of_equal_tokens_the_accepted_node_counts
_PASSES = test_token_recycling.test_nothing_passes_from_one_request_to_another_unless_asked
TOKEN_RECYCLING = (
    Slip(
        token_recycling.last_of_all,
        "[*(node for node in range(num_nodes) if node not in accepted), *path]",
        "list(range(num_nodes))",
        _EQUAL,
        keeps_tokens="token-recycling",
    ),
    Slip(AdjacencyMatrix.update, "top_ids[::-1][last]", "top_ids[last]", _EQUAL, keeps_tokens="token-recycling"),
    Slip(
        AdjacencyMatrix.add_text,
        "range(len(tokens) - 1, 0, -1)",
        "range(1, len(tokens))",
        test_token_recycling.test_a_text_goes_before_what_is_known,
        keeps_tokens="token-recycling",
    ),
    Slip(
        AdjacencyMatrix.copy,
        "self._successors.copy()",
        "self._successors",
        test_drafter_state.test_a_request_leaves_what_requests_start_from_as_it_was,
        keeps_tokens="token-recycling",
    ),
    Slip(TokenRecyclingDrafter.observe, ".numpy()[order]", ".numpy()", _ROWS, keeps_tokens="token-recycling"),
    Slip(
        TokenRecyclingDrafter.observe,
        "self._matrix_of[row.id].update(tokens, top_ids.cpu().numpy()[order])",
        "pass",
        _ROWS,
        keeps_tokens="token-recycling",
    ),
    Slip(
        TokenRecyclingDrafter.start,
        "row.token_ids[-1 - len(prompt.top_ids) : -1]",
        "row.token_ids[-len(prompt.top_ids) :]",
        test_drafter_state.test_candidates_of_the_prompt_stand_behind_their_tokens,
        keeps_tokens="token-recycling",
    ),
    Slip(TokenRecyclingDrafter.start, "matrix.add_text(row.token_ids)", "pass", _ROWS, keeps_tokens="token-recycling"),
    Slip(
        TokenRecyclingDrafter._matrix,
        "if self._shared:",
        "if True:",
        _PASSES,
        ("prompt",),
        keeps_tokens="token-recycling",
    ),
    Slip(
        TokenRecyclingDrafter.forget,
        "self._matrix_of.pop(row.id, None)",
        "pass",
        _PASSES,
        ("empty",),
        keeps_tokens="token-recycling",
    ),
    Slip(
        TreeShape.filled,
        "np.where(above < 0, -1, found)",
        "found",
        test_token_recycling.test_the_tree_is_filled_breadth_first_with_what_is_known,
        raises=TreeError,
    ),
    Slip(
        TreeShape.filled,
        "[: max_depth + 1]",
        "[: max_depth + 2]",
        test_token_recycling.test_the_tree_is_filled_breadth_first_with_what_is_known,
    ),
)

_NGRAM_GREW = test_ngram.test_a_text_that_grew_equals_a_text_that_was_given
_SCAN = test_ngram.test_draft_equals_the_scan
NGRAM = (
    Slip(
        NGramDrafter.propose_row,
        "index.extend(row.token_ids)",
        "pass",
        _NGRAM_GREW,
        keeps_tokens="ngram",
    ),
    Slip(
        NGramDrafter.forget,
        "self._index_of.pop(row.id, None)",
        "pass",
        test_ngram.test_rows_are_apart_and_leave_nothing_behind,
        keeps_tokens="ngram",
    ),
    Slip(
        ngram.SuffixIndex.extend, "max(self._num_tokens, 1)", "self._num_tokens + 1", _NGRAM_GREW, keeps_tokens="ngram"
    ),
    Slip(ngram.SuffixIndex._occurrences, "reverse=True", "reverse=False", _SCAN, keeps_tokens="ngram"),
    Slip(ngram._Ends.add, "self._older[end] = older", "pass", _SCAN, keeps_tokens="ngram"),
    Slip(ngram._Ends.add, "self._newest[ngram] = end", "self._newest.setdefault(ngram, end)", _SCAN),
    Slip(
        ngram.continuation,
        "tokens[start : start + length]",
        "tokens[start - 1 : start + length]",
        _SCAN,
        keeps_tokens="ngram",
    ),
)

_NASD_GREW = test_nasd.test_a_text_that_grew_equals_a_text_that_was_given
NASD = (
    Slip(
        NasdDrafter.observe,
        "len(row.token_ids) - len(result.emitted)",
        "len(row.token_ids) - 1",
        _NASD_GREW,
        keeps_tokens="nasd",
    ),
    Slip(
        NasdDrafter.forget,
        "self._storage_of.pop(row.id, None)",
        "pass",
        test_nasd.test_rows_are_apart_and_leave_nothing_behind,
        keeps_tokens="nasd",
    ),
    Slip(
        NGramStorage.extend,
        "ranked[place - first] if",
        "ranked[place - first - 1] if",
        test_drafter_state.test_runners_up_are_learned_in_their_places,
        keeps_tokens="nasd",
    ),
    Slip(
        NGramStorage.extend,
        "if token != tokens[place]:",
        "if True:",
        test_nasd.test_the_chosen_token_is_not_counted_as_a_runner_up,
        keeps_tokens="nasd",
    ),
    Slip(
        NGramStorage.draft,
        "contexts[parent], token)[-longest:]",
        "contexts[newest], token)[-longest:]",
        test_drafter_state.test_every_node_of_a_tree_of_counts_follows_its_own_path,
        keeps_tokens="nasd",
    ),
)

_TOLD = test_composition.test_every_part_is_told_about_its_own_nodes
_BEST = test_composition.test_a_merged_tree_holds_the_best_paths_of_all
_PARTS = test_composition.test_parts_learn_of_the_prompt_what_they_asked_for_and_are_told_what_to_retain
_BELIEVES = test_drafter_state.test_a_composition_learns_whom_to_believe
COMPOSITION = (
    Slip(composition._own_result, "if place in accepted)", "if node in accepted)", _TOLD, keeps_tokens="union"),
    Slip(
        composition._own_features,
        "found.choices[place] for place in verified",
        "found.choices[place] for place in range(len(verified))",
        _TOLD,
        keeps_tokens="union",
    ),
    Slip(
        composition._own_features,
        "verified if requires.all_nodes else result.path",
        "verified",
        test_drafter_state.test_a_part_gets_features_of_what_was_emitted_whoever_drafted_it,
        keeps_tokens="union",
    ),
    Slip(
        composition._best_scores,
        "max(best.get(path, 0.0), tree_scores[node])",
        "tree_scores[node]",
        _BEST,
        keeps_tokens="union",
    ),
    Slip(composition.merged, "len(tokens) >= max_nodes", "len(tokens) > max_nodes", _BEST, keeps_tokens="union"),
    Slip(
        composition.merged,
        "(-best[path], len(path), path)",
        "(best[path], len(path), path)",
        _BEST,
        keeps_tokens="union",
    ),
    Slip(composition._restricted, "features.top_ids[:, : requires.top_k]", "features.top_ids", _PARTS),
    Slip(CompositeDrafter.start, "_restricted(part.requires.of_prompt, found)", "found", _PARTS),
    Slip(
        CompositeDrafter.observe,
        "self._calibrations[place].observe(result.tree, result.path)",
        "pass",
        _BELIEVES,
        keeps_tokens="union",
    ),
    Slip(CompositeDrafter.forget, "self._proposed.pop(row.id, None)", "pass", _LEFT, ("union",), keeps_tokens="union"),
    Slip(
        FirstDrafter._ask,
        "self._is_enough(tree, calibration)",
        "False",
        test_composition.test_a_dear_drafter_is_not_asked_where_a_cheap_one_knows_enough,
        keeps_tokens="first",
    ),
    Slip(FirstDrafter._combined, "reversed(trees)", "trees", _BELIEVES, keeps_tokens="first"),
    Slip(Calibration.observe, "(node in accepted)", "1.0", _BELIEVES, keeps_tokens="union"),
    Slip(
        Calibration.scores,
        "scores[tree.parents[node]] * ",
        "",
        test_composition.test_calibration_moves_from_what_is_stated_to_what_happens,
        keeps_tokens="union",
    ),
)

_RIGHT = test_self_draft_state.test_a_variant_that_leaves_nothing_out_is_always_right
_SWIFT_SCORE = test_swift.test_the_score_is_the_share_of_tokens_that_the_set_would_have_drafted
_FAULTLESS = test_self_draft_state.test_the_search_scores_the_target_itself_as_faultless
_FOUR_BIT = test_self_draft_state.test_four_bit_weights_and_a_layer_set_work_together
SELF_DRAFTING = (
    Slip(SelfDrafter._first_logits, "draft.trunk += 1", "pass", _RIGHT, ("llama", 3), keeps_tokens="layer-skip-tree"),
    Slip(
        SelfDrafter._rows_to_feed,
        "return list(rows[: last + 1])",
        "return [row for row, draft in zip(rows, drafts) if draft.cap > 0]",
        test_self_draft_state.test_a_row_that_may_not_draft_takes_nobodys_place,
        (1,),
        keeps_tokens="layer-skip-tree",
    ),
    Slip(
        LayerSet.exit_at,
        "range(layer, num_layers)",
        "range(layer + 1, num_layers)",
        test_self_draft.test_early_exit_is_the_model_without_its_last_layers,
        ("eager",),
    ),
    Slip(
        layer_skip.skipping,
        "leave_out(layer_set.attention, layer_set.mlp)",
        "leave_out(layer_set.mlp, layer_set.attention)",
        test_self_draft.test_a_skipped_branch_adds_nothing,
        ("llama", "attention"),
        keeps_tokens="layer-skip-tree",
    ),
    Slip(
        SkippableLayers.leave_out,
        'vars(module).pop("forward", None)',
        "pass",
        test_self_draft_state.test_what_was_left_out_is_put_back_before_something_else_is,
        keeps_tokens="swift",
    ),
    Slip(quantized_self.quantized, "if len(layer_set):", "if False:", _FOUR_BIT, keeps_tokens="quantized"),
    Slip(
        quantized_self.quantized,
        "quantize_linears(model, group_size, with_head=with_head)",
        "pass",
        test_self_draft.test_the_output_embedding_keeps_its_weights_unless_asked,
        keeps_tokens="quantized",
    ),
    Slip(
        SwiftDrafter._score, "row.token_ids[first + 1 :]", "row.token_ids[first:-1]", _SWIFT_SCORE, keeps_tokens="swift"
    ),
    Slip(
        SwiftDrafter._score,
        "range(first + 1, first + 1 + size)",
        "range(first, first + size)",
        _FAULTLESS,
        keeps_tokens="swift",
    ),
    Slip(SwiftDrafter._score, "cache.kept(slot,", "cache.kept(0,", _FAULTLESS, raises=ShapeError),
    Slip(SwiftDrafter._score, "first_row=slot", "first_row=0", _FAULTLESS, keeps_tokens="swift"),
    Slip(
        SwiftDrafter._try_one,
        "self._use(search.best)",
        "pass",
        test_self_draft_state.test_drafting_goes_on_with_the_best_set_after_a_trial,
        keeps_tokens="swift",
    ),
)

BUILDING = (
    Slip(
        building._Builder._reopened,
        "file.truncate(self._state.open_bytes)",
        "pass",
        test_datastore_resume.test_tokens_behind_the_last_checkpoint_are_cut_off,
        (22, "tmp_path", "monkeypatch"),
    ),
    Slip(
        building._Builder._take,
        "self._state.piece += 1",
        "pass",
        test_datastore_resume.test_tokens_behind_the_last_checkpoint_are_cut_off,
        (41, "tmp_path", "monkeypatch"),
    ),
)

SLIPS = {
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

"""What a drafter knows of a row: nobody else's, as new as its text, and gone with it; unless requests share it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import test_drafters
import torch
from test_drafters import VOCAB_SIZE, target

from drafting import begin, made
from foredraft import LLM, SamplingParams
from foredraft.drafters.compose import FirstDrafter, UnionDrafter
from foredraft.drafters.lookup.nasd import NGramStorage
from foredraft.drafters.lookup.suffix import SuffixDrafter
from foredraft.drafters.parts.draft import GrowingDraft
from foredraft.drafters.parts.layer_set import LayerSet
from foredraft.drafters.parts.self_draft import SelfDrafter
from foredraft.engine.drafter import Drafter, DrafterFacts, DraftSize, Features, Needs, PromptChunk, StepResult
from foredraft.engine.engine import Engine
from foredraft.engine.row import Row
from foredraft.errors import ConfigError, TokenizerMismatchError
from foredraft.methods.lengths import Fixed
from foredraft.model.cache.ragged import KVCache
from foredraft.model.lm import CausalLM
from foredraft.retrieval.datastore import Datastore
from foredraft.retrieval.history import OutputHistory
from foredraft.testing import PROMPTS, check_no_state, toy_model
from foredraft.testing.conformance import FIRST_ROW_ID
from foredraft.tree import DraftTree
from toys import datastore_of

STORED = ((0, 1, 2, 3, 4, 5), (7, 2, 9, 9), (5, 6, 8))


@cache
def datastore() -> Datastore:
    return datastore_of([*STORED, *PROMPTS])


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    name: partial(test_drafters.DRAFTERS[name], 4)
    for name in (
        *("ngram", "ngram-tree", "nasd", "nasd-tree", "nasd-single-random", "jacobi", "jacobi-from-prompt"),
        *("lookahead", "suffix", "token-recycling"),
    )
}
DRAFTERS["rest"] = lambda: made("rest", 3, datastore())
OTHERS: dict[str, Callable[[], Drafter]] = {
    "layer-skip": lambda: SelfDrafter(
        "layer_skip", layer_set=LayerSet((1,), ()), target_vocab_size=VOCAB_SIZE, policy=Fixed(3)
    ),
    "union": lambda: UnionDrafter([DRAFTERS["suffix"](), DRAFTERS["lookahead"](), DRAFTERS["token-recycling"]()], 12),
    "first": lambda: FirstDrafter([DRAFTERS["ngram"](), DRAFTERS["jacobi"]()]),
}
REQUESTS = tuple(
    (PROMPTS[i], SamplingParams(max_tokens=12, temperature=temperature, seed=5))
    for i, temperature in ((0, 0.0), (4, 0.9), (3, 0.0))
)


def run(drafter: Drafter, requests: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[Row]:
    engine = Engine(target(), drafter)
    rows = [row for prompt, params in requests for row in engine.add_request(prompt, params)]
    list(engine.run())
    return rows


def counts(rows: Sequence[Row]) -> list[tuple[Any, ...]]:
    return [
        (tuple(row.output_ids), row.stats.num_steps, row.stats.num_draft_tokens, row.stats.num_accepted_draft_tokens)
        for row in rows
    ]


@cache
def alone(name: str) -> list[tuple[Any, ...]]:
    """Every request by itself, each with a new drafter."""
    return [counts(run(DRAFTERS[name](), [request]))[0] for request in REQUESTS]


@pytest.mark.parametrize("method", DRAFTERS)
def test_neighbours_and_predecessors_change_no_draft(method: str) -> None:
    """A row drafts the same number of tokens alone, in a batch, and with a drafter that has had the batch before."""
    drafter = DRAFTERS[method]()
    assert counts(run(drafter, REQUESTS)) == alone(method)
    assert counts(run(drafter, REQUESTS[::-1])) == alone(method)[::-1]


class OneByOne(Drafter):
    """Hands rows on one at a time."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.facts = drafter, drafter.facts

    def needs(self, target: CausalLM, cache: KVCache) -> Needs:
        return self.drafter.needs(target, cache)

    def start(self, rows: Sequence[Row], chunks: Sequence[PromptChunk]) -> None:
        for row, chunk in zip(rows, chunks, strict=True):
            self.drafter.start([row], [chunk])

    def propose(self, rows: Sequence[Row], budgets: Sequence[DraftSize]) -> list[DraftTree]:
        return [self.drafter.propose([row], [budget])[0] for row, budget in zip(rows, budgets, strict=True)]

    def observe(self, rows: Sequence[Row], results: Sequence[StepResult]) -> None:
        for row, result in zip(rows, results, strict=True):
            self.drafter.observe([row], [result])


@pytest.mark.parametrize("method", DRAFTERS)
def test_rows_that_start_together_are_told_apart(method: str) -> None:
    """Samples of one prompt."""
    samples = (PROMPTS[0], SamplingParams(max_tokens=10, temperature=0.9, seed=5, n=3))
    assert counts(run(DRAFTERS[method](), [samples])) == counts(run(OneByOne(DRAFTERS[method]()), [samples]))


@pytest.mark.parametrize("method", [*DRAFTERS, *OTHERS])
def test_nothing_is_left_of_rows_that_have_ended(method: str) -> None:
    """Neither state nor ids, in a drafter that lives on, its parts and their policies; one of the rows is aborted."""
    drafter = {**DRAFTERS, **OTHERS}[method]()
    engine = Engine(target(), drafter)
    rows = [
        row
        for number, (prompt, params) in enumerate(REQUESTS)
        for row in engine.add_request(prompt, params, str(number))
    ]
    for row in rows:
        row.id += FIRST_ROW_ID
    engine.step()
    known = states_of(rows)
    engine.step()
    known += states_of(rows)
    assert len(known) >= len(rows) or method == "layer-skip"  # which knows a row by the cache of the target alone
    engine.abort("1")
    while engine.has_unfinished:
        engine.step()
        known += states_of(rows)
    assert [row.state for row in rows] == [{}] * len(rows)
    check_no_state(drafter)
    gc.collect()
    assert [state() for state in known if state() is not None] == []


def states_of(rows: Iterable[Row]) -> list[weakref.ref[Any]]:
    """What is known of rows now, as far as that can be referred to weakly."""
    states = [state for row in rows for state in row.state.values()]
    return [weakref.ref(state) for state in states if not isinstance(state, (int, list, tuple))]


# -- as new as the text --------------------------------------------------------------------------------------------


class Ranked(Features):
    """What the target ranked high after every token."""

    def __init__(self, rows: list[list[int]]) -> None:
        self._rows = torch.tensor(rows)

    def top_ids(self, k: int, nodes: Sequence[int]) -> torch.Tensor:
        return self._rows[list(nodes), :k]


def row_of(row_id: int, tokens: Sequence[int], num_output_tokens: int = 0) -> Any:
    first = len(tokens) - num_output_tokens
    return SimpleNamespace(
        id=row_id,
        token_ids=list(tokens),
        output_ids=list(tokens[first:]),
        num_prompt_tokens=first,
        pending=tokens[-1],
        state={},
    )


def started(drafter: Drafter, tokens: Sequence[int]) -> Any:
    row = row_of(0, tokens)
    begin(drafter, [row])
    return row


def proposal(drafter: Drafter, row: Any, budget: int = 8) -> DraftTree:
    return drafter.propose([row], [budget])[0]


def paths(tree: DraftTree) -> set[tuple[int, ...]]:
    return {tree.path_tokens(node) for node in range(1, len(tree))}


@pytest.mark.parametrize("method", ["ngram", "suffix", "rest"])
def test_a_text_that_grew_is_drafted_for_like_one_that_was_given(method: str) -> None:
    drafter = DRAFTERS[method]()
    row = started(drafter, PROMPTS[0])
    for emitted in ((8, 3, 1), (4,), (1, 5, 9, 2), (6, 8), (3,)):
        tree = proposal(drafter, row)
        row.token_ids += emitted
        drafter.observe([row], [StepResult(tree, (0,), emitted)])
        fresh = DRAFTERS[method]()
        whole = started(fresh, row.token_ids)
        grown, given = proposal(drafter, row), proposal(fresh, whole)
        assert (grown.tokens, grown.parents, grown.scores) == (given.tokens, given.parents, given.scores)
    assert len(proposal(drafter, row)) > 1


def test_rest_reads_what_followed_the_end_of_the_text() -> None:
    """The pending token is part of the context, and the budget is the depth."""
    drafter = made("rest", 9, datastore(), retrieval_match_min=2, retrieval_dynamic_index=False)
    assert paths(proposal(drafter, started(drafter, [60, 0, 1]))) == {(2,), (2, 3), (2, 3, 4), (2, 3, 4, 5)}
    assert paths(proposal(drafter, started(drafter, [60, 0, 1]), 2)) == {(2,), (2, 3)}
    assert paths(proposal(drafter, started(drafter, [60, 61]))) == set()


def test_rest_merges_the_datastore_with_the_text() -> None:
    drafter = made("rest", 1, datastore(), retrieval_match_min=2)
    row = started(drafter, [5, 6, 50, 5, 6])
    assert paths(proposal(drafter, row)) == {(8,), (50,)}


def test_a_place_in_the_history_outlives_what_is_added_meanwhile() -> None:
    history = OutputHistory(8)
    history.add([1, 2, 3, 4])
    spot = history.match([1, 2])
    assert spot is not None
    history.add([1, 2, 9])
    assert {candidate.token: candidate.score for candidate in history.candidates(spot)} == {
        candidate.token: candidate.score for candidate in history.candidates(history.match([1, 2]))
    }


def test_an_output_that_was_right_is_forgotten_later() -> None:
    history = OutputHistory(6, max_outputs=2)
    for start in (10, 20):
        history.add(range(start, start + 4))
    drafter = SuffixDrafter(history=history)
    row = started(drafter, [1, 10, 11])
    tree = proposal(drafter, row)
    assert tree.tokens[1] == 12
    drafter.observe([row], [StepResult(tree, (0, 1), (12, 5))])
    history.add(range(30, 34))
    assert history.match([10, 11]) is not None
    assert history.match([20, 21]) is None


def test_a_request_leaves_what_requests_start_from_as_it_was() -> None:
    drafter = made("token_recycling", 3, VOCAB_SIZE, max_draft_nodes=10, initial_state="vocabulary")
    drafter.needs(target(), target().new_cache(1))
    before = drafter._start.candidates
    run(drafter, REQUESTS[:1])
    assert (drafter._start.candidates == before).all()


def test_candidates_of_the_prompt_stand_behind_their_tokens() -> None:
    """The text's own successors first, then what the target ranked high in the same place."""
    drafter, row = made("token_recycling", 3, 9, num_candidates=3, max_draft_nodes=4), row_of(0, [4, 5, 6])
    for chunk in (PromptChunk(0, 2, Ranked([[1, 2, 3], [3, 1, 7]])), PromptChunk.end_of(row)):
        drafter.start([row], [chunk])
    assert row.state[drafter].matrix.candidates[[4, 5, 6]].tolist() == [[5, 1, 2], [6, 3, 1], [-1, -1, -1]]


def test_every_node_of_a_tree_of_counts_follows_its_own_path() -> None:
    """Trigrams: what follows 1 7 is not what follows 2 7."""
    storage = NGramStorage(3, 2)
    storage.extend([0, 1, 7, 8, 0, 2, 7, 9, 0, 1, 7, 8, 0, 2, 7, 9, 0], [], first=1)
    tree = storage.draft([7, 50, 0], 3)
    assert paths(tree) == {(1,), (1, 7), (1, 7, 8), (2,), (2, 7), (2, 7, 9)}


def test_a_path_ends_where_the_nodes_do() -> None:
    draft = GrowingDraft(cast("Row", SimpleNamespace(pending=9)), 99)
    draft.add_path([1, 2, 3, 4], 3)
    assert draft.tree("").tokens == (9, 1, 2)
    draft.add_path([1, 5], 3)
    assert len(draft.tokens) == 3


class Fixedly(Drafter):
    """One token below every pending token."""

    def __init__(self, name: str, guess: Callable[[Any], int]) -> None:
        self.facts, self._guess = DrafterFacts(name), guess
        self.told: list[StepResult] = []
        self.learned: list[torch.Tensor] = []

    def observe(self, rows: Sequence[Any], results: Sequence[StepResult]) -> None:
        self.told += results
        self.learned += [result.committed.top_ids(1, range(len(result.emitted)))[:, 0] for result in results]

    def propose(self, rows: Sequence[Any], budgets: Sequence[int]) -> list[DraftTree]:
        pairs = zip(rows, budgets, strict=True)
        return [DraftTree.chain(row.pending, [self._guess(row)][:budget], source=self.name) for row, budget in pairs]


def test_a_composition_learns_whom_to_believe() -> None:
    """A part that is always wrong is worth ever less, also where the room is for one node."""
    (plain,) = run(made("ngram", 0), [REQUESTS[0]])
    text = plain.token_ids

    def right(row: Any) -> int:
        return text[len(row.token_ids)]

    for composed in (
        UnionDrafter([Fixedly("wrong", lambda row: right(row) ^ 1), Fixedly("right", right)], max_nodes=2),
        FirstDrafter([Fixedly("wrong", lambda row: right(row) ^ 1), Fixedly("right", right)], min_expected=0.4),
    ):
        (row,) = run(composed, [(REQUESTS[0][0], replace(REQUESTS[0][1], max_tokens=12))])
        assert tuple(row.output_ids) == tuple(text[len(REQUESTS[0][0]) :])
        assert row.stats.num_accepted_draft_tokens >= 3


def test_a_part_gets_features_of_what_was_emitted_whoever_drafted_it() -> None:
    """Unless it asks for its own nodes: one token was accepted here, and this part drafted another."""
    text = run(made("ngram", 0), [REQUESTS[0]])[0].token_ids
    right = Fixedly("right", lambda row: text[len(row.token_ids)])
    wrong = Fixedly("wrong", lambda row: text[len(row.token_ids)] ^ 1)
    run(UnionDrafter([right, wrong]), [(REQUESTS[0][0], replace(REQUESTS[0][1], max_tokens=3))])
    first = len(REQUESTS[0][0])
    for part in (right, wrong):
        assert part.learned[0].tolist() == text[first : first + 2]
    assert (wrong.told[0].path, right.told[0].path) == ((0,), (0, 1))


# -- through the public face ---------------------------------------------------------------------------------------


def drafted(llm: LLM, prompt: Sequence[int]) -> tuple[tuple[int, ...], int, int]:
    params = SamplingParams(max_tokens=30, temperature=0.0, seed=1)  # lookahead draws its first window by the seed
    (output,) = llm.generate([{"prompt_token_ids": list(prompt)}], params)
    metrics = output.metrics.speculative_decoding
    return tuple(output.outputs[0].token_ids), metrics["num_draft_tokens"], metrics["num_accepted_draft_tokens"]


@pytest.mark.parametrize("method", ["suffix", "token_recycling", "nasd"])
def test_nothing_passes_from_one_call_to_the_next(method: str) -> None:
    llm = LLM(toy_model(VOCAB_SIZE), speculative_config={"method": method})
    first = drafted(llm, PROMPTS[0])
    drafted(llm, [*PROMPTS[0], *first[0][:20]])  # a request that knows how the other went on
    assert drafted(llm, PROMPTS[0]) == first


@pytest.mark.parametrize("method", ["suffix", "token_recycling", "nasd"])
def test_what_requests_share_helps_the_next_call_and_changes_no_token(method: str) -> None:
    plain = drafted_by_nobody()
    llm = LLM(toy_model(VOCAB_SIZE), speculative_config={"method": method, "shared": True})
    first, second = drafted(llm, PROMPTS[0]), drafted(llm, PROMPTS[0])
    assert first[0] == second[0] == plain
    assert second[2] > first[2]


def drafts_of(config: dict[str, Any], vocab_size: int = VOCAB_SIZE) -> None:
    LLM(toy_model(vocab_size), speculative_config=config).generate(
        [{"prompt_token_ids": [1, 2, 1]}], SamplingParams(max_tokens=3, temperature=0.0)
    )


@pytest.mark.parametrize("method", ["suffix", "token_recycling", "nasd"])
def test_what_was_learned_is_not_read_by_a_smaller_vocabulary(method: str, tmp_path: Path) -> None:
    """A history used to be: without a tokenizer nothing told the two models apart, and ids led out of the embedding."""
    config = {"method": method, "shared": True, "state_file": str(tmp_path / "state")}
    llm = LLM(toy_model(VOCAB_SIZE), speculative_config=config)
    assert max(drafted(llm, PROMPTS[0])[0]) >= 32
    with pytest.raises((TokenizerMismatchError, ConfigError), match="the target has 32"):
        drafts_of(config, 32)


@pytest.mark.parametrize("method", ["suffix", "token_recycling", "nasd"])
def test_a_state_file_in_no_directory_is_refused_before_anything_runs(method: str, tmp_path: Path) -> None:
    """`suffix` used to say so when everything had been generated, and learned."""
    with pytest.raises(ConfigError, match="cannot be written: it needs to be a file in a folder that exists"):
        drafts_of({"method": method, "shared": True, "state_file": str(tmp_path / "nowhere" / "state")})


def test_a_key_of_a_part_is_told_where_it_belongs() -> None:
    with pytest.raises(ConfigError, match=r"give it to a part: drafters=\[\{'method': 'rest', 'datastore': ...\}"):
        drafts_of({"method": "rest+nasd", "datastore": "somewhere"})


def drafted_by_nobody() -> tuple[int, ...]:
    params = SamplingParams(max_tokens=30, temperature=0.0)
    return tuple(run(made("ngram", 0), [(PROMPTS[0], params)])[0].output_ids)

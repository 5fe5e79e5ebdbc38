"""Rows that have ended leave their cache to prompts that begin like them: the same tokens, and only new text is fed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafting import made
from foredraft.beginnings import shared_length
from foredraft.config.engine import EngineConfig
from foredraft.config.sampling import SamplingParams
from foredraft.drafters.lm.draft_model import DraftModelDrafter
from foredraft.drafters.none import EmptyDrafter
from foredraft.engine.drafter import Drafter, Needs
from foredraft.engine.engine import Engine
from foredraft.engine.row import Row, RowState
from foredraft.llm import LLM
from foredraft.model.cache.prefixes import PrefixStore
from foredraft.model.cache.ragged import KVCache
from foredraft.model.lm import CausalLM, Nodes, Wanted
from foredraft.testing import GREEDY, PROMPTS, SAMPLED, toy_model
from toys import VOCAB_SIZE, small, target

TURN = (7, 8, 9, 10, 11)


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "none": EmptyDrafter,
    "ngram": lambda: made("ngram", 4, prompt_lookup_min=1),
    "chain": lambda: DraftModelDrafter(small(), target_vocab_size=VOCAB_SIZE),
    "tree": lambda: DraftModelDrafter(small(), target_vocab_size=VOCAB_SIZE, num_branches=2),
}


def engine(kind: str = "none", prefixes: PrefixStore | None = None, **options: Any) -> Engine:
    return Engine(target(), DRAFTERS[kind](), EngineConfig(**options), prefixes=prefixes)


def answer(engine: Engine, prompt: tuple[int, ...], params: SamplingParams = GREEDY) -> Row:
    (row,) = engine.add_request(prompt, params)
    list(engine.run())
    return row


def fed(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens fed to a model from now on, one entry per forward: counted where they go in."""
    counts: list[int] = []
    forward = model.forward

    def counting(nodes: Any, *args: Any, **options: Any) -> Any:
        counts.append(sum(nodes.counts))
        return forward(nodes, *args, **options)

    monkeypatch.setattr(model, "forward", counting)
    return counts


# -- conversations ---------------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "kind", ["none", "chain", *(pytest.param(name, marks=pytest.mark.full) for name in ("ngram", "tree"))]
)
def test_a_conversation_goes_on_as_a_fresh_one_would(kind: str) -> None:
    going_on = engine(kind, PrefixStore(2))
    history = PROMPTS[0]
    for turn, params in enumerate([GREEDY, SAMPLED, GREEDY, SAMPLED]):
        continued, fresh = answer(going_on, history, params), answer(engine(kind), history, params)
        assert continued.output_ids == fresh.output_ids
        assert (continued.num_cached_tokens > 0) == (turn > 0)
        history = (*history, *continued.output_ids, *TURN)


@pytest.mark.parametrize("kind", ["none", "tree"])
def test_only_new_text_is_fed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second turn feeds the last token of the first answer, which no cache holds, and all but the last new one."""
    going_on = engine(kind, PrefixStore(1))
    row = answer(going_on, PROMPTS[0])
    of_target, of_drafter = fed(target(), monkeypatch), fed(small(), monkeypatch)
    again = answer(going_on, (*row.token_ids, *TURN), replace(GREEDY, max_tokens=1))
    assert again.num_cached_tokens == len(row.token_ids) - 1
    assert of_target == [1 + len(TURN) - 1, 1]  # the prompt; then the pending token alone, for one token is wanted
    assert going_on.profile.num_prefill_tokens == len(PROMPTS[0]) - 1 + len(TURN)
    assert going_on.profile.num_cached_tokens == len(row.token_ids) - 1
    if kind == "tree":
        assert sum(of_drafter) <= len(TURN) + 5  # and what was drafted last, at most, which it had not fed itself
        assert sum(of_drafter) >= len(TURN)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("kind", "prompt_logprobs"), [("none", 1), ("ngram", None), ("chain", 1)])
def test_samples_without_a_slot_do_not_read_their_prompt_again(
    kind: str, prompt_logprobs: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven samples in two slots read one prompt, in chunks, and say what they say in seven; each read it anew."""
    params = replace(SAMPLED, n=7, seed=5, prompt_logprobs=prompt_logprobs)
    prompt = tuple(range(1, 24))
    wide, narrow = engine(kind, max_num_seqs=8), engine(kind, max_num_seqs=2, prefill_chunk_size=8)
    expected = wide.add_request(prompt, params)
    list(wide.run())
    of_drafter = fed(small(), monkeypatch)
    rows = narrow.add_request(prompt, params)
    list(narrow.run())
    assert [row.output_ids for row in rows] == [row.output_ids for row in expected]
    assert narrow.profile.num_prefill_tokens == len(prompt) - 1
    assert [row.num_cached_tokens for row in rows] == [0] * 7
    assert all(row.beginning is None for row in rows)
    if kind == "chain":
        num_said = sum(row.num_output_tokens for row in rows)
        assert sum(of_drafter) < len(prompt) + 6 * num_said, "its drafter reads it once, too"


def test_other_weights_read_a_prompt_again() -> None:
    """What was read with weights that have changed since is not handed down."""
    narrow = engine(max_num_seqs=1)
    rows = narrow.add_request(PROMPTS[0], replace(SAMPLED, n=3, seed=5))
    while not rows[0].num_output_tokens:
        narrow.step()
    narrow.forget_prefixes()
    list(narrow.run())
    assert narrow.profile.num_prefill_tokens == 3 * (len(PROMPTS[0]) - 1)


@cache
def narrow_llm(size: int) -> LLM:
    return LLM("zoo:tiny", max_num_seqs=2, prefill_chunk_size=size)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("method", "size", "num_again"),
    [
        ("eagle3", 16, 1),
        ("eagle3", 512, 39),
        ("draft_model", 512, 0),
        pytest.param("medusa", 16, 1, marks=pytest.mark.full),
        pytest.param("sparse_kv", 16, 0, marks=pytest.mark.full),
    ],
)
def test_heads_read_again_what_their_states_are_made_from(method: str, size: int, num_again: int) -> None:
    """The state of the last token: it alone is read again, or its whole chunk where that has other kernels."""
    wide = narrow_llm(size)
    narrow = wide.with_speculative_config(method)
    prompt = {"prompt_token_ids": list(range(40, 80))}
    params = SamplingParams(n=5, max_tokens=12, seed=3, ignore_eos=True)
    before = narrow.profile.num_prefill_tokens
    ids = [text.token_ids for text in narrow.generate(prompt, params)[0].outputs]
    assert ids == [text.token_ids for text in wide.generate(prompt, params)[0].outputs]
    assert narrow.profile.num_prefill_tokens - before == 39 + 3 * num_again


@pytest.mark.parametrize(
    "method", ["suffix+eagle3", *(pytest.param(name, marks=pytest.mark.full) for name in ("eagle3", "draft_model"))]
)
def test_engines_of_several_drafters_take_over_a_system_prompt_each(method: str) -> None:
    """Plain rows once left texts that heads know nothing of, and these were taken for the best beginnings of all: with
    a way of drafting and plain decoding over one model, a head never took over anything."""
    drafting = LLM("zoo:tiny", method, dtype="float32", num_cached_prefixes=8, prefill_chunk_size=64)
    plain, fresh = drafting.with_speculative_config(None), LLM("zoo:tiny", method, dtype="float32")
    system, params = tuple(range(40, 70)), SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    lag = 0 if method == "draft_model" else 1  # entries of a head know the token that follows theirs
    for turn in range(3):
        prompt = {"prompt_token_ids": [*system, *range(80 + 9 * turn, 88 + 9 * turn)]}
        of_plain = plain.generate(prompt, params)[0]
        drafted, whole = drafting.generate(prompt, params)[0], fresh.generate(prompt, params)[0]
        assert drafted.outputs[0].token_ids == of_plain.outputs[0].token_ids == whole.outputs[0].token_ids
        if turn:
            assert of_plain.num_cached_tokens == len(system)
            assert drafted.num_cached_tokens >= len(system) - lag  # all of it by rows that go without the drafter


@pytest.mark.parametrize("kind", ["chain"])
def test_samples_and_batches_take_over_too(kind: str) -> None:
    """Ragged: one row goes on, one is new, one goes on from the middle, with two samples each."""
    going_on, fresh = engine(kind, PrefixStore(4), max_num_seqs=8), engine(kind, max_num_seqs=8)
    first = answer(going_on, PROMPTS[0])
    prompts = [(*first.token_ids, *TURN), PROMPTS[1], (*first.token_ids[:-4], *TURN)]
    rows = {}
    for each in (going_on, fresh):
        rows[each] = [row for prompt in prompts for row in each.add_request(prompt, replace(SAMPLED, n=2))]
        list(each.run())
    assert [row.output_ids for row in rows[going_on]] == [row.output_ids for row in rows[fresh]]
    assert [row.num_cached_tokens for row in rows[going_on][::2]] == [
        len(first.token_ids) - 1,
        0,
        len(first.token_ids) - 4,
    ]


def test_an_aborted_row_is_kept_as_far_as_it_came() -> None:
    store = PrefixStore(1)
    going_on = engine("chain", store)
    (row,) = going_on.add_request(PROMPTS[0], replace(GREEDY, max_tokens=30))
    for _ in range(4):
        going_on.step()
    going_on.abort(row.request_id)
    assert store.num_tokens == len(row.token_ids) - 1
    again = answer(going_on, tuple(row.token_ids))
    assert again.output_ids == answer(engine(), tuple(row.token_ids)).output_ids


def test_as_many_texts_are_kept_as_there_is_room_for() -> None:
    """The third of four once dropped the first: what was too many was counted below zero, from the end."""
    store = PrefixStore(4)
    going_on = engine(prefixes=store)
    kept = []
    for first in (10, 20, 30, 40, 50):
        answer(going_on, (first, 3, first + 1), replace(GREEDY, max_tokens=2))
        kept.append(len(store))
    assert kept == [1, 2, 3, 4, 4]


def test_rows_that_ended_in_an_error_leave_nothing() -> None:
    class Failing:
        calls = 0

        def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return scores if self.calls < 3 else scores * torch.nan

    store = PrefixStore(1)
    row = answer(engine("none", store), PROMPTS[0], replace(GREEDY, logits_processors=(Failing(),)))
    assert row.finish_reason == "error"
    assert len(store) == 0


@dataclass(eq=False)
class Hidden(RowState):
    """Features of every committed token of a row."""

    states: list[torch.Tensor]

    def copied(self) -> Hidden:
        return Hidden(list(self.states))

    def cut(self, num_tokens: int) -> tuple[Hidden, int]:
        known = Hidden(self.states[:num_tokens])
        return known, len(known.states)


class RemembersHidden(EmptyDrafter):
    """Holds the last hidden state of every committed token, and keeps them for prompts that begin alike.

    Attributes:
      states, num_read: by row, also when that has ended: what was known of it, and how long the chunks of its prompt
        were.
    """

    def __init__(self) -> None:
        self.states: dict[int, list[torch.Tensor]] = {}
        self.num_read: dict[int, list[int]] = {}

    def needs(self, target: CausalLM, cache: KVCache) -> Needs:
        return Needs(last_hidden=True, layer_inputs=(1,))

    def start(self, rows: Any, chunks: Any) -> None:
        for row, chunk in zip(rows, chunks, strict=True):
            hidden = row.state.setdefault(self, Hidden([]))
            self.states[row.id] = hidden.states
            assert len(hidden.states) == chunk.start
            if not chunk.is_last:
                self._add(row, chunk.features, chunk.num_tokens)
                self.num_read.setdefault(row.id, []).append(chunk.num_tokens)

    def observe(self, rows: Any, results: Any) -> None:
        for row, result in zip(rows, results, strict=True):
            self._add(row, result.committed, len(result.emitted))

    def _add(self, row: Any, features: Any, count: int) -> None:
        both = features.last_hidden(range(count)), features.layer_input(1, range(count))
        row.state[self].states.extend(torch.cat(both, dim=-1).clone())


def hidden_states(tokens: list[int]) -> torch.Tensor:
    """By the model itself: what the output embedding and the second layer read."""
    output = target().shadow(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
    return torch.cat([output.hidden_states[-1][0], output.hidden_states[1][0]], dim=-1)


@pytest.mark.parametrize("chunk", [3, 256])
def test_a_drafter_that_keeps_its_features_is_shown_new_text_only(chunk: int) -> None:
    drafter = RemembersHidden()
    going_on = Engine(target(), drafter, EngineConfig(prefill_chunk_size=chunk), prefixes=PrefixStore(2))
    history = PROMPTS[0]
    for turn in range(3):
        row = answer(going_on, history, replace(SAMPLED, n=1))
        known = row.num_cached_tokens
        assert (known > 0) == (turn > 0)
        assert sum(drafter.num_read[row.id]) == len(history) - 1 - known
        states = torch.stack(drafter.states[row.id])
        assert torch.allclose(states, hidden_states(row.token_ids)[: len(states)])
        assert len(states) >= len(row.token_ids) - 2  # the last step of a row is observed by nobody
        history = (*row.token_ids, *TURN)


def test_where_the_output_embedding_reads_something_else_that_is_what_features_are() -> None:
    """A model that scales what its decoder returns: hidden states are taken in front of the output embedding."""
    model = toy_model(VOCAB_SIZE)
    model.lm_head.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    scaled = CausalLM(model, execution="eager")
    wanted, nodes = Wanted(last_hidden=True), Nodes.from_chains([PROMPTS[0]])
    output = scaled.forward_with(wanted, nodes, scaled.new_cache(1), keep=slice(0, 0))
    plain = target().forward_with(wanted, nodes, target().new_cache(1), keep=slice(0, 0))
    assert output.logits.shape[1] == plain.logits.shape[1] == 0
    assert output.last_hidden is not None
    assert torch.allclose(output.last_hidden, 2 * plain.last_hidden)


# -- the store -------------------------------------------------------------------------------------------------------


def cache_with(*lengths: int) -> KVCache:
    cache = KVCache(1, num_rows=len(lengths), capacity=8)
    layer = cache.layers[0]
    layer.lazy_initialization(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2))
    cache.lengths = list(lengths)
    return cache


def test_the_least_recently_used_text_makes_room() -> None:
    store, cache = PrefixStore(2), cache_with(3, 0)
    for tokens in ((1, 2, 3), (4, 5, 6)):
        store.keep(tokens, cache, 0, 3)
    assert store.load((1, 2), cache, 1) == 2  # used again
    store.keep((7, 8, 9), cache, 0, 3)
    assert store.load((1, 2), cache, 1) == 2
    assert store.load((4, 5), cache, 1) == 0
    assert store.load((7,), cache, 1) == 1


def test_a_text_is_kept_once() -> None:
    store, cache = PrefixStore(3), cache_with(3, 0)
    store.keep((1, 2, 3), cache, 0, 2)
    store.keep((1, 2, 3), cache, 0, 3)  # the shorter one goes
    assert (len(store), store.num_tokens) == (1, 3)
    store.keep((1, 2, 3), cache, 0, 1)  # known already
    assert (len(store), store.num_tokens) == (1, 3)
    assert store.num_bytes == 2 * 3 * 2 * 4
    store.keep((9,), cache, 0, 0)
    assert len(store) == 1
    store.clear()
    assert len(store) == 0


tokens = st.lists(st.integers(0, 2), max_size=12).map(tuple)


@settings(max_examples=200)
@given(tokens, tokens)
def test_shared_length(first: tuple[int, ...], second: tuple[int, ...]) -> None:
    length = shared_length(first, second)
    assert first[:length] == second[:length]
    assert length == min(len(first), len(second)) or first[length] != second[length]

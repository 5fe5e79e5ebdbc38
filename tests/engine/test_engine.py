"""The engine at its edges: broken steps, aborts in every state, contexts that just fit, rows that go bad."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from cuts import cut_at, spread
from drafting import made
from foredraft.config.engine import EngineConfig
from foredraft.config.sampling import SamplingParams
from foredraft.drafters.lm.draft_model import DraftModelDrafter
from foredraft.drafters.none import EmptyDrafter
from foredraft.engine.drafter import Drafter
from foredraft.engine.engine import Engine
from foredraft.engine.row import Row
from foredraft.errors import ConfigError, NumericsError
from foredraft.model.lm import CausalLM
from foredraft.testing import check_cache_lengths, perturbed, strengthen, toy_model
from foredraft.tree import DraftTree

PROMPTS = ((3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4, 1, 5), (7,), (2, 7, 1, 8, 2, 8), (1, 6, 1))
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=6, temperature=0.9, top_p=0.95, seed=5)


@cache
def target() -> CausalLM:
    return CausalLM(toy_model(), execution="eager")


@cache
def small() -> CausalLM:
    return CausalLM(perturbed(toy_model(), 0.15), execution="eager")


def drafter_of(kind: str, model: CausalLM | None = None, **options: Any) -> Drafter:
    model = model or small()
    if kind == "nasd":
        return made("nasd", 4, num_draft_branches=2)
    branches = 2 if kind == "tree" else 1
    return DraftModelDrafter(model, target_vocab_size=64, num_branches=branches, num_speculative_tokens=3, **options)


def finish(engine: Engine, requests: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[tuple[int, ...]]:
    rows = [row for prompt, params in requests for row in engine.add_request(prompt, params)]
    for _ in engine.run():
        check_cache_lengths(engine)
    return [tuple(row.output_ids) for row in rows]


REQUESTS = [(PROMPTS[0], GREEDY), (PROMPTS[1], SAMPLED), (PROMPTS[2], replace(SAMPLED, n=3))]


@cache
def plain_outputs() -> tuple[tuple[int, ...], ...]:
    return tuple(finish(Engine(target(), EmptyDrafter()), REQUESTS))


# -- steps that break off --------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["nasd", "tree"])
def test_an_engine_whose_step_broke_off_goes_on_like_a_new_one(kind: str) -> None:
    """Cut off at lines all over its steps: its rows end, nothing of them stays, and all later tokens are right."""
    engine = Engine(target(), drafter_of(kind), EngineConfig(max_num_seqs=4, prefill_chunk_size=8))

    def added() -> list[Row]:
        return [row for prompt, params in REQUESTS for row in engine.add_request(prompt, params)]

    added()
    for number in spread(cut_at(None, lambda: list(engine.run())), 8):
        rows = added()
        cut_at(number, lambda: list(engine.run()))
        for row in rows:
            if not row.is_finished:  # which waited, or ends with the next call where a step was cut off at its very end
                engine.abort(row.request_id)
        assert not engine.has_unfinished, number
        assert engine.num_running == engine.cache.num_rows == 0, number
        assert tuple(finish(engine, REQUESTS)) == plain_outputs(), number


# -- contexts and vocabularies ---------------------------------------------------------------------------------------


def absolute_model(context: int, vocab_size: int = 64) -> PreTrainedModel:
    """A GPT-2, whose learned positions end where its context ends: one step further is an IndexError."""
    names = {"bos_token_id": None, "eos_token_id": None}
    config = GPT2Config(vocab_size=vocab_size, n_positions=context, n_embd=32, n_layer=2, n_head=4, **names)
    return strengthen(GPT2LMHeadModel(config)).double().eval()


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["chain", "tree"])
@pytest.mark.parametrize("context", [24, 20])
def test_nothing_looks_behind_the_end_of_a_context(context: int, kind: str) -> None:
    """Prompts up to the last place of the target's context; a drafter of a shorter context stops drafting there."""
    lm = CausalLM(absolute_model(24), execution="eager")
    drafter = drafter_of(kind, CausalLM(perturbed(absolute_model(context), 0.15), execution="eager"))
    whole = replace(GREEDY, max_tokens=None)
    requests = [(tuple(range(1, length + 1)), whole) for length in (1, 15, 19, 20, 23)]
    assert finish(Engine(lm, drafter), requests) == finish(Engine(lm, EmptyDrafter()), requests)


@pytest.mark.parametrize("vocab_size", [48, 80])
@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_a_drafter_may_know_fewer_or_more_tokens(kind: str, vocab_size: int) -> None:
    """Prompts and outputs hold tokens that the smaller drafter has never heard of."""
    drafter = drafter_of(kind, CausalLM(absolute_model(64, vocab_size), execution="eager"))
    requests = [((60, 61, 3, 62), replace(SAMPLED, logit_bias={63: 9.0})), ((1, 2), GREEDY)]
    assert finish(Engine(target(), drafter), requests) == finish(Engine(target(), EmptyDrafter()), requests)


class Repeater(Drafter):
    """Proposes the same paths in every step."""

    name = "repeater"

    def __init__(self, *paths: Sequence[int]) -> None:
        self.paths = paths

    def propose(self, rows: Sequence[Row], budgets: Sequence[int]) -> list[DraftTree]:
        return [
            DraftTree.from_paths(row.pending, self.paths).cut(budget) for row, budget in zip(rows, budgets, strict=True)
        ]


# -- rows that go bad ------------------------------------------------------------------------------------------------


def nan_target() -> CausalLM:
    """Token 63 makes everything behind it NaN."""
    model = toy_model()
    with torch.no_grad():
        model.get_input_embeddings().weight[63] = torch.nan
    return CausalLM(model, execution="eager", probe=False)


@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_row_with_nan_leaves_nothing_to_those_after_it(is_aborted: bool) -> None:
    """Its keys and values would reach the next row in its place through masked columns: 0 * NaN is NaN."""
    lm = nan_target()
    requests = [(PROMPTS[2], GREEDY), (tuple(range(40)), GREEDY)]
    engine = Engine(lm, EmptyDrafter())
    (bad,) = engine.add_request([63] * 60, GREEDY, "bad")
    if is_aborted:
        engine.step()
        engine.abort("bad")
    else:
        *_, output = [output for outputs in engine.run() for output in outputs]  # it is tried a second time
        assert isinstance(output.error, NumericsError)
    assert bad.finish_reason == ("abort" if is_aborted else "error")
    assert finish(engine, requests) == finish(Engine(lm, EmptyDrafter()), requests)


# -- rows that come and go -------------------------------------------------------------------------------------------


def test_ids_of_rows_stay_unique_when_threads_add_requests() -> None:
    engine = Engine(target(), EmptyDrafter())
    with ThreadPoolExecutor(8) as pool:
        added = list(pool.map(lambda _: engine.add_request(PROMPTS[1], GREEDY), range(64)))
    assert len({row.id for rows in added for row in rows}) == 64
    assert len({row.request_id for rows in added for row in rows}) == 64


@pytest.mark.parametrize("option", ["max_num_seqs", "prefill_chunk_size", "max_model_len"])
def test_a_size_of_zero_is_refused(option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option} is 0"):
        EngineConfig(**{option: 0})

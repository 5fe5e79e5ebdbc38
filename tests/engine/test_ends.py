"""Requests that end where it hurts: aborted in every phase, at the limit of the context, with the first token."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from test_broken_steps import NAMED as METHODS_BY_NAME
from test_broken_steps import completed, given, mark_of

from drafting import made
from engines import engine_of
from foredraft import LLM, SamplingParams
from foredraft.config.engine import EngineConfig
from foredraft.drafters.lookup.ngram import NGramDrafter
from foredraft.engine.engine import Engine
from foredraft.errors import ContextLengthError, PromptError
from foredraft.testing import check_cache_lengths, toy_model

PROMPTS = [[5, 6, 7, 5, 6, 7] * 4, [9, 3] * 9, [2, 4] * 11, [11]]
LIMIT = 60
SMALL_VIEW = {"method": "sparse_kv", "kv_budget": 12, "kv_sinks": 2, "kv_refresh": 4}
NAMED = {**METHODS_BY_NAME, "sparse_kv-12-2-4": SMALL_VIEW}
METHODS = [
    pytest.param(
        config, id=name, marks=() if name in ("ngram", "sparse_kv-12-2-4") else mark_of(name) or pytest.mark.slow
    )
    for name, config in NAMED.items()
]


@cache
def base() -> LLM:
    """Two rows at once, prompts in chunks of five, a plan that has room for caches of drafters, too."""
    return LLM(
        toy_model(64, dtype=torch.float32, max_position_embeddings=LIMIT),
        max_num_seqs=2,
        prefill_chunk_size=5,
        max_kv_bytes=8 * 128 * 2 * 2 * 2 * 8 * 4,
        num_cached_prefixes=2,
    )


def params(**others: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.8, "seed": 3, "max_tokens": 10, "ignore_eos": True, **others})


@cache
def plain(max_tokens: int | None = 10) -> list[tuple[int, ...]]:
    outputs = base().generate(given(PROMPTS), params(max_tokens=max_tokens))
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def is_waiting(engine: Engine, name: str) -> bool:
    return any(row.request_id == name for row in engine.waiting_rows)


def is_reading(engine: Engine, name: str) -> bool:
    reading = engine.running_rows[len(engine.decoding_rows) :]
    return any(row.request_id == name and 0 < row.num_prefilled < row.num_to_prefill for row in reading)


def is_decoding(engine: Engine, name: str) -> bool:
    return any(row.request_id == name and row.num_output_tokens > 2 for row in engine.decoding_rows)


PHASES: dict[str, Callable[[Engine, str], bool]] = {
    "waiting": is_waiting,
    "reading": is_reading,
    "decoding": is_decoding,
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("config", METHODS)
def test_aborts_in_every_phase_harm_nobody(config: Any, tmp_path: Path) -> None:
    llm = base().with_speculative_config(completed(config, tmp_path))
    engine = engine_of(llm)
    for victim, (phase, has_come) in zip((2, 1, 0), PHASES.items(), strict=True):
        rows = [engine.add_request(prompt, params(), str(i))[0] for i, prompt in enumerate(PROMPTS)]
        is_seen = False
        engine.forget_prefixes()
        while engine.has_unfinished:
            if not is_seen and has_come(engine, str(victim)):
                is_seen = bool(engine.abort(str(victim)))
                check_cache_lengths(engine)
            engine.step()
            check_cache_lengths(engine)
        assert is_seen, phase
        for number, (row, text) in enumerate(zip(rows, plain(), strict=True)):
            if number == victim:
                assert row.finish_reason == "abort"
                assert tuple(row.output_ids) == text[: row.num_output_tokens]
            else:
                assert tuple(row.output_ids) == text, phase


@pytest.mark.parametrize("config", [NAMED["ngram"], SMALL_VIEW], ids=["ngram", "sparse_kv"])
def test_a_stream_that_is_closed_within_a_step_ends_after_it(config: Any, tmp_path: Path) -> None:
    """A processor closes the stream of another call between its draft and the verdict on it."""
    llm = base().with_speculative_config(completed(config, tmp_path))
    first = llm.stream(given(PROMPTS[:1])[0], params(max_tokens=None))
    next(first)
    num_calls, close = [0], first.close

    def closing(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        num_calls[0] += 1
        if num_calls[0] == 2:
            close()
        return scores

    second = llm.generate(given(PROMPTS[1:2])[0], params(logits_processors=[closing]))
    assert tuple(second[0].outputs[0].token_ids) == plain()[1]
    list(first)
    ended = first.outputs()[0].outputs[0]
    assert ended.finish_reason == "abort"
    assert tuple(ended.token_ids) == plain(None)[0][: len(ended.token_ids)]
    dropped = llm.stream(given(PROMPTS[2:3])[0], params())
    next(dropped)
    del dropped
    outputs = llm.generate(given(PROMPTS), params())
    assert [tuple(output.outputs[0].token_ids) for output in outputs] == plain()
    assert llm.num_unfinished == 0


def test_an_engine_does_not_abort_inside_of_its_own_step() -> None:
    """It says that it is busy; contained, that is a fault of the drafter, and no token changes."""

    class Aborting(NGramDrafter):
        def propose(self, rows: Any, budgets: Any) -> Any:
            engine.abort("0")
            return super().propose(rows, budgets)

    engine = Engine(base().target, made("ngram", 3, cls=Aborting), EngineConfig(contains_faults=True))
    rows = [engine.add_request(prompt, params(), str(i))[0] for i, prompt in enumerate(PROMPTS)]
    list(engine.run())
    assert [tuple(row.output_ids) for row in rows] == plain()
    assert all("EngineBusyError" in row.stats.drafter_error for row in rows)


@pytest.mark.sample(2)
@pytest.mark.parametrize("config", METHODS)
def test_limits_are_reached_exactly(config: Any, tmp_path: Path) -> None:
    """Up to the last position of the context, one token, the end with the first token, and what is refused."""
    llm = base().with_speculative_config(completed(config, tmp_path))
    outputs = llm.generate(given(PROMPTS), params(max_tokens=None))
    assert [tuple(output.outputs[0].token_ids) for output in outputs] == plain(None)
    assert [len(prompt) + len(text) for prompt, text in zip(PROMPTS, plain(None), strict=True)] == [LIMIT] * 4
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}
    (last,) = llm.generate(given([[7] * (LIMIT - 1)])[0], params(max_tokens=None))
    assert len(last.outputs[0].token_ids) == 1
    outputs = llm.generate(given(PROMPTS), params(max_tokens=1))
    assert [tuple(output.outputs[0].token_ids) for output in outputs] == [text[:1] for text in plain()]
    outputs = llm.generate(given(PROMPTS), [params(stop_token_ids=[text[0]]) for text in plain()])
    assert [(tuple(one.outputs[0].token_ids), one.outputs[0].finish_reason) for one in outputs] == [
        (text[:1], "stop") for text in plain()
    ]
    with pytest.raises(ContextLengthError):
        llm.generate(given([[7] * LIMIT])[0], params())
    with pytest.raises(PromptError):
        llm.generate(given([[]])[0], params())
    assert llm.num_unfinished == 0

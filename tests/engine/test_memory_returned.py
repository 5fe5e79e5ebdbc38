"""Memory that rows have needed is given back when they end: of the target, of drafters, and of an idle LLM."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from test_memory_limits import long_target
from test_memory_limits import text as long_text
from test_memory_plan import DRAFTERS, make_counted, params, text

from drafting import made
from engines import engine_of
from foredraft import LLM, SamplingParams
from foredraft.config.engine import EngineConfig
from foredraft.engine import engine as engine_module
from foredraft.engine import frontend
from foredraft.engine.engine import Engine
from foredraft.engine.row import Row
from foredraft.model.cache import storage
from foredraft.model.lm import Nodes
from foredraft.testing import toy_model

METHODS = [
    pytest.param(name, marks=() if name in ("none", "sparse-kv", "union") else pytest.mark.full)
    for name in (*DRAFTERS, "eagle2", "hydra++", "union")
]


def held(engine: Engine) -> int:
    """Bytes of all caches."""
    return engine.memory().allocated_bytes


@pytest.mark.sample(1)
@pytest.mark.parametrize("method", METHODS)
def test_an_engine_without_rows_gives_everything_back_and_goes_on(method: str) -> None:
    """The texts after it are those before it, in the same memory."""
    target, drafter = make_counted(method)
    engine = Engine(target, drafter, EngineConfig(max_num_seqs=8))
    assert held(engine) == 0

    def run() -> tuple[list[list[int]], int]:
        rows = [engine.add_request(text(i, 50 + 9 * (i % 3)), params(i, 30))[0] for i in range(6)]
        most = max(held(engine) for _ in engine.run())
        return [row.output_ids for row in rows], most

    first = run()
    assert first[1] > 0
    engine.release_memory()
    assert held(engine) == 0
    assert run() == first


def generate_beside_a_long_row() -> tuple[Engine, list[Row], int, int]:
    """One row of 3,000 tokens that ends soon, beside 7 short ones; what was held at most, and before they ended."""
    engine = Engine(long_target(), made("ngram", 3, prompt_lookup_min=1), EngineConfig(max_num_seqs=8))
    requests = [(3000, 10), *[(10 + i, 200) for i in range(7)]]
    rows = [
        engine.add_request(
            long_text(i, length), SamplingParams(temperature=0.8, seed=i, max_tokens=n, ignore_eos=True)
        )[0]
        for i, (length, n) in enumerate(requests)
    ]
    most = last = 0
    while engine.has_unfinished:
        engine.step()
        if engine.num_running:
            most, last = max(most, held(engine)), held(engine)
    return engine, rows, most, last


@pytest.mark.slow
def test_a_long_row_that_has_ended_leaves_its_memory_while_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once where memory is held page by page, and else after a while."""
    _, free, most, kept = generate_beside_a_long_row()
    assert kept < most / 2
    monkeypatch.setattr(storage, "IS_LAZY", False)
    _, _, most, kept = generate_beside_a_long_row()
    assert kept == most
    monkeypatch.setattr(engine_module, "SHRINK_STEPS", 16)
    _, rows, most, last = generate_beside_a_long_row()
    assert last <= most / 8
    assert [row.output_ids for row in rows] == [row.output_ids for row in free]


def test_an_idle_llm_gives_back_what_a_long_call_has_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The native program, too, whose tables grow with positions; the answers stay the same."""
    has_rested = threading.Event()
    monkeypatch.setattr(frontend, "IDLE_SECONDS", 0.05)
    llm = LLM("zoo:tiny", "draft_model", num_cached_prefixes=2)
    engine = engine_of(llm)
    release = engine.release_memory
    monkeypatch.setattr(engine, "release_memory", lambda: (release(), has_rested.set()))
    prompts = [{"prompt_token_ids": [5 + i, 6, 7] * (300 if i == 0 else 3)} for i in range(5)]

    def answers() -> list[list[int]]:
        has_rested.clear()
        found = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True), use_tqdm=False)
        return [output.outputs[0].token_ids for output in found]

    first = answers()
    assert llm.memory.prefix_bytes > 0
    assert has_rested.wait(30)
    assert llm.memory.allocated_bytes == 0
    kept = llm.memory.prefix_bytes
    assert answers() == first
    assert llm.memory.prefix_bytes == kept
    assert has_rested.wait(30)


# -- the pause -----------------------------------------------------------------------------------------------------


def test_a_pause_does_not_keep_an_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontend, "IDLE_SECONDS", 0.5)
    llm, gone, before = LLM(toy_model()), threading.Event(), {*threading.enumerate()}
    llm.generate([[1, 2]], SamplingParams(temperature=0, max_tokens=4))
    (thread,) = {*threading.enumerate()} - before
    weakref.finalize(llm.target, gone.set)
    del llm
    gc.collect()
    assert gone.is_set()
    thread.join(30)
    assert not thread.is_alive()


def test_tables_of_a_model_are_given_back() -> None:
    target, nodes = long_target(), Nodes.from_chains([long_text(3, 300)])
    want = target.forward(nodes, target.new_cache(1))
    target.release_tables()
    torch.testing.assert_close(target.forward(nodes, target.new_cache(1)), want, atol=0, rtol=0)

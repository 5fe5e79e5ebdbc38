"""Memory of caches: how they grow, what a plan counts, and long texts under a plan that holds few of them."""

from __future__ import annotations

import gc
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from drafting import made
from foredraft import SamplingParams
from foredraft.config.engine import EngineConfig, share_of
from foredraft.drafters.none import EmptyDrafter
from foredraft.engine.drafter import Drafter
from foredraft.engine.engine import Engine
from foredraft.engine.memory import available_on, bytes_per_token
from foredraft.engine.row import Row
from foredraft.model.cache.ragged import KVCache
from foredraft.model.lm import CausalLM
from foredraft.testing import toy_model
from foredraft.testing.divergence import token_gap
from foredraft.tree import DraftTree

VOCAB_SIZE = 32


@cache
def long_target() -> CausalLM:
    """As small as a model can be, over a long context."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
    model = toy_model(VOCAB_SIZE, scale=0.6, num_hidden_layers=1, max_position_embeddings=8192, **sizes)
    return CausalLM(model, execution="eager")


def text(number: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(number)
    return (torch.randint(0, VOCAB_SIZE, (19,), generator=generator).tolist() * length)[:length]


def run(target: CausalLM, drafter: Drafter, requests: list[Any], **config: Any) -> tuple[list[Row], Engine, int]:
    """The rows, and the most bytes that keys and values held after any step."""
    engine = Engine(target, drafter, EngineConfig(max_num_seqs=64, **config))
    rows = [engine.add_request(prompt, given)[0] for prompt, given in requests]
    most = 0
    while engine.has_unfinished:
        engine.step()
        most = max(most, engine.cache.num_bytes)
    return rows, engine, most


# -- how a cache grows ---------------------------------------------------------------------------------------------


def test_a_cache_that_grows_token_by_token_copies_little() -> None:
    """What is copied in all is a small multiple of what there is in the end, so steps are no quadratic cost."""
    kv = KVCache(1)
    kv.layers[0].lazy_initialization(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1))
    sizes = [kv.capacity]
    for length in range(257, 32_768):
        kv.reserve(length)
        if kv.capacity != sizes[-1]:
            sizes.append(kv.capacity)
    assert all(new <= (2.0 if old < 2048 else 1.25) * old for old, new in pairwise(sizes))
    assert sum(sizes[:-1]) <= 5 * sizes[-1]


# -- what a plan counts --------------------------------------------------------------------------------------------


class Wide(Drafter):
    """Drafts trees that are wider than the room that a plan leaves for drafts."""

    name = "wide"

    def propose(self, rows: Any, budgets: Any) -> list[DraftTree]:
        return [
            DraftTree.from_paths(row.pending, [(token, other) for token in range(12) for other in range(12)])
            if budget > 1
            else DraftTree.root(row.pending)
            for row, budget in zip(rows, budgets, strict=True)
        ]


def test_wide_trees_stay_within_a_plan() -> None:
    """157 nodes where the plan counts on 64: what does not fit is not verified."""
    target = long_target()
    requests = [(text(i, 190), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)) for i in range(5)]
    free, *_ = run(target, EmptyDrafter(), requests)
    size = 1024 * bytes_per_token(target)
    rows, _, most = run(target, Wide(), requests, max_kv_bytes=size)
    assert [row.output_ids for row in rows] == [row.output_ids for row in free]
    assert most <= size


# -- limits of the process -----------------------------------------------------------------------------------------


@contextmanager
def address_space(num_bytes: int) -> Iterator[None]:
    """So many bytes more than the process has now, as ``ulimit -v`` would set it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (num_pages * resource.getpagesize() + num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not hold this limit")
def test_a_share_is_of_what_the_limits_of_the_process_leave() -> None:
    with address_space(100_000_000):
        assert 0 < share_of("max_kv_bytes", "50%", available_on(torch.device("cpu"))) <= 50_000_000


def run_out_of_memory() -> None:
    """64 samples of 1,000 tokens want 140 MB and find 70: without a plan the call fails, and later ones run.

    With a plan for two sevenths of it all of them finish, and say what they say where there is room.
    """
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2}
    target = CausalLM(toy_model(VOCAB_SIZE, max_position_embeddings=4096, **sizes), execution="eager")
    prompt = text(1, 1000)

    def samples(num_rows: int, **config: Any) -> tuple[Engine, list[Row]]:
        engine = Engine(target, made("ngram", 3), EngineConfig(max_num_seqs=64, **config))
        return engine, engine.add_request(prompt, SamplingParams(n=num_rows, max_tokens=4, seed=1, ignore_eos=True))

    plain, few = samples(3)
    list(plain.run())
    with address_space(70_000_000):
        engine, rows = samples(64)
        with pytest.raises((MemoryError, RuntimeError), match="allocate"):
            list(engine.run())
        assert {row.finish_reason for row in rows} == {"abort"}
        assert not engine.has_unfinished
        (again,) = engine.add_request(prompt[:50], SamplingParams(max_tokens=4, temperature=0))
        list(engine.run())
        assert again.finish_reason == "length"
    del engine
    gc.collect()
    with address_space(70_000_000):
        planned, rows = samples(64, max_kv_bytes=20_000_000)
        list(planned.run())
        assert planned.cache.num_bytes <= 20_000_000
    assert {row.finish_reason for row in rows} == {"length"}
    assert [row.output_ids for row in rows[:3]] == [row.output_ids for row in few]


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not hold this limit")
def test_where_memory_ends_the_step_breaks_off_and_a_plan_keeps_within_it() -> None:
    """In a process of its own: what other tests have given back to this one would be room that no limit counts."""
    program = "import sys; sys.path[:0] = sys.argv[1:]; import test_memory_limits as m; m.run_out_of_memory()"
    here = Path(__file__).parent
    command = [sys.executable, "-c", program, str(here), str(here.parent / "support")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


# -- long texts ----------------------------------------------------------------------------------------------------


def test_in_float32_texts_part_only_where_two_tokens_tie() -> None:
    """What is read again is rounded otherwise; a difference needs a gap below 1e-4."""
    target = CausalLM(toy_model(64, dtype=torch.float32, max_position_embeddings=1024), execution="eager")
    given = [
        SamplingParams(temperature=0.0 if i % 2 else 0.7, max_tokens=130, seed=i, ignore_eos=True) for i in range(4)
    ]
    requests = [(text(i, 200), params) for i, params in enumerate(given)]
    free, *_ = run(target, EmptyDrafter(), requests)
    size = 2 * 416 * bytes_per_token(target)
    rows, engine, most = run(target, made("ngram", 4, prompt_lookup_min=1), requests, max_kv_bytes=size)
    assert engine.profile.num_preemptions > 0
    assert most <= size
    for (prompt, params), row, plain in zip(requests, rows, free, strict=True):
        pairs = enumerate(zip(row.output_ids, plain.output_ids, strict=True))
        place = next((i for i, (got, want) in pairs if got != want), None)
        if place is not None:
            tokens = row.output_ids[place], plain.output_ids[place]
            assert token_gap(target, prompt, plain.output_ids[:place], params, 0, tokens) < 1e-4

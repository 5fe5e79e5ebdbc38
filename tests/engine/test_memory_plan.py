"""Keys and values within a number of bytes: who waits, who leaves for a while, and that no token changes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import eagle_heads
import toy_heads
from drafting import made
from foredraft import SamplingParams
from foredraft.config.engine import EngineConfig, available_bytes, memory_size, share_of
from foredraft.drafters.compose import UnionDrafter
from foredraft.drafters.heads.eagle import EagleDrafter
from foredraft.drafters.heads.medusa_hydra import MultiHeadDrafter
from foredraft.drafters.lm.draft_model import DraftModelDrafter
from foredraft.drafters.none import EmptyDrafter
from foredraft.drafters.parts.self_draft import SelfDrafter
from foredraft.drafters.parts.sparse_view import SparseView
from foredraft.drafters.selfdraft.sparse_kv import USUAL_ACCEPTANCE
from foredraft.engine import memory
from foredraft.engine.drafter import Drafter
from foredraft.engine.engine import Engine
from foredraft.engine.memory import available_on, bytes_per_token
from foredraft.engine.row import Row
from foredraft.errors import ConfigError, ContextLengthError
from foredraft.methods.lengths import LengthPolicy
from foredraft.methods.rank_tree import RankTree
from foredraft.model.cache import storage
from foredraft.model.cache.prefixes import PrefixStore
from foredraft.model.lm import CausalLM
from foredraft.testing import check_cache_lengths
from toys import VOCAB_SIZE, small, target

DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "none": EmptyDrafter,
    "ngram": lambda: made("ngram", 4, prompt_lookup_min=1),
    "suffix": lambda: made("suffix", 4, suffix_decoding_min_token_prob=0.0),
    "draft-model": lambda: DraftModelDrafter(small(), target_vocab_size=VOCAB_SIZE),
    "sparse-kv": lambda: SelfDrafter(
        "sparse_kv",
        usual_acceptance=USUAL_ACCEPTANCE,
        view=SparseView(budget=16, selector="streaming", sinks=1, window=15, refresh=8),
        target_vocab_size=VOCAB_SIZE,
        policy=LengthPolicy(3),
    ),
}
MARKS = dict.fromkeys(("none", "suffix", "draft-model", "sparse-kv"), pytest.mark.full)


OWN_CACHES = ("draft-model", "eagle2", "hydra++")
"""Drafters with caches that grow; so has a union of one of them."""


def text(number: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(number)
    return (torch.randint(0, VOCAB_SIZE, (9,), generator=generator).tolist() * length)[:length]


def params(number: int, max_tokens: int | None, **others: Any) -> SamplingParams:
    temperature = 0.0 if number % 2 else 0.8
    return SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=number, ignore_eos=True, **others)


def run(
    drafter: Drafter, config: EngineConfig, requests: list[tuple[list[int], SamplingParams]]
) -> tuple[list[Row], Engine, int, int]:
    """The rows, and the most rows and cells that were in the cache at once."""
    engine = Engine(target(), drafter, config)
    rows = [row for prompt, given in requests for row in engine.add_request(prompt, given)]
    most_rows = most_cells = 0
    while engine.has_unfinished:
        engine.step()
        check_cache_lengths(engine)
        most_rows = max(most_rows, engine.num_running)
        most_cells = max(most_cells, engine.cache.num_bytes // bytes_per_token(target()))
    return rows, engine, most_rows, most_cells


def plan(cells: int, **others: Any) -> EngineConfig:
    return EngineConfig(max_num_seqs=64, max_kv_bytes=cells * bytes_per_token(target()), **others)


RAGGED = [(text(i, 60 - i % 7), params(i, 12)) for i in range(64)]


@cache
def free_of_plans() -> tuple[list[Row], Engine, int, int]:
    return run(EmptyDrafter(), EngineConfig(max_num_seqs=64), RAGGED)


@pytest.mark.parametrize("method", [pytest.param(name, marks=MARKS.get(name, ())) for name in DRAFTERS])
def test_64_requests_under_a_plan_for_8_finish_as_without_one(method: str) -> None:
    """Ragged texts, greedy and sampled, float64."""
    free, _, all_rows, _ = free_of_plans()
    cells = 8 * 192
    rows, engine, most_rows, most_cells = run(DRAFTERS[method](), plan(cells), RAGGED)
    assert [row.output_ids for row in rows] == [row.output_ids for row in free]
    assert all(row.finish_reason == "length" for row in rows)
    assert all_rows == 64
    assert most_rows <= 8
    assert most_cells <= cells
    assert engine.profile.num_preemptions == sum(row.stats.num_preemptions for row in rows)


SAMPLES = [(text(1, 90), params(1, 20, n=5)), (text(2, 30), params(2, 20))]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("requests", "cells", "is_lazy", "num_rows"),
    [
        pytest.param([(text(i, 20), params(i, 125)) for i in range(3)], 576, True, 3, id="rows that grow"),
        pytest.param(
            [(text(i, n), params(i, 12)) for i, n in enumerate([200, 5, 6, 7, 150, 8, 9])], 500, True, 2, id="one long"
        ),
        pytest.param(SAMPLES, 512, True, 3, id="samples of 192, 192 and 128 tokens"),
        pytest.param(SAMPLES, 512, False, 2, id="where all take as much as the longest, as on accelerators"),
    ],
)
def test_rows_share_a_plan(
    requests: Any, cells: int, is_lazy: bool, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns are given back for rows and rows for columns; who came first stays, and who leaves is counted."""
    monkeypatch.setattr(storage, "IS_LAZY", is_lazy)
    free, *_ = run(EmptyDrafter(), EngineConfig(), requests)
    rows, engine, most_rows, most_cells = run(DRAFTERS["ngram"](), plan(cells), requests)
    assert [row.output_ids for row in rows] == [row.output_ids for row in free]
    assert most_rows == num_rows
    assert most_cells <= cells
    assert sum(row.stats.num_preemptions for row in rows) == engine.profile.num_preemptions
    assert rows[0].stats.num_preemptions == 0
    assert (engine.profile.num_preemptions > 0) == (cells == 576)


def test_what_rows_take_of_the_plan_is_told_while_they_run() -> None:
    engine = Engine(target(), EmptyDrafter(), plan(512))
    assert (engine.memory().planned_share, engine.memory().planned_bytes) == (0.0, 512 * bytes_per_token(target()))
    engine.add_request(text(0, 30), params(0, 60, n=2))
    found = [(engine.memory().planned_share, engine.memory().allocated_bytes) for _ in engine.run()]
    assert {share for share, _ in found} == {2 * 128 / 512, 2 * 192 / 512, 0.0}  # two rows, beyond 64 tokens, none
    assert max(allocated for _, allocated in found) == 2 * 88 * bytes_per_token(target())
    assert Engine(target(), EmptyDrafter()).memory().planned_share is None


@pytest.mark.parametrize("method", ["union", *(pytest.param(name, marks=pytest.mark.full) for name in OWN_CACHES)])
def test_caches_of_drafters_that_grow_are_counted(method: str) -> None:
    """What target and drafter have allocated together stays within the plan, and the texts are those without one."""
    lm, drafter = make_counted(method)
    requests = [(text(i, 50 + 9 * (i % 3)), params(i, 30)) for i in range(8)]
    num_bytes = 6 * 192 * bytes_per_token(lm)
    engine = Engine(lm, drafter, EngineConfig(max_num_seqs=8, max_kv_bytes=num_bytes))
    rows = [row for prompt, given in requests for row in engine.add_request(prompt, given)]
    most = most_of_drafter = 0
    while engine.has_unfinished:
        engine.step()
        most = max(most, engine.memory().allocated_bytes)
        most_of_drafter = max(most_of_drafter, engine.memory().allocated_bytes - engine.cache.num_bytes)
    assert 0 < most_of_drafter < most <= num_bytes
    free, *_ = run(EmptyDrafter(), EngineConfig(), requests)
    assert [row.output_ids for row in rows] == [row.output_ids for row in free]


def make_counted(method: str) -> tuple[CausalLM, Drafter]:
    if method == "eagle2":
        growth: dict[str, Any] = {"num_branches": 2, "reranks": True, "max_nodes": 6}
        lm = eagle_heads.target()
        drafter: Drafter = EagleDrafter(
            eagle_heads.trained(1), lm, policy=LengthPolicy(3), target_vocab_size=VOCAB_SIZE, **growth
        )
        return lm, drafter
    if method == "hydra++":
        tree = RankTree.grown([[0.6, 0.1]] * 3, 6)
        lm = toy_heads.target()
        return lm, MultiHeadDrafter(
            toy_heads.hydra_heads(True), 2, tree=tree, target_vocab_size=VOCAB_SIZE, max_depth=3
        )
    if method == "union":
        return target(), UnionDrafter([DRAFTERS["ngram"](), DRAFTERS["draft-model"]()])
    return target(), DRAFTERS[method]()


def test_an_aborted_row_that_waits_to_be_read_again_is_gone() -> None:
    engine = Engine(target(), EmptyDrafter(), plan(576))
    rows = [engine.add_request(text(i, 20), params(i, 115), str(i))[0] for i in range(3)]
    while engine.has_unfinished and not rows[2].stats.num_preemptions:
        engine.step()
    assert rows[2].num_output_tokens > 100
    assert engine.abort("2") == [rows[2]]
    list(engine.run())
    assert [row.finish_reason for row in rows] == ["length", "length", "abort"]


# -- refusals ------------------------------------------------------------------------------------------------------


def test_a_request_that_fits_not_even_alone_is_refused() -> None:
    engine = Engine(target(), EmptyDrafter(), plan(256))
    with pytest.raises(ContextLengthError, match=r"150 tokens that may grow to 250 needs \d+ bytes.*lower max_tokens"):
        engine.add_request(text(1, 150), params(1, 100))
    (row,) = engine.add_request(text(1, 150), params(1, 40))
    list(engine.run())
    assert row.finish_reason == "length"


def test_a_request_without_a_limit_ends_where_the_plan_does() -> None:
    """Only a request that asks for more than fits alone is refused."""
    engine = Engine(target(), EmptyDrafter(), plan(256))
    (row,) = engine.add_request(text(1, 150), params(1, None))
    list(engine.run())
    assert (row.finish_reason, len(row.token_ids)) == ("length", 192)
    with pytest.raises(ContextLengthError, match="200 tokens that may grow to 201"):
        engine.add_request(text(1, 200), params(1, None))


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ("lots", "give a number of bytes, a size like 500MB"),
        (-5, "give a number of bytes"),
        (True, "give a number of bytes"),
        ("0", "1 byte or more"),
        ("120%", "a share is more than 0% and at most 100%"),
        (1000, r"enough for 1 tokens .*128 are needed"),
    ],
)
def test_plans_that_make_no_sense_are_refused(size: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Engine(target(), EmptyDrafter(), EngineConfig(max_kv_bytes=size))


def test_sizes_are_read() -> None:
    assert memory_size("x", "500MB") == 500_000_000
    assert memory_size("x", "1.5 GiB") == 3 * 2**29
    assert memory_size("x", 7) == memory_size("x", "7B") == 7
    assert memory_size("x", "40 %") == "40%"


def test_a_share_is_of_what_the_device_of_the_model_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU has its own memory, of which torch holds what this process has freed; other devices may not say."""
    monkeypatch.setattr(memory, "available_bytes", lambda: 8_000_000)
    engine = Engine(target(), EmptyDrafter(), EngineConfig(max_kv_bytes="25 %"))
    assert engine.plan is not None
    assert engine.plan.num_bytes == 2_000_000
    gpu = torch.device("cuda:1")
    monkeypatch.setattr(torch.cuda, "mem_get_info", {gpu: (5_000, 9_000)}.__getitem__)
    monkeypatch.setattr(torch.cuda, "memory_reserved", {gpu: 3_000}.__getitem__)
    monkeypatch.setattr(torch.cuda, "memory_allocated", {gpu: 1_000}.__getitem__)
    assert share_of("x", "50%", available_on(gpu)) == 3_500
    monkeypatch.setattr(memory, "available_bytes", lambda: None)
    with pytest.raises(ConfigError, match="max_kv_bytes is '25%', but the available memory is not known"):
        Engine(target(), EmptyDrafter(), EngineConfig(max_kv_bytes="25%"))
    with pytest.raises(ConfigError, match="the available memory is not known"):
        share_of("x", "50%", available_on(torch.device("mps")))


def told(folder: Path, limit: object, used: int, droppable: int = 0, version: int = 2) -> None:
    """Write what a cgroup says of itself."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    line = "inactive_file" if version == 2 else "total_inactive_file"
    (folder / "memory.stat").write_text(f"anon 5\n{line} {droppable}\nfile 7\n")


def test_shares_are_of_the_smaller_of_machine_and_cgroup(tmp_path: Path) -> None:
    meminfo, own = tmp_path / "meminfo", tmp_path / "own"
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable:    4000 kB\n")
    assert available_bytes(meminfo, tmp_path, own) == 4_096_000
    told(tmp_path, 3_000_000, 1_000_000)
    assert available_bytes(meminfo, tmp_path, own) == 2_000_000
    told(tmp_path, 3_000_000, 3_000_001)
    assert available_bytes(meminfo, tmp_path, own) == 0
    told(tmp_path, "max", 1_000_000)
    assert available_bytes(meminfo, tmp_path, own) == 4_096_000
    assert available_bytes(tmp_path / "none", tmp_path, own) is None


@pytest.mark.parametrize("version", [1, 2])
def test_limits_of_the_own_cgroup_and_of_those_above_it_hold(version: int, tmp_path: Path) -> None:
    """A service of systemd, or a job of a scheduler, on a machine whose root has no limit."""
    meminfo, own = tmp_path / "meminfo", tmp_path / "own"
    meminfo.write_text("MemAvailable:    4000 kB\n")
    own.write_text("4:memory:/jobs/one\n1:name=systemd:/elsewhere\n0::/\n" if version == 1 else "0::/jobs/one\n")
    root = tmp_path / "memory" if version == 1 else tmp_path
    told(root / "jobs" / "one", 2_500_000, 1_000_000, version=version)
    assert available_bytes(meminfo, tmp_path, own) == 1_500_000
    told(root / "jobs", 9_000_000, 8_000_000, version=version)  # its siblings have used that
    assert available_bytes(meminfo, tmp_path, own) == 1_000_000
    told(root / "jobs", 9_000_000, 8_000_000, droppable=400_000, version=version)  # files that were read
    assert available_bytes(meminfo, tmp_path, own) == 1_400_000
    told(root / "jobs" / "two", 10, 10, version=version)  # of others
    assert available_bytes(meminfo, tmp_path, own) == 1_400_000


def test_kept_prefixes_take_a_quarter_of_a_plan_on_top() -> None:
    """The least recently used one makes room, and one that does not fit alone is not kept."""
    store = PrefixStore(8)
    engine = Engine(target(), DRAFTERS["draft-model"](), plan(1200), prefixes=store)
    assert store.max_bytes == 300 * bytes_per_token(target())
    kept = []
    for number, length in enumerate([60, 60, 60, 140, 200]):  # and as many columns of the drafter
        engine.add_request(text(number, length), params(number, 2))
        list(engine.run())
        kept.append((len(store), store.num_tokens))
        assert store.num_bytes <= store.max_bytes
    assert kept == [(1, 61), (2, 122), (2, 122), (1, 141), (1, 141)]

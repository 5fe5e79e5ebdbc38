"""Drafters that cost more than they bring are left: beside short steps, and there alone; rows come back to them."""

from __future__ import annotations

import copy
import sys
import time
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from soak import Moody

import toy_heads
from foredraft.config.engine import EngineConfig
from foredraft.config.speculative import SpeculativeConfig
from foredraft.drafters import make_drafter
from foredraft.drafters.context import DrafterContext
from foredraft.drafters.heads.medusa_hydra import MultiHeadDrafter
from foredraft.drafters.none import EmptyDrafter
from foredraft.drafters.parts.rank_tree import RankTree
from foredraft.engine.cost_model import SHARE, CostModel
from foredraft.engine.drafter import Drafter, Needs
from foredraft.engine.engine import Engine
from foredraft.engine.governor import TO_LOSE, TO_RETURN, Governor, Patience
from foredraft.engine.row import Row, RowState
from foredraft.model.capture import Wanted
from foredraft.model.lm import CausalLM
from foredraft.testing import GREEDY, SAMPLED, perturbed, toy_model
from foredraft.tree import DraftTree

PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [5], [9, 8, 7, 6, 5, 9, 8], [4, 4, 4, 4], [11, 12, 13, 14, 15, 16, 17, 18, 19]]
CURVE = {1: 0.001, 512: 0.00101}


def steps_to_the_end(patience: Patience, taken: float, most: int = 5000) -> int:
    """Steps without drafts, of which a drafter takes a share, until it is left; ``most`` where it is not."""
    for step in range(most):
        patience.attended(1, 1, taken * 0.001, 0.001, drafts=False)
        if patience.ends():
            return step + 1
    return most


@pytest.mark.parametrize(("taken", "num_arms"), [(0.05, 1), (0.1, 1), (0.5, 1), (0.5, 3)])
def test_what_a_drafter_may_lose_is_limited(taken: float, num_arms: int) -> None:
    patience = Patience(num_arms)
    lost = steps_to_the_end(patience, taken) * (taken - SHARE)
    assert TO_LOSE * num_arms <= lost <= TO_LOSE * num_arms + taken
    assert not patience.welcomes()
    for _ in range(int(TO_RETURN * TO_LOSE * num_arms / SHARE) - 1):
        patience.rested(1, 0.001)
        assert not patience.welcomes()
    for _ in range(2):
        patience.rested(1, 0.001)
    assert patience.welcomes()
    assert patience.totals.speedup == pytest.approx(1.0)
    assert patience.totals.num_tokens == patience.totals.num_steps == int(TO_RETURN * TO_LOSE * num_arms / SHARE) + 1


@pytest.mark.parametrize("taken", [0.05, 0.6, 3.0])
def test_what_is_lost_over_time_is_limited_though_it_is_tried_again(taken: float) -> None:
    patience, lost, trials = Patience(), 0.0, 0
    for step in range(20_000):
        if step % 50 == 0 and not patience.is_attending:  # a row comes in
            trials += patience.welcomes()
        if patience.is_attending:
            patience.attended(1, 1, taken * 0.001, 0.001, drafts=False)
            lost += taken
            patience.ends()
        else:
            patience.rested(1, 0.001)
    assert trials >= 10
    assert lost <= TO_LOSE + SHARE * 20_000 + taken * (trials + 1)


def test_what_is_small_beside_a_step_is_borne() -> None:
    assert steps_to_the_end(Patience(), 0.02) == 5000


def test_reading_prompts_is_a_loss_too() -> None:
    """A head that read a prompt for every 50 tokens, and drafted for none of them, took 8 % of the time for ever."""
    patience, lost = Patience(), 0.0
    patience.read(1.0)  # before it is known how long a step takes
    patience.attended(1, 1, SHARE * 0.001, 0.001, drafts=False)
    while patience.is_attending and lost < 1000:
        patience.read(0.003)
        lost += 3.0
        for _ in range(50):
            patience.attended(1, 1, 0.00002, 0.001, drafts=False)
            lost += 0.02 - SHARE
            if patience.ends():
                break
    assert not patience.welcomes()
    assert TO_LOSE <= lost <= TO_LOSE + 4.0
    for _ in range(1000):
        patience.rested(1, 0.001)
    assert patience.welcomes()
    patience.read(60.0)  # a pause of the machine
    assert not patience.ends()


class Studious(Drafter):
    """Drafts nothing, and wants to see prompts."""

    name = "studious"

    def needs(self, target: CausalLM, cache: Any) -> Needs:
        return Needs(prompts=True)

    def propose(self, rows: Any, budgets: Any) -> list[DraftTree]:
        return [DraftTree.root(row.pending) for row in rows]


class Counting(Patience):
    """Notes what was read."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def read(self, drafter_seconds: float) -> None:
        self.seconds.append(drafter_seconds)


def test_every_chunk_that_a_drafter_reads_is_counted() -> None:
    lm, patience = CausalLM(toy_model(64), execution="eager"), Counting()
    engine = Engine(lm, Studious(), EngineConfig(prefill_chunk_size=4), governor=Willing(patience))
    engine.add_request(PROMPTS[-1], replace(GREEDY, max_tokens=2))
    list(engine.run())
    assert len(patience.seconds) == 2  # nine tokens, the last of which is pending
    assert all(seconds > 0 for seconds in patience.seconds)


def test_what_brings_more_than_it_takes_is_kept() -> None:
    patience = Patience()
    for _ in range(1000):  # a fifth of every step is lost, and every second one brings half a token more than it costs
        patience.attended(2, 2, 0.0002, 0.001, drafts=False)
        patience.attended(2, 4, 0.0002, 0.0013, drafts=True)
        assert not patience.ends()
    assert patience.welcomes()


def test_pauses_of_the_machine_are_not_the_drafters() -> None:
    patience = Patience()
    for step in range(1000):
        patience.attended(1, 1, 0.00005, 0.001 if step % 200 else 1.0, drafts=False)
        patience.attended(1, 2, 0.00005, 0.0011 if step % 150 else 1.0, drafts=True)
        assert not patience.ends()


def test_a_machine_that_pauses_often_does_not_drive_a_good_drafter_away() -> None:
    """Chat on an idle machine was left once, for pauses of 20 ms in steps of 8."""
    patience = Patience()
    for step in range(1000):
        patience.attended(1, 1, 0.0006, 0.0075, drafts=False)
        patience.attended(1, 2, 0.001, 0.0105 if step % 4 else 0.03, drafts=True)
        assert not patience.ends()


class Dawdling(Drafter):
    """Drafts nothing, wants features, and takes its time over every step."""

    name = "dawdling"

    def __init__(self) -> None:
        self.started: list[int] = []
        self.observed: list[int] = []
        self.ended: list[int] = []

    def needs(self, target: CausalLM, cache: Any) -> Needs:
        return Needs(last_hidden=True, choices=True)

    def start(self, rows: Any, chunks: Any) -> None:
        begun = [row for row, chunk in zip(rows, chunks, strict=True) if chunk.is_last]
        self.started += [row.id for row in begun]
        for row in begun:
            row.state[self] = Noted(self)

    def propose(self, rows: Any, budgets: Any) -> list[DraftTree]:
        return [DraftTree.root(row.pending) for row in rows]

    def observe(self, rows: Any, results: Any) -> None:
        assert all(result.features.last_hidden([0]).isfinite().all() for result in results)
        self.observed += [row.id for row in rows]
        time.sleep(0.05)


@dataclass(eq=False)
class Noted(RowState):
    """Tells a `Dawdling` drafter which rows have ended for it."""

    drafter: Dawdling

    def ended(self, row: Row, *, is_kept: bool) -> None:
        self.drafter.ended.append(row.id)


def test_rows_go_on_without_a_drafter_that_takes_longer_than_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = CausalLM(toy_model(64), execution="eager")
    wanted: list[Wanted] = []
    forward = CausalLM.forward_with

    def watched(self: CausalLM, what: Wanted, *args: Any, **keys: Any) -> Any:
        wanted.append(what)
        return forward(self, what, *args, **keys)

    monkeypatch.setattr(CausalLM, "forward_with", watched)
    drafter = Dawdling()
    governor = Governor(CostModel(CURVE))
    engine = Engine(lm, drafter, EngineConfig(max_num_seqs=2), governor=governor)
    params = replace(SAMPLED, max_tokens=60)
    first = [engine.add_request(prompt, params)[0] for prompt in PROMPTS[:2]]
    list(engine.run())
    assert all(row.is_plain for row in first)
    assert 0 < len(drafter.observed) < 60, "it was told of some steps and then left"
    assert sorted(drafter.ended) == sorted(row.id for row in first)
    assert wanted[0].last_hidden, "features were wanted at first,"
    assert not wanted[-1].last_hidden, "and not in the end"
    assert first[0].stats.num_undrafted_steps["governor"] >= 20
    assert "without the drafter" in (governor.describe() or "")
    later = engine.add_request(PROMPTS[2], params)[0]
    num_seen = len(wanted)
    list(engine.run())
    assert governor.totals.num_tokens == sum(row.num_output_tokens for row in (*first, later)), "and those counted, too"
    assert later.id not in drafter.started
    assert later.id not in drafter.observed
    assert not any(each.last_hidden for each in wanted[num_seen:])
    plain = Engine(lm, EmptyDrafter(), EngineConfig(max_num_seqs=2))
    rows = [plain.add_request(prompt, params)[0] for prompt in PROMPTS[:3]]
    list(plain.run())
    assert [row.output_ids for row in (*first, later)] == [row.output_ids for row in rows]


class Willing(Governor):
    """Lets every draft pass, so that what is drafted does not hang on measured times."""

    def __init__(self, patience: Patience) -> None:
        super().__init__(CostModel(CURVE))
        self.patience = patience
        self.habit.depth = sys.maxsize

    def budgets(self, rows: Any, budgets: Any, *args: Any, **keys: Any) -> Any:
        return budgets

    def trimmed(self, rows: Any, trees: Any, *args: Any) -> Any:
        return trees

    def cut(self, rows: Any, trees: Any, *args: Any, **keys: Any) -> Any:
        return trees


def drafter_of(method: str, lm: CausalLM) -> Drafter:
    if method == "medusa":
        heads = copy.deepcopy(toy_heads.medusa_heads()).to(torch.float64)
        return MultiHeadDrafter(
            heads, 2, target_vocab_size=64, max_depth=3, tree=RankTree.published("zephyr_stage2").first(16)
        )
    small = CausalLM(perturbed(toy_model(64, dtype=torch.float64), 0.05), execution="eager")
    keys: dict[str, Any] = {"exit_layer": 1} if method == "layer_skip" else {}
    return make_drafter(SpeculativeConfig(method, **keys), DrafterContext(lm, small))


def run_all(lm: CausalLM, drafter: Drafter, governor: Governor | None = None) -> list[Row]:
    """Greedy and sampled rows."""
    engine = Engine(lm, drafter, EngineConfig(max_num_seqs=3, prefill_chunk_size=4), governor=governor)
    given = [replace((GREEDY, SAMPLED)[number % 2], max_tokens=30) for number in range(len(PROMPTS))]
    rows = [row for prompt, params in zip(PROMPTS, given, strict=True) for row in engine.add_request(prompt, params)]
    list(engine.run())
    return rows


@cache
def plain_texts() -> tuple[CausalLM, list[list[int]]]:
    lm = CausalLM(toy_model(64, dtype=torch.float64), execution="eager")
    return lm, [row.output_ids for row in run_all(lm, EmptyDrafter())]


@pytest.mark.parametrize("method", ["ngram", "token_recycling", "draft_model", "layer_skip", "medusa"])
def test_leaving_at_any_time_changes_no_token(method: str) -> None:
    lm, wanted = plain_texts()
    rows: list[Row] = []
    for seed in range(2):
        these = run_all(lm, drafter_of(method, lm), Willing(Moody(seed, 0.6, 0.03)))
        assert [row.output_ids for row in these] == wanted
        rows += these
    assert {row.is_plain for row in rows} == {True, False}
    assert sum(row.stats.num_accepted_draft_tokens for row in rows) > 0
    assert not any(row.stats.drafter_error for row in rows)

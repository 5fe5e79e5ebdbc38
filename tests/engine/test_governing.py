"""How often a governor decides: by what that takes of steps of made-up lengths."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from foredraft.drafters.none import EmptyDrafter
from foredraft.engine.budget import DraftSize
from foredraft.engine.cost_model import CostModel
from foredraft.engine.governing import LONGEST, Attention, Governing
from foredraft.engine.governor import Governor
from foredraft.tree import DraftTree

DECIDING, FOLLOWING = 100e-6, 8e-6


def step(attention: Attention, step_seconds: float, num_rows: int = 1, deciding: float = DECIDING) -> bool:
    """Run a step; whether it was decided in."""
    if attention.begin(num_rows):
        attention.end(deciding, step_seconds)
    else:
        attention.follow(FOLLOWING)
    return attention.is_deciding


def share(step_seconds: float, num_steps: int = 4000, deciding: float = DECIDING) -> tuple[float, float]:
    """Of the time of steps that governing took, and of the later steps that were decided in."""
    attention = Attention()
    decided = [step(attention, step_seconds, deciding=deciding) for _ in range(num_steps)]
    own = sum(deciding if one else FOLLOWING for one in decided)
    later = decided[num_steps // 2 :]
    return own / (num_steps * step_seconds), sum(later) / len(later)


@pytest.mark.parametrize("step_seconds", [0.002, 0.004, 0.008, 0.02, 0.2])
def test_governing_takes_less_than_a_hundredth(step_seconds: float) -> None:
    assert share(step_seconds)[0] < 0.01


def test_where_steps_are_long_every_one_is_decided_in() -> None:
    assert share(0.02)[1] == 1.0
    assert 0.4 < share(0.008)[1] < 1.0


def test_where_following_alone_takes_too_long_the_longest_interval_is_taken() -> None:
    assert share(0.0003, 20_000)[1] == pytest.approx(1 / LONGEST, rel=0.1)


def test_the_first_steps_are_decided_in_most_often() -> None:
    attention = Attention()
    decided = [step(attention, 0.0003) for _ in range(100)]
    assert all(decided[:3])
    assert sum(decided[:40]) > 1.5 * sum(decided[60:])


def test_another_batch_is_decided_upon_at_once() -> None:
    attention = Attention()
    decided = [step(attention, 0.0003, 4) for _ in range(500)]
    assert not all(decided)
    while not step(attention, 0.0003, 4):  # so that the next ones are not
        pass
    assert not step(attention, 0.0003, 5)
    assert step(attention, 0.0003, 8)


def test_a_pause_of_the_machine_does_not_keep_it_from_deciding() -> None:
    attention = Attention()
    for number in range(400):
        step(attention, 0.01, deciding=10.0 if number == 200 else DECIDING)
    assert sum(step(attention, 0.01) for _ in range(64)) > 24


def test_drafts_are_learned_of_between_decisions_where_steps_are_long() -> None:
    for step_seconds, is_learning in ((0.01, True), (0.0003, False)):
        attention = Attention()
        attention.begin(1)
        assert not attention.is_learning  # nothing is known yet
        for _ in range(20):
            step(attention, step_seconds)
        assert attention.is_learning == is_learning


def test_what_is_learned_at_the_next_decision_is_what_every_step_has_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps, drafts and tokens between decisions are counted by then, and at once where a row ends."""
    ticks = itertools.count()
    monkeypatch.setattr("foredraft.engine.governing.perf_counter", lambda: next(ticks) * 10e-6)
    governor = Governor(CostModel({1: 8.0, 8: 9.0, 32: 20.0}))
    scheduler: Any = SimpleNamespace(waiting=[], prefilling=[])
    governing = Governing(governor, EmptyDrafter().facts, scheduler)
    row: Any = SimpleNamespace(id=0, state={}, is_finished=False, token_ids=[1], num_remaining_tokens=500)
    clock: Any = SimpleNamespace(laps={"propose_seconds": 0.0, "verify_seconds": 0.002, "observe_seconds": 0.0})
    tree = DraftTree.chain(1, [2, 3], source="x")
    counted, decided = [], 0
    for number in range(200):
        (budget,) = governing.budgets([row], [DraftSize(4)])
        decided += governing.is_deciding
        if governing.is_deciding:
            assert governor.totals.num_steps == number  # all before it are known
        trees = governing.trimmed([row], [tree if budget else DraftTree.root(1)])
        row.is_finished = number == 199
        output: Any = SimpleNamespace(row=row, token_ids=(2, 9))
        governing.learn(trees, [output], clock)
        counted.append(governor.totals.num_steps)
    assert 1 < decided < 200
    assert counted[-1] == 200
    assert governor.totals.num_tokens == 400
    assert governor.acceptance.at_depth(1) > 0.95
    assert governor.acceptance.at_depth(2) < 0.05

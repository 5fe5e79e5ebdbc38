"""How often a governor decides: by what that takes of steps of made-up lengths."""

from __future__ import annotations

import pytest

from foretoken.engine.governing import LONGEST, Attention

DECIDING, FOLLOWING = 100e-6, 8e-6


def share(step_seconds: float, num_steps: int = 4000, deciding: float = DECIDING) -> tuple[float, float]:
    """Of the time of steps that governing took, and of the later steps that were decided in."""
    attention = Attention()
    own, decided = 0.0, []
    for _ in range(num_steps):
        decided.append(attention.begin(1))
        seconds = deciding if decided[-1] else FOLLOWING
        own += seconds
        attention.end(seconds, step_seconds)
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
    decided = []
    for _ in range(100):
        decided.append(attention.begin(1))
        attention.end(DECIDING if decided[-1] else FOLLOWING, 0.0003)
    assert all(decided[:3])
    assert sum(decided[:40]) > 1.5 * sum(decided[60:])


def test_another_batch_is_decided_upon_at_once() -> None:
    attention = Attention()
    for _ in range(500):
        attention.begin(4)
        attention.end(DECIDING, 0.0003)
    assert not attention.begin(4)
    attention.end(FOLLOWING, 0.0003)
    assert not attention.begin(5)
    attention.end(FOLLOWING, 0.0003)
    assert attention.begin(8)


def test_a_pause_of_the_machine_does_not_keep_it_from_deciding() -> None:
    attention = Attention()
    for step in range(400):
        is_deciding = attention.begin(1)
        attention.end((10.0 if step == 200 else DECIDING) if is_deciding else FOLLOWING, 0.01)
    later = []
    for _ in range(64):
        later.append(attention.begin(1))
        attention.end(DECIDING if later[-1] else FOLLOWING, 0.01)
    assert sum(later) > 24


def test_drafts_are_learned_of_between_decisions_where_steps_are_long() -> None:
    for step_seconds, is_learning in ((0.01, True), (0.0003, False)):
        attention = Attention()
        attention.begin(1)
        assert not attention.is_learning  # nothing is known yet
        attention.end(DECIDING, step_seconds)
        assert attention.is_learning == is_learning

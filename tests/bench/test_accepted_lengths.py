"""Accepted lengths beside the truncated geometric distribution."""

from __future__ import annotations

import io
import itertools

import pytest
from parts import AcceptedLengths, Position, accepted_lengths, expected_length, table, wilson
from rich.console import Console

from drafting import made
from foredraft.bench.arms import EngineArm
from foredraft.bench.report import plain_data, show
from foredraft.bench.trial import Sampling
from foredraft.model.lm import CausalLM
from foredraft.testing import PROMPTS, toy_model


def lengths_of(*steps: tuple[int, int, int]) -> AcceptedLengths:
    return AcceptedLengths("arm", "greedy", 1, steps)


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("num_drafted", [0, 1, 4])
def test_the_formula_is_the_mean_over_all_outcomes(rate: float, num_drafted: int) -> None:
    mean = 0.0
    for outcome in itertools.product((True, False), repeat=num_drafted):
        chance = 1.0
        for is_accepted in outcome:
            chance *= rate if is_accepted else 1.0 - rate
        mean += chance * (1 + len(list(itertools.takewhile(bool, outcome))))
    assert expected_length(rate, num_drafted) == pytest.approx(mean, abs=1e-12)


def test_a_small_table_by_hand() -> None:
    """Two drafts of 2: one accepted whole, one rejected at once; one draft of 1, rejected."""
    found = lengths_of((1, 0, 1), (2, 0, 1), (2, 2, 1))
    assert found.rate == 2 / 4
    assert found.observed == pytest.approx((1 + 1 + 3) / 3)
    assert found.expected == pytest.approx((1.5 + 1.75 + 1.75) / 3)
    assert found.histogram == {0: 2 / 3, 1: 0.0, 2: 1 / 3}
    assert found.expected_histogram == pytest.approx({0: 0.5, 1: (0.5 + 2 * 0.25) / 3, 2: 2 * 0.25 / 3})
    assert found.distance == pytest.approx(1 / 3)
    assert [(place.num_tested, place.rate) for place in found.positions] == [(3, 1 / 3), (1, 1.0)]
    assert Position(1, 2, 0.5).interval == pytest.approx((0.0945, 0.9055), abs=1e-4)
    assert (wilson(0, 5)[0], wilson(5, 5)[1]) == (0.0, 1.0)
    assert found.expected_from_first == pytest.approx((4 / 3 + 2 * (1 + 1 / 3 + 1 / 9)) / 3)


def test_steps_of_an_arm_are_counted_but_the_last_of_a_text() -> None:
    arm = EngineArm("ngram", CausalLM(toy_model(64), execution="eager"), made("ngram", 4, prompt_lookup_min=1))
    found = accepted_lengths(arm, PROMPTS, 20, Sampling())
    runs = [arm.run(prompt, 20, Sampling()) for prompt in PROMPTS]
    steps = [step for run in runs for step in run.trace[:-1] if step.drafted]
    assert found.num_prompts == len(PROMPTS)
    assert found.num_steps == len(steps) > 0
    assert found.observed == pytest.approx(sum(1 + step.accepted for step in steps) / len(steps))
    assert max(drafted for drafted, _, _ in found.steps) <= 4


def test_the_table_takes_no_steps_at_all() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    rows = [plain_data(one) for one in (lengths_of((9, 9, 3), (9, 0, 1), (2, 1, 2)), lengths_of())]
    show(console, [table("accepted", rows)])
    text = console.export_text()
    assert "5.833" in text  # tokens per step: (3 * 10 + 1 + 2 * 2) / 6
    assert "0.000" in text

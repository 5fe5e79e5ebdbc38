"""Drafting that does not pay is said once, with the reason and what to try, and nothing else is claimed."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from foredraft import LLM, SamplingParams
from foredraft.engine.budget import NOTHING_FOUND
from foredraft.engine.stats import SequenceStats, StepProfile
from foredraft.sessions.payoff import (
    MIN_PLAIN_STEPS,
    MIN_STEPS,
    MOST_UNDRAFTED,
    WARM_UP_STEPS,
    PayoffWatch,
    describe_loss,
    drafting_share,
)
from foredraft.testing import toy_model


def stats(num_steps: int, num_tokens: int, *, num_drafted: int = 100) -> SequenceStats:
    counts = SequenceStats(num_steps=num_steps, num_emitted_tokens=num_tokens, num_draft_tokens=num_drafted)
    counts.num_accepted_draft_tokens = num_tokens - num_steps
    counts.num_spec_steps = num_steps if num_drafted else 0
    if not num_drafted:
        counts.cuts.steps.update({NOTHING_FOUND: num_steps - 1, "budget": 1})
    return counts


@pytest.mark.parametrize(
    ("counts", "share", "speed", "message"),
    [
        (
            stats(100, 105),
            0.1,
            None,
            "hardly pays so far: 1.05 tokens per step over 100 steps (5 of 100 drafted tokens",
        ),
        (stats(100, 100, num_drafted=0), 0.0, None, "it has found nothing to draft in 99 steps, the end of the text's"),
        (stats(100, 150), 0.5, None, "drafting takes 50% of the time, which makes it 0.75 times as fast as plain"),
        (stats(100, 170), 0.0, 0.5, "about 0.50 times as fast as plain decoding"),
        (stats(100, 150), 0.3, None, None),
        (stats(100, 170), 0.0, 0.97, None),
        (stats(100, 115), 0.01, None, None),
    ],
)
def test_a_loss_is_named_and_a_gain_is_not(
    counts: SequenceStats, share: float, speed: float | None, message: str | None
) -> None:
    found = describe_loss("ngram", counts, share, speed)
    assert (message is None) == (found is None)
    assert message is None or message in str(found)


def test_the_share_of_drafting_leaves_out_the_first_steps() -> None:
    """They load and compile: a drafter that packs its weights in its first proposal is not slow for that."""
    before = StepProfile(propose_seconds=10.0, verify_seconds=1.0)
    after = StepProfile(propose_seconds=11.0, verify_seconds=3.5, observe_seconds=0.5)
    assert drafting_share(after, before) == pytest.approx(1.5 / 4.0)
    assert drafting_share(before, before) == 0.0


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_it_is_said_once_and_not_too_early(caplog: pytest.LogCaptureFixture) -> None:
    watch = PayoffWatch("ngram", 10, "zoo:tiny")
    for _ in range(1000):
        watch.ended(stats(15, 15), StepProfile())  # rows too short to draft in
    watch.ended(stats(MIN_STEPS - 1, MIN_STEPS - 1), StepProfile())
    assert not warnings(caplog)
    watch.ended(stats(16, 16), StepProfile())
    (line,) = warnings(caplog)
    assert line.endswith(
        "Try another method, fewer tokens (num_speculative_tokens=5), or method 'none'; foredraft bench --methods all "
        "--model zoo:tiny measures what pays."
    )
    watch.ended(stats(100, 100), StepProfile())
    assert len(warnings(caplog)) == 1


@pytest.mark.parametrize(("method", "length"), [("none", 0), ("ngram", 0)])
def test_who_does_not_draft_hears_nothing(caplog: pytest.LogCaptureFixture, method: str, length: int) -> None:
    PayoffWatch(method, length).ended(stats(1000, 1000, num_drafted=0), StepProfile())
    assert not warnings(caplog)


def outputs(row: Any, num_tokens: int) -> list[Any]:
    return [SimpleNamespace(row=row, token_ids=(7,) * num_tokens)]


def test_steps_without_a_draft_tell_what_plain_decoding_takes(caplog: pytest.LogCaptureFixture) -> None:
    """Wide trees made 2.5 tokens per step and took four times as long as plain steps, and nothing said so."""
    watch, profile = PayoffWatch("token_recycling", 6), StepProfile()
    row = SimpleNamespace(id=3, stats=SequenceStats())

    def run(seconds: float, num_tokens: int, num_drafted: int) -> None:
        row.stats.record(num_drafted, num_tokens - 1, num_tokens)
        profile.num_steps += 1
        profile.verify_seconds += seconds
        watch.step(outputs(row, num_tokens), seconds, profile)

    for _ in range(WARM_UP_STEPS):
        run(50.0, 1, 0)  # slow, and no measure of anything
    for _ in range(MIN_PLAIN_STEPS):
        run(1.0, 1, 0)
    for _ in range(MIN_STEPS):
        run(4.0, 3, 80)
    watch.ended(row.stats, profile)
    (line,) = warnings(caplog)
    relative = (MIN_PLAIN_STEPS + 3 * MIN_STEPS) / (MIN_PLAIN_STEPS + 4 * MIN_STEPS)
    assert f"about {relative:.2f} times as fast as plain decoding" in line


def test_steps_of_batches_and_of_other_rows_are_no_measure(caplog: pytest.LogCaptureFixture) -> None:
    watch, profile = PayoffWatch("ngram", 6), StepProfile(num_steps=100)
    rows = [SimpleNamespace(id=place, stats=SequenceStats()) for place in range(2)]
    for place in range(4 * MIN_STEPS):
        row = rows[place % 2]
        row.stats.record(6 if place % 4 < 2 else 0, 1, 2)
        watch.step(outputs(row, 2), 9.0 if place % 4 < 2 else 1.0, profile)
        watch.step([*outputs(rows[0], 2), *outputs(rows[1], 2)], 5.0, profile)
        watch.step([], 5.0, profile)
    watch.ended(rows[0].stats, profile)
    assert not warnings(caplog)


def held(row: Any, cause: str, num_proposed: int = 0) -> list[Any]:
    """A step that had no draft, for this cause."""
    row.stats.cuts.record(NOTHING_FOUND if num_proposed else cause, num_proposed, [(cause, 0)] if num_proposed else ())
    return outputs(row, 1)


def test_a_method_that_could_draft_and_does_not_is_told_after_32_steps(caplog: pytest.LogCaptureFixture) -> None:
    """A method that one node per step had cut to nothing was once said to have found nothing to draft."""
    watch, row = PayoffWatch("ngram", 10, "zoo:tiny"), SimpleNamespace(id=1, stats=SequenceStats())
    for _ in range(MOST_UNDRAFTED):
        watch.step(held(row, NOTHING_FOUND), 1.0, StepProfile())  # a method that finds nothing is not held back
    assert not warnings(caplog)
    watch.step(outputs(SimpleNamespace(id=1, stats=SequenceStats()), 2), 1.0, StepProfile())  # a draft
    for number in range(MOST_UNDRAFTED):
        assert not warnings(caplog)
        if number % 4 == 0:
            watch.step(held(row, NOTHING_FOUND), 1.0, StepProfile())
        watch.step(held(row, "bits", 5), 1.0, StepProfile())
    (line,) = warnings(caplog)
    assert line.startswith(
        "method ngram has had no draft verified in 40 steps: it has found nothing to draft in 8 steps, the promise of "
        "bits cut 160 drafted tokens and left 32 steps without a draft."
    )
    assert "strict_width" in line
    watch.step(held(row, "bits", 5), 1.0, StepProfile())
    assert len(warnings(caplog)) == 1


def test_a_governor_that_waits_is_told_and_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "foredraft")
    watch, row = PayoffWatch("ngram", 10, "zoo:tiny"), SimpleNamespace(id=1, stats=SequenceStats())
    for number in range(2 * MOST_UNDRAFTED):
        watch.step(held(row, "governor", 4 if number < 10 else 0), 1.0, StepProfile())
    row.stats.num_emitted_tokens = row.stats.num_steps = 2 * MOST_UNDRAFTED
    watch.ended(row.stats, StepProfile())
    assert not warnings(caplog)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "the governor cut 40 drafted tokens and left 32 steps without a draft. By measured costs plain" in line


def test_an_llm_names_what_holds_its_method_back(caplog: pytest.LogCaptureFixture) -> None:
    """Drafts of a prompt that repeats itself, and a promise that leaves no room for any."""
    llm = LLM(toy_model(), "ngram", exactness="strict", strict_width=1)
    params = SamplingParams(temperature=0, max_tokens=MOST_UNDRAFTED + 8, ignore_eos=True)
    counts = llm.generate([[1, 2, 3] * 5], params)[0].metrics.speculative_decoding
    assert counts["num_draft_tokens"] == 0
    assert counts["num_undrafted_steps"]["bits"] > MOST_UNDRAFTED
    (line,) = warnings(caplog)
    assert line.startswith("method ngram has had no draft verified in 32 steps: the promise of bits left 32 steps")


def in_turn(input_ids: Any, scores: Any) -> Any:
    """Every token of the vocabulary once, in an order that no guess from the text foresees."""
    scores[:] = float("-inf")
    scores[:, (5 * int(input_ids[0, -1]) + 3) % 64] = 0.0
    return scores


@pytest.mark.parametrize(
    ("method", "reason"),
    [("jacobi", "hardly pays so far"), ("ngram", "cannot be faster than none here: it has found nothing to draft")],
)
def test_an_llm_says_it_when_a_request_has_ended(caplog: pytest.LogCaptureFixture, method: str, reason: str) -> None:
    llm = LLM(toy_model(), method)
    params = SamplingParams(temperature=0, max_tokens=40, logits_processors=[in_turn], ignore_eos=True)
    llm.generate([[1]], params)
    assert not warnings(caplog)
    for _ in range(3):
        llm.generate([[1]], params)
    (line,) = warnings(caplog)
    assert line.startswith(f"method {method} {reason}")
    assert line.endswith("foredraft bench --methods all --model MODEL measures what pays.")
    llm.with_speculative_config(None).generate([[1]] * 4, params)
    assert len(warnings(caplog)) == 1


def test_an_llm_whose_drafts_are_accepted_says_nothing_about_them(caplog: pytest.LogCaptureFixture) -> None:
    llm = LLM("zoo:tiny", "ngram", dtype="float32")
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    metrics = llm.generate("Once upon a time there was a", params)[0].metrics.speculative_decoding
    assert metrics["tokens_per_step"] > 1.5
    assert not [line for line in warnings(caplog) if "hardly pays" in line or "nothing to draft" in line]


def test_a_draft_model_whose_context_is_too_short_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """Its context ends before the prompt does: it has not looked for a draft in vain."""
    small = toy_model(max_position_embeddings=16)
    llm = LLM(toy_model(), {"method": "draft_model", "model": small, "length_policy": "fixed"})
    params = SamplingParams(max_tokens=MOST_UNDRAFTED + 8, temperature=0, ignore_eos=True)
    counts = llm.generate([list(range(1, 31))], params)[0].metrics.speculative_decoding
    assert counts["num_undrafted_steps"] == {"context": MOST_UNDRAFTED + 7, "budget": 1}
    (line,) = warnings(caplog)
    assert "in 32 steps: the context of the draft model left 32 steps without a draft" in line
    assert "a draft model with a longer context" in line

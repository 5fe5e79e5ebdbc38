"""Drafting that does not pay is said once, with the reason and what to try, and nothing else is claimed."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import pytest

from foredraft import LLM, SamplingParams
from foredraft.config.engine import Guarantee
from foredraft.engine.frontend import MIN_ROW_TOKENS, MIN_STEPS, log_low_gain
from foredraft.engine.stats import NOTHING_FOUND, RowStats
from foredraft.model.lm import CausalLM
from foredraft.testing import toy_model


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_method_that_is_kept_from_drafting_is_told_by_what(caplog: pytest.LogCaptureFixture) -> None:
    """A method that one node per step had cut to nothing was once said to have found nothing to draft."""
    counts = RowStats(
        num_steps=80,
        num_emitted_tokens=80,
        num_cut_tokens=Counter(bits=160),
        num_undrafted_steps=Counter({NOTHING_FOUND: 8, "bits": 32}),
    )
    assert log_low_gain(counts, "ngram", "MODEL")
    (line,) = warnings(caplog)
    assert line.startswith(
        "method ngram gains little so far: 1.00 tokens per step over 80 steps (0 of 0 verified draft tokens accepted, "
        "nothing was found to draft in 8 steps, the limit of bitwise exactness cut 160 drafted tokens and left 32 "
        "steps without a draft)."
    )


@pytest.mark.parametrize(("num_steps", "num_tokens"), [(100, 115), (100, 170)])
def test_a_gain_is_not_claimed(caplog: pytest.LogCaptureFixture, num_steps: int, num_tokens: int) -> None:
    caplog.set_level(logging.INFO, "foredraft")
    counts = RowStats(num_steps=num_steps, num_emitted_tokens=num_tokens, num_draft_tokens=100)
    counts.num_accepted_draft_tokens, counts.num_spec_steps = num_tokens - num_steps, num_steps
    assert not log_low_gain(counts, "ngram", "MODEL")
    assert not caplog.records


def test_an_llm_names_what_holds_its_method_back(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts of a prompt that repeats itself, and a promise that leaves no room for any."""
    one_node = Guarantee("bit-identical")
    object.__setattr__(one_node, "max_nodes", 1)
    monkeypatch.setattr(CausalLM, "guarantee", lambda lm, exactness: one_node)
    llm = LLM(toy_model(), "ngram")
    params = SamplingParams(temperature=0, max_tokens=MIN_STEPS + 8, ignore_eos=True)
    counts = llm.generate([[1, 2, 3] * 5], params)[0].metrics.speculative_decoding
    assert counts["num_draft_tokens"] == 0
    assert counts["num_undrafted_steps"]["bits"] > MIN_STEPS
    (line,) = warnings(caplog)
    assert (
        f"over {MIN_STEPS + 8} steps (0 of 0 verified draft tokens accepted, the limit of bitwise exactness left"
        in line
    )


def in_turn(input_ids: Any, scores: Any) -> Any:
    """Every token of the vocabulary once, in an order that no guess from the text foresees."""
    scores[:] = float("-inf")
    scores[:, (5 * int(input_ids[0, -1]) + 3) % 64] = 0.0
    return scores


def in_vain(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, logits_processors=[in_turn], ignore_eos=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize("method", ["jacobi", "ngram"])
def test_an_llm_says_it_once_when_a_request_has_ended(caplog: pytest.LogCaptureFixture, method: str) -> None:
    llm = LLM(toy_model(), method)
    llm.generate([[1]], in_vain(40))
    assert not warnings(caplog)
    for _ in range(5):
        llm.generate([[1]], in_vain(40))
    (line,) = warnings(caplog)
    assert line.startswith(f"method {method} gains little so far")
    assert line.endswith("foredraft bench --methods all --model MODEL shows which method is fastest.")


@pytest.mark.parametrize("config", [None, {"method": "ngram", "num_speculative_tokens": 0}])
def test_who_does_not_draft_hears_nothing(caplog: pytest.LogCaptureFixture, config: Any) -> None:
    LLM(toy_model(), config).generate([[1]] * 4, in_vain(40))
    assert not warnings(caplog)


def test_rows_too_short_to_draft_in_and_those_of_a_warm_up_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    llm = LLM(toy_model(), "ngram")
    llm.generate([[1]] * 8, in_vain(MIN_ROW_TOKENS - 1))
    llm.logs_low_gain = False
    llm.generate([[1]] * 4, in_vain(40))
    llm.logs_low_gain = True
    llm.generate([[1]], in_vain(40))
    assert not warnings(caplog)
    llm.generate([[1]], in_vain(40))
    (line,) = warnings(caplog)
    assert "over 80 steps" in line


def test_a_draft_model_whose_context_is_too_short_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """Its context ends before the prompt does: it has not looked for a draft in vain."""
    small = toy_model(max_position_embeddings=16)
    llm = LLM(toy_model(), {"method": "draft_model", "model": small, "length_policy": "fixed"})
    params = SamplingParams(max_tokens=MIN_STEPS + 8, temperature=0, ignore_eos=True)
    counts = llm.generate([list(range(1, 31))], params)[0].metrics.speculative_decoding
    assert counts["num_undrafted_steps"] == {"context": MIN_STEPS + 7, "budget": 1}
    (line,) = warnings(caplog)
    assert f"the context of the draft model left {MIN_STEPS + 7} steps without a draft" in line

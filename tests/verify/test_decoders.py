"""Verdicts: nothing is found about what is lossless, and known defects are."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from foredraft import LLM, SamplingParams
from foredraft.errors import ConfigError, PromptError
from foredraft.verify import (
    Answer,
    FunctionSubject,
    LLMSubject,
    Sample,
    Subject,
    Verdict,
    draws,
    verify,
    verifying,
)
from foredraft.verify import distributions as verify_distributions
from foredraft.verify.distributions import (
    SHIFT,
    Distribution,
    enumerate_distribution,
    judge_samples,
    reference_distribution,
    shifted,
)
from foredraft.verify.draws import DEPTH, FEWEST, draw
from foredraft.verify.verdict import Finding, holm, logprob_finding

PROMPTS = [
    "Once upon a time there was a boy. Once upon a time there was a girl. Once upon a",
    "One, two, one, two, one",
]
LENGTH = 3  # of drafts
DEFECTS = (
    "argmax draft taken as sampled",
    "stop string missed inside a block",
    "processors at the first token of a block alone",
    "bonus from the wrong node",
    "the same text for every sample",
    "log-probabilities of the draft",
    "penalties of the prompt",
)
TICK = 0.1


@pytest.fixture(autouse=True)
def _counted_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock finds it a tick later: what there is time for hangs on no machine."""
    clock = SimpleNamespace(monotonic=functools.partial(next, itertools.count(0.0, TICK)))
    for module in (verifying, draws):
        monkeypatch.setattr(module, "time", clock)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("zoo:tiny", {"method": "ngram", "num_speculative_tokens": 4}, dtype="float32")


DISTRIBUTIONS: dict[Any, Callable[..., np.ndarray[Any, Any]]] = {}
"""What all decoders draw from, by prompt and settings."""


class Decoder:
    """Speculative decoding as a textbook has it, by a draft of likely tokens; with a defect, or without."""

    def __init__(self, llm: LLM, defect: str) -> None:
        self._llm, self._defect = llm, defect
        self._distributions: dict[Any, np.ndarray[Any, Any]] = {}

    def __call__(self, prompt: list[int], params: SamplingParams) -> Any:
        samples = []
        for index in range(params.n):
            number = 0 if self._defect == "the same text for every sample" else index
            samples.append(self._sample(prompt, params, np.random.default_rng([params.seed or 0, number])))
        return samples if params.n > 1 else samples[0]

    def _distribution(self, prompt: list[int], output: list[int], params: SamplingParams) -> np.ndarray[Any, Any]:
        """Of the next token; a point where the text is greedy."""
        asked = tuple(prompt), params.temperature, params.repetition_penalty, params.top_k, params.top_p
        asked += (params.presence_penalty, params.frequency_penalty, str(params.logit_bias), params.min_p)
        key = asked, tuple(output)
        if key not in self._distributions:
            fields = ("repetition_penalty", "top_k", "top_p", "presence_penalty", "frequency_penalty", "logit_bias")
            own = SamplingParams(
                temperature=params.temperature or 1.0, **{name: getattr(params, name) for name in (*fields, "min_p")}
            )
            if asked not in DISTRIBUTIONS:
                DISTRIBUTIONS[asked] = functools.cache(reference_distribution(self._llm.target, prompt, own))
            probs = DISTRIBUTIONS[asked](tuple(output)).copy()
            if self._defect == "penalties of the prompt":
                probs[list(set(prompt))] *= np.exp(-params.presence_penalty)
            probs /= probs.sum()
            if params.is_greedy:
                probs = np.eye(1, len(probs), int(probs.argmax()))[0]
            self._distributions[key] = probs
        return self._distributions[key]

    def _sample(self, prompt: list[int], params: SamplingParams, rng: np.random.Generator) -> Sample:
        output: list[int] = []
        logprobs: list[dict[int, float]] = []
        plain = SamplingParams(temperature=params.temperature)
        while len(output) < params.max_tokens:
            start = len(output)
            for _ in range(LENGTH + 1):
                is_first = len(output) == start
                limited = self._defect == "processors at the first token of a block alone" and not is_first
                distribution = self._distribution(prompt, output, plain if limited else params)
                guess = int(np.argsort(-distribution)[1 if len(output) % 4 == 3 else 0])
                is_bonus = len(output) == start + LENGTH
                if is_bonus and self._defect == "bonus from the wrong node":
                    distribution = self._distribution(prompt, output[:-1], params)
                token, is_kept = self._choose(distribution, guess, rng, is_bonus)
                output.append(token)
                found = np.log(np.maximum(distribution, 1e-300))
                if self._defect == "log-probabilities of the draft":
                    found = found - 0.2
                logprobs.append({token: float(found[token])})
                if not is_kept:
                    break
            if self._ends(output, start, params):
                break
        output = output[: params.max_tokens]
        text = self._llm.tokenizer.decode(output, skip_special_tokens=True)
        if (place := self._stop(text, params)) >= 0:
            text = text[:place]
        wants = params.logprobs is not None and params.is_greedy and self._defect.startswith("log-prob")
        return Sample(tuple(output), text, tuple(logprobs[: len(output)]) if wants else None)

    def _choose(
        self, distribution: np.ndarray[Any, Any], guess: int, rng: np.random.Generator, is_bonus: bool
    ) -> tuple[int, bool]:
        """The next token, and whether it is the guess that was drafted."""
        if not is_bonus:
            chance = distribution[guess]
            if self._defect == "argmax draft taken as sampled":
                chance = min(1.0, distribution[guess] / max(distribution[guess] ** 2, 1e-9))
            if rng.random() < chance:
                return guess, True
            distribution = distribution.copy()
            distribution[guess] = 0.0
        return int(rng.choice(len(distribution), p=distribution / distribution.sum())), False

    def _stop(self, text: str, params: SamplingParams) -> int:
        return min((place for stop in params.stop_strings if (place := text.find(stop)) >= 0), default=-1)

    def _ends(self, output: list[int], start: int, params: SamplingParams) -> bool:
        ends = set(params.stop_token_ids or ()) | set(() if params.ignore_eos else self._llm.eos_token_ids)
        misses = self._defect == "stop string missed inside a block"
        for length in range(len(output) if misses else start + 1, len(output) + 1):
            text = self._llm.tokenizer.decode(output[:length], skip_special_tokens=True)
            if output[length - 1] in ends or self._stop(text if not misses else text[-4:], params) >= 0:
                del output[length:]
                return True
        return False


TAKES = frozenset(
    {"temperature", "top_k", "top_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"}
    | {"n", "stop", "stop_token_ids", "ignore_eos", "logprobs"}
)


@pytest.mark.sample(2)
@pytest.mark.parametrize("defect", ["", *DEFECTS])
def test_known_defects_are_found_and_a_decoder_without_is_not_blamed(defect: str, llm: LLM) -> None:
    subject = FunctionSubject(Decoder(llm, defect), "a decoder", takes=TAKES)
    found = verify(llm, PROMPTS, subject, max_tokens=12, budget_seconds=4.0, false_alarm_rate=0.001)
    assert found.status == ("not lossless" if defect else "lossless"), found.sentence()


def test_log_probabilities_that_are_missing_or_none_are_faults() -> None:
    wanted = [Answer((Sample((4, 5), None, ({4: -1.0, 6: -np.inf}, {5: -2.0})),))]
    for own, is_sound in [
        (({4: -1.0, 6: -np.inf}, {5: -2.0}), True),
        (({4: -1.0}, {5: -2.0, 9: -3.0}), True),
        (({4: -1.0},), False),
        (({4: -1.0}, {9: -3.0}), False),
        (({4: float("nan")}, {5: -2.0}), False),
        (({4: -1.0, 6: -9.0}, {5: -2.0}), False),
    ]:
        finding = logprob_finding("greedy", [Answer((Sample((4, 5), None, own),))], wanted, 1e-3)
        assert finding.status == ("holds" if is_sound else "broken"), own


def test_what_a_function_fails_for_is_left_out(llm: LLM) -> None:
    """It ended the whole verification."""
    plain = llm.with_speculative_config(None)

    def decoder(prompt: list[int], params: SamplingParams) -> Any:
        if params.min_p or params.stop:
            raise NotImplementedError("no such setting")
        outputs = plain.generate({"prompt_token_ids": prompt}, params)[0].outputs
        return [list(output.token_ids) for output in outputs] if params.n > 1 else list(outputs[0].token_ids)

    found = verify(llm, PROMPTS, FunctionSubject(decoder), max_tokens=8, budget_seconds=4.0)
    left = {(one.check, one.feature) for one in found.findings if "NotImplementedError: no such" in one.found}
    assert ("tokens", "stop string") in left
    assert found.status == "lossless", found.sentence()


@pytest.mark.parametrize(
    ("defect", "status", "feature"),
    [
        pytest.param("", "lossless", "", marks=pytest.mark.full),
        pytest.param("seed ignored", "not lossless", "sampled", marks=pytest.mark.full),
        ("seed ignored with n > 1", "not lossless", "samples of a prompt"),
    ],
)
def test_a_keyed_decoder_has_to_heed_its_seed(defect: str, status: str, feature: str, llm: LLM) -> None:
    plain = llm.with_speculative_config(None)

    def decoder(prompt: list[int], params: SamplingParams) -> Any:
        if defect == "seed ignored" or (defect and params.n > 1):
            params = replace(params, seed=12345)
        outputs = plain.generate({"prompt_token_ids": prompt}, params)[0].outputs
        samples = [list(output.token_ids) for output in outputs]
        return samples if params.n > 1 else samples[0]

    found = verify(llm, PROMPTS, FunctionSubject(decoder, is_keyed=True), max_tokens=8, budget_seconds=4.0)
    assert found.status == status, found.sentence()
    assert not feature or ("tokens", feature) in [(one.check, one.feature) for one in found.broken]


@pytest.mark.parametrize(
    "config",
    [
        pytest.param("suffix+token_recycling", marks=pytest.mark.full),
        {"method": "ngram", "rejection_sample_method": "standard"},
        pytest.param(
            {"method": "draft_model", "rejection_sample_method": "block", "num_speculative_tokens": 3},
            marks=pytest.mark.full,
        ),
        pytest.param("auto", marks=pytest.mark.full),
    ],
    ids=str,
)
def test_lossless_methods_are_found_lossless(config: Any, llm: LLM) -> None:
    found = verify(llm.with_speculative_config(config), PROMPTS, max_tokens=16, budget_seconds=5.0)
    assert found.status == "lossless", found.sentence()
    assert found.num_accepted
    assert {finding.check for finding in found.findings} >= {"tokens", "distribution", "control"}
    assert any(finding.check == "log-probabilities" and finding.status == "holds" for finding in found.findings)


def test_the_lossy_rule_is_found_out(llm: LLM) -> None:
    found = verify(
        llm.with_speculative_config({"method": "medusa", "rejection_sample_method": "typical"}),
        PROMPTS,
        max_tokens=8,
        budget_seconds=4.0,
    )
    assert found.status == "not lossless", found.sentence()
    assert found.exit_status == 3


@pytest.mark.full
def test_what_drafting_pays_is_not_its_business(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    """Of its forced drafts, verify once said that they hardly pay, and to try another method."""
    subject = llm.with_speculative_config({"method": "suffix", "num_speculative_tokens": 16})
    with caplog.at_level("INFO", logger="foredraft"):
        verify(subject, ["Lily said", "One day"], max_tokens=24, budget_seconds=2.0)
    assert "pays" not in caplog.text


def test_nothing_is_decided_where_nothing_was_drafted(llm: LLM) -> None:
    found = verify(llm.with_speculative_config(None), PROMPTS, max_tokens=8, budget_seconds=2.0)
    assert found.status == "undecided"
    assert "no draft token was accepted" in found.sentence()
    assert found.exit_status == 4


def test_what_there_was_no_time_for_is_named(llm: LLM) -> None:
    found = verify(llm, PROMPTS, max_tokens=8, budget_seconds=0.01)
    left = [finding for finding in found.findings if finding.status == "left out"]
    assert left
    assert all("no time was left" in finding.found for finding in left)


def test_bad_input_is_refused(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="max_tokens is 2"):
        verify(llm, PROMPTS, max_tokens=2)
    with pytest.raises(ConfigError, match=r"false_alarm_rate is 1\.5"):
        verify(llm, PROMPTS, false_alarm_rate=1.5)
    with pytest.raises(PromptError):
        verify(llm, [""])


@pytest.mark.full
def test_a_function_that_takes_no_n_is_asked_for_one_sample_at_a_time(llm: LLM) -> None:
    """Distribution tests asked it for sixteen, whatever it takes, and said that there was no time for the control."""
    plain = llm.with_speculative_config(None)
    asked: list[tuple[int, int | None]] = []

    def decoder(prompt: list[int], params: SamplingParams) -> list[int]:
        asked.append((params.n, params.seed))
        return list(plain.generate({"prompt_token_ids": prompt}, params)[0].outputs[0].token_ids)

    subject = FunctionSubject(decoder, takes=frozenset({"temperature"}))
    found = verify(llm, PROMPTS, subject, max_tokens=8, budget_seconds=4.0)
    assert found.status == "lossless", found.sentence()
    assert {n for n, _ in asked} == {1}
    assert len({seed for _, seed in asked}) > FEWEST / 2

    text_alone = FunctionSubject(lambda prompt, params: Sample(None, "a"), takes=frozenset({"temperature"}))
    (reason,) = [doubt for doubt in verify(llm, PROMPTS, text_alone, max_tokens=8, budget_seconds=2.0).doubts
                 if "control" in doubt]  # fmt: skip
    assert "which was left out" in reason


def test_a_function_has_to_return_its_samples(llm: LLM) -> None:
    found = verify(llm, PROMPTS, lambda prompt, params: [[1, 2, 3]] if params.n > 1 else [1, 2, 3], budget_seconds=1.0)
    assert any("returned 1 samples for n=16" in finding.found for finding in found.findings)
    assert found.status != "lossless"


# -- the statistics ----------------------------------------------------------------------------------------------------

DISTRIBUTION = np.array([0.5, 0.3, 0.15, 0.05])


def probs_after(text: tuple[int, ...], distribution: np.ndarray[Any, Any] = DISTRIBUTION) -> np.ndarray[Any, Any]:
    return np.roll(distribution, len(text))


def drawn(
    rng: np.random.Generator, number: int, distribution: Callable[..., np.ndarray[Any, Any]]
) -> list[tuple[int, ...]]:
    columns = [rng.choice(4, size=number, p=distribution((0,) * place)) for place in range(2)]
    return [(int(first), int(second)) for first, second in zip(*columns, strict=True)]


def test_the_enumerated_distribution_is_whole() -> None:
    distribution = enumerate_distribution(probs_after, depth=2)
    assert sum(distribution.cells.values()) == pytest.approx(1.0, abs=1e-12)
    assert distribution.cells[0, 1] == pytest.approx(0.5 * 0.5)
    assert distribution.cell_of((0, 1)) == (0, 1)
    assert distribution.cells[distribution.cell_of((0, 99))] == 0.0


def test_what_cannot_be_is_found_by_one_sample() -> None:
    distribution = enumerate_distribution(probs_after, depth=2)
    rng = np.random.default_rng(0)
    samples = drawn(rng, 200, probs_after)
    assert judge_samples(distribution, samples, 0.01).p_value > 0.01
    assert judge_samples(distribution, [*samples, (99, 0)], 0.01).p_value < 1e-4


def test_a_distribution_of_one_first_token_can_be_judged() -> None:
    """As after filters that leave one: nothing can be shifted to another, and one that is impossible is found."""
    distribution = enumerate_distribution(lambda text: np.array([0.0, 1.0, 0.0] if not text else [0.5, 0.5, 0.0]), 2)
    samples = [(1, place % 2) for place in range(200)]
    found = judge_samples(distribution, samples, 0.01)
    assert (found.p_value > 0.01, found.detectable) == (True, 1.0)
    assert judge_samples(distribution, [*samples, (2, 0)], 0.01).p_value < 1e-4


def test_texts_that_end_early_have_cells_of_their_own() -> None:
    distribution = enumerate_distribution(probs_after, depth=2, eos=[3])
    assert distribution.cell_of((3,)) == distribution.cell_of(()) == (3,)
    assert distribution.cells[3,] == pytest.approx(0.05)


def test_power_grows_with_samples_and_is_what_is_seen() -> None:
    distribution = enumerate_distribution(probs_after, depth=2)
    few, many = (
        judge_samples(distribution, drawn(np.random.default_rng(1), number, probs_after), 0.05)
        for number in (200, 3000)
    )
    assert few.power < many.power
    assert few.detectable > many.detectable
    shifted = functools.partial(
        probs_after, distribution=np.array([0.5 - many.detectable, 0.3 + many.detectable, 0.15, 0.05])
    )
    seen = [
        judge_samples(
            distribution,
            [
                (each[0], *other[1:])
                for each, other in zip(drawn(rng, 3000, shifted), drawn(rng, 3000, probs_after), strict=True)
            ],
            0.05,
        )
        for rng in map(np.random.default_rng, range(10))
    ]
    assert sum(test.p_value <= 0.05 for test in seen) >= 4


NUM_CONTINUATIONS = (64, 256, 1024, 4096)


def like_a_models(place: int, text: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """One of three distributions over 40 tokens, as flat as a model's at temperature 1, truncated, and at 0.8."""
    logits = np.random.default_rng([place, *text]).normal(size=40) * (2.5, 2.5, 3.1)[place]
    if place == 1:
        logits[np.argsort(logits)[:-8]] = -np.inf
    probs: np.ndarray[Any, Any] = np.exp(logits - logits.max())
    return probs / probs.sum()


class Simulated(Subject):
    """Draws from known masses of texts."""

    name = "simulated"

    def __init__(self, distribution: Distribution, shift: float, rng: np.random.Generator) -> None:
        self._texts, self._masses = list(distribution.cells), list(shifted(distribution, shift).values())
        self._rng = rng

    def samples(self, number: int) -> list[Any]:
        counts = self._rng.multinomial(number, self._masses)
        return [text for text, count in zip(self._texts, counts, strict=True) for _ in range(count)]

    def generate(self, prompts: Any, params: Any) -> list[Answer]:
        return [Answer(tuple(Sample(text) for text in self.samples(one.n))) for one in params]


def simulated_verdicts(num_runs: int, shift: float, rate: float = 0.01) -> dict[int, Counter[str]]:
    """How many runs of the three distribution tests fail, and what second draws make of these, by number of samples.

    Args:
      shift: mass of the likeliest first token that the sampler gives to the next one, under all three distributions:
        the total variation between the distribution that is tested and the one that is drawn from; 0 if correct.

    Returns: "failed" counts first draws, "broken" and "undecided" what came of them; the others are lossless.
    """
    distributions = [
        enumerate_distribution(functools.partial(like_a_models, place), DEPTH, eos=[3]) for place in range(3)
    ]
    found = {}
    for num_samples in NUM_CONTINUATIONS:
        told = found[num_samples] = Counter[str]()
        for run in range(num_runs):
            rng = np.random.default_rng([run, num_samples])
            subjects = [Simulated(distribution, shift, rng) for distribution in distributions]
            tests = []
            for distribution, subject in zip(distributions, subjects, strict=True):
                samples = subject.samples(num_samples)
                test = judge_samples(distribution, samples, rate / 3, run)
                tests.append(draws.Tested(0, distribution, [1], SamplingParams(max_tokens=DEPTH), samples, test))
            rejected = holm([tested.test.p_value for tested in tests], rate)
            statuses = []
            for tested, subject, is_rejected in zip(tests, subjects, rejected, strict=True):
                if is_rejected:
                    finding = Finding("", "distribution", "holds", "")
                    levels = {"rate": rate, "level": rate / 3}
                    second = draws.judge_again(tested, finding, subject, run, **levels, until=float("inf"))
                    statuses.append(second.status)
            told["failed"] += any(rejected)
            told["broken"] += "broken" in statuses
            told["undecided"] += "undecided" in statuses and "broken" not in statuses
    return found


@pytest.mark.full
def test_false_alarms_of_two_thousand_simulations(monkeypatch: pytest.MonkeyPatch) -> None:
    """All distribution tests of a verdict together, at 1 %: 17 of 500 are expected once in 100,000 times per number.

    A total variation of 0.02 in one token is found by 64 continuations hardly ever, and by 4,096 in one run of nine.
    What fails is drawn once more, and nothing that holds is: a second draw adds no false alarm.
    """
    monkeypatch.setattr(verify_distributions, "SHIFTS", (SHIFT,))  # powers at others are not looked at here
    judge = judge_samples

    def by_fewer(*given: Any) -> Any:
        monkeypatch.setattr(verify_distributions, "NUM_SIMULATED", 2_000)  # the level is exact at any number
        try:
            return judge(*given)
        finally:
            monkeypatch.setattr(verify_distributions, "NUM_SIMULATED", 20_000)  # second draws are held to a finer one

    monkeypatch.setitem(globals(), "judge_samples", by_fewer)
    alarms = simulated_verdicts(500, 0.0)
    assert max(told["failed"] for told in alarms.values()) < 17
    assert sum(told["failed"] for told in alarms.values()) <= 34  # chance of more: one in a thousand
    assert sum(told["broken"] for told in alarms.values()) <= 2  # each failed by chance, and once more at 1 %
    power = simulated_verdicts(100, SHIFT)
    assert power[64]["failed"] <= 5 <= power[4096]["failed"]


def test_holm_rejects_as_published() -> None:
    assert holm([0.001, 0.02, 0.2], 0.05) == [True, True, False]
    assert holm([0.03, 0.04], 0.05) == [False, False]
    assert holm([], 0.05) == []


def test_a_single_distribution_test_is_held_to_the_level_that_its_power_is_told_for(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of 15 s had time for one of three, and p = 0.0092 of a lossless decoder was "not lossless" at 1 %."""
    told: list[float] = []

    def judge(distribution: Any, samples: Any, level: float, seed: int) -> Any:
        told.append(level)
        return replace(judge_samples(distribution, samples, level, seed), p_value=0.0092)

    monkeypatch.setattr(verifying, "judge_samples", judge)
    monkeypatch.setattr(verifying, "SHARE_OF_DISTRIBUTIONS", 0.0)
    found = verify(llm, PROMPTS, max_tokens=8, budget_seconds=4.0)
    assert [one.status for one in found.findings if one.check == "distribution"] == ["holds", "left out", "left out"]
    assert max(told) == pytest.approx(0.01 / 3)
    assert found.status != "not lossless"


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("again", "together", "status"),
    [
        (0.4, 0.4, "lossless"),
        pytest.param(0.001, 0.4, "not lossless", marks=pytest.mark.full),
        (0.4, 1e-4, "not lossless"),
        pytest.param(0.4, 0.002, "undecided", marks=pytest.mark.full),
    ],
)
def test_a_distribution_test_that_fails_is_drawn_once_more(
    again: float, together: float, status: str, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chance fails once in a hundred runs; what fails twice is a fault, and what fails by far over both draws."""
    drawn: list[list[Any]] = []

    def judge(distribution: Any, samples: Any, level: float, seed: int) -> Any:
        drawn.append(list(samples))
        forged = [1e-4, 1e-5, again, together][len(drawn) - 1]  # the test and the control, then the test again
        return replace(judge_samples(distribution, drawn[-1], level, seed), p_value=forged)

    monkeypatch.setattr(verifying, "judge_samples", judge)
    monkeypatch.setattr(draws, "judge_samples", judge)
    monkeypatch.setattr(verifying, "SHARE_OF_DISTRIBUTIONS", 0.0)
    found = verify(llm, PROMPTS, max_tokens=8, budget_seconds=1e6)
    (distribution,) = (one for one in found.findings if one.check == "distribution" and "p_value" in one.numbers)
    assert len(drawn) == 4
    assert len(drawn[2]) == len(drawn[0])
    assert drawn[2] != drawn[0]
    assert drawn[3] == [*drawn[0], *drawn[2]]
    assert distribution.numbers["p_value_again"] == again
    assert distribution.numbers["p_value_together"] == together
    assert f"drawn once more, p = {again:.2g}, together {together:.2g}" in distribution.found
    assert found.status == status


class Clock:
    """Time that goes on by one second for every request."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.mark.full
def test_a_second_draw_ends_with_the_budget(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was made when everything else had used the budget up, as long as the first: 74 s of 30 on a busy machine."""
    clock, generate = Clock(), LLMSubject.generate
    num_judged = 0

    def counted(self: LLMSubject, prompts: Any, params: Any) -> list[Answer]:
        clock.now += 1.0
        return generate(self, prompts, params)

    def judge(distribution: Any, samples: Any, level: float, seed: int) -> Any:
        nonlocal num_judged
        num_judged += 1
        return replace(judge_samples(distribution, samples, level, seed), p_value=1e-5 if num_judged == 2 else 1e-3)

    monkeypatch.setattr(LLMSubject, "generate", counted)
    monkeypatch.setattr(verifying, "judge_samples", judge)
    monkeypatch.setattr(verify_distributions, "NUM_SIMULATED", 200)
    for module in (verifying, draws):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(verifying, "SHARE_OF_DISTRIBUTIONS", 0.8)
    found = verify(llm, PROMPTS, max_tokens=4, budget_seconds=60.0)
    distributions = [one for one in found.findings if one.check == "distribution"]
    assert all(one.numbers["num_samples"] > FEWEST for one in distributions)
    assert distributions[-1].numbers["num_samples_again"] < distributions[-1].numbers["num_samples"]
    assert "no time was left" in distributions[-1].found
    assert found.seconds <= 61.0


@pytest.mark.parametrize(
    ("p_value", "until", "status", "said"),
    [
        (1e-3, float("-inf"), "undecided", "no time was left"),
        (1e-4, float("-inf"), "broken", "no time was left"),
        (1e-3, float("inf"), "undecided", "far fails"),
    ],
)
def test_a_second_draw_that_cannot_be_made_acquits_nobody(p_value: float, until: float, status: str, said: str) -> None:
    """For want of time nothing is asked for; a server that went away ended the whole verification with an error.

    What was far from chance is a fault all the same: false alarms are those of the first draw, at most.
    """

    def gone(*_: Any) -> Any:
        assert until > 0, "it was asked"
        raise ConnectionResetError("gone")

    distribution = enumerate_distribution(probs_after, depth=2)
    samples: list[Any] = drawn(np.random.default_rng(0), 64, probs_after)
    test = replace(judge_samples(distribution, samples, 0.01), p_value=p_value)
    tested = draws.Tested(0, distribution, [1], SamplingParams(max_tokens=2), samples, test)
    finding, far = Finding("sampled", "distribution", "holds", "p"), FunctionSubject(gone, "far")
    found = draws.judge_again(tested, finding, far, 0, rate=0.01, level=0.01 / 3, until=until)
    assert found.status == status
    assert found.numbers.get("num_samples_again", 0) == 0
    assert f"not drawn once more ({said}" in found.found


def test_what_was_left_out_is_said_with_the_reason() -> None:
    """Three distribution tests "agree" of five, and settings that nobody asked for, were in the table alone."""
    numbers = {"p_value": 0.5, "detectable": 0.1, "num_tokens": 8}
    findings = (
        Finding("greedy", "tokens", "holds", "", numbers),
        Finding("stop string", "tokens", "left out", "the subject does not support stop"),
        Finding("sampled", "distribution", "holds", "", numbers),
        Finding("min-p 0.1", "distribution", "left out", "no time was left in the budget of 3 s"),
        Finding("typical-p 0.7", "distribution", "left out", "no time was left in the budget of 3 s"),
        Finding("broken acceptance", "control", "holds", ""),
    )
    found = Verdict("it", "plain decoding", "", findings, 5, 3, 0.01, 1.0)
    assert "1 of 3 distribution tests agrees" in found.sentence()
    assert found.sentence().endswith(
        " Left out: tokens of stop string (the subject does not support stop); distribution of min-p 0.1, "
        "distribution of typical-p 0.7 (no time was left in the budget of 3 s)."
    )
    assert found.as_dict()["left_out"] == {
        "the subject does not support stop": ["tokens of stop string"],
        "no time was left in the budget of 3 s": ["distribution of min-p 0.1", "distribution of typical-p 0.7"],
    }
    whole = replace(found, findings=tuple(one for one in findings if one.status == "holds"))
    assert "Left out" not in whole.sentence()
    assert "1 distribution test agrees" in whole.sentence()
    undecided = replace(found, num_accepted=0)
    assert "Left out: tokens of stop string" in undecided.sentence()


def test_distributions_that_a_decoder_cannot_be_asked_for_are_named(llm: LLM) -> None:
    """They were in no table."""
    subject = FunctionSubject(Decoder(llm, ""), takes=frozenset({"temperature", "n"}))
    found = verify(llm, PROMPTS, subject, max_tokens=4, budget_seconds=2.0)
    reasons = {one.feature: one.found for one in found.findings if one.check == "distribution"}
    assert reasons["top-k 8, repetition penalty 1.3"] == "the subject does not support repetition_penalty, top_k"
    assert reasons["min-p 0.1"] == "the subject does not support min_p"


def test_samples_come_one_request_at_a_time(llm: LLM) -> None:
    """Four requests of 16 at once took longer to read than to sample: rows beyond the batch read the prompt again."""

    class Counting(Subject):
        counts_drafts = True
        requests: ClassVar[list[tuple[int, int]]] = []

        def generate(self, prompts: Any, params: Any) -> list[Answer]:
            self.requests += [(len(prompts), params[0].n)]
            return [Answer((Sample((1, 2, 3)),) * params[0].n, 2, 1)]

    found, counts = draw(Counting(), [1], SamplingParams(max_tokens=3), 0, until=0.0)
    assert len(found) == FEWEST
    assert Counting.requests == [(1, 16)] * (FEWEST // 16)
    assert llm.engine_config.max_num_seqs >= 16
    assert counts == {"num_drafted": 8, "num_accepted": 4}


def test_plain_answers_are_not_decoded_again(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy decoding is what stop strings are made of, what drafts are held against, and prompts one by one."""
    asked = []
    generate = LLMSubject.generate

    def counted(self: LLMSubject, prompts: Any, params: Any) -> list[Answer]:
        if self.name == "plain decoding":
            asked.append(params)
        return generate(self, prompts, params)

    monkeypatch.setattr(LLMSubject, "generate", counted)
    monkeypatch.setattr(verifying, "SHARE_OF_DISTRIBUTIONS", 0.0)  # they take a share of the time
    found = verify(llm, PROMPTS, max_tokens=4, budget_seconds=1e6)
    assert sum(one.check == "tokens" and one.status == "holds" for one in found.findings) == 15
    assert len(asked) == 14


def test_the_enumerated_distribution_is_made_of_the_logits_that_tokens_are_chosen_by() -> None:
    """Read as a prompt, an output has others within rounding, and one token stood outside of a nucleus here alone."""
    llm = LLM("zoo:tiny", "ngram", dtype="bfloat16")
    for prompt in (PROMPTS[0] * 8, PROMPTS[1]):  # one is longer than what the kernels of steps run
        (output,) = llm.generate(prompt, SamplingParams(seed=1, max_tokens=12, logprobs=0, ignore_eos=True))
        after = reference_distribution(llm.target, output.prompt_token_ids, SamplingParams())
        ids = output.outputs[0].token_ids
        for length, table in enumerate(output.outputs[0].logprobs):
            told = table[ids[length]]
            expected = np.log(after(tuple(ids[:length]))[ids[length]])
            assert getattr(told, "logprob", told) == pytest.approx(expected, abs=1e-5)

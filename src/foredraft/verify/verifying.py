"""Verification of a decoder within a time budget: tokens against plain decoding, samples against the distribution."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from foredraft.beginnings import shared_length
from foredraft.config.sampling import SamplingParams
from foredraft.ending import finishing
from foredraft.errors import ConfigError, ForedraftError
from foredraft.llm import LLM
from foredraft.prompts.prompts import read_prompts
from foredraft.testing import ungoverned
from foredraft.testing.divergence import NEAR_TIES, token_gap
from foredraft.verify.distributions import (
    SHIFT,
    Distribution,
    enumerate_distribution,
    judge_samples,
    reference_distribution,
)
from foredraft.verify.draws import DEPTH, FEWEST, Tested, begun, draw, judge_again, telling
from foredraft.verify.features import CONTROL, DISTRIBUTIONS, DISTRIBUTIONS_UNKEYED, NUM_FIRST, Feature, features
from foredraft.verify.subjects import Answer, BrokenSubject, FunctionSubject, LLMSubject, Sample, Subject, asked_for
from foredraft.verify.verdict import (
    INTERRUPTED,
    NEVER,
    Check,
    Difference,
    Finding,
    Verdict,
    holm,
    logprob_finding,
    token_finding,
    tokens_of,
)

SHARE_OF_DISTRIBUTIONS = 0.45
"""Largest share of the time for distribution tests and the control. The rest is left for comparing tokens."""

SHARE_UNKEYED = 0.7
"""The same share, for subjects whose sampled tokens are not compared."""


def check_false_alarm_rate(rate: float) -> None:
    """Raise ConfigError for a rate that is not between 0 and 1."""
    if not 0.0 < rate < 1.0:
        raise ConfigError(f"false_alarm_rate is {rate}; it must be between 0 and 1")


def verify(
    llm: LLM,
    prompts: Any,
    subject: Subject | Callable[[list[int], SamplingParams], Any] | None = None,
    *,
    max_tokens: int = 16,
    budget_seconds: float = 60.0,
    false_alarm_rate: float = 0.01,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Verdict:
    """Verify whether a decoder is lossless: whether it keeps the tokens or the distribution of the model.

    Under every sampling setting, the decoder's tokens are compared with those of plain decoding with the same seeds.
    Where tokens differ, their gap under the model's distribution distinguishes rounding from faults. Samples of short
    continuations are tested against the model's distribution, which transformers' processors enumerate over plain
    forward passes. As a control, a decoder that accepts every draft goes through the same test and has to fail it.

    Args:
      llm: the model and its speculative config. Drafts are as long as the config allows, even where long drafts are
        slower.
      prompts: prompts as for `LLM.generate`. Repetitive text leads to the most accepted drafts.
      subject: the decoder to verify; by default ``llm``. Another decoder must run the same model as ``llm``. A function
        is wrapped in `FunctionSubject`.
      max_tokens: length of every output that is compared.
      budget_seconds: time after which no new check and no second draw begins. The verdict names the checks left out.
      false_alarm_rate: largest chance that a lossless decoder fails any distribution test. A failed test is drawn once
        more.
      progress: function that is called with one line before each check.

    Ctrl-C ends the verification early. The verdict then contains the finished checks and is never "lossless".

    Raises: ConfigError for values out of range, PromptError for invalid prompts.
    Randomness: keyed by ``seed``. The same call gives the same tokens, and as many of them as time allows.
    """
    check_false_alarm_rate(false_alarm_rate)
    if max_tokens < DEPTH or budget_seconds <= 0:
        raise ConfigError(
            f"max_tokens is {max_tokens} and budget_seconds is {budget_seconds}; max_tokens must be at least {DEPTH} "
            "and budget_seconds positive"
        )
    if subject is not None and not isinstance(subject, Subject):
        subject = FunctionSubject(subject)
    asked = [list(one.token_ids) for one in read_prompts(prompts, llm.tokenizer)]
    is_governed_anyway = any(part.method == "auto" for part in llm.speculative_config.parts)
    with nullcontext() if is_governed_anyway else ungoverned():
        work = _Work(
            llm, asked, subject, max_tokens, budget_seconds, false_alarm_rate, seed, progress or (lambda _: None)
        )
        return work.run()


class _Work:
    """One running verification."""

    def __init__(
        self,
        llm: LLM,
        prompts: list[list[int]],
        subject: Subject | None,
        max_tokens: int,
        budget: float,
        rate: float,
        seed: int,
        progress: Callable[[str], None],
    ) -> None:
        self._began = time.monotonic()
        self._ends = self._began + budget
        self._budget, self._rate, self._seed, self._progress = budget, rate, seed, progress
        self._draw = partial(draw, seed=seed)
        if subject and subject.prefill_chunk_size:
            llm = llm.with_chunks_of(subject.prefill_chunk_size)
        self._llm = llm.with_speculative_config(llm.speculative_config)  # a fresh LLM, whose engine is created here
        self._llm.logs_low_gain = False  # drafting is forced, so a low gain is expected
        self._plain = LLMSubject(llm.with_speculative_config(None), "plain decoding")
        self._subject = subject or LLMSubject(self._llm)
        self._is_own = subject is None
        self._prompts, self._max_tokens = prompts, max_tokens
        self._near_tie = 0.0 if self._is_own and self._llm.guarantee.keeps_bits else NEAR_TIES[llm.target.dtype]
        self._findings: list[Finding] = []
        self._tested: list[Tested] = []
        self._num_tests = 0
        self._num_drafted = self._num_accepted = 0
        self._said: list[tuple[list[SamplingParams], list[Answer]]] = []
        is_keyed = self._subject.is_keyed
        self._share = SHARE_OF_DISTRIBUTIONS if is_keyed else SHARE_UNKEYED
        self._known = DISTRIBUTIONS if is_keyed else (*DISTRIBUTIONS, *DISTRIBUTIONS_UNKEYED)
        self._asked: list[tuple[str, Check]] = [
            (CONTROL, "control"),
            *((name, "distribution") for name, _ in self._known),
        ]

    def run(self) -> Verdict:
        """Make all checks that time allows, or until interrupted, and return the verdict."""
        is_interrupted = False
        try:
            self._look()
            self._judge_distributions()
        except KeyboardInterrupt:
            is_interrupted, self._ends = True, float("-inf")
            with finishing():
                self._judge_distributions()
            found = {(one.feature, one.check) for one in self._findings}
            self._findings += [Finding(*one, "left out", INTERRUPTED) for one in self._asked if one not in found]
        counts = self._subject.counts_drafts
        return Verdict(
            self._subject.name,
            self._plain.name,
            self._llm.guarantee.describe() if self._is_own else "",
            tuple(self._findings),
            num_drafted=self._num_drafted if counts else None,
            num_accepted=self._num_accepted if counts else None,
            false_alarm_rate=self._rate,
            seconds=time.monotonic() - self._began,
            is_interrupted=is_interrupted,
        )

    def _look(self) -> None:
        """Make every check except for judging the distribution tests, which are judged together at the end."""
        ends = SamplingParams(temperature=0.0, max_tokens=self._max_tokens, logprobs=2)
        self._progress("plain decoding of every prompt")
        plain = self._expected([ends] * len(self._prompts))
        every = features(plain, self._max_tokens, self._seed, is_keyed=self._subject.is_keyed)
        self._asked += [(feature.name, "tokens") for feature in every]
        first, others = every[:NUM_FIRST], every[NUM_FIRST:]
        began = time.monotonic()
        for feature in first:
            self._compare(feature)
        of_a_setting = (time.monotonic() - began) / max(1, self._num_compared(first))
        self._test_distributions(plain, self._ends - of_a_setting * self._num_compared(others))
        for feature in others:
            self._compare(feature)

    # -- tokens ----------------------------------------------------------------------------------------------------

    def _num_compared(self, settings: Sequence[Feature]) -> int:
        return sum(not self._why_not(feature) for feature in settings)

    def _given(self, feature: Feature) -> list[SamplingParams]:
        takes_logprobs = "logprobs" in self._subject.takes
        return [one if takes_logprobs else replace(one, logprobs=None) for one in feature.params]

    def _compare(self, feature: Feature) -> None:
        """Compare the tokens of every prompt under one setting with those of plain decoding under it."""
        is_late = time.monotonic() >= self._ends
        if reason := self._why_not(feature) or (
            f"no time was left in the budget of {self._budget:g} s" if is_late else ""
        ):
            self._findings.append(Finding(feature.name, "tokens", "left out", reason))
            return
        self._progress(f"{feature.name}: tokens")
        try:
            found = self._answers(feature)
        except ForedraftError as error:
            self._findings.append(Finding(feature.name, "tokens", "left out", f"the subject refuses it: {error}"))
            return
        wanted = self._expected(feature.params)
        self._num_drafted += sum(answer.num_drafted for answer in found)
        self._num_accepted += sum(answer.num_accepted for answer in found)
        differences = []
        num_tokens = num_samples = 0
        for place, (answer, plain) in enumerate(zip(found, wanted, strict=True)):
            for index, (got, want) in enumerate(zip(answer.samples, plain.samples, strict=True)):
                num_samples += 1
                num_tokens += len(want.token_ids or ())
                if found_here := self._difference(place, index, feature.params[place], got, want):
                    differences.append(found_here)
        self._findings.append(token_finding(feature.name, num_samples, num_tokens, differences, self._near_tie))
        if any(sample.logprobs is not None for answer in found for sample in answer.samples) and not differences:
            self._findings.append(logprob_finding(feature.name, found, wanted, self._near_tie))

    def _difference(
        self, prompt: int, sample: int, params: SamplingParams, got: Sample, want: Sample
    ) -> Difference | None:
        """Return the first difference between a sample and the sample of plain decoding; None if they are equal."""
        expected, text = list(want.token_ids or ()), want.text or ""
        found: Sequence[int]
        if got.token_ids is None:
            if got.text == text:
                return None
            found = tokens_of(self._llm.tokenizer, got.text or "", text, expected)
        else:
            found = got.token_ids
        position = shared_length(list(found), expected)
        if position < min(len(found), len(expected)):
            tokens = found[position], expected[position]
            context = self._prompts[prompt], expected[:position]
            gap = token_gap(self._llm.target, *context, params, sample, tokens)
            return Difference(prompt, sample, position, *tokens, gap=gap)
        if len(found) != len(expected):
            one, other = (each[position] if position < len(each) else "(end)" for each in (found, expected))
            return Difference(prompt, sample, position, one, other, NEVER)
        if got.text is not None and got.text != text:
            return Difference(prompt, sample, len(found), got.text, text, NEVER)
        return None

    def _expected(self, params: Sequence[SamplingParams]) -> list[Answer]:
        """Return the plain outputs of all prompts. Outputs of equal parameters are decoded once."""
        asked = [replace(one, logprobs=None, seed=None) if one.is_greedy else one for one in params]
        for known, answers in self._said:
            if known == asked:
                return answers
        self._said.append((asked, self._plain.generate(self._prompts, params)))
        return self._said[-1][1]

    def _answers(self, feature: Feature) -> list[Answer]:
        params = self._given(feature)
        if not feature.is_alone:
            return self._subject.generate(self._prompts, params)
        pairs = zip(self._prompts, params, strict=True)
        return [answer for prompt, own in pairs for answer in self._subject.generate([prompt], [own])]

    def _why_not(self, feature: Feature) -> str:
        """Return why the subject cannot be checked under a setting; empty if it can."""
        if missing := set().union(*map(asked_for, self._given(feature))) - self._subject.takes:
            return f"the subject does not support {', '.join(sorted(missing))}"
        if not self._subject.is_keyed and not all(params.is_greedy for params in feature.params):
            return "sampled tokens need not equal those of plain decoding; their distribution is tested instead"
        return ""

    # -- distributions -------------------------------------------------------------------------------------------------

    def _test_distributions(self, plain: Sequence[Answer], ends: float) -> None:
        """Draw samples of short continuations, and test the control.

        Args:
          ends: time at which the other checks need the rest of the budget. The first test and the control are made in
            any case.
        """
        until = min(ends, time.monotonic() + self._share * self._budget)
        tests = [(name, keys) for name, keys in self._known if not keys.keys() - self._subject.takes]
        self._num_tests = len(tests)
        self._progress("looking for a prompt with accepted and rejected drafts")
        candidates = begun(self._prompts, plain, self._max_tokens)
        prompt = telling(self._subject, self._llm.target, candidates, self._seed)
        for place, (name, keys) in enumerate(tests):
            params = SamplingParams(**{"temperature": 1.0, "max_tokens": DEPTH, **keys})
            left = until - time.monotonic()
            if left <= 0 and place:
                self._findings.append(
                    Finding(name, "distribution", "left out", f"no time was left in the budget of {self._budget:g} s")
                )
                continue
            self._progress(f"{name}: distribution of {DEPTH} tokens")
            after = reference_distribution(self._llm.target, prompt, params, self._llm.engine_config.prefill_chunk_size)
            distribution = enumerate_distribution(after, DEPTH, self._llm.eos_token_ids)
            share = left / (len(tests) - place + (0.5 if place == 0 else 0))
            try:
                samples, drafts = self._draw(self._subject, prompt, params, until=time.monotonic() + share)
            except ForedraftError as error:
                self._findings.append(Finding(name, "distribution", "left out", str(error)))
                if place == 0:
                    why = "the control has to fail the first distribution test, which was left out"
                    self._findings.append(Finding(CONTROL, "control", "left out", why))
                continue
            level = self._rate / len(tests)
            test = judge_samples(distribution, samples, level, self._seed)
            numbers = {**vars(test), **drafts}
            self._tested.append(Tested(len(self._findings), distribution, prompt, params, samples, test))
            said = (
                f"p = {test.p_value:.2g} over {test.num_samples} continuations, {test.num_cells} cells; a shift of "
                f"{test.detectable:g} would have been found, one of {SHIFT:g} with probability {test.power:.2f}"
            )
            self._findings.append(Finding(name, "distribution", "holds", said, numbers))
            if place == 0:
                self._catch_control(distribution, prompt, params, len(samples), level)
        for name, keys in self._known:
            if missing := keys.keys() - self._subject.takes:
                why = f"the subject does not support {', '.join(sorted(missing))}"
                self._findings.append(Finding(name, "distribution", "left out", why))

    def _catch_control(
        self, distribution: Distribution, prompt: list[int], params: SamplingParams, num_samples: int, level: float
    ) -> None:
        """Check that the test finds a broken decoder: one that accepts every draft must fail the test that the subject
        has passed."""
        self._progress("control: a decoder that accepts every draft")
        broken = BrokenSubject(self._llm)
        samples, drafts = self._draw(broken, prompt, params, num_samples=min(num_samples, FEWEST))
        test = judge_samples(distribution, samples, level, self._seed)
        is_caught = test.p_value <= level
        said = (
            f"the broken decoder was {'' if is_caught else 'not '}caught (p = {test.p_value:.2g} over "
            f"{test.num_samples} continuations)"
        )
        status: Any = "holds" if is_caught else "undecided"
        self._findings.append(Finding(CONTROL, "control", status, said, {**vars(test), **drafts}))

    def _judge_distributions(self) -> None:
        """Decide which distribution tests reject, by Holm's method over all of them. Tests left out count as tests that
        hold.

                A rejected test is drawn once more with other seeds. A lossless decoder does not fail twice by chance,
                nor by a wide margin over both draws.
        """
        found = [tested.test.p_value for tested in self._tested]
        rejected = holm([*found, *[1.0] * (self._num_tests - len(found))], self._rate)
        for tested, is_rejected in zip(self._tested, rejected, strict=False):
            finding = self._findings[tested.place]
            if is_rejected and "p_value_again" not in finding.numbers:  # present if the draw preceded an interruption
                self._progress(f"{finding.feature}: distribution, drawn once more")
                self._findings[tested.place] = judge_again(
                    tested,
                    finding,
                    self._subject,
                    self._seed,
                    rate=self._rate,
                    level=self._rate / self._num_tests,
                    until=self._ends,
                )

"""Samples of short continuations for distribution tests.

Chooses the prompt at which a test is most sensitive, draws as many samples as time allows, and draws again where a test
failed: a failure by chance alone is unlikely to happen twice.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from foredraft.config.sampling import SamplingParams
from foredraft.errors import ConfigError, ForedraftError
from foredraft.model.lm import CausalLM
from foredraft.sampling.noise import mix
from foredraft.verify.distributions import Distribution, DistributionTest, judge_samples, reference_distribution
from foredraft.verify.subjects import Answer, Sample, Subject
from foredraft.verify.verdict import Finding, Status

DEPTH = 3
"""Length of the continuations whose distribution is enumerated: at most two draft tokens and a bonus."""

SAMPLES_AT_ONCE = 16
"""Samples per request of a distribution test. Requests are sent one at a time, so that the prompt is prefilled once for
all their samples. Samples beyond `EngineConfig.max_num_seqs` would each prefill the prompt again."""

FEWEST, MOST = 64, 4096
"""Smallest and largest number of samples of a distribution test."""

FIRST_REQUEST = 7919
"""Number of the first request. The seed is mixed with it, so that no other check draws with the same seeds."""
FAR = 0.1
"""Share of a test's level. A p-value over both draws below this share is a fault, whatever the second draw shows."""


def begun(prompts: Sequence[list[int]], plain: Sequence[Answer], max_tokens: int) -> list[list[int]]:
    """Return each prompt followed by none, a third and two thirds of its greedy plain output."""
    return [
        [*prompt, *(answer.samples[0].token_ids or ())[: max_tokens * part // 3]]
        for prompt, answer in zip(prompts, plain, strict=True)
        for part in (0, 1, 2)
    ]


def telling(subject: Subject, target: CausalLM, candidates: Sequence[list[int]], seed: int) -> list[int]:
    """Return the prompt at which some drafts are accepted, some are rejected, and samples differ.

    If the subject does not count draft tokens, return the prompt whose most likely next token has a probability closest
    to 0.5.
    """
    if not subject.counts_drafts:
        probs = [reference_distribution(target, prompt, SamplingParams())(()) for prompt in candidates]
        return min(zip(candidates, probs, strict=True), key=lambda one: abs(float(one[1].max()) - 0.5))[0]
    params = [SamplingParams(temperature=1.0, max_tokens=DEPTH, n=4, seed=seed)] * len(candidates)
    worth = [_worth(answer) for answer in subject.generate(candidates, params)]
    return candidates[max(range(len(candidates)), key=worth.__getitem__)]


def draw(
    subject: Subject,
    prompt: list[int],
    params: SamplingParams,
    seed: int,
    *,
    until: float = float("inf"),
    num_samples: int = MOST,
    num_least: int = FEWEST,
) -> tuple[list[Sequence[int]], dict[str, int]]:
    """Draw continuations of one prompt, each with its own seed, as many as time allows.

    Args:
      until: time at which to stop, on the clock of `time.monotonic`.
      num_samples: largest number of samples.
      num_least: number of samples that are drawn even after ``until``.
    Returns: token ids of each sample, and the numbers of verified and of accepted draft tokens.
    Raises: ConfigError if the subject returns text without token ids.
    """
    found: list[Sequence[int]] = []
    num_drafted = num_accepted = calls = 0
    while len(found) < num_samples and (len(found) < num_least or time.monotonic() < until):
        asked = replace(params, seed=mix(seed, FIRST_REQUEST + calls), n=SAMPLES_AT_ONCE)
        calls += 1
        for answer in subject.generate([prompt], [asked]):
            found += [_ids(sample) for sample in answer.samples]
            num_drafted += answer.num_drafted
            num_accepted += answer.num_accepted
    return found[:num_samples], {"num_drafted": num_drafted, "num_accepted": num_accepted}


def _ids(sample: Sample) -> Sequence[int]:
    if sample.token_ids is None and sample.text == "":  # the sample ended at once; some servers omit the id of EOS
        return ()
    if sample.token_ids is None:
        raise ConfigError(
            "the subject returned text without token ids; one text has several tokenisations, each with a probability "
            "of its own"
        )
    return sample.token_ids


def _worth(answer: Answer) -> float:
    """Return a score of a prompt for a test: accepted drafts, rejected drafts and differing samples raise it."""
    mixed = min(answer.num_accepted, answer.num_drafted - answer.num_accepted)
    return mixed + 0.1 * answer.num_drafted + len({sample.token_ids for sample in answer.samples})


@dataclass(frozen=True)
class Tested:
    """One distribution test that was made.

    Args:
      place: index of its finding in the list of findings.
      samples: token ids of the samples of the first draw.
    """

    place: int
    distribution: Distribution
    prompt: list[int]
    params: SamplingParams
    samples: list[Sequence[int]]
    test: DistributionTest


def judge_again(
    tested: Tested, finding: Finding, subject: Subject, seed: int, *, rate: float, level: float, until: float
) -> Finding:
    """Draw as many samples as the first draw had, with other seeds, and judge the test again.

    If time runs out, fewer samples are drawn. An incomplete second draw never changes the result to "holds".

    Args:
      tested: the test that failed.
      finding: the finding of that test.
      rate: false alarm rate of all distribution tests together.
      level: significance level of one distribution test.
      until: time at which to stop, on the clock of `time.monotonic`.

    Exactness: the number of samples does not depend on their values, so both levels stay exact.
    """
    wanted = len(tested.samples)
    again: list[Sequence[int]] = []
    failed = ""
    try:
        again, _ = draw(
            subject, tested.prompt, tested.params, mix(seed, 1), until=until, num_samples=wanted, num_least=0
        )
    except ForedraftError as error:
        failed = str(error)
    why = failed or "no time was left"
    if again:
        p_value, p_together = (
            judge_samples(tested.distribution, samples, FAR, seed).p_value
            for samples in (again, [*tested.samples, *again])
        )
        cut = f" ({len(again)} of {wanted} continuations: {why})" if len(again) < wanted else ""
        said = f"drawn once more{cut}, p = {p_value:.2g}, together {p_together:.2g}"
    else:
        p_value, p_together = 1.0, tested.test.p_value
        said = f"it was not drawn once more ({why})"
    is_fault = p_value <= rate or p_together <= FAR * level
    is_doubtful = len(again) < wanted or p_together <= level
    status: Status = "broken" if is_fault else "undecided" if is_doubtful else "holds"
    numbers = {"p_value_again": p_value, "p_value_together": p_together, "num_samples_again": len(again)}
    return replace(finding, status=status, found=f"{finding.found}; {said}", numbers={**finding.numbers, **numbers})

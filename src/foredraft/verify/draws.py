"""Samples of short continuations for tests of a distribution: after which prompt they tell most, as many as time
allows, and once more where a test failed, since what fails by chance alone does not fail twice."""

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
"""Tokens of a continuation whose distribution is enumerated: two drafts and a bonus at most."""

SAMPLES_AT_ONCE = 16
"""Samples of one request of a distribution test, and one request at a time: the prompt is read once for them. Samples
beyond `EngineConfig.max_num_seqs`, of the same request or the next, would read it again, each by itself."""

FEWEST, MOST = 64, 4096
"""Samples of a distribution test."""

FIRST_REQUEST = 7919
"""Number of the first request, by which its seed is mixed: behind all samples that anything else draws."""
FAR = 0.1
"""Share of the level of a distribution test below which p over both draws is a fault, whatever the second one shows."""


def begun(prompts: Sequence[list[int]], plain: Sequence[Answer], max_tokens: int) -> list[list[int]]:
    """Prompts, with none, a third and two thirds of what plain decoding greedily answered."""
    return [
        [*prompt, *(answer.samples[0].token_ids or ())[: max_tokens * part // 3]]
        for prompt, answer in zip(prompts, plain, strict=True)
        for part in (0, 1, 2)
    ]


def telling(subject: Subject, target: CausalLM, candidates: Sequence[list[int]], seed: int) -> list[int]:
    """The prompt after which drafts are kept and rejected, and texts differ.

    Where nobody counts drafts, the one after which the likeliest token is likely and not certain.
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
    """Continuations of one prompt, by seeds of their own, as many as time allows.

    Args:
      until: by `time.monotonic`.
      num_samples, num_least: at most, and at least, however late it is.
    Returns: token ids of each, and how many draft tokens were verified and kept.
    Raises: ConfigError for a subject that returns text alone.
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
    if sample.token_ids is None and sample.text == "":  # it ended at once, and ids of an end are not always told
        return ()
    if sample.token_ids is None:
        raise ConfigError(
            "it returned text alone, and one text has several tokenisations, of which each has its chance"
        )
    return sample.token_ids


def _worth(answer: Answer) -> float:
    """A score of a prompt for a test: accepted drafts, rejected drafts and different texts raise it."""
    mixed = min(answer.num_accepted, answer.num_drafted - answer.num_accepted)
    return mixed + 0.1 * answer.num_drafted + len({sample.token_ids for sample in answer.samples})


@dataclass(frozen=True)
class Tested:
    """One distribution test that was made.

    Args:
      place: of its finding.
      samples: of the first draw.
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
    """Draw as many samples as the first draw had, by other seeds, or as many as time allows; and judge the test anew.

    A second draw that was cut short acquits nobody.

    Args:
      tested: a test that failed.
      finding: its finding.
      rate: false alarms of all distribution tests together.
      level: level of one distribution test.
      until: by `time.monotonic`.

    Exactness: the number of samples does not depend on their values, so that both levels stay exact.
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
    why = failed or "no time was left for more"
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

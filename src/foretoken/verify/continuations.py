"""Samples of short continuations: after which prompt they tell most, and as many as time allows."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import replace

from foretoken.config.sampling import SamplingParams
from foretoken.errors import ConfigError
from foretoken.law.noise import mix
from foretoken.model.lm import CausalLM
from foretoken.verify.laws import ReferenceLaw
from foretoken.verify.subjects import Answer, Sample, Subject

DEPTH = 3
"""Tokens of a continuation whose law is enumerated: two drafts and a bonus at most."""

SAMPLES_AT_ONCE = 16
"""Samples of one request of a law test, and one request at a time: the prompt is read once for them. Samples beyond
`EngineConfig.max_num_seqs`, of the same request or the next, would read it again, each by itself."""

FEWEST, MOST = 64, 4096
"""Samples of a law test."""

FIRST_REQUEST = 7919
"""Number of the first request, by which its seed is mixed: behind all samples that anything else draws."""


def begun(prompts: Seq[list[int]], plain: Seq[Answer], max_tokens: int) -> list[list[int]]:
    """Prompts, with none, a third and two thirds of what plain decoding greedily answered."""
    return [
        [*prompt, *(answer.samples[0].token_ids or ())[: max_tokens * part // 3]]
        for prompt, answer in zip(prompts, plain, strict=True)
        for part in (0, 1, 2)
    ]


def telling(subject: Subject, target: CausalLM, candidates: Seq[list[int]], seed: int) -> list[int]:
    """The prompt after which drafts are kept and rejected, and texts differ.

    Where nobody counts drafts, the one after which the likeliest token is likely and not certain.
    """
    if not subject.counts_drafts:
        laws = [ReferenceLaw(target, prompt, SamplingParams())(()) for prompt in candidates]
        return min(zip(candidates, laws, strict=True), key=lambda one: abs(float(one[1].max()) - 0.5))[0]
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
) -> tuple[list[Seq[int]], dict[str, int]]:
    """Continuations of one prompt, by seeds of their own, as many as time allows.

    Args:
      until: by `time.monotonic`.
      num_samples, num_least: at most, and at least, however late it is.
    Returns: token ids of each, and how many draft tokens were verified and kept.
    Raises: ConfigError for a subject that returns text alone.
    """
    found: list[Seq[int]] = []
    num_drafted = num_accepted = calls = 0
    while len(found) < num_samples and (len(found) < num_least or time.monotonic() < until):
        asked = replace(params, seed=mix(seed, FIRST_REQUEST + calls), n=SAMPLES_AT_ONCE)
        calls += 1
        for answer in subject.generate([prompt], [asked]):
            found += [_ids(sample) for sample in answer.samples]
            num_drafted += answer.num_drafted
            num_accepted += answer.num_accepted
    return found[:num_samples], {"num_drafted": num_drafted, "num_accepted": num_accepted}


def _ids(sample: Sample) -> Seq[int]:
    if sample.token_ids is None and sample.text == "":  # it ended at once, and ids of an end are not always told
        return ()
    if sample.token_ids is None:
        raise ConfigError(
            "it returned text alone, and one text has several tokenisations, of which each has its chance"
        )
    return sample.token_ids


def _worth(answer: Answer) -> float:
    """How much a test after this prompt tells: drafts that are kept, drafts that are not, texts that differ."""
    mixed = min(answer.num_accepted, answer.num_drafted - answer.num_accepted)
    return mixed + 0.1 * answer.num_drafted + len({sample.token_ids for sample in answer.samples})

"""What a comparison of methods finds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foretoken.bench.candidates import PLAIN, Candidate
from foretoken.bench.equality import Equality
from foretoken.bench.measure import Comparison, Trial, compare, prompt_ratios
from foretoken.engine.stats import SequenceStats, StepProfile


@dataclass(frozen=True)
class Refused:
    """A method that this model cannot draft by, and why."""

    method: str
    reason: str


@dataclass(frozen=True)
class MethodRow:
    """The results of one method; figures are None where it differs from plain decoding or nothing was timed.

    Args:
      given: the speculative config.
      comparison: speed by own plain decoding.
      prompt_ratios: the same of every prompt, None where nothing was left to time.
      tokens_per_step: tau, the bonus included.
      nodes_per_step: verified nodes, the pending token included.
      draft_seconds: proposing and observing, per step.
      memory_bytes: by which the process grew when the method was loaded and ran for the first time, its own
        key-value cache of the target included; None where the system does not say.
      equality: with plain decoding, in the mode in which it is promised.
      timed_equality: the same in the runs that were timed.
      lossless: the acceptance rule keeps the law of the target.
    """

    method: str
    given: Mapping[str, Any]
    tokens_per_second: float | None
    comparison: Comparison | None
    prompt_ratios: tuple[float | None, ...]
    tokens_per_step: float
    acceptance_rate: float | None
    nodes_per_step: float
    draft_seconds: float
    memory_bytes: int | None
    equality: Equality | None
    timed_equality: Equality | None
    lossless: bool = True

    @property
    def is_timed(self) -> bool:
        return self.comparison is not None and self.comparison.num_prompts > 0


@dataclass(frozen=True)
class Outcome:
    """All findings of a comparison.

    Args:
      kinds: of the prompts, in their order.
      promised: "default" or "strict": the mode in which equality was judged.
      different: methods whose tokens are not those of plain decoding in that mode.
      repeated_share: of plain decoding's tokens, those inside repeated 8-grams.
      num_prompts_planned: what an interrupted run did not reach.
    """

    sampling: str
    kinds: tuple[str, ...]
    num_prompts_planned: int
    runs_per_prompt: int
    other_cpu_share: float
    promised: str
    repeated_share: float
    plain: MethodRow
    rows: tuple[MethodRow, ...]
    different: tuple[Equality, ...]
    refused: tuple[Refused, ...]

    @property
    def num_prompts(self) -> int:
        return len(self.kinds)


def row_of(
    trial: Trial,
    candidate: Candidate,
    profile: StepProfile,
    memory_bytes: int | None,
    judged: Equality | None,
    timed: Equality | None,
) -> MethodRow:
    """What a trial tells of a method.

    Args:
      profile: of the steps of its runs.
      judged, timed: equality with plain decoding, where it is promised and in the runs that were timed.
    """
    stats = SequenceStats()
    for run in (run for runs in trial.runs[candidate.name] for run in runs):
        stats.add(run.stats or SequenceStats())
    speed = trial.tokens_per_second(candidate.name)
    steps = max(1, stats.num_steps)
    return MethodRow(
        method=candidate.name,
        given=candidate.given,
        tokens_per_second=None if math.isnan(speed) else speed,
        comparison=None if candidate.name == PLAIN else compare(trial, candidate.name, PLAIN),
        prompt_ratios=tuple(prompt_ratios(trial, candidate.name, PLAIN)),
        tokens_per_step=stats.tokens_per_step,
        acceptance_rate=stats.draft_acceptance_rate if stats.num_draft_tokens else None,
        nodes_per_step=1 + stats.num_draft_tokens / steps,
        draft_seconds=(profile.propose_seconds + profile.observe_seconds) / max(1, profile.num_steps),
        memory_bytes=memory_bytes,
        equality=judged,
        timed_equality=timed,
        lossless=candidate.config.rule.is_lossless,
    )

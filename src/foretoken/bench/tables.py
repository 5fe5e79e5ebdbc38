"""What the parts of the benchmark find: tables and their rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from foretoken.bench import costs
from foretoken.bench.arms import Arm
from foretoken.bench.equality import Equality
from foretoken.bench.measure import Comparison, Trial
from foretoken.bench.profile import Profile
from foretoken.bench.workload import repeated_share
from foretoken.engine.stats import SequenceStats


@dataclass(frozen=True)
class Row:
    """One arm of a table."""

    arm: str
    tokens_per_second: float
    comparisons: tuple[Comparison, ...]
    tokens_per_step: float | None
    acceptance_rate: float | None
    repeated_share: float
    equality: Equality | None


@dataclass(frozen=True)
class SpeedTable:
    """Arms over the same prompts in the same interleaved trial."""

    title: str
    sampling: str
    context: int | None
    num_prompts: int
    num_prompt_tokens: float
    runs_per_prompt: int
    other_cpu_share: float
    rows: tuple[Row, ...]
    tuned: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class EfficiencyTable:
    """Efficiencies with one drafter."""

    drafter: str
    measured_cost: float
    context: int
    rows: tuple[costs.Efficiency, ...]


@dataclass(frozen=True)
class BatchRow:
    """Throughput of many ragged rows at once, and of the same prompts one by one."""

    arm: str
    batch_size: int
    together_per_second: float
    alone_per_second: float

    @property
    def gain(self) -> float:
        return self.together_per_second / self.alone_per_second


@dataclass(frozen=True)
class ProfileCell:
    """A profile with its conditions."""

    vocab_size: int
    context: int
    sampling: str
    profile: Profile


def row_of(trial: Trial, arm: Arm, ratios: tuple[Comparison, ...], equal: Equality | None) -> Row:
    """What a trial tells of an arm; ``ratios`` and ``equal`` as in `Row`."""
    stats = SequenceStats()
    for runs in trial.runs[arm.name]:
        if runs[0].stats is not None:
            stats.add(runs[0].stats)
    has_stats = stats.num_steps > 0
    return Row(
        arm=arm.name,
        tokens_per_second=trial.tokens_per_second(arm.name),
        comparisons=ratios,
        tokens_per_step=stats.tokens_per_step if has_stats else None,
        acceptance_rate=stats.draft_acceptance_rate if stats.num_draft_tokens else None,
        repeated_share=repeated_share(trial.outputs(arm.name)),
        equality=equal,
    )

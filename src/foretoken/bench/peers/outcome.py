"""The results of a race: texts compared first, speeds and ratios afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import product
from typing import Any

from foretoken.bench.measure import Comparison, Trial, compare
from foretoken.bench.peers.client import RemoteArm
from foretoken.bench.peers.sameness import Sameness
from foretoken.bench.peers.workers.protocol import DRAFT, LOOKUP, PLAIN

OWN = "foretoken"
COMPARED = {"plain": (PLAIN,), "best without a second model": (PLAIN, LOOKUP), "best with a second model": (DRAFT,)}
"""What is compared, and the kinds of arms among which each engine's best is taken."""


@dataclass(frozen=True)
class PeerRow:
    """One arm.

    Args:
      engine: as the user names it.
      counts: False for other weights than the checkpoint's, and for what learns from one request for the next.
      tuned_tokens_per_second: on the prompts on which settings were chosen, and which do not count.
      runs: per prompt, of every run: tokens decoded, seconds of decoding, seconds before.
    """

    arm: str
    engine: str
    kind: str
    num_rows: int
    settings: str
    numerics: str
    counts: bool
    tuned_tokens_per_second: float
    tokens_per_second: float
    num_busy_threads: float
    sameness: Sameness
    runs: tuple[tuple[tuple[int, float, float], ...], ...]


@dataclass(frozen=True)
class Verdict:
    """One arm by another, each the best of its engine on the prompts that do not count.

    Args:
      what: is compared.
      counts: both sides do.
    """

    what: str
    arm: str
    base: str
    counts: bool
    comparison: Comparison


@dataclass(frozen=True)
class Heat:
    """All arms of one number of rows over one set of prompts.

    Args:
      prompts: prompts, or groups of them.
      idle_shares: of one processor, what every worker used while another one was asked.
      is_complete: all prompts are done.
      wrong: own arms whose texts break the promise of full precision; then no speed is shown.
    """

    title: str
    num_rows: int
    prompts: tuple[str, ...]
    runs_per_prompt: int
    other_cpu_share: float
    idle_shares: Mapping[str, float]
    rows: tuple[PeerRow, ...]
    verdicts: tuple[Verdict, ...]
    wrong: tuple[str, ...]
    is_complete: bool


@dataclass(frozen=True)
class Outcome:
    """A whole race.

    Args:
      engines: with their versions, by name.
      plain_peak_bytes: of every engine, the largest resident size of a process that has only decoded plainly.
      missing: engines that take no part, and why.
      skipped: prompts whose answers are too short to be timed.
      tried: of every arm, the tokens per second of all settings on the prompts that do not count.
    """

    models: str
    dtype: str
    engines: Mapping[str, str]
    plain_peak_bytes: Mapping[str, int]
    missing: Mapping[str, str]
    prompts: tuple[str, ...]
    tuning_prompts: tuple[str, ...]
    skipped: tuple[str, ...]
    tried: Mapping[str, Mapping[str, Any]]
    heats: tuple[Heat, ...]

    @property
    def wrong(self) -> tuple[str, ...]:
        return tuple(name for heat in self.heats for name in heat.wrong)


def row_of(trial: Trial, arm: RemoteArm, same: Sameness) -> PeerRow:
    """What a trial has shown of an arm."""
    facts: Mapping[str, Any] = arm.facts
    return PeerRow(
        arm=arm.name,
        engine=arm.worker.launch.name,
        kind=facts["kind"],
        num_rows=arm.num_rows,
        settings=facts["settings"],
        numerics=facts["numerics"],
        counts=facts["counts"],
        tuned_tokens_per_second=facts["tuned_tokens_per_second"],
        tokens_per_second=trial.tokens_per_second(arm.name),
        num_busy_threads=arm.num_busy_threads,
        sameness=same,
        runs=tuple(
            tuple((run.num_decoded, run.decode_seconds, run.first_seconds) for run in runs)
            for runs in trial.runs[arm.name]
        ),
    )


def best_of(arms: Seq[RemoteArm], engine: str, kinds: Seq[str], num_rows: int, counts: bool) -> RemoteArm | None:
    """The arm of an engine that was the fastest on the tuning prompts; None where it has none of these kinds."""
    some = [
        arm
        for arm in arms
        if arm.worker.launch.name == engine
        and arm.facts["kind"] in kinds
        and arm.num_rows == num_rows
        and arm.facts["counts"] == counts
    ]
    return max(some, key=lambda arm: arm.facts["tuned_tokens_per_second"], default=None)


def verdicts(trial: Trial, arms: Seq[RemoteArm]) -> list[Verdict]:
    """This library by every other engine, arm by arm of a kind; batches by the single row of their engine."""
    peers = [name for name in dict.fromkeys(arm.worker.launch.name for arm in arms) if name != OWN]
    sizes = sorted({arm.num_rows for arm in arms})
    present = {arm.facts["kind"] for arm in arms}
    found = []
    for num_rows in sizes:
        for what, kinds in COMPARED.items():
            ours = best_of(arms, OWN, kinds, num_rows, counts=True)
            if ours is None or kinds[-1] not in present:
                continue
            for peer, counts in product(peers, (True, False)):
                theirs = best_of(arms, peer, kinds, num_rows, counts)
                if theirs is not None:
                    title = what if num_rows == 1 else f"{what}, {num_rows} rows"
                    found.append(Verdict(title, ours.name, theirs.name, counts, compare(trial, ours.name, theirs.name)))
    for name, num_rows in product((OWN, *peers), sizes):
        batch, alone = best_of(arms, name, (PLAIN,), num_rows, True), best_of(arms, name, (PLAIN,), 1, True)
        if num_rows > 1 and batch is not None and alone is not None:
            comparison = compare(trial, batch.name, alone.name)
            found.append(Verdict(f"{num_rows} rows by one", batch.name, alone.name, True, comparison))
    return found

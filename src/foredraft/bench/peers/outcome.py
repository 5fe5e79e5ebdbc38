"""The results of a race: texts compared first, speeds and ratios afterwards."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from foredraft.bench.equality import Equality
from foredraft.bench.peers.client import RemoteArm
from foredraft.bench.peers.workers.protocol import DRAFT, LOOKUP, PLAIN
from foredraft.bench.report import WHY_NOTHING, Column, Line, Table, figure, load_lines
from foredraft.bench.tables import same_of
from foredraft.bench.trial import Comparison, Trial, compare
from foredraft.engine.budget import counted

OWN = "foredraft"
COMPARED = {"plain": (PLAIN,), "best without a second model": (PLAIN, LOOKUP), "best with a second model": (DRAFT,)}
"""What is compared, and the kinds of arms among which each engine's best is taken."""

_BUSY = 0.05
"""Share of a processor that a waiting engine may use before it is told."""


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
    equality: Equality = field(repr=False)
    runs: tuple[tuple[tuple[int, float, float], ...], ...]

    @property
    def sameness(self) -> dict[str, Any]:
        """Its texts beside those of foredraft's plain decoding, as results have it.

        ``tokens`` are those of the reference and of the arm where a row departs, -1 where one has ended.
        """
        found = self.equality
        return {
            "num_rows": found.num_prompts,
            "num_same_rows": found.num_identical,
            "same_share": found.same_share,
            "is_repeatable": found.is_repeatable,
            "departures": [
                {"prompt": one.prompt, "position": one.position, "tokens": (one.expected, one.found), "gap": one.gap}
                for one in found.divergences
            ],
            "largest_gap": found.largest_gap,
        }

    def label(self) -> str:
        """For tables."""
        return self.arm + ("" if self.counts else " *")

    def conditions(self) -> str:
        """Its settings, and in which numbers it computes."""
        return f"{self.settings}; {self.numerics}" if self.settings else self.numerics


@dataclass(frozen=True)
class EngineRatio:
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
    verdicts: tuple[EngineRatio, ...]
    wrong: tuple[str, ...]
    is_complete: bool

    def shown(self) -> Iterator[Table | Line]:
        """Texts first, speeds and ratios afterwards."""
        title = self.title if self.is_complete else f"{self.title}, interrupted after {len(self.prompts)}"
        yield Table(f"texts beside foredraft's plain decoding: {title}", _TEXT_COLUMNS, self.rows, is_wide=True)
        yield Line(
            "same tokens: before the first difference of a row; gap: by how much foredraft's target prefers one token "
            "to the other there, in logits",
            "dim",
        )
        if self.wrong:
            names = ", ".join(self.wrong)
            yield Line(f"{names}: texts differ where equality is promised, so no speed is shown", "red")
            return
        yield Table(f"speed of decoding: {title}", _SPEED_COLUMNS, self.rows, is_wide=True)
        told = f"greedy, {counted(self.runs_per_prompt, 'interleaved run')} each; threads: processor seconds per second"
        told += "" if all(row.counts for row in self.rows) else "; *: shown, and does not count"
        if any(math.isnan(row.tokens_per_second) for row in self.rows):
            told += f"; {WHY_NOTHING}"
        yield Line(told, "dim")
        yield Table(f"ratios: {title}", _VERDICT_COLUMNS, self.verdicts, is_wide=True)
        yield Line(
            "ratio: of tokens per second, median of the prompts, and its interval by bootstrap over them; each engine "
            "with its arm that was fastest on the prompts that do not count",
            "dim",
        )
        yield from load_lines(self.other_cpu_share)
        for name, share in self.idle_shares.items():
            if share > _BUSY:
                yield Line(f"{name} used {share:.0%} of a processor while others were asked", "yellow")


def _interval(found: Comparison) -> str:
    if found.num_prompts < 2:
        return "one prompt" if found.num_prompts else ""
    return f"{found.low:.2f}-{found.high:.2f}"


def _same_rows(row: PeerRow) -> str:
    return same_of(row.equality) + ("" if row.equality.is_repeatable else " (not repeatable)")


_TEXT_COLUMNS = (
    Column("arm", PeerRow.label, is_text=True),
    Column("same rows", _same_rows),
    Column("same tokens", lambda row: f"{row.equality.same_share:.1%}"),
    Column("largest gap", lambda row: f"{row.equality.largest_gap:.2g}"),
)
_SPEED_COLUMNS = (
    Column("arm", PeerRow.label, is_text=True),
    Column("tok/s", lambda row: figure(row.tokens_per_second, 1)),
    Column("threads", lambda row: f"{row.num_busy_threads:.1f}"),
    Column("settings", PeerRow.conditions, is_text=True),
)
_VERDICT_COLUMNS = (
    Column("what", lambda one: one.what, is_text=True),
    Column("arm", lambda one: one.arm, is_text=True),
    Column("by", lambda one: one.base + ("" if one.counts else " *"), is_text=True),
    Column("ratio", lambda one: figure(one.comparison.ratio)),
    Column("95 % interval", lambda one: _interval(one.comparison)),
)


@dataclass(frozen=True)
class RaceOutcome:
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

    def shown(self) -> Iterator[Table | Line]:
        """Everything but the conditions."""
        for name, engine in self.engines.items():
            memory = f"{self.plain_peak_bytes[name] / 1e6:.0f} MB at most with plain decoding alone"
            yield Line(f"engine   {engine}: {memory}")
        for name, reason in self.missing.items():
            yield Line(f"missing  {name}: {reason}", "yellow", is_whole=True)
        if self.prompts:
            skipped = f"; {len(self.skipped)} with short answers left out" if self.skipped else ""
            chosen = f"settings were chosen on {len(self.tuning_prompts)} others"
            yield Line(f"prompts  {len(self.prompts)} that count; {chosen}{skipped}")
        for heat in self.heats:
            yield from heat.shown()


def row_of(trial: Trial, arm: RemoteArm, equality: Equality) -> PeerRow:
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
        equality=equality,
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


def verdicts(trial: Trial, arms: Seq[RemoteArm]) -> list[EngineRatio]:
    """This library by every other engine, arm by arm of a kind; batches by the single row of their engine."""
    peers = [name for name in dict.fromkeys(arm.worker.launch.name for arm in arms) if name != OWN]
    sizes = sorted({arm.num_rows for arm in arms})
    present = {arm.facts["kind"] for arm in arms}
    found = []
    for num_rows in sizes:
        for what, kinds in COMPARED.items():
            if kinds[-1] not in present:
                continue
            for peer, (we_count, they_count) in product(peers, ((True, True), (True, False), (False, False))):
                ours = best_of(arms, OWN, kinds, num_rows, we_count)
                theirs = best_of(arms, peer, kinds, num_rows, they_count)
                if ours is not None and theirs is not None:
                    title = what if num_rows == 1 else f"{what}, {num_rows} rows"
                    comparison = compare(trial, ours.name, theirs.name)
                    found.append(EngineRatio(title, ours.name, theirs.name, we_count and they_count, comparison))
    for name, num_rows in product((OWN, *peers), sizes):
        batch, alone = best_of(arms, name, (PLAIN,), num_rows, True), best_of(arms, name, (PLAIN,), 1, True)
        if num_rows > 1 and batch is not None and alone is not None:
            comparison = compare(trial, batch.name, alone.name)
            found.append(EngineRatio(f"{num_rows} rows by one", batch.name, alone.name, True, comparison))
    return found

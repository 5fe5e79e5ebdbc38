"""What the parts of the benchmark find: tables, and how they are shown."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from foredraft.bench.drafting import DraftCost
from foredraft.bench.equality import Equality
from foredraft.bench.forwards import VERBS, Efficiency, StepTimes
from foredraft.bench.report import WHY_NOTHING, Column, Line, Table, figure, load_lines, percent
from foredraft.bench.trial import Comparison
from foredraft.engine.budget import counted

# -- speed -------------------------------------------------------------------------------------------------------


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

    def shown(self) -> Iterator[Table | Line]:
        """Tokens per second and ratios; then where outputs differ, and how near the tie was."""
        context = f"context {self.context}" if self.context else f"{self.num_prompt_tokens:.0f} prompt tokens"
        title = f"{self.title}: {self.sampling}, {context}"
        yield Table(title, self._columns(), self.rows, is_wide=True, narrow=self._columns(is_narrow=True))
        yield Line(
            f"{counted(self.num_prompts, 'prompt')}, {counted(self.runs_per_prompt, 'interleaved run')} each; ratio: "
            f"median of the prompts{' (95 % interval)' if self.num_prompts > 1 else ', of which one has no interval'}; "
            "repeats: share of the tokens inside repeated 8-grams",
            "dim",
        )
        if any(math.isnan(row.tokens_per_second) for row in self.rows):
            yield Line(WHY_NOTHING, "dim")
        yield from load_lines(self.other_cpu_share)
        for row in self.rows:
            for one in row.equality.divergences if row.equality else ():
                reference = row.equality.reference if row.equality else ""
                place = f"{one.prompt} at token {one.position}"
                yield Line(f"{row.arm} leaves {reference} on {place}: gap {one.gap:.2g}", "dim")

    def _columns(self, *, is_narrow: bool = False) -> list[Column]:
        bases = dict.fromkeys(one.base for row in self.rows for one in row.comparisons)
        heads = ["tau", "accepted", "repeats", "same tokens"]
        if is_narrow:
            heads = ["tau", "accep-\nted", "repe-\nats", "same"]

        def ratio(base: str) -> Column:
            return Column(
                f"x {_short(base) if is_narrow else _without_settings(base)}",
                lambda row: next((shown(one) for one in row.comparisons if one.base == base), "1"),
            )

        def shown(found: Comparison) -> str:
            """ "1.50 (1.40-1.60)", in two lines where columns are narrow."""
            return str(found).replace(" (", "\n").removesuffix(")") if is_narrow else str(found)

        return [
            Column("arm", lambda row: row.arm, is_text=True),
            Column("tok/s", lambda row: figure(row.tokens_per_second, 1)),
            *map(ratio, bases),
            Column(heads[0], lambda row: figure(row.tokens_per_step)),
            Column(heads[1], lambda row: percent(row.acceptance_rate)),
            Column(heads[2], lambda row: percent(row.repeated_share)),
            Column(heads[3], lambda row: same_of(row.equality)),
        ]


def same_of(found: Equality | None) -> str:
    """ "3/4": identical prompts, of all."""
    return "" if found is None else f"{found.num_identical}/{found.num_prompts}"


def _without_settings(arm: str) -> str:
    """ "prompt lookup (5)" is "prompt lookup"."""
    return arm.partition(" (")[0]


def _short(base: str) -> str:
    """The name of an arm without its settings, broken where a narrow column needs it."""
    name = _without_settings(base)
    return {"transformers": "trans-\nformers", "assisted": "assis-\nted"}.get(name, name.replace(" ", "\n"))


# -- the other parts ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EfficiencyTable:
    """Efficiencies with one drafter."""

    drafter: str
    measured_cost: float
    context: int
    rows: tuple[Efficiency, ...]

    def shown(self) -> Iterator[Table | Line]:
        """Measured speed-up against what tau and the forwards allow."""
        title = f"efficiency with drafter {self.drafter}, c {self.measured_cost:.3f}, context {self.context}"
        if not self.rows:
            yield Line(f"\n{title}: nothing to time, all tokens came with the first emission; raise --max-new-tokens")
            return
        seconds = {"T(1)": "plain_seconds", "T(n)": "target_seconds", "T_draft": "drafter_seconds"}
        columns = [
            Column("arm", lambda row: row.arm, is_text=True),
            Column("tau", lambda row: f"{row.tokens_per_step:.2f}"),
            Column("n", lambda row: f"{row.nodes_per_step:.1f}"),
            *(Column(head, _milliseconds(name)) for head, name in seconds.items()),
            Column("allowed", lambda row: f"{row.allowed:.2f}"),
            Column("speed-\nup", lambda row: f"{row.speedup:.2f}"),
            Column("effi-\nciency", lambda row: f"{row.efficiency:.3f}"),
            Column("forwards", lambda row: f"{row.plain_forward_share:.0%} / {row.forward_share:.0%}"),
        ]
        yield Table(title, columns, self.rows)
        yield Line(
            "efficiency: speed-up / (tau T(1) / (T_draft + T(n))); T in ms, by replaying the forwards of the run with "
            "nothing in between; forwards: their share of the loop, plain / drafted",
            "dim",
        )


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
    profile: StepTimes


def batch_table(rows: Seq[BatchRow]) -> Table:
    """Throughput together and alone."""
    columns = [
        Column("arm", lambda row: row.arm, is_text=True),
        Column("rows", lambda row: str(row.batch_size)),
        Column("together", lambda row: f"{row.together_per_second:.1f}"),
        Column("one by one", lambda row: f"{row.alone_per_second:.1f}"),
        Column("gain", lambda row: f"{row.gain:.2f}"),
    ]
    return Table("ragged batches, tokens per second of decoding", columns, rows, is_wide=True)


def profile_table(cells: Seq[ProfileCell]) -> Table:
    """Shares of a step by verb, models left out."""
    heads = {"propose": "pro-\npose", "accept": "ac-\ncept", "verify": "ver-\nify", "observe": "ob-\nserve"}

    def share(verb: str) -> Column:
        return Column(heads.get(verb, verb), lambda cell: f"{cell.profile.verb_shares[verb] * 100:.1f}")

    def models(cell: ProfileCell) -> str:
        return f"{(cell.profile.target_seconds + cell.profile.drafter_seconds) * 1e3:.1f}"

    columns = [
        Column("vocab-\nulary", lambda cell: str(cell.vocab_size)),
        Column("context", lambda cell: str(cell.context)),
        Column("sampling", lambda cell: cell.sampling, is_text=True),
        Column("step\nms", lambda cell: f"{cell.profile.step_seconds * 1e3:.1f}"),
        Column("models\nms", models),
        *map(share, VERBS),
        Column("outside", lambda cell: f"{cell.profile.outside_share * 100:.1f}"),
    ]
    arms = ", ".join(dict.fromkeys(cell.profile.arm for cell in cells))
    return Table(f"step profile of {arms}: shares of a step outside of the models, in %", columns, cells)


def drafting_table(costs: Seq[DraftCost]) -> Table:
    """Microseconds per step."""
    micros = {"propose\nus": "propose_us", "p90\nus": "propose_p90_us", "observe\nus": "observe_us"}
    columns = [
        Column("drafter", lambda cost: cost.drafter, is_text=True),
        Column("context", lambda cost: f"{cost.context:,}"),
        Column("store", lambda cost: "" if cost.datastore_tokens is None else f"{cost.datastore_tokens:,}"),
        Column("start\nms", lambda cost: f"{cost.start_ms:.1f}"),
        *(Column(head, _whole(name)) for head, name in micros.items()),
        Column("nodes", lambda cost: f"{cost.nodes:.1f}"),
    ]
    return Table("drafting without forwards: host time per step, medians", columns, costs)


def _milliseconds(name: str) -> Callable[[Any], str]:
    return lambda row: f"{getattr(row, name) * 1e3:.1f}"


def _whole(name: str) -> Callable[[Any], str]:
    return lambda row: f"{getattr(row, name):.0f}"

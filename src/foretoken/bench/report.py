"""Results for people, and as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any

from rich.console import Console
from rich.table import Table

from foretoken.bench.costs import Efficiency
from foretoken.bench.drafting import DraftCost
from foretoken.bench.equality import Equality
from foretoken.bench.profile import VERBS
from foretoken.bench.suite import BatchRow, EfficiencyTable, ProfileCell, Row, SpeedTable

QUIET_SHARE = 0.1
"""Share of the processors used by others beyond which a timing is not to be trusted."""


def plain_data(value: Any) -> Any:
    """Dataclasses as dictionaries, properties included, ready for JSON; NaN and infinities become None."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        derived = {
            name: getattr(value, name)
            for name, attribute in vars(type(value)).items()
            if isinstance(attribute, property) and not name.startswith("_")
        }
        return plain_data({**fields, **derived})
    if isinstance(value, dict):
        return {str(key): plain_data(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_data(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value


def show_provenance(console: Console, facts: dict[str, Any], model: str, dtype: str, execution: str) -> None:
    """The conditions, in a few lines."""
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items() if number)
    console.print(f"models   {model}, {dtype}, {execution}")
    console.print(f"machine  {facts['cpu']}, {facts['num_threads']} of {facts['num_cpus']} threads used")
    console.print(f"code     {versions}, commit {facts['commit'] or 'unknown'}")


def show_speed(console: Console, table: SpeedTable) -> None:
    """Tokens per second and ratios; every ratio is a median over prompts with its 95 % interval."""
    bases = list(dict.fromkeys(found.base for row in table.rows for found in row.comparisons))
    context = f"context {table.context}" if table.context else f"{table.num_prompt_tokens:.0f} prompt tokens"
    shown = Table(title=f"{table.title}: {table.sampling}, {context}", title_justify="left")
    for column in ("arm", "tok/s", *(f"x {base}" for base in bases), "tau", "accepted", "repeats", "same tokens"):
        shown.add_column(column, justify="left" if column == "arm" else "right")
    for row in table.rows:
        ratios = {found.base: str(found) for found in row.comparisons}
        shown.add_row(
            row.arm,
            f"{row.tokens_per_second:.1f}",
            *(ratios.get(base, "1") for base in bases),
            _number(row.tokens_per_step),
            _percent(row.acceptance_rate),
            _percent(row.repeated_share),
            _same(row.equality),
        )
    console.print(shown)
    console.print(
        f"[dim]{table.num_prompts} prompts, {table.runs_per_prompt} interleaved runs each; ratio: median "
        "of the prompts (95 % interval); repeats: share of the tokens inside repeated 8-grams[/dim]"
    )
    if table.other_cpu_share > QUIET_SHARE:
        console.print(
            f"[yellow]other processes used {table.other_cpu_share:.0%} of the processors meanwhile: repeat this on a "
            "quiet machine[/yellow]"
        )


def show_gaps(console: Console, rows: Iterable[Row]) -> None:
    """Where outputs differ, and how near the tie was."""
    for row in rows:
        for found in row.equality.divergences if row.equality else ():
            console.print(
                f"[dim]{row.arm} leaves {row.equality.reference if row.equality else ''} on {found.prompt} at token "
                f"{found.position}: gap {found.gap:.2g}[/dim]"
            )


def show_efficiency(console: Console, tables: Seq[EfficiencyTable]) -> None:
    """Measured speed-up against what tau and the forwards allow."""
    shown = Table(title="efficiency = speed-up / (tau T(1) / (T_draft + T(n)))", title_justify="left")
    columns = ("drafter", "c", "context", "arm", "tau", "n", "T(1)", "T(n)", "T_draft", "allowed", "speed-up")
    for column in (*columns, "efficiency", "forwards"):
        shown.add_column(column, justify="left" if column in ("drafter", "arm") else "right")
    for table in tables:
        for row in table.rows:
            shown.add_row(table.drafter, f"{table.measured_cost:.3f}", str(table.context), *_efficiency(row))
    console.print(shown)
    console.print(
        "[dim]T in ms, measured by making the very forwards of the run again with nothing in between; forwards: their "
        "share of the loop, plain / drafted[/dim]"
    )


def _efficiency(row: Efficiency) -> tuple[str, ...]:
    return (
        row.arm,
        f"{row.tokens_per_step:.2f}",
        f"{row.nodes_per_step:.1f}",
        *(f"{seconds * 1e3:.1f}" for seconds in (row.plain_seconds, row.target_seconds, row.drafter_seconds)),
        f"{row.allowed:.2f}",
        f"{row.speedup:.2f}",
        f"{row.efficiency:.3f}",
        f"{row.plain_forward_share:.0%} / {row.forward_share:.0%}",
    )


def show_batch(console: Console, rows: Seq[BatchRow]) -> None:
    """Throughput together and alone."""
    shown = Table(title="ragged batches, tokens per second of decoding", title_justify="left")
    for column in ("arm", "rows", "together", "one by one", "gain"):
        shown.add_column(column, justify="left" if column == "arm" else "right")
    for row in rows:
        shown.add_row(
            row.arm,
            str(row.batch_size),
            f"{row.together_per_second:.1f}",
            f"{row.alone_per_second:.1f}",
            f"{row.gain:.2f}",
        )
    console.print(shown)


def show_profiles(console: Console, cells: Seq[ProfileCell]) -> None:
    """Shares of a step by verb, models left out."""
    shown = Table(title="step profile: shares of a step outside of the models, in %", title_justify="left")
    for column in ("arm", "vocabulary", "context", "sampling", "step ms", "models ms", *VERBS, "outside"):
        shown.add_column(column, justify="left" if column in ("arm", "sampling") else "right")
    for cell in cells:
        found = cell.profile
        shown.add_row(
            found.arm,
            str(cell.vocab_size),
            str(cell.context),
            cell.sampling,
            f"{found.step_seconds * 1e3:.1f}",
            f"{(found.target_seconds + found.drafter_seconds) * 1e3:.1f}",
            *(f"{found.verb_shares[verb] * 100:.1f}" for verb in VERBS),
            f"{found.outside_share * 100:.1f}",
        )
    console.print(shown)


def show_drafting(console: Console, costs: Seq[DraftCost]) -> None:
    """Microseconds per step."""
    shown = Table(title="drafting without forwards: host time per step, medians", title_justify="left")
    columns = ("drafter", "context", "store", "start\nms", "propose\nus", "p90\nus", "observe\nus", "nodes")
    for column in columns:
        shown.add_column(column, justify="left" if column == "drafter" else "right", no_wrap=True)
    for cost in costs:
        shown.add_row(
            cost.drafter,
            f"{cost.context:,}",
            "" if cost.datastore_tokens is None else f"{cost.datastore_tokens:,}",
            f"{cost.start_ms:.1f}",
            *(f"{micros:.0f}" for micros in (cost.propose_us, cost.propose_p90_us, cost.observe_us)),
            f"{cost.nodes:.1f}",
        )
    console.print(shown)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _same(equality: Equality | None) -> str:
    return "" if equality is None else f"{equality.num_identical}/{equality.num_prompts}"

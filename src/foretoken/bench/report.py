"""Results for people, and as plain data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from foretoken.bench.costs import Efficiency
from foretoken.bench.drafting import DraftCost
from foretoken.bench.equality import Equality
from foretoken.bench.measure import Comparison
from foretoken.bench.profile import VERBS
from foretoken.bench.tables import BatchRow, EfficiencyTable, ProfileCell, Row, SpeedTable

QUIET_SHARE = 0.1
"""Share of the processors used by others beyond which a timing is not to be trusted."""

_UNLIMITED = 10_000

NOTHING = "-"
"""Shown where there was nothing to time."""


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


def table_of(columns: Iterable[str], left: Iterable[str] = ()) -> Table:
    """A table that fits 80 columns: no rules between narrow columns, text folds and is never cut off.

    Args:
      left: columns of text; all others hold figures, which do not fold.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for column in columns:
        is_text = column in left
        table.add_column(column, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
    return table


def show_table(console: Console, title: str, table: Table) -> None:
    """A table under its title, which may be wider than the table."""
    console.print(f"\n{title}", markup=False)
    console.print(table)


def show_provenance(console: Console, facts: dict[str, Any], model: str, dtype: str, execution: str) -> None:
    """The conditions, in a few lines."""
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items() if number)
    console.print(f"models   {model}, {dtype}, {execution}")
    console.print(f"machine  {facts['cpu']}, {facts['num_threads']} of {facts['num_cpus']} threads used")
    console.print(f"code     {versions}, commit {facts['commit'] or 'unknown'}")


def show_speed(console: Console, table: SpeedTable) -> None:
    """Tokens per second and ratios; every ratio is a median over prompts with its 95 % interval."""
    wide = _speed(table, is_narrow=False)
    fits = Measurement.get(console, console.options.update(max_width=_UNLIMITED), wide).maximum <= console.width
    context = f"context {table.context}" if table.context else f"{table.num_prompt_tokens:.0f} prompt tokens"
    title = f"{table.title}: {table.sampling}, {context}"
    show_table(console, title, wide if fits else _speed(table, is_narrow=True))
    console.print(
        f"[dim]{count(table.num_prompts, 'prompt')}, {count(table.runs_per_prompt, 'interleaved run')} each; ratio: "
        f"median of the prompts{' (95 % interval)' if table.num_prompts > 1 else ', of which one has no interval'}; "
        "repeats: share of the tokens inside repeated 8-grams[/dim]"
    )
    if any(math.isnan(row.tokens_per_second) for row in table.rows):
        console.print(
            f"[dim]{NOTHING}: all tokens came with the first emission, so nothing was left to time; raise "
            "--max-new-tokens[/dim]"
        )
    show_load(console, table.other_cpu_share)


def show_load(console: Console, other_cpu_share: float) -> None:
    """A warning where others computed meanwhile."""
    if other_cpu_share > QUIET_SHARE:
        console.print(
            f"[yellow]other processes used {other_cpu_share:.0%} of the processors meanwhile: repeat this on a "
            "quiet machine[/yellow]"
        )


def _speed(table: SpeedTable, *, is_narrow: bool) -> Table:
    bases = list(dict.fromkeys(found.base for row in table.rows for found in row.comparisons))
    ratios = [f"x {_without_settings(base)}" for base in bases]
    last = ["tau", "accepted", "repeats", "same tokens"]
    if is_narrow:
        ratios = [f"x {_short(base)}" for base in bases]
        last = ["tau", "accep-\nted", "repe-\nats", "same"]
    shown = table_of(("arm", "tok/s", *ratios, *last), ("arm",))
    if not is_narrow:
        shown.padding = (0, 1)
    for row in table.rows:
        found = {one.base: _stacked(one) if is_narrow else str(one) for one in row.comparisons}
        shown.add_row(
            row.arm,
            figure(row.tokens_per_second, 1),
            *(found.get(base, "1") for base in bases),
            figure(row.tokens_per_step),
            _percent(row.acceptance_rate),
            _percent(row.repeated_share),
            _same(row.equality),
        )
    return shown


def _stacked(found: Comparison) -> str:
    """A ratio above its interval: "1.50 (1.40-1.60)" in two lines."""
    return str(found).replace(" (", "\n").removesuffix(")")


def _without_settings(arm: str) -> str:
    """ "prompt lookup (5)" is "prompt lookup"."""
    return arm.partition(" (")[0]


def _short(base: str) -> str:
    """The name of an arm without its settings, broken where a narrow column needs it."""
    name = _without_settings(base)
    return {"transformers": "trans-\nformers", "assisted": "assis-\nted"}.get(name, name.replace(" ", "\n"))


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
    heads = ("arm", "tau", "n", "T(1)", "T(n)", "T_draft", "allowed", "speed-\nup", "effi-\nciency", "forwards")
    console.print("\nefficiency = speed-up / (tau T(1) / (T_draft + T(n)))")
    for table in tables:
        title = f"drafter {table.drafter}, c {table.measured_cost:.3f}, context {table.context}"
        shown = table_of(heads, ("arm",))
        for row in table.rows:
            shown.add_row(*_efficiency(row))
        if table.rows:
            show_table(console, title, shown)
        else:
            console.print(
                f"\n{title}: nothing to time, all tokens came with the first emission; raise --max-new-tokens"
            )
    console.print(
        "[dim]T in ms, measured by replaying the forwards of the run with nothing in between; forwards: their "
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
    heads = ("arm", "rows", "together", "one by one", "gain")
    shown = table_of(heads, ("arm",))
    shown.padding = (0, 1)
    for row in rows:
        shown.add_row(
            row.arm,
            str(row.batch_size),
            f"{row.together_per_second:.1f}",
            f"{row.alone_per_second:.1f}",
            f"{row.gain:.2f}",
        )
    show_table(console, "ragged batches, tokens per second of decoding", shown)


def show_profiles(console: Console, cells: Seq[ProfileCell]) -> None:
    """Shares of a step by verb, models left out."""
    verbs = {"propose": "pro-\npose", "accept": "ac-\ncept", "verify": "ver-\nify", "observe": "ob-\nserve"}
    heads = ("vocab-\nulary", "context", "sampling", "step\nms", "models\nms")
    for arm in dict.fromkeys(cell.profile.arm for cell in cells):
        title = f"step profile of {arm}: shares of a step outside of the models, in %"
        shown = table_of((*heads, *(verbs.get(verb, verb) for verb in VERBS), "outside"), ("sampling",))
        for cell in (one for one in cells if one.profile.arm == arm):
            shown.add_row(*_profile(cell))
        show_table(console, title, shown)


def _profile(cell: ProfileCell) -> tuple[str, ...]:
    found = cell.profile
    return (
        str(cell.vocab_size),
        str(cell.context),
        cell.sampling,
        f"{found.step_seconds * 1e3:.1f}",
        f"{(found.target_seconds + found.drafter_seconds) * 1e3:.1f}",
        *(f"{found.verb_shares[verb] * 100:.1f}" for verb in VERBS),
        f"{found.outside_share * 100:.1f}",
    )


def show_drafting(console: Console, costs: Seq[DraftCost]) -> None:
    """Microseconds per step."""
    columns = ("drafter", "context", "store", "start\nms", "propose\nus", "p90\nus", "observe\nus", "nodes")
    shown = table_of(columns, ("drafter",))
    for cost in costs:
        shown.add_row(
            cost.drafter,
            f"{cost.context:,}",
            "" if cost.datastore_tokens is None else f"{cost.datastore_tokens:,}",
            f"{cost.start_ms:.1f}",
            *(f"{micros:.0f}" for micros in (cost.propose_us, cost.propose_p90_us, cost.observe_us)),
            f"{cost.nodes:.1f}",
        )
    show_table(console, "drafting without forwards: host time per step, medians", shown)


def count(number: int, noun: str) -> str:
    """(1, "prompt") is "1 prompt", (2, "prompt") is "2 prompts"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def figure(value: float | None, digits: int = 2) -> str:
    """A figure, nothing where there is none to have, and `NOTHING` where nothing was timed."""
    if value is None:
        return ""
    return NOTHING if math.isnan(value) else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _same(equality: Equality | None) -> str:
    return "" if equality is None else f"{equality.num_identical}/{equality.num_prompts}"

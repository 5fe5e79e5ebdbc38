"""A race for people: texts first, speeds and ratios afterwards."""

from __future__ import annotations

import math

from rich.console import Console
from rich.markup import escape

from foretoken.bench.measure import Comparison
from foretoken.bench.peers.outcome import Heat, Outcome, PeerRow
from foretoken.bench.report import NOTHING, count, figure, show_load, show_table, table_of

BUSY = 0.05
"""Share of a processor that a waiting engine may use before it is told."""


def show(console: Console, outcome: Outcome) -> None:
    """Everything but the conditions."""
    for name, engine in outcome.engines.items():
        memory = f"{outcome.plain_peak_bytes[name] / 1e6:.0f} MB at most with plain decoding alone"
        console.print(f"engine   {engine}: {memory}", markup=False, highlight=False)
    show_missing(console, outcome)
    if outcome.prompts:
        console.print(
            f"prompts  {len(outcome.prompts)} that count; settings were chosen on {len(outcome.tuning_prompts)} others"
            + (f"; {len(outcome.skipped)} with short answers left out" if outcome.skipped else ""),
            highlight=False,
        )
    for heat in outcome.heats:
        _show_heat(console, heat)


def show_missing(console: Console, outcome: Outcome) -> None:
    """Who takes no part, and why."""
    for name, reason in outcome.missing.items():
        console.print(f"missing  {name}: {reason}", style="yellow", markup=False, soft_wrap=True)


def _show_heat(console: Console, heat: Heat) -> None:
    title = heat.title if heat.is_complete else f"{heat.title}, interrupted after {len(heat.prompts)}"
    _show_texts(console, heat, title)
    if heat.wrong:
        names = ", ".join(heat.wrong)
        console.print(
            f"{names}: texts differ where equality is promised, so no speed is shown", style="red", markup=False
        )
        return
    _show_speeds(console, heat, title)
    _show_verdicts(console, heat, title)
    show_load(console, heat.other_cpu_share)
    for name, share in heat.idle_shares.items():
        if share > BUSY:
            console.print(f"[yellow]{name} used {share:.0%} of a processor while others were asked[/yellow]")


def _show_texts(console: Console, heat: Heat, title: str) -> None:
    table = table_of(("arm", "same rows", "same tokens", "largest gap"), ("arm",))
    table.padding = (0, 1)
    for row in heat.rows:
        same = row.sameness
        rows = f"{same.num_same_rows}/{same.num_rows}" + ("" if same.is_repeatable else " (not repeatable)")
        table.add_row(_name(row), rows, f"{same.same_share:.1%}", f"{same.largest_gap:.2g}")
    show_table(console, f"texts beside foretoken's plain decoding: {title}", table)
    console.print(
        "same tokens: before the first difference of a row; gap: by how much foretoken's target prefers one token to "
        "the other there, in logits",
        style="dim",
    )


def _show_speeds(console: Console, heat: Heat, title: str) -> None:
    table = table_of(("arm", "tok/s", "threads", "settings"), ("arm", "settings"))
    table.padding = (0, 1)
    for row in heat.rows:
        cells = (figure(row.tokens_per_second, 1), f"{row.num_busy_threads:.1f}")
        table.add_row(_name(row), *cells, escape(f"{row.settings}; {row.numerics}" if row.settings else row.numerics))
    show_table(console, f"speed of decoding: {title}", table)
    told = f"greedy, {count(heat.runs_per_prompt, 'interleaved run')} each; threads: processor seconds per second"
    has_others = any(not row.counts for row in heat.rows)
    told += "; *: shown, and does not count" if has_others else ""
    if any(math.isnan(row.tokens_per_second) for row in heat.rows):
        told += f"; {NOTHING}: all tokens came with the first emission, which is not timed; raise --max-new-tokens"
    console.print(told, style="dim")


def _show_verdicts(console: Console, heat: Heat, title: str) -> None:
    table = table_of(("what", "arm", "by", "ratio", "95 % interval"), ("what", "arm", "by"))
    table.padding = (0, 1)
    for found in heat.verdicts:
        mark = "" if found.counts else " *"
        arms = escape(found.arm), escape(found.base) + mark
        table.add_row(escape(found.what), *arms, *_ratio(found.comparison))
    show_table(console, f"ratios: {title}", table)
    console.print(
        "ratio: of tokens per second, median of the prompts, and its interval by bootstrap over them; each engine with "
        "its arm that was fastest on the prompts that do not count",
        style="dim",
    )


def _ratio(found: Comparison) -> tuple[str, str]:
    if found.num_prompts == 0:
        return NOTHING, ""
    return f"{found.ratio:.2f}", f"{found.low:.2f}-{found.high:.2f}" if found.num_prompts > 1 else "one prompt"


def _name(row: PeerRow) -> str:
    return escape(row.arm) + ("" if row.counts else " *")

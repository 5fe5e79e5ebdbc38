"""The comparison of methods for people."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from foretoken.bench.advice import Advice, KindRow, advise, by_kind, ranked
from foretoken.bench.equality import Equality
from foretoken.bench.outcome import MethodRow, Outcome
from foretoken.bench.report import NOTHING, count, figure, plain_data, show_load, show_table, table_of

_SHOWN_PER_KIND = 3


def show(console: Console, outcome: Outcome, model: str, notes: Iterable[str] = ()) -> None:
    """Everything, the recommendation last.

    Args:
      model: as the user names it.
      notes: what is to be known about the model.
    """
    advice = advise(outcome)
    title = f"methods: {outcome.sampling}, {count(outcome.num_prompts, 'prompt')}"
    num_kinds = len(set(outcome.kinds))
    show_table(console, title + (f" of {num_kinds} kinds" if num_kinds > 1 else ""), _table(outcome))
    console.print(_legend(outcome), style="dim")
    show_load(console, outcome.other_cpu_share)
    _show_equality(console, outcome)
    if num_kinds > 1:
        show_table(console, "by kind of prompt: x plain, the fastest first", _kinds(by_kind(outcome)))
    if outcome.refused:
        _show_refused(console, outcome)
    _show_advice(console, advice, model, [*advice.notes, *notes])


def as_data(outcome: Outcome, notes: Iterable[str] = ()) -> dict[str, Any]:
    """The whole report as data for JSON."""
    advice = advise(outcome)
    found: dict[str, Any] = plain_data(outcome)
    return {
        "methods": found,
        "by_kind": plain_data(by_kind(outcome)),
        "recommended_config": plain_data(dict(advice.config)),
        "reason": advice.reason,
        "notes": [*advice.notes, *notes],
    }


def _table(outcome: Outcome) -> Table:
    heads = ("method", "x plain", "tok/s", "tau", "acc.", "nodes", "draft\nms", "MB", "same")
    table = table_of(heads, ("method",))
    for row in (outcome.plain, *ranked(outcome), *(row for row in outcome.rows if not row.is_timed)):
        table.add_row(*_cells(row))
    return table


def _cells(row: MethodRow) -> tuple[str, ...]:
    same = row.timed_equality
    return (
        escape(row.method),
        "1" if row.comparison is None else str(row.comparison),
        NOTHING if row.tokens_per_second is None else figure(row.tokens_per_second, 1),
        figure(row.tokens_per_step),
        "" if row.acceptance_rate is None else f"{row.acceptance_rate:.0%}",
        figure(row.nodes_per_step, 1),
        figure(row.draft_seconds * 1e3),
        "" if row.memory_bytes is None else f"{row.memory_bytes / 1e6:.0f}",
        "" if same is None else f"{same.num_identical}/{same.num_prompts}",
    )


def _legend(outcome: Outcome) -> str:
    interval = " (95 % interval)" if outcome.num_prompts > 1 else ""
    parts = [
        f"x plain: times plain decoding's speed, median of the prompts{interval}, "
        f"{count(outcome.runs_per_prompt, 'interleaved run')} each",
        "tau: tokens per step",
        "acc.: drafted tokens that were accepted",
        "nodes: verified per step",
        "draft: proposing and observing, per step",
        "MB: what loading and a first run added, a key-value cache of its own included",
        "same: prompts with plain decoding's tokens",
    ]
    untimed = [row for row in outcome.rows if not row.is_timed]
    if untimed:
        parts.append(
            f"{NOTHING}: all tokens came with the first emission, so nothing was left to time; raise --max-new-tokens"
        )
    return "; ".join(parts)


def _show_equality(console: Console, outcome: Outcome) -> None:
    """The promise of exactness, whether it was kept, and where the timed runs departed from plain decoding."""
    judged = [row.equality for row in outcome.rows if row.equality is not None]
    if judged:
        mode = "in strict mode, before anything was timed" if outcome.promised == "strict" else "in the timed runs"
        same = sum(found.num_identical for found in judged)
        total = sum(found.num_prompts for found in judged)
        text = f"tokens equal plain decoding's {mode}: {same} of {total}"
        near = max((found.largest_gap for found in judged), default=0.0)
        console.print(text + (f", the others at near-ties of at most {near:.1g}" if same < total else ""))
    loose = [row.timed_equality for row in outcome.rows if row.timed_equality and row.timed_equality.divergences]
    if loose and outcome.promised == "strict":
        gap = max(found.largest_gap for found in loose)
        console.print(
            "the timed runs round differently at some steps: their texts leave plain decoding's where two tokens "
            f"{f'are at most {gap:.2g} apart in logits' if gap else 'tie'} (column same); --exactness strict rules "
            "that out"
        )
    for found in outcome.different:
        console.print(_difference(found), style="red")


def _difference(found: Equality) -> str:
    first = found.divergences[0]
    return (
        f"{escape(found.arm)} differs from plain decoding on {found.num_prompts - found.num_identical} of "
        f"{found.num_prompts} prompts, first on {escape(first.prompt)} at token {first.position} (gap "
        f"{first.gap:.3g}), where equality is promised: no speed is shown for it"
    )


def _kinds(rows: list[KindRow]) -> Table:
    table = table_of(("kind", "prompts", "methods"), ("kind", "methods"))
    table.padding = (0, 1)
    for row in rows:
        best = ", ".join(f"{escape(name)} {ratio:.2f}" for name, ratio in row.ratios[:_SHOWN_PER_KIND])
        table.add_row(escape(row.kind), str(row.num_prompts), best or NOTHING)
    return table


def _show_refused(console: Console, outcome: Outcome) -> None:
    table = Table(box=None, show_header=False, padding=(0, 1))
    for refused in outcome.refused:
        table.add_row(escape(refused.method), Text(refused.reason))
    show_table(console, "methods that do not apply", table)


def _show_advice(console: Console, advice: Advice, model: str, notes: list[str]) -> None:
    console.print(f"\nrecommended: {escape(advice.reason)}")
    for line in usage(advice.config, model):
        console.print(f"  {line}", markup=False, soft_wrap=True)  # whole, so that it can be copied
    for note in notes:
        console.print(f"note: {escape(note)}")


def usage(config: Mapping[str, Any], model: str) -> list[str]:
    """How to use a config, on the command line and in Python."""
    text = json.dumps(dict(config))
    return [
        f"foretoken generate -m {shlex.quote(model)} --speculative-config {shlex.quote(text)} ...",
        f"LLM({model!r}, speculative_config={dict(config)!r})",
    ]

"""The parts of ``foretoken bench``: run, shown and kept one table after another."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from foretoken.bench.settings import Settings
    from foretoken.bench.suite import Suite
    from foretoken.bench.tables import EfficiencyTable, SpeedTable


def suite_of(model: str, draft_model: str | None, dtype: str, scale: str, settings: Settings) -> Suite:
    """The models behind the options; what is running is told on standard error, when that is a terminal."""
    from rich.console import Console

    from foretoken.bench.models import load_pair
    from foretoken.bench.suite import Suite

    status = Console(stderr=True, style="dim", highlight=False, quiet=not sys.stderr.isatty())
    return Suite(load_pair(model, draft_model, dtype), scale, settings, status.print)


def measure_parts(
    suite: Suite, parts: list[str], results: dict[str, Any], keep: Callable[[], None], *, is_shown: bool
) -> None:
    """Run the parts into ``results``; tables appear, and are kept, as they are ready."""
    import torch
    from rich.console import Console

    from foretoken.bench import report
    from foretoken.bench.provenance import provenance

    console = Console(highlight=False, quiet=not is_shown)
    facts = provenance()
    kind = str(suite.target.dtype).removeprefix("torch.")
    execution = suite.target.execution.describe()
    report.show_provenance(console, facts, suite.pair.label, kind, execution)
    results |= {
        "provenance": facts,
        "models": suite.pair.label,
        "dtype": kind,
        "execution": execution,
        "settings": {**report.plain_data(suite.settings), "prompts_file": str(suite.settings.prompts_file or "own")},
    }
    with torch.inference_mode():
        for _ in _parts(suite, parts, results, console):
            keep()


def _parts(suite: Suite, parts: list[str], results: dict[str, Any], console: Console) -> Iterator[None]:
    """After every table that was added to ``results``."""
    from foretoken.bench import report
    from foretoken.bench.accepted_report import show_accepted
    from foretoken.progress import build_bar

    tables: list[Callable[[], SpeedTable]] = []
    if "speed" in parts:
        tables += [partial(suite.speed, context, suite.greedy) for context in suite.settings.contexts]
    if "copying" in parts:
        tables += [partial(suite.copying, suite.greedy), partial(suite.passages, suite.greedy)]
    if "sampling" in parts:
        first = suite.settings.contexts[0]
        tables += [partial(suite.speed, first, suite.sampled(top_p)) for top_p in (1.0, 0.9)]
    for measure in tables:
        table = measure()
        report.show_speed(console, table)
        report.show_gaps(console, table.rows)
        results.setdefault("speed", []).append(report.plain_data(table))
        yield
    efficiencies: list[Callable[[], EfficiencyTable]] = []
    if "efficiency" in parts and suite.pair.drafter is not None:
        context = suite.settings.contexts[0]
        efficiencies += [partial(suite.efficiency, cost, context, suite.greedy) for cost in suite.settings.draft_costs]
    if "lookup-efficiency" in parts:
        efficiencies.append(partial(suite.lookup_efficiency, suite.greedy))
    found = []
    for measure_efficiency in efficiencies:
        found.append(measure_efficiency())
        results["efficiency"] = report.plain_data(found)
        yield
    if found:
        report.show_efficiency(console, found)
    if "accepted" in parts:
        lengths = []
        for sampling in (suite.greedy, suite.sampled()):
            lengths += suite.accepted(sampling)
            results["accepted"] = report.plain_data(lengths)
            yield
        show_accepted(console, lengths)
    if "batch" in parts:
        rows = suite.batch(suite.greedy)
        report.show_batch(console, rows)
        results["batch"] = report.plain_data(rows)
        yield
    if "profile" in parts:
        cells = list(suite.profiles([suite.greedy, suite.sampled(0.9)]))
        report.show_profiles(console, cells)
        results["profile"] = report.plain_data(cells)
        yield
    if "drafting" in parts:
        with build_bar() as bar:
            costs = list(suite.drafting(bar))
        report.show_drafting(console, costs)
        results["drafting"] = report.plain_data(costs)
        yield

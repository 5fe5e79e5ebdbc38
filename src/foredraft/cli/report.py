"""``foredraft report``: a file of results as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foredraft.cli.running import exit_codes, say

PAGES = ("", ".html", ".htm")
"""Endings of what is written as a page; everything else is a picture, by the format that its ending names."""


def report(
    results: Annotated[
        Path,
        typer.Argument(
            metavar="RESULT.json|jsonl",
            help="Of bench --output, generate --trace, or verify, info, tune with --json.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE.html|svg|png",
            help="Where to; a page beside the results if left out. Its charts as a picture need matplotlib.",
        ),
    ] = None,
    title: Annotated[str | None, typer.Option(help="Of the page or picture.")] = None,
) -> None:
    """Write one HTML page of what was measured, judged or generated. It loads nothing from anywhere.

    Speed with intervals by kind, acceptance by position, accepted lengths, cost curves, memory, verdicts; and of a
    trace, every token by who proposed it, with what was rejected, step by step with the arrow keys.
    """
    with exit_codes():
        from foredraft.errors import ConfigError
        from foredraft.report import read, sections
        from foredraft.report import report as written
        from foredraft.views.trajectory import write_text

        records = read(results)
        place = out or results.with_suffix(".html")
        if place.exists() and place.samefile(results):
            raise ConfigError(f"{place} holds the results, which the page would replace; give another place by --out")
        heading = title or f"foredraft: {results.name}"
        if place.suffix.lower() in PAGES:
            write_text(place, written(records, heading))
            say(f"written to {place}")
        else:
            from foredraft.report.charts import plot_report

            count = plot_report(sections(records), heading, place)
            say(f"{count} {'chart' if count == 1 else 'charts'} written to {place}")

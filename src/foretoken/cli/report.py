"""``foretoken report``: a file of results as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foretoken.cli.running import exit_codes, say


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
        Path | None, typer.Option("--out", "-o", metavar="FILE.html", help="Where to; beside the results if left out.")
    ] = None,
    title: Annotated[str | None, typer.Option(help="Of the page.")] = None,
) -> None:
    """Write one HTML page of what was measured, judged or generated. It loads nothing from anywhere.

    Speed with intervals by kind, acceptance by position, accepted lengths, cost curves, memory, verdicts; and of a
    trace, every token by who proposed it, with what was rejected, step by step with the arrow keys.
    """
    with exit_codes():
        from foretoken.report import read
        from foretoken.report import report as written
        from foretoken.views.trajectory import write_text

        place = out or results.with_suffix(".html")
        write_text(place, written(read(results), title or f"foretoken: {results.name}"))
        say(f"written to {place}")

"""``foredraft report``: a file of results as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foredraft.cli.running import exit_codes, say


def report(
    results: Annotated[
        Path,
        typer.Argument(
            metavar="RESULT.json|jsonl",
            help="File of bench --output, generate --trace, or verify or tune with --json.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE.html",
            help="File of the page; by default, beside the results.",
        ),
    ] = None,
    title: Annotated[str | None, typer.Option(help="Title of the page.")] = None,
) -> None:
    """Write one HTML page of what was measured, judged or generated. It loads nothing from anywhere.

    It has the headline of each result, and the speed of every method with its interval. Of a trace, it shows every
    token by who proposed it, with what was rejected, step by step with the arrow keys.
    """
    with exit_codes():
        from foredraft.errors import ConfigError
        from foredraft.folders import write_text
        from foredraft.views.report import read
        from foredraft.views.report import report as written

        records = read(results)
        place = out or results.with_suffix(".html")
        if place.exists() and place.samefile(results):
            raise ConfigError(f"{place} holds the results, which the page would replace; give another place by --out")
        if place.suffix.lower() not in ("", ".html", ".htm"):
            raise ConfigError(f"--out is {str(place)!r}, and a report is an HTML page; name it .html")
        write_text(place, written(records, title or f"foredraft: {results.name}"))
        say(f"written to {place}")

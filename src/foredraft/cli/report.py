"""``foredraft report``: results as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foredraft.cli.running import exit_codes, say


def report(
    results: Annotated[
        Path,
        typer.Argument(
            metavar="RESULT.json",
            help="Result of bench --output, generate --trace, verify --json or tune --json.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE.html",
            help="The page. Default: next to the results.",
        ),
    ] = None,
    title: Annotated[str | None, typer.Option(metavar="TEXT", help="Title of the page.")] = None,
) -> None:
    """Write measurements, checks or a trace as one HTML page.

    The page needs no network. It shows the speed of every method with its confidence interval. For a trace, it shows
    the source of every token and the rejected tokens; the arrow keys move from step to step.

    Examples:
      foredraft report bench.json     (from foredraft bench --output bench.json)
      foredraft report trace.jsonl    (from foredraft generate --trace trace.jsonl)
    """
    with exit_codes():
        from foredraft.errors import ConfigError
        from foredraft.folders import write_text
        from foredraft.views.report import read
        from foredraft.views.report import report as written

        records = read(results)
        place = out or results.with_suffix(".html")
        if place.exists() and place.samefile(results):
            raise ConfigError(
                f"{place} is the file of the results, which the page would replace; give another file with --out"
            )
        if place.suffix.lower() not in ("", ".html", ".htm"):
            raise ConfigError(f"--out is {str(place)!r}, but a report is an HTML page; use the suffix .html")
        write_text(place, written(records, title or f"foredraft: {results.name}"))
        say(f"written to {place}")

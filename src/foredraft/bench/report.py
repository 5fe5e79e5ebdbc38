"""Reports of benchmarks: tables and lines for the terminal, and the same results as JSON, written as they arrive."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from foredraft.bench.provenance import provenance
from foredraft.folders import keep_json, write_atomically

QUIET_SHARE = 0.1
"""Largest share of the processors that other processes may use; above it, timings are not reliable."""

NOTHING = "-"
"""Cell of a table where nothing was timed."""

WHY_NOTHING = f"{NOTHING}: all tokens came with the first step, so nothing was left to time; raise --max-new-tokens"


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Args:
      cell: function that returns the cell of a row.
      is_text: True if long cells are wrapped; figures are never wrapped.
    """

    head: str
    cell: Callable[[Any], str]
    is_text: bool = False


def table(title: str, columns: Sequence[Column], rows: Iterable[Any], *, is_wide: bool = False) -> Group:
    """Return a table under a title that may be wider than the table.

    The table has no lines between narrow columns. Text is wrapped and never cut off, so 80 columns are enough.

    Args:
      is_wide: True to leave space beside every column.
    """
    made = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1) if is_wide else 0,
        show_edge=False,
        show_header=any(column.head for column in columns),
    )
    for column in columns:
        justify: Any = "left" if column.is_text else "right"
        made.add_column(Text(column.head), justify=justify, no_wrap=not column.is_text, overflow="fold")
    for row in rows:
        made.add_row(*(Text(column.cell(row)) for column in columns))
    return Group(Text(f"\n{title}"), made)


def show(console: Console, parts: Iterable[Group | Text]) -> None:
    """Print tables and lines on a console. Lines with ``no_wrap`` are not broken."""
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, Text) and bool(part.no_wrap))


@dataclass
class Report:
    """The results of one benchmark. Results are shown and written as they arrive, so that an interrupted run keeps
    them.

    A file whose name ends in .jsonl contains a line of JSON for the conditions and one for every result. Each result
    has its name under "result". Any other file contains one JSON object.

    Args:
      output: file for the results; None for none.
      complain: function that is called with the reason if the file cannot be written. The run goes on.
    """

    console: Console
    output: Path | None = None
    complain: Callable[[str], None] = lambda _: None
    results: dict[str, Any] = field(default_factory=dict)
    _conditions: tuple[str, ...] = ()

    def begin(self, settings: Any, **more: Any) -> None:
        """Record the conditions of the measurement: ``models``, ``dtype``, ``execution`` and so on.

        Args:
          settings: a dataclass with ``prompts_file``.
          more: further conditions by name.
        """
        data = {**plain_data(settings), "prompts_file": str(settings.prompts_file or "own")}
        self.results |= {"provenance": provenance(), **more, "settings": data}
        self._conditions = tuple(self.results)

    def show_conditions(self) -> None:
        """Print the conditions in a few lines."""
        facts, found = self.results["provenance"], self.results
        versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items() if number)
        for line in (
            f"models   {found['models']}, {found['dtype']}, {found['execution']}",
            f"machine  {facts['cpu']}, {facts['num_threads']} of {facts['num_cpus']} threads used",
            f"code     {versions}, commit {facts['commit'] or 'unknown'}",
        ):
            self.console.print(line, markup=False, highlight=False)

    def keep(self, **found: Any) -> None:
        """Store results by name, replacing earlier ones, and write the file."""
        self.results |= {name: plain_data(value) for name, value in found.items()}
        if self.output is None:
            return
        try:
            if self.output.suffix == ".jsonl":
                write_atomically(self.output, "".join(json.dumps(line) + "\n" for line in self.lines()))
            else:
                keep_json(self.output, self.results)
        except OSError as error:
            self.complain(
                f"{self.output} cannot be written ({error.strerror}); the results are still shown, and the file is "
                "written again with the next result"
            )

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield the conditions, and after them every result."""
        yield {"result": "conditions", **{name: self.results[name] for name in self._conditions}}
        for name, found in self.results.items():
            if name not in self._conditions:
                for one in found if isinstance(found, list) else [found]:
                    yield {"result": name, **(one if isinstance(one, dict) else {name: one})}


def plain_data(value: Any) -> Any:
    """Convert dataclasses to dictionaries, properties included, ready for JSON. NaN and infinities become None.

    Fields that a dataclass omits from its representation are omitted.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.repr}
        for name, attribute in vars(type(value)).items():
            if isinstance(attribute, property) and not name.startswith("_"):
                found[name] = getattr(value, name)
        return plain_data(found)
    if isinstance(value, Mapping):
        return {str(key): plain_data(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_data(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


# -- words and figures -------------------------------------------------------------------------------------------


def load_lines(other_cpu_share: float) -> Iterator[Text]:
    """Yield a warning if other processes used the processors during the measurement."""
    if other_cpu_share > QUIET_SHARE:
        yield Text(
            f"other processes used {other_cpu_share:.0%} of the processors: repeat the measurement on a quiet machine",
            "yellow",
        )


def figure(value: float | None, digits: int = 2) -> str:
    """Format a figure: empty for None, and `NOTHING` for NaN, where nothing was timed."""
    if value is None:
        return ""
    return NOTHING if math.isnan(value) else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """Format a share: 0.5 is "50%", and None is empty."""
    return "" if value is None else f"{value:.0%}"

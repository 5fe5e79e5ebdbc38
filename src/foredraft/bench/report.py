"""The report: tables and lines as people see them, and the same results as JSON, kept as they come."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from foredraft.bench.provenance import provenance
from foredraft.folders import keep_json, keep_text

QUIET_SHARE = 0.1
"""Share of the processors used by others beyond which a timing is not to be trusted."""

NOTHING = "-"
"""Shown where there was nothing to time."""

WHY_NOTHING = f"{NOTHING}: all tokens came with the first emission, so nothing was left to time; raise --max-new-tokens"

_UNLIMITED = 10_000


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Args:
      cell: what it shows of a row.
      is_text: folds where there is no room; all others hold figures, which do not.
    """

    head: str
    cell: Callable[[Any], str]
    is_text: bool = False


@dataclass(frozen=True)
class Table:
    """Rows with their figures, under a title that may be wider than they are.

    No rules stand between narrow columns, text folds and nothing is cut off, so that 80 columns do.

    Args:
      is_wide: leave space beside every column.
      narrow: the columns where these do not fit.
    """

    title: str
    columns: Seq[Column]
    rows: Iterable[Any]
    is_wide: bool = False
    narrow: Seq[Column] = ()

    def drawn(self, console: Console) -> RichTable:
        """As the console has room."""
        rows = list(self.rows)
        made = self._drawn(self.columns, rows, is_wide=self.is_wide)
        unlimited = console.options.update(max_width=_UNLIMITED)
        if self.narrow and Measurement.get(console, unlimited, made).maximum > console.width:
            return self._drawn(self.narrow, rows, is_wide=False)
        return made

    @staticmethod
    def _drawn(columns: Seq[Column], rows: list[Any], *, is_wide: bool) -> RichTable:
        made = RichTable(
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
        return made


@dataclass(frozen=True)
class Line:
    """A line of text. It is kept whole where it is to be copied."""

    text: str
    style: str = ""
    is_whole: bool = False


def show(console: Console, parts: Iterable[Table | Line]) -> None:
    """On a console, or whatever else it writes to."""
    for part in parts:
        if isinstance(part, Table):
            console.print(f"\n{part.title}", markup=False)
            console.print(part.drawn(console))
        else:
            console.print(part.text, style=part.style, markup=False, highlight=False, soft_wrap=part.is_whole)


@dataclass
class Report:
    """The results of one benchmark, shown and kept as they come, so that an interrupted one leaves what it has.

    A file whose name ends in .jsonl has a line of JSON for the conditions, and one for every result, each with its
    name under "result"; any other is one JSON object.

    Args:
      output: file to keep everything in.
      complain: told why the file cannot be written, which loses nothing.
    """

    console: Console
    output: Path | None = None
    complain: Callable[[str], None] = lambda _: None
    results: dict[str, Any] = field(default_factory=dict)
    _conditions: tuple[str, ...] = ()

    def begin(self, facts: Mapping[str, Any], settings: Any, **more: Any) -> None:
        """The conditions under which everything is measured: ``models``, ``dtype`` and ``execution``, and what else.

        Args:
          facts: beside provenance, or instead of parts of it.
          settings: a dataclass with ``prompts_file``.
        """
        data = {**plain_data(settings), "prompts_file": str(settings.prompts_file or "own")}
        self.results |= {"provenance": {**provenance(), **facts}, **more, "settings": data}
        self._conditions = tuple(self.results)

    def show_conditions(self, execution: str | None = None) -> None:
        """In a few lines.

        Args:
          execution: in words, where the kept ones do not do.
        """
        facts, found = self.results["provenance"], self.results
        versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items() if number)
        for line in (
            f"models   {found['models']}, {found['dtype']}, {execution or found['execution']}",
            f"machine  {facts['cpu']}, {facts['num_threads']} of {facts['num_cpus']} threads used",
            f"code     {versions}, commit {facts['commit'] or 'unknown'}",
        ):
            self.console.print(line, markup=False, highlight=False)

    def add(self, name: str, found: Any, shown: Iterable[Table | Line] = ()) -> None:
        """One more result among those of a name, and how it is shown."""
        show(self.console, shown)
        self.keep(**{name: [*self.results.get(name, ()), plain_data(found)]})

    def keep(self, **found: Any) -> None:
        """Results under their names, in place of those of before."""
        self.results |= {name: plain_data(value) for name, value in found.items()}
        if self.output is None:
            return
        try:
            if self.output.suffix == ".jsonl":
                keep_text(self.output, "".join(json.dumps(line) + "\n" for line in self.lines()))
            else:
                keep_json(self.output, self.results)
        except OSError as error:
            self.complain(
                f"{self.output} cannot be written ({error.strerror}); what was measured is shown all the same, "
                "and kept with the next result if there is room by then"
            )

    def lines(self) -> Iterator[dict[str, Any]]:
        """The conditions, then every result by itself."""
        yield {"result": "conditions", **{name: self.results[name] for name in self._conditions}}
        for name, found in self.results.items():
            if name not in self._conditions:
                for one in found if isinstance(found, list) else [found]:
                    yield {"result": name, **(one if isinstance(one, dict) else {name: one})}


def plain_data(value: Any) -> Any:
    """Dataclasses as dictionaries, properties included, ready for JSON; NaN and infinities become None.

    Fields that a dataclass leaves out of its representation are left out here, too.
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


def load_lines(other_cpu_share: float) -> Iterator[Line]:
    """A warning where others computed meanwhile."""
    if other_cpu_share > QUIET_SHARE:
        yield Line(
            f"other processes used {other_cpu_share:.0%} of the processors meanwhile: repeat this on a quiet machine",
            "yellow",
        )


def figure(value: float | None, digits: int = 2) -> str:
    """A figure, nothing where there is none to have, and `NOTHING` where nothing was timed."""
    if value is None:
        return ""
    return NOTHING if math.isnan(value) else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """0.5 is "50%"; nothing where there is none to have."""
    return "" if value is None else f"{value:.0%}"

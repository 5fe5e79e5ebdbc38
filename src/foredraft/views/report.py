"""HTML report of a results file: a headline for each result, a chart of speeds, and the output token by token."""

from __future__ import annotations

import json
import logging
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from foredraft.engine.stats import counted
from foredraft.errors import ConfigError
from foredraft.folders import parsed_json
from foredraft.views.token_view import page

logger = logging.getLogger("foredraft")

Record = Mapping[str, Any]

REMEDY = "give a file of bench --output, generate --trace, or verify or tune with --json"

WIDTH, LABEL, RIGHT, ROW = 720, 190, 160, 26
"""Width of the chart, of its labels and of its figures, and height of one bar, in SVG units."""


def read(file: Path) -> list[Record]:
    """Read the results in a file, in order. NaN and infinities become null.

    If the last line is incomplete, because the writer was killed or the disk was full, it is left out with a warning.

    Raises: ConfigError for a file that cannot be read or contains no result.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}; {REMEDY}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file} is not text; {REMEDY}") from None
    try:
        found = [_parsed(text)]
    except ValueError:
        found = list(_lines(file, text))
    records: list[Record] = [record for record in found if isinstance(record, dict)]
    if not any({"steps", "sentence", "reason", "rows"} & record.keys() for record in records):
        raise ConfigError(f"{file} contains no result that a report can show; {REMEDY}")
    return records


def _lines(file: Path, text: str) -> Iterator[Any]:
    """Yield the value on each line. Only a line feed ends a line, because strings may contain other line separators."""
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    for number, line in lines:
        try:
            yield _parsed(line)
        except ValueError as error:
            if number == lines[-1][0] > lines[0][0] and not text.endswith("\n"):
                logger.warning("line %d of %s is incomplete and is left out", number, file)
                return
            raise ConfigError(f"{file} is not JSON or JSONL: line {number}: {error}; {REMEDY}") from None


def _parsed(text: str) -> Any:
    """Parse JSON, with null for NaN and infinities.

    Raises: ValueError.
    """
    return parsed_json(text, parse_constant=lambda _: None, parse_float=_finite)


def _finite(number: str) -> float | None:
    """Parse a number; None if it overflows, such as 1e999."""
    value = float(number)
    return value if math.isfinite(value) else None


def report(records: Sequence[Record], title: str) -> str:
    """Return the report as one HTML page without external resources.

    Args:
      records: results of `read`.
      title: title of the page.

    Raises: ConfigError for a record with missing or invalid keys.
    """
    try:
        traces = [_trace(record) for record in records if "steps" in record]
        shown = [part for record in records if "steps" not in record for part in _parts(record)]
        if traces:
            shown.append(_headline(_trace_sentence(traces)))
    except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"a result is missing a key or has an invalid value ({error!r}); {REMEDY}") from None
    texts = json.dumps(traces, allow_nan=False).replace("<", "\\u003c")
    filling = {"title": escape(title), "results": "".join(shown), "texts": texts}
    filled = re.sub(r"\{\{(\w+)\}\}", lambda found: filling[found[1]], page("foredraft.views", "report.html"))
    return filled.encode("utf-8", "replace").decode()  # file names may contain bytes that are not valid text


def _parts(record: Record) -> Iterator[str]:
    """Yield the conditions, the headline and the chart of a record, as far as it contains them."""
    if "provenance" in record and "models" in record:
        facts = record["provenance"]
        machine = f"{facts.get('gpu') or facts.get('cpu')}, {counted(facts['num_threads'], 'thread')}"
        told = f"{record['models']}, {record['dtype']}, on {machine}"
        yield f'<p class="told">{escape(told)}</p>'
    if "sentence" in record or "reason" in record:
        yield _headline(_str(record.get("sentence", record.get("reason"))))
    compared = record.get("methods", record)
    if "rows" in compared:
        for one in compared.get("different", ()):
            told = f"{_str(one['arm'])} differs from plain decoding, although identical output is guaranteed."
            yield f"<p>{escape(told)}</p>"
        yield _bars([row for row in compared["rows"] if row["comparison"] and row["comparison"]["num_prompts"]])


def _headline(sentence: str) -> str:
    return f'<p class="headline">{escape(sentence)}</p>'


def _bars(rows: Sequence[Record]) -> str:
    """Chart of speeds relative to plain decoding with their intervals, fastest first. A dashed line marks plain
    decoding."""
    rows = sorted(rows, key=lambda row: -row["comparison"]["ratio"])
    most = max([1.0, *(end for row in rows for end in (row["comparison"]["ratio"], row["comparison"]["high"]))])

    def at(value: float) -> float:
        return LABEL + (WIDTH - LABEL - RIGHT) * max(0.0, value) / float(most)

    height = ROW * len(rows) + 8
    marks, told = [], []
    for place, row in enumerate(rows):
        found, top, middle = row["comparison"], 4 + place * ROW, 4 + (place + 0.5) * ROW
        left, right = at(found["low"]), at(found["high"])
        interval = f" ({found['low']:.2f}-{found['high']:.2f})" if found["num_prompts"] > 1 else ", one prompt"
        figure = f"{found['ratio']:.2f}{interval}"
        told.append(f"{_str(row['method'])} {figure}")
        marks += [
            f'<text x="{LABEL - 8}" y="{middle + 4}" class="label">{escape(row["method"])}</text>',
            f'<rect x="{LABEL}" y="{top + 4}" width="{at(found["ratio"]) - LABEL:.1f}" height="{ROW - 8}"/>',
            f'<path d="M{left:.1f} {middle}H{right:.1f}M{left:.1f} {middle - 5}v10M{right:.1f} {middle - 5}v10"/>',
            f'<text x="{WIDTH - RIGHT + 8}" y="{middle + 4}">{figure}</text>',
        ]
    marks.append(f'<path class="plain" d="M{at(1.0):.1f} 0V{height}"/>')
    title = "Speed relative to plain decoding, with 95 % intervals"
    spoken = escape(f"{title}: {'; '.join(told)}", quote=True)
    drawn = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{spoken}">{"".join(marks)}</svg>'
    return f"<figure><figcaption>{title}</figcaption>{drawn}</figure>" if rows else ""


def _trace(record: Record) -> dict[str, Any]:
    """Part of a trace that the token view shows.

    Raises: KeyError, TypeError for a trace that the script of the page could not show.
    """
    prompt = record["prompt"]
    return {
        "prompt": prompt if isinstance(prompt, str) else f"{len(prompt)} token ids",
        "steps": [
            {
                "texts": list(map(_str, step["texts"])),
                "sources": list(map(_str, step["sources"])),
                "rejected": [{key: _str(branch[key]) for key in ("source", "text")} for branch in step["rejected"]],
                "num_drafted": int(step["num_drafted"]),
                "num_accepted": int(step["num_accepted"]),
            }
            for step in record["steps"]
        ],
    }


def _trace_sentence(traces: Sequence[Record]) -> str:
    """Summary of all traces: tokens, steps, and the number of tokens proposed by each drafter."""
    steps = [step for trace in traces for step in trace["steps"]]
    sources = Counter(source for step in steps for source in step["sources"])
    who = ", ".join(
        f"{'the model itself' if name == 'target' else name} {count}" for name, count in sources.most_common()
    )
    drafted, accepted = (sum(step[key] for step in steps) for key in ("num_drafted", "num_accepted"))
    return (
        f"{counted(sources.total(), 'token')} in {counted(len(steps), 'step')}, {accepted} of {drafted} drafted tokens "
        f"accepted; proposed by: {who}"
    )


def _str(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is not text")
    return value

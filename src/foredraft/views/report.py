"""HTML report of a results file: the finding as headline, the output token by token, and a table of speeds."""

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

UNKNOWN = "\u2013"
"""Shown in a table for a figure that a result does not have."""


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
        traces = [record for record in records if "steps" in record]
        views = [_trace(record) for record in traces]
        others = [record for record in records if "steps" not in record]
        headlines = "".join(_headlines(others, traces, views))
        details = "".join(part for record in others for part in _details(record))
    except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"a result is missing a key or has an invalid value ({error!r}); {REMEDY}") from None
    texts = json.dumps(views, allow_nan=False).replace("<", "\\u003c")
    results = f"<h2>Measurements</h2>{details}" if details else ""
    filling = {"title": escape(title), "headlines": headlines, "results": results, "texts": texts}
    filled = re.sub(r"\{\{(\w+)\}\}", lambda found: filling[found[1]], page("foredraft.views", "report.html"))
    return filled.encode("utf-8", "replace").decode()  # file names may contain bytes that are not valid text


def _headlines(others: Sequence[Record], traces: Sequence[Record], views: Sequence[Record]) -> Iterator[str]:
    """Yield the findings of all results, and below them the counts of the traces. The reason for a recommendation is
    left out if the speeds themselves are there."""
    compared = [record.get("methods", record) for record in others]
    found = [_finding(one) for one in compared if "rows" in one]
    for record in others:
        if "sentence" in record or ("reason" in record and not any(found)):
            found.append(_str(record.get("sentence", record.get("reason"))))
    if traces:
        found.append(_trace_finding(traces))
    yield from (f'<p class="headline">{escape(sentence)}</p>' for sentence in found if sentence)
    if traces:
        yield f"<p>{escape(_trace_sentence(views))}</p>"


def _finding(compared: Record) -> str:
    """Finding of a comparison: the speed of the fastest method relative to plain decoding, and whether texts are equal.
    Empty if nothing was timed."""
    rows = _timed(compared)
    if not rows:
        return ""
    best, found = _method(rows[0]), rows[0]["comparison"]
    speed = f"{found['ratio']:.2f}x as fast"
    interval = f" ({found['low']:.2f}-{found['high']:.2f})" if found["num_prompts"] > 1 else ""
    prompts = "these prompts" if found["num_prompts"] > 1 else "one prompt"
    if found["ratio"] <= 1:
        said = f"no method is faster than plain decoding on {prompts}: the best, {best}, is {speed}{interval}"
    elif found["num_prompts"] > 1 and found["low"] <= 1:
        said = f"no method is clearly faster than plain decoding on {prompts}: the best, {best}, is {speed}{interval}"
    else:
        said = f"{best} is {speed} as plain decoding on {prompts}{interval}"
    judged = [row["equality"] for row in compared["rows"] if row.get("equality")]
    total, same = (sum(int(one[key]) for one in judged) for key in ("num_prompts", "num_identical"))
    equal = f"; {'all' if same == total else f'{same} of {total}'} texts equal" if total else ""
    return f"{said}{equal}"


def _timed(compared: Record) -> list[Record]:
    """Methods that were timed, the fastest first."""
    rows = [row for row in compared["rows"] if row["comparison"] and row["comparison"]["num_prompts"]]
    return sorted(rows, key=lambda row: -row["comparison"]["ratio"])


def _method(row: Record) -> str:
    """Name of a method, with room around the plus signs of a combination."""
    return re.sub(r"(?<=\w)\+(?=\w)", " + ", _str(row["method"]))


def _details(record: Record) -> Iterator[str]:
    """Yield the conditions, the table of speeds and the notes of a record, as far as it contains them."""
    if "provenance" in record and "models" in record:
        facts = record["provenance"]
        machine = f"{facts.get('gpu') or facts.get('cpu')}, {counted(facts['num_threads'], 'thread')}"
        conditions = f"{record['models']}, {record['dtype']}, on {machine}"
        yield f'<p class="told conditions">{escape(conditions)}</p>'
    compared = record.get("methods", record)
    if "rows" in compared:
        for one in compared.get("different", ()):
            sentence = f"{_str(one['arm'])} differs from plain decoding, although identical output is guaranteed."
            yield f"<p>{escape(sentence)}</p>"
        yield _table(compared)
    notes = record.get("notes", ())
    for note in [notes] if isinstance(notes, str) else notes:
        yield f'<p class="told">Note: {escape(_str(note))}</p>'


def _table(compared: Record) -> str:
    """Table of the timed methods, the fastest first, and of plain decoding. With two methods or more, the table has
    bars, on which a dashed line marks plain decoding."""
    rows = _timed(compared)
    if not rows:
        return ""
    has_bars = len(rows) > 1
    most = max([1.0, *(end for row in rows for end in (row["comparison"]["ratio"], row["comparison"]["high"]))])
    columns = ["method", *([""] if has_bars else []), "x plain", "tok/s", "tokens per step", "accepted", "equal texts"]
    head = "".join(f'<th scope="col">{column}</th>' for column in columns)
    lines = []
    for row in rows:
        found = row["comparison"]
        interval = f" ({found['low']:.2f}-{found['high']:.2f})" if found["num_prompts"] > 1 else ", one prompt"
        bar = f'<td class="bar">{_bar(found, float(most))}</td>' if has_bars else ""
        lines.append(_line(_method(row), bar, f"{found['ratio']:.2f}{interval}", row))
    if "plain" in compared:
        lines.append(_line("plain", "<td></td>" if has_bars else "", "1", compared["plain"]))
    caption = "Speed relative to plain decoding: median of the prompts, with 95 % intervals"
    return (
        f'<p class="caption">{caption}</p><div class="wide" tabindex="0" role="group" aria-label="Speeds"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _line(name: str, bar: str, speed: str, row: Record) -> str:
    """Line of the table for one method."""
    equality = row.get("equality")
    figures = [
        speed,
        _figure(row.get("tokens_per_second"), ".1f"),
        _figure(row.get("tokens_per_step"), ".2f"),
        _figure(row.get("acceptance_rate"), ".0%"),
        f"{int(equality['num_identical'])} of {int(equality['num_prompts'])}" if equality else UNKNOWN,
    ]
    cells = "".join(f"<td>{figure}</td>" for figure in figures)
    return f'<tr><th scope="row">{escape(name)}</th>{bar}{cells}</tr>'


def _figure(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else format(value, form)


def _bar(found: Record, most: float) -> str:
    """Bar of a speed with its interval, in an image that fills its cell."""
    speed, low, high, plain = (100 * max(0.0, end) / most for end in (found["ratio"], found["low"], found["high"], 1.0))
    return (
        '<svg viewBox="0 0 100 24" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect y="4" width="{speed:.1f}" height="16"/>'
        f'<path d="M{low:.1f} 12H{high:.1f}M{low:.1f} 8v8M{high:.1f} 8v8"/>'
        f'<path class="plain" d="M{plain:.1f} 0V24"/></svg>'
    )


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


def _trace_finding(traces: Sequence[Record]) -> str:
    """Speed of the traced outputs relative to plain decoding, as the governor estimated it. Empty if the speed of a
    trace is not known, or if their methods differ."""
    reports = [(trace.get("metrics") or {}).get("governor") or {} for trace in traces]
    speeds = [float(speed) for report in reports if (speed := report.get("estimated_speedup")) is not None]
    methods = {trace.get("method") for trace in traces}
    if len(methods) > 1 or None in methods or len(speeds) < len(traces):
        return ""
    low, high = (f"{end(speeds):.2f}x" for end in (min, max))
    speed = low if low == high else f"{low} to {high}"
    lossless = "; lossless" if all(trace.get("lossless") is True for trace in traces) else ""
    outputs = "this output" if len(traces) == 1 else "these outputs"
    return f"{_method(traces[0])} is {speed} as fast as plain decoding on {outputs} (estimated){lossless}"


def _trace_sentence(views: Sequence[Record]) -> str:
    """Summary of all traces: tokens, steps, and the number of tokens proposed by each drafter."""
    steps = [step for view in views for step in view["steps"]]
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

"""One page of the records of a file of results: bench, verify, info, tune profile, or a trace of generate."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any

from foredraft.errors import ConfigError
from foredraft.folders import parsed_json
from foredraft.report.charts import Section
from foredraft.report.sections import SECTIONS, trace
from foredraft.views.token_view import page

logger = logging.getLogger("foredraft")

REMEDY = "give a file of bench --output, generate --trace, or verify, info or tune with --json"

MARKS = {"steps": "trace", "findings": "verdict", "costs": "profile", "step_cost": "info"}
"""Keys that tell the kind of a record, by the first of them: a choice of tune has both of the last ones."""


def read(file: Path) -> list[tuple[str, Mapping[str, Any]]]:
    """The records of a file in their order, each with its kind: one of `MARKS`, "methods" or
    "conditions" of bench. NaN and infinities are read as null.

    A last line that was cut off, by a kill or a full disk, is left out with a warning.

    Raises: ConfigError for a file that cannot be read or holds something else.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}; {REMEDY}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file} is not text; {REMEDY}") from None
    try:
        objects = [_parsed(text)]
    except ValueError:
        objects = list(_lines(file, text))
    found = [one for each in objects if isinstance(each, dict) for one in _kinds(each)]
    if not any(kind != "conditions" for kind, _ in found):
        raise ConfigError(f"{file} holds no result that a report is made of; {REMEDY}")
    return found


def _lines(file: Path, text: str) -> Iterator[Any]:
    """What stands on each line. Lines end with a line feed alone: strings may hold what else ends one elsewhere."""
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    for number, line in lines:
        try:
            yield _parsed(line)
        except ValueError as error:
            if number == lines[-1][0] > lines[0][0] and not text.endswith("\n"):
                logger.warning("line %d of %s is cut off, and left out", number, file)
                return
            raise ConfigError(f"{file} is not JSON or JSONL: line {number}: {error}; {REMEDY}") from None


def _parsed(text: str) -> Any:
    """Raises: ValueError."""
    return parsed_json(text, parse_constant=lambda _: None, parse_float=_finite)


def _finite(number: str) -> float | None:
    """JSON may write what no float holds, such as 1e999."""
    value = float(number)
    return value if math.isfinite(value) else None


def _kinds(record: dict[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    if kind := next((kind for key, kind in MARKS.items() if key in record), None):
        return [(kind, record)]
    if record.get("result") in ("methods", "conditions"):
        return [(str(record["result"]), record)]
    found: list[tuple[str, Mapping[str, Any]]] = []
    if "provenance" in record:
        found.append(("conditions", record))
    if isinstance(record.get("methods"), dict):
        found.append(("methods", record["methods"]))
    return found


# -- writing ---------------------------------------------------------------------------------------------------------


def sections(records: Seq[tuple[str, Mapping[str, Any]]]) -> list[Section]:
    """What there is to show of the records, in their order; what all traces say together comes last.

    Args:
      records: with their kinds, as `foredraft.report.read` finds them.

    Raises: ConfigError for a record that lacks what its kind holds.
    """
    found = []
    for kind, record in records:
        if kind != "trace":
            with _complaints(kind):
                found.append(SECTIONS[kind](record))
    traced = [record for kind, record in records if kind == "trace"]
    if traced:
        with _complaints("trace"):
            found.append(trace(traced))
    return found


def report(records: Seq[tuple[str, Mapping[str, Any]]], title: str) -> str:
    """The page: HTML that loads nothing.

    Args:
      records: with their kinds, as `foredraft.report.read` finds them.

    Raises: ConfigError for a record that lacks what its kind holds.
    """
    shown = "".join(section.html() for section in sections(records))
    with _complaints("trace"):
        told = [_text(record) for kind, record in records if kind == "trace"]
        texts = json.dumps(told, allow_nan=False).replace("<", "\\u003c")
    filling = {"title": escape(title), "sections": shown, "texts": texts}
    filled = re.sub(r"\{\{(\w+)\}\}", lambda found: filling[found[1]], page("foredraft.report", "report.html"))
    return filled.encode("utf-8", "replace").decode()  # names of files may hold bytes that are not text


@contextmanager
def _complaints(kind: str) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"a result of kind {kind} lacks what it should hold ({error!r}); {REMEDY}") from None


def _text(record: Mapping[str, Any]) -> dict[str, Any]:
    """What the token view shows of a text."""
    prompt = record["prompt"]
    return {
        "prompt": prompt if isinstance(prompt, str) else f"{len(prompt)} token ids",
        "steps": list(map(_step, record["steps"])),
    }


def _step(step: Mapping[str, Any]) -> dict[str, Any]:
    """Raises: KeyError, TypeError for what the view's script could not show."""
    rejected = [{key: _str(branch[key]) for key in ("source", "text")} for branch in step["rejected"]]
    return {
        "texts": list(map(_str, step["texts"])),
        "sources": list(map(_str, step["sources"])),
        "rejected": rejected,
        "num_drafted": int(step["num_drafted"]),
        "num_accepted": int(step["num_accepted"]),
    }


def _str(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is not text")
    return value

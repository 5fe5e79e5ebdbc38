"""One page of the records of a file: sections, and the token view of the texts whose steps were traced."""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from html import escape
from typing import Any

from foretoken.errors import ConfigError
from foretoken.report.reading import REMEDY
from foretoken.report.sections import SECTIONS, plain_table, trace
from foretoken.views.page import page


def report(records: Seq[tuple[str, Mapping[str, Any]]], title: str) -> str:
    """The page: HTML that loads nothing.

    Args:
      records: with their kinds, as `foretoken.report.read` finds them.

    Raises: ConfigError for a record that lacks what its kind holds.
    """
    parts = []
    kind = "trace"
    try:
        for kind, record in records:
            if kind != "trace":
                parts.append(SECTIONS.get(kind, plain_table)(record))
        traced = [record for kind, record in records if kind == "trace"]
        kind = "trace"
        if traced:
            parts.append(trace(traced))
        told = [_text(record) for record in traced]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(f"a result of kind {kind} lacks what it should hold ({error!r}); {REMEDY}") from None
    texts = json.dumps(told).replace("<", "\\u003c")
    filled = page("foretoken.report", "report.html").replace("{{title}}", escape(title))
    return filled.replace("{{sections}}", "".join(parts)).replace("{{texts}}", texts)


def _text(record: Mapping[str, Any]) -> dict[str, Any]:
    """What the token view shows of a text."""
    prompt = record["prompt"]
    steps = [
        {key: step[key] for key in ("texts", "sources", "rejected", "num_drafted", "num_accepted")}
        for step in record["steps"]
    ]
    return {"prompt": prompt if isinstance(prompt, str) else f"{len(prompt)} token ids", "steps": steps}

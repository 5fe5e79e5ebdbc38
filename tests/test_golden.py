"""Texts and steps of every method of zoo:tiny are those that were frozen before the engine was rebuilt."""

from __future__ import annotations

import json
from pathlib import Path

import golden
import pytest

FROZEN = Path(__file__).parent / "golden" / "tiny.json"


@pytest.mark.full
@pytest.mark.parametrize("method", golden.METHODS)
def test_texts_and_steps_are_those_of_the_freeze(method: str) -> None:
    """Equal token ids, and per step the depth of the draft and how much of it was accepted.

    A rebuilt drafter that finds the same texts by other drafts shows here and nowhere else.
    """
    frozen = json.loads(FROZEN.read_text())
    wanted = {name: rows for name, rows in frozen["cells"].items() if name.split(",")[0] == method}
    assert len(wanted) == 4
    assert any(row["steps"] for rows in wanted.values() for row in rows)
    found = dict(golden.traces(frozen["model"], frozen["dtype"], [method]))
    assert golden.differences(wanted, found) == []

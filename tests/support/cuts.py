"""Ctrl-C at any line of the engine: the places are lines that run, so no test names a function of it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

ROOMS = ("foredraft/engine/", "foredraft/drafters/", "foredraft/model/cache/")
"""Where lines are counted."""


class Cut(KeyboardInterrupt):
    """Ctrl-C at a chosen line."""


def cut_at(number: int | None, call: Callable[[], Any]) -> int:
    """Call with Ctrl-C before the n-th line that runs in `ROOMS`, or to its end: the number of lines that ran."""
    count = 0

    def line(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        if event == "line":
            count += 1
            if count == number:
                raise Cut
        return line

    def enter(frame: Any, *_: Any) -> Any:
        return line if any(room in frame.f_code.co_filename for room in ROOMS) else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        with contextlib.suppress(Cut):
            call()
    finally:
        sys.settrace(before)
    return count


def spread(most: int, count: int) -> list[int]:
    """Numbers from 1 to ``most``, evenly spread."""
    return [1 + place * (most - 1) // (count - 1) for place in range(count)]

"""Progress bars on standard error, and lines about what is being loaded."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

SECONDS_PER_LINE = 10.0
"""Seconds between lines of progress without a terminal."""

SECONDS_UNSAID = 0.5
"""Seconds after which work that may also be quick gets a line with its name."""

Watch = Callable[[str, int, int], None]
"""Function that is called with the name of the running work, the finished part, and the total."""

T = TypeVar("T")

logger = logging.getLogger("foredraft")


def stage(what: str, level: int = logging.INFO, *, ends_line: bool = False) -> None:
    """Log the start of work that may take seconds. The command line shows these records as its status.

    In Python, a record of level INFO is also shown on standard error if that is a terminal or a notebook. It is not
    shown if the program handles these records or has turned them off.

    Args:
      ends_line: True if text that does not end with a line break may be on the terminal.
    """
    if _is_awaited(level):
        sys.stderr.write(f"{chr(10) if ends_line else ''}foredraft: {what} ...\n")
        sys.stderr.flush()
    logger.log(level, "%s ...", what, extra={"is_stage": True})


def _is_awaited(level: int) -> bool:
    """Whether someone at a terminal or a notebook would otherwise not see a record."""
    is_handled = logger.isEnabledFor(level) and logger.hasHandlers()
    is_off = logger.disabled or logger.level > level or logger.manager.disable >= level
    if level < logging.INFO or is_handled or is_off or sys.stderr is None:
        return False
    console = Console(stderr=True)
    return console.is_terminal or console.is_jupyter


@contextmanager
def stage_if_slow(name: Callable[[], str], *, ends_line: bool = False) -> Iterator[None]:
    """Log a `stage` if the block takes longer than `SECONDS_UNSAID`. ``name`` returns its name."""
    timer = threading.Timer(SECONDS_UNSAID, lambda: stage(name(), ends_line=ends_line))
    timer.daemon = True  # ends with the program
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def progress_bar(num_prompts: int, *, shown: bool | None = None) -> Iterator[Callable[[int, int], None]]:
    """Show a bar while the block runs. The yielded function takes the numbers of finished prompts and generated tokens.

    Args:
      shown: whether to show the bar. None shows it for several prompts on a terminal.
    """
    console = Console(stderr=True)
    if not (console.is_terminal and num_prompts > 1 if shown is None else shown):
        yield lambda num_finished, num_tokens: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=shown is None) as progress:
        task = progress.add_task("prompts", total=num_prompts, tokens=0)
        yield lambda num_finished, num_tokens: progress.update(task, completed=num_finished, tokens=num_tokens)


@contextmanager
def stages(say: Callable[[str], None] | None = None) -> Iterator[Watch]:
    """Show the running work and the remaining time on a terminal.

    Args:
      say: called with a line every `SECONDS_PER_LINE` seconds without a terminal; None shows nothing there.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield (lambda what, done, total: None) if say is None else _lines(say)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def watch(what: str, done: int, total: int) -> None:
            if what not in tasks:
                for task in tasks.values():
                    bar.update(task, visible=False)
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=max(done, total))  # a resumed search may have more

        yield watch


def _lines(say: Callable[[str], None]) -> Watch:
    started = perf_counter()
    latest = ("", started)

    def watch(what: str, done: int, total: int) -> None:
        nonlocal latest
        now = perf_counter()
        if what != latest[0] or now - latest[1] > SECONDS_PER_LINE:
            say(f"{(now - started) / 60:.1f} min: {what}, {done} of {max(done, total)}")
            latest = what, now

    return watch


SECONDS_TO_BAR = 1.0
"""Seconds after which work has a bar or a line."""
SECONDS_PER_UPDATE = 0.1
WIDTH = 24
"""Characters of a bar in a line of text."""


@contextmanager
def counting(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show how far work has come, if it takes longer than `SECONDS_TO_BAR`. Call the function after each part.

    On a terminal or in a notebook there is a bar, elsewhere one line. The command line shows both as stages of its
    status. A program that handles the records of foredraft gets one record of level INFO.

    Args:
      what: name of the work.
      total: size of all parts.

    Yields: a function whose argument is the size of the part that was done.
    """
    started = latest = perf_counter()
    done, is_shown = 0, False
    bar: Progress | None = None
    is_terminal = sys.stderr is not None and sys.stderr.isatty()

    def advance(size: int) -> None:
        nonlocal latest, done, is_shown, bar
        done, now = done + size, perf_counter()
        if now - started < SECONDS_TO_BAR or (is_shown and now - latest < SECONDS_PER_UPDATE):
            return
        if not is_shown and _is_awaited(logging.INFO):
            columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %")
            bar = Progress(*columns, console=Console(stderr=True), transient=True)
            bar.add_task(what, total=total)
            bar.start()
        elif not is_shown:
            stage(what)
        latest, is_shown = now, True
        if bar is not None:
            bar.update(bar.task_ids[0], completed=done)
        elif is_terminal:
            logger.debug("%s %s", what, _bar(done / max(total, 1)), extra={"is_stage": True})

    try:
        yield advance
    finally:
        if bar is not None:
            bar.stop()


def counted(what: str, parts: Iterable[T], size_of: Callable[[T], int]) -> Iterator[T]:
    """Yield parts of work, and show how far it has come; see `counting`."""
    given = list(parts)
    with counting(what, sum(map(size_of, given))) as advance:
        for part in given:
            yield part
            advance(size_of(part))


def _bar(share: float) -> str:
    """Return a bar as text.

    Example:
        >>> _bar(0.5)
        '━━━━━━━━━━━━──────────── 50 %'
    """
    filled = min(WIDTH, round(share * WIDTH))
    return f"{'━' * filled}{'─' * (WIDTH - filled)} {min(100, round(share * 100))} %"


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Hide progress bars of `transformers`, and restore the user's setting afterwards."""
    from transformers.utils import logging

    is_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if is_shown:
            logging.enable_progress_bar()


@contextmanager
def no_warnings() -> Iterator[None]:
    """Hide warnings of `transformers`, and restore the user's setting afterwards."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)

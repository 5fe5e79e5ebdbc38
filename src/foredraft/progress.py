"""Progress bars on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

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
"""Seconds between lines of progress if there is no terminal."""

Watch = Callable[[str, int, int], None]
"""Callback for progress: what is running, how much of it is done, and the total."""


@contextmanager
def progress_bar(num_prompts: int, *, shown: bool | None = None) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar during the block; yields a function of the numbers of finished prompts and generated tokens.

    Args:
      shown: True to show the bar. None shows it for more than one prompt if standard error is a terminal.
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
    """Show on standard error what is running and how long it will take, if standard error is a terminal.

    Args:
      say: function that receives a line now and then if there is no terminal; without it, nothing is shown then.
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
            bar.update(tasks[what], completed=done)

        yield watch


def _lines(say: Callable[[str], None]) -> Watch:
    started = perf_counter()
    latest = ("", started)

    def watch(what: str, done: int, total: int) -> None:
        nonlocal latest
        now = perf_counter()
        if what != latest[0] or now - latest[1] > SECONDS_PER_LINE:
            say(f"{(now - started) / 60:.1f} min: {what}, {done} of {total}")
            latest = what, now

    return watch


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Hide the progress bars of `transformers`, which small files do not need. The user's setting is restored."""
    from transformers.utils import logging

    is_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if is_shown:
            logging.enable_progress_bar()

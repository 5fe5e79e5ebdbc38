"""Progress bars on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class Bar:
    """Counts finished prompts and generated tokens."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def update(self, num_finished: int, num_tokens: int) -> None:
        self._progress.update(self._task, completed=num_finished, tokens=num_tokens)


@contextmanager
def progress_bar(num_prompts: int, *, shown: bool | None = None) -> Iterator[Bar | None]:
    """A bar while the block runs.

    Args:
      shown: None shows it for more than one prompt, where standard error is a terminal.
    """
    console = Console(stderr=True)
    if not (console.is_terminal and num_prompts > 1 if shown is None else shown):
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=shown is None) as progress:
        yield Bar(progress, progress.add_task("prompts", total=num_prompts, tokens=0))


@contextmanager
def build_bar() -> Iterator[Callable[[str, int, int], None] | None]:
    """A bar for building a datastore, on standard error, where that is a terminal; None elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("reading", total=None)

        def report(stage: str, done: int, total: int) -> None:
            if stage == "sorting":
                progress.update(task, description=f"sorting {done:,} tokens")
            else:
                progress.update(task, description=stage, completed=done, total=total)

        yield report


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Hide those of `transformers`: small files need none. The user's setting is put back."""
    from transformers.utils import logging

    is_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if is_shown:
            logging.enable_progress_bar()

"""``foretoken bench --methods``: the comparison of methods behind the verb, with its progress and its files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from foretoken.cli.running import EXIT_DIFFERS, EXIT_INTERRUPTED
from foretoken.errors import ConfigError
from foretoken.folders import keep_text

if TYPE_CHECKING:
    from foretoken.bench.candidates import Candidate
    from foretoken.bench.outcome import Outcome
    from foretoken.bench.which import WhichSettings


def compare_methods(
    model: str,
    dtype: str,
    scale: str,
    candidates: list[Candidate],
    settings: WhichSettings,
    results: dict[str, Any],
    keep: Callable[[], None],
    *,
    is_shown: bool,
    save_config: Path | None = None,
) -> int:
    """Run the comparison into ``results``, show it, and return the exit code.

    Interrupted, it shows and keeps what the prompts so far have told.
    """
    import torch

    from foretoken.bench import report, which_report
    from foretoken.bench.provenance import provenance
    from foretoken.bench.which import Which

    console = Console(highlight=False, quiet=not is_shown)
    latest: list[Outcome] = []
    notes = model_notes(model, candidates)
    code = 0

    def note(outcome: Outcome) -> None:
        latest[:] = [outcome]
        results.update(which_report.as_data(outcome, notes))
        keep()

    try:
        with progress() as say, torch.inference_mode():
            which = Which(model, dtype, scale, settings, say)
            facts, kind = provenance(), str(which.target.dtype).removeprefix("torch.")
            results |= {
                "provenance": facts,
                "model": model,
                "models": which.label,
                "dtype": kind,
                "execution": which.target.execution.describe(),
                "settings": {
                    **report.plain_data(settings),
                    "prompts_file": str(settings.prompts_file or "own"),
                },
            }
            note(which.run(candidates, note))
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    if not latest:
        Console(stderr=True).print("interrupted before the first prompt was done: nothing was measured")
        return code
    report.show_provenance(console, facts, which.label, kind, which.target.execution.describe())
    which_report.show(console, latest[0], model, notes)
    if save_config is not None:
        try:
            save_config.parent.mkdir(parents=True, exist_ok=True)
            keep_text(save_config, json.dumps(results["recommended_config"]) + "\n")
        except OSError as error:
            raise ConfigError(f"{save_config} cannot be written: {error.strerror}; the config is shown above") from None
        console.print(f"  --speculative-config @{save_config}", markup=False, soft_wrap=True)
    return code or (EXIT_DIFFERS if latest[0].different else 0)


def model_notes(model: str, candidates: list[Candidate]) -> tuple[str, ...]:
    """The zoo's notes on the figures that these methods reach with a model."""
    from foretoken import zoo
    from foretoken.loading.models import is_zoo

    if not is_zoo(model):
        return ()
    named = {part.method for one in candidates for part in one.config.parts}
    return zoo.manifest(model).notes_about(map(str, named))


@contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """Show what is running and how long it will take on standard error, if that is a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda what, done, total: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        tasks: dict[str, Any] = {}

        def say(what: str, done: int, total: int) -> None:
            if what not in tasks:
                for task in tasks.values():
                    bar.update(task, visible=False)
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done)

        yield say

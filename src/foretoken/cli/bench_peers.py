"""``foretoken bench --peers`` and ``--make-peers``: the race beside other engines behind the verb."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from foretoken.cli.running import EXIT_DIFFERS, EXIT_INTERRUPTED

if TYPE_CHECKING:
    from foretoken.bench.peers.outcome import Outcome
    from foretoken.cli.bench_options import BenchOptions

_SECONDS_PER_LINE = 10.0
"""Of progress where there is no terminal."""


def make_environments(options: BenchOptions) -> None:
    """Make what ``--make-peers`` names.

    Raises: ConfigError.
    """
    from foretoken.bench.peers.environments import environments, make_all, read_peers

    peers = read_peers(options.make_peers or "", "--make-peers")
    make_all(peers, environments(options.peers_folder), lambda text: typer.echo(text, err=True))


def race_peers(options: BenchOptions, model: str, scale: str, results: dict[str, Any], keep: Callable[[], None]) -> int:
    """Run the race into ``results``, show it, and return the exit code.

    Interrupted, it shows and keeps what the prompts so far have told.

    Raises: ForetokenError.
    """
    import torch
    from rich.console import Console

    from foretoken.bench import report
    from foretoken.bench.peers import launching
    from foretoken.bench.peers import report as peers_report
    from foretoken.bench.peers.environments import check_installed, environments, read_peers
    from foretoken.bench.peers.export import export
    from foretoken.bench.peers.prompts import prompts_of
    from foretoken.bench.peers.race import Race
    from foretoken.bench.provenance import provenance
    from foretoken.errors import ConfigError

    peers = read_peers(options.peers or "", "--peers")
    folder = environments(options.peers_folder)
    check_installed(peers, folder)
    settings = options.race_settings(options.threads or torch.get_num_threads())
    console = Console(highlight=False, quiet=options.as_json)
    latest: list[Outcome] = []
    code = 0

    def note(outcome: Outcome) -> None:
        latest[:] = [outcome]
        results["race"] = report.plain_data(outcome)
        keep()

    with _progress() as say:
        exported = export(model, options.draft_model, scale, lambda text: typer.echo(f"foretoken: {text}", err=True))
        dtype = exported.dtype if options.dtype == "auto" else options.dtype
        if dtype not in launching.OPENVINO:
            raise ConfigError(f"--dtype is {dtype!r}; other engines run in {', '.join(launching.OPENVINO)}")
        arming = options.arming(exported.has_draft)
        launches, missing = launching.launches(exported, model, scale, dtype, arming, peers, folder)
        for name, reason in missing.items():
            typer.echo(f"foretoken: {name} takes no part: {reason}", err=True)
        facts = {**provenance(), "num_threads": settings.threads}
        results |= {
            "provenance": facts,
            "model": model,
            "models": exported.models,
            "dtype": dtype,
            "execution": options.execution,
            "settings": {**report.plain_data(settings), "prompts_file": str(settings.prompts_file or "own")},
        }
        try:
            with Race(exported, dtype, launches, missing, settings, say) as race:
                source = prompts_of(
                    exported.folder / "target",
                    settings.kinds,
                    settings.prompts_file,
                    settings.max_new_tokens,
                    race.answer,
                )
                note(race.run(source, note))
        except KeyboardInterrupt:
            code = EXIT_INTERRUPTED
    if not latest:
        Console(stderr=True).print("interrupted before the first prompt was done: nothing was measured")
        return code
    report.show_provenance(console, facts, exported.models, dtype, f"execution {options.execution}")
    peers_report.show(console, latest[0])
    return code or (EXIT_DIFFERS if latest[0].wrong else 0)


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on terminals; elsewhere a line now and then, since a race takes long."""
    from foretoken.cli.which import progress

    if sys.stderr.isatty():
        with progress() as say:
            yield say
        return
    started = time.perf_counter()
    latest = ("", started)

    def tell(what: str, done: int, total: int) -> None:
        nonlocal latest
        now = time.perf_counter()
        if what != latest[0] or now - latest[1] > _SECONDS_PER_LINE:
            typer.echo(f"foretoken: {(now - started) / 60:.1f} min: {what}, {done} of {total}", err=True)
            latest = what, now

    yield tell

"""``foretoken bench``: measurements of the parts, or a comparison of methods."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import typer

from foretoken.cli.bench_options import BenchOptions
from foretoken.cli.options import takes_groups
from foretoken.cli.running import EXIT_DIFFERS, EXIT_INTERRUPTED, EXIT_REFUSED, choose_model
from foretoken.folders import check_place, keep_json


@takes_groups
def run(options: BenchOptions) -> None:
    """Measure drafted decoding against plain decoding, transformers' generate, assisted generation and prompt lookup.

    With --peers: a race beside other engines on the same weights and token ids, each in a process and an environment of
    its own (--make-peers makes these), at the settings that are their fastest on other prompts.

    With --methods: plain decoding and these methods interleaved on the same prompts, tokens compared first, and at the
    end the speculative config to use, as JSON.

    Parts. speed: greedy, prompts of all kinds, at every context. copying: lookup where the output repeats the prompt.
    sampling: temperature 1. efficiency, lookup-efficiency: speed-up against what tau and the forwards allow. batch:
    ragged rows together against one by one. profile: where a step goes, by vocabulary and context. drafting:
    microseconds per proposal of the drafters that make no forward, by context and size of the datastore. accepted:
    how many drafted tokens are accepted, beside the geometric law that independent acceptances would follow.

    Exit codes: 0 done, 2 refused, 3 outputs differ (then their speed is not shown), 130 interrupted (partial
    results are kept).
    """
    from foretoken.bench.suite import UnequalOutputsError
    from foretoken.errors import ForetokenError

    results: dict[str, Any] = {}
    code = 0
    try:
        code = _measure(options, results)
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except UnequalOutputsError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(EXIT_DIFFERS) from None
    except ForetokenError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(EXIT_REFUSED) from None
    if options.as_json and results:
        sys.stdout.write(json.dumps(results) + "\n")
    if code:
        raise typer.Exit(code)


def _measure(options: BenchOptions, results: dict[str, Any]) -> int:
    """Fill ``results``, which are kept as they come, and return the exit code."""
    if options.make_peers is not None:
        from foretoken.cli.bench_peers import make_environments

        make_environments(options)
        return 0
    for file in (options.output, options.save_config):
        if file is not None:
            _check_place(file)
    model = options.model or _default_model()
    is_small = options.quick and options.peers is None
    threads = options.threads or (1 if is_small else None)  # several would wait longer than they compute
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    scale = options.scale or _default_scale(model, options.quick)
    _hide_progress_of_loading()
    keep = partial(_write, options.output, results)
    if options.peers is not None:
        from foretoken.cli.bench_peers import race_peers

        return race_peers(options, model, scale, results, keep)
    if options.methods is not None:
        from foretoken.bench.candidates import read_candidates
        from foretoken.cli.which import compare_methods

        return compare_methods(
            model,
            options.dtype,
            scale,
            read_candidates(options.methods, options.draft_model, options.num_speculative_tokens),
            options.which_settings(is_toy=_is_toy(model)),
            results,
            keep,
            is_shown=not options.as_json,
            save_config=options.save_config,
        )
    from foretoken.cli.bench_parts import measure_parts, suite_of

    parts = options.chosen_parts()
    suite = suite_of(model, options.draft_model, options.dtype, scale, options.settings())
    measure_parts(suite, parts, results, keep, is_shown=not options.as_json)
    return 0


def _check_place(file: Path) -> None:
    """Make the folder of a file that is to be written.

    Raises: ConfigError.
    """
    from foretoken.errors import ConfigError

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}; choose another place") from None
    check_place(file)


def _write(output: Path | None, results: dict[str, Any]) -> None:
    """All that was measured so far, so that an interrupted run leaves it; nothing is lost where that cannot be."""
    if output is None:
        return
    try:
        keep_json(output, results)
    except OSError as error:
        typer.echo(
            f"foretoken: {output} cannot be written ({error.strerror}); what was measured is shown all the same, "
            "and kept with the next result if there is room by then",
            err=True,
        )


def _default_model() -> str:
    """The best model available; the user is told which."""
    from foretoken import zoo

    chosen = choose_model(None)
    typer.echo(f"foretoken: measuring {chosen}, {zoo.manifest(chosen).title}", err=True)
    return chosen


def _hide_progress_of_loading() -> None:
    """Hide the progress of loading where standard error is not a terminal."""
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()


def _is_toy(model: str) -> bool:
    from foretoken import zoo

    return model.startswith(zoo.PREFIX) and zoo.manifest(model).is_toy


def _default_scale(model: str, quick: bool) -> str:
    """A toy of the zoo gets the width of a real model; others are measured as they are."""
    return "100m" if _is_toy(model) and not quick else "none"

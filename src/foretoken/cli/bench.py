"""``foretoken bench``: the options of the verb."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.options import EXIT_DIFFERS, EXIT_INTERRUPTED, EXIT_REFUSED, choose_model

if TYPE_CHECKING:
    from rich.console import Console

    from foretoken.bench.suite import EfficiencyTable, Settings, SpeedTable, Suite

PARTS = ("speed", "copying", "sampling", "efficiency", "lookup-efficiency", "batch")
EXTRA_PARTS = ("profile", "drafting")
_QUICK: dict[str, Any] = {
    "num_prompts": 1,
    "max_new_tokens": 16,
    "contexts": (64,),
    "draft_costs": (0.0,),
    "batch_size": 2,
    "vocab_sizes": (4096,),
    "profile_contexts": (64,),
    "draft_contexts": (1000,),
    "datastore_sizes": (10_000,),
    "draft_steps": 20,
    "assisted_lengths": (2,),
    "lookup_lengths": (3,),
}
_QUICK_METHODS: dict[str, Any] = {"num_prompts": 2, "max_new_tokens": 16}


def run(
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            metavar="PATH|HUB_ID|zoo:NAME",
            show_default=False,
            help="The target; zoo:smollm2 where it is installed, else the toy zoo:tiny.",
        ),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME,...|all",
            help="Instead of the parts: which of these methods suits the model? By comma; a+b and a>b combine, JSON "
            "gives settings, all takes every method that applies.",
        ),
    ] = None,
    draft_model: Annotated[str | None, typer.Option(help="The drafter; a zoo model may bring its own.")] = None,
    scale: Annotated[
        str | None,
        typer.Option(help="Width to inflate the target to: none, 100m or HIDDENxFFN. By default 100m for a toy."),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="auto: the checkpoint's where the CPU computes in it, else float32.")
    ] = "auto",
    execution: Annotated[str, typer.Option(help="auto, eager, packed or compiled.")] = "auto",
    threads: Annotated[int | None, typer.Option(help="Threads; torch's own choice by default.", min=1)] = None,
    parts: Annotated[
        str, typer.Option(help=f"Which of {', '.join(PARTS)}, {', '.join(EXTRA_PARTS)}, by comma; see below.")
    ] = ",".join(PARTS),
    contexts: Annotated[str, typer.Option(help="Tokens of context, by comma.")] = "256,1500",
    num_prompts: Annotated[
        int | None,
        typer.Option(help="Prompts: 4 per table; with --methods 9, of the kinds in turn.", min=1, show_default=False),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per prompt.", min=2)] = 48,
    repeats: Annotated[int, typer.Option(help="Rounds of A B B A per prompt.", min=1)] = 1,
    num_speculative_tokens: Annotated[
        int | None,
        typer.Option(
            "--num-speculative-tokens",
            "-k",
            help="Draft tokens of foretoken's own drafters; by default those of their methods.",
            min=1,
        ),
    ] = None,
    draft_costs: Annotated[
        str, typer.Option(help="Costs to inflate the drafter to, by comma; 0 is the drafter as it is.")
    ] = "0,0.05,0.15",
    assisted_lengths: Annotated[
        str, typer.Option(help="Numbers of assistant tokens among which transformers' assisted generation is tuned.")
    ] = "1,2,3,4,5,6,8",
    lookup_lengths: Annotated[
        str, typer.Option(help="Numbers of tokens among which transformers' prompt lookup is tuned.")
    ] = "2,3,5,8,10,15",
    batch_size: Annotated[int, typer.Option(help="Rows of the batch.", min=1)] = 8,
    stop_at_eos: Annotated[
        bool | None,
        typer.Option(
            "--stop-at-eos/--ignore-eos",
            help="End where the model ends (with --methods, unless the model is a toy), or at the budget (the parts).",
        ),
    ] = None,
    prompts_file: Annotated[
        Path | None,
        typer.Option(
            help="Spec-Bench's question.jsonl, JSONL with prompt or text, or .txt; by default the built-in prompts."
        ),
    ] = None,
    kinds: Annotated[
        str | None, typer.Option(help="With --methods: kinds of prompts, by comma; again is a question asked again.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="With --methods: 0 is greedy.", min=0.0)] = 0.0,
    top_p: Annotated[float, typer.Option(help="With --methods: 1 is off.", min=0.0, max=1.0)] = 1.0,
    exactness: Annotated[
        str, typer.Option(help="With --methods: default, strict or relaxed, of the runs that are timed.")
    ] = "default",
    save_config: Annotated[
        Path | None,
        typer.Option(help="With --methods: write the recommended config here, for --speculative-config @FILE."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of sampling.", min=0)] = 0,
    profile: Annotated[bool, typer.Option("--profile", help=f"Also the parts {' and '.join(EXTRA_PARTS)}.")] = False,
    draft_contexts: Annotated[
        str, typer.Option(help="Tokens of context at which the host time of drafting is measured.")
    ] = "1000,16000,128000",
    datastore_sizes: Annotated[
        str,
        typer.Option(
            help="Tokens of the datastores that are built for it, such as 1e5,1e7,1e8; of 1e8 tokens the sorting alone "
            "takes 40 seconds and 1 GB of memory."
        ),
    ] = "1e5",
    quick: Annotated[
        bool, typer.Option("--quick", help="Everything once and small, in seconds; no figures to quote.")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="Write all results, with their conditions, to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The same on standard output instead of tables.")] = False,
) -> None:
    """Measure drafted decoding against plain decoding, transformers' generate, assisted generation and prompt lookup.

    With --methods: plain decoding and these methods interleaved on the same prompts, tokens compared first, and at the
    end the speculative config to use, as JSON.

    Parts. speed: greedy, prompts of all kinds, at every context. copying: lookup where the output repeats the prompt.
    sampling: temperature 1. efficiency, lookup-efficiency: speed-up against what tau and the forwards allow. batch:
    ragged rows together against one by one. profile: where a step goes, by vocabulary and context. drafting:
    microseconds per proposal of the drafters that make no forward, by context and size of the datastore.

    Exit codes: 0 done, 2 refused, 3 outputs differ (then their speed is not shown), 130 interrupted (partial
    results are kept).
    """
    from foretoken.bench.suite import Settings, UnequalOutputsError
    from foretoken.errors import ForetokenError

    results: dict[str, Any] = {}
    keep = partial(_write, output, results)
    code = 0
    try:
        model = model or _default_model()
        if quick:
            threads = threads or 1  # several would wait for each other longer than they compute
        if threads is not None:
            import torch

            torch.set_num_threads(threads)
        scale = scale or _default_scale(model, quick)
        _hide_progress_of_loading()
        if methods is not None:
            from foretoken.bench.arms import Sampling
            from foretoken.bench.which import WhichSettings, read_candidates
            from foretoken.cli.which import compare_methods

            ignore_eos = _is_toy(model) if stop_at_eos is None else not stop_at_eos
            wanted = {
                "num_prompts": num_prompts,
                "max_new_tokens": max_new_tokens,
                "kinds": None if kinds is None else tuple(_split(kinds)),
                **(_QUICK_METHODS if quick else {}),
            }
            code = compare_methods(
                model,
                dtype,
                scale,
                read_candidates(methods, draft_model, num_speculative_tokens),
                WhichSettings(
                    repeats=repeats,
                    prompts_file=prompts_file,
                    sampling=Sampling(temperature, top_p, seed, ignore_eos),
                    execution=execution,
                    exactness=exactness,
                    **{name: value for name, value in wanted.items() if value is not None},
                ),
                results,
                keep,
                is_shown=not as_json,
                save_config=save_config,
            )
        else:
            chosen = _chosen(parts) + [part for part in EXTRA_PARTS if profile]
            settings = Settings(
                num_prompts=num_prompts or Settings.num_prompts,
                max_new_tokens=max_new_tokens,
                repeats=repeats,
                contexts=_integers(contexts, "contexts"),
                draft_costs=_numbers(draft_costs, "draft-costs"),
                num_draft_tokens=num_speculative_tokens,
                assisted_lengths=_integers(assisted_lengths, "assisted-lengths"),
                lookup_lengths=_integers(lookup_lengths, "lookup-lengths"),
                batch_size=batch_size,
                draft_contexts=_integers(draft_contexts, "draft-contexts"),
                datastore_sizes=_integers(datastore_sizes, "datastore-sizes"),
                ignore_eos=not stop_at_eos,
                seed=seed,
                execution=execution,
                prompts_file=prompts_file,
            )
            if quick:
                settings = replace(settings, **_QUICK)
            suite = _suite(model, draft_model, dtype, scale, settings)
            _measure(suite, chosen, results, keep, is_shown=not as_json)
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except UnequalOutputsError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(EXIT_DIFFERS) from None
    except ForetokenError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(EXIT_REFUSED) from None
    if as_json and results:
        sys.stdout.write(json.dumps(results) + "\n")
    if code:
        raise typer.Exit(code)


def _write(output: Path | None, results: dict[str, Any]) -> None:
    """All that was measured so far, so that an interrupted run leaves it."""
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


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


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _integers(text: str, name: str) -> tuple[int, ...]:
    return tuple(int(number) for number in _numbers(text, name))


def _numbers(text: str, name: str) -> tuple[float, ...]:
    from foretoken.errors import ConfigError

    try:
        return tuple(map(float, _split(text)))
    except ValueError:
        raise ConfigError(f"--{name} is {text!r}; give numbers with commas between them") from None


def _chosen(parts: str) -> list[str]:
    from foretoken.errors import ConfigError

    chosen = _split(parts)
    unknown = [part for part in chosen if part not in (*PARTS, *EXTRA_PARTS)]
    if unknown:
        raise ConfigError(f"--parts holds {unknown[0]!r}; choose among {', '.join((*PARTS, *EXTRA_PARTS))}")
    return chosen


def _suite(model: str, draft_model: str | None, dtype: str, scale: str, settings: Settings) -> Suite:
    """The models behind the options; what is running is told on standard error, when that is a terminal."""
    from rich.console import Console

    from foretoken.bench.models import load_pair
    from foretoken.bench.suite import Suite

    status = Console(stderr=True, style="dim", highlight=False, quiet=not sys.stderr.isatty())
    return Suite(load_pair(model, draft_model, dtype), scale, settings, status.print)


def _measure(
    suite: Suite, parts: list[str], results: dict[str, Any], keep: Callable[[], None], *, is_shown: bool
) -> None:
    """Run the parts into ``results``; tables appear, and are kept, as they are ready."""
    import torch
    from rich.console import Console

    from foretoken.bench import report
    from foretoken.bench.provenance import provenance

    console = Console(highlight=False, quiet=not is_shown)
    facts = provenance()
    kind = str(suite.target.dtype).removeprefix("torch.")
    execution = suite.target.execution.describe()
    report.show_provenance(console, facts, suite.pair.label, kind, execution)
    results |= {
        "provenance": facts,
        "models": suite.pair.label,
        "dtype": kind,
        "execution": execution,
        "settings": {**report.plain_data(suite.settings), "prompts_file": str(suite.settings.prompts_file or "own")},
    }
    with torch.inference_mode():
        for _ in _parts(suite, parts, results, console):
            keep()


def _parts(suite: Suite, parts: list[str], results: dict[str, Any], console: Console) -> Iterator[None]:
    """After every table that was added to ``results``."""
    from foretoken.bench import report
    from foretoken.progress import build_bar

    tables: list[Callable[[], SpeedTable]] = []
    if "speed" in parts:
        tables += [partial(suite.speed, context, suite.greedy) for context in suite.settings.contexts]
    if "copying" in parts:
        tables += [partial(suite.copying, suite.greedy), partial(suite.passages, suite.greedy)]
    if "sampling" in parts:
        first = suite.settings.contexts[0]
        tables += [partial(suite.speed, first, suite.sampled(top_p)) for top_p in (1.0, 0.9)]
    for measure in tables:
        table = measure()
        report.show_speed(console, table)
        report.show_gaps(console, table.rows)
        results.setdefault("speed", []).append(report.plain_data(table))
        yield
    efficiencies: list[Callable[[], EfficiencyTable]] = []
    if "efficiency" in parts and suite.pair.drafter is not None:
        context = suite.settings.contexts[0]
        efficiencies += [partial(suite.efficiency, cost, context, suite.greedy) for cost in suite.settings.draft_costs]
    if "lookup-efficiency" in parts:
        efficiencies.append(partial(suite.lookup_efficiency, suite.greedy))
    found = []
    for measure_efficiency in efficiencies:
        found.append(measure_efficiency())
        results["efficiency"] = report.plain_data(found)
        yield
    if found:
        report.show_efficiency(console, found)
    if "batch" in parts:
        rows = suite.batch(suite.greedy)
        report.show_batch(console, rows)
        results["batch"] = report.plain_data(rows)
        yield
    if "profile" in parts:
        cells = list(suite.profiles([suite.greedy, suite.sampled(0.9)]))
        report.show_profiles(console, cells)
        results["profile"] = report.plain_data(cells)
        yield
    if "drafting" in parts:
        with build_bar() as bar:
            costs = list(suite.drafting(bar))
        report.show_drafting(console, costs)
        results["drafting"] = report.plain_data(costs)
        yield

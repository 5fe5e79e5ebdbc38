"""``foredraft bench``: measurements of the parts, a comparison of methods, or a race beside other engines."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import typer
from rich.console import Console

from foredraft.cli.bench_options import BenchOptions
from foredraft.cli.options import takes_groups
from foredraft.cli.running import (
    EXIT_DIFFERS,
    EXIT_INTERRUPTED,
    choose_model,
    exit_codes,
    hide_progress_of_loading,
    put_json,
    say,
    writing,
)
from foredraft.ending import finishing
from foredraft.folders import check_place, keep_json
from foredraft.progress import stages

if TYPE_CHECKING:
    from foredraft.bench.candidates import MethodCandidate
    from foredraft.bench.parts import Suite
    from foredraft.bench.report import Report
    from foredraft.model.lm import CausalLM

Found = TypeVar("Found")


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
    from foredraft.bench.parts import UnequalOutputsError

    if options.make_peers is not None:
        measure: Callable[[], int] = partial(_make_environments, options)
        results: dict[str, Any] = {}
    else:
        from foredraft.bench.report import Report

        console = Console(highlight=False, quiet=options.as_json)
        report = Report(console, options.output, say)
        measure, results = partial(_measure, options, report), report.results
    try:
        with exit_codes():
            try:
                code = measure()
            except UnequalOutputsError as error:
                say(f"{type(error).__name__}: {error}")
                code = EXIT_DIFFERS
    finally:
        if options.as_json and results:
            with finishing():
                put_json(results)
    if code:
        raise typer.Exit(code)


def _make_environments(options: BenchOptions) -> int:
    """Make what ``--make-peers`` names.

    Raises: ConfigError.
    """
    from foredraft.bench.peers.environments import environments, make, read_peers

    for peer in read_peers(options.make_peers or "", "--make-peers"):
        make(peer, environments(options.peers_folder), lambda text: typer.echo(text, err=True))
    return 0


def _measure(options: BenchOptions, report: Report) -> int:
    """Fill the report, which is kept as it grows, and return the exit code."""
    import torch

    for file in (options.output, options.save_config):
        if file is not None:
            with writing(file):
                file.parent.mkdir(parents=True, exist_ok=True)
            check_place(file)
    model = options.model or _default_model()
    is_small = options.quick and options.peers is None
    threads = options.threads or (1 if is_small else None)  # several would wait longer than they compute
    if threads is not None:
        torch.set_num_threads(threads)
    scale = options.scale or _default_scale(model, options.quick)
    hide_progress_of_loading()
    if options.peers is not None:
        return _race(options, model, scale, report)
    with torch.inference_mode():
        if options.methods is not None:
            return _compare_methods(options, model, scale, report)
        return _measure_parts(options, model, scale, report)


# -- the three benchmarks ----------------------------------------------------------------------------------------


def _measure_parts(options: BenchOptions, model: str, scale: str, report: Report) -> int:
    """Tables appear, and are kept, as they are ready; what is running is told on standard error of a terminal."""
    from foredraft.bench.models import load_pair
    from foredraft.bench.parts import Suite
    from foredraft.errors import ConfigError

    parts = options.chosen_parts()
    status = Console(stderr=True, style="dim", highlight=False, quiet=not sys.stderr.isatty())
    loading = options.loading()
    del loading["execution"]
    if loading.pop("kv_cache_dtype") != "auto":
        raise ConfigError(
            f"--kv-cache-dtype {options.kv_cache_dtype} is for --methods: the parts compare with transformers' own "
            "generate, which rounds no keys and values"
        )
    pair = load_pair(model, options.draft_model, **loading)
    suite = Suite(pair, scale, options.settings(), status.print)
    dtype, execution = _dtype(suite.target), suite.target.execution.describe()
    report.begin({}, suite.settings, models=suite.pair.label, dtype=dtype, execution=execution)
    report.show_conditions()
    _fill_parts(suite, parts, report)
    return 0


def _fill_parts(suite: Suite, parts: list[str], report: Report) -> None:
    from foredraft.bench import accepted
    from foredraft.bench.report import show
    from foredraft.bench.tables import batch_table, drafting_table, profile_table

    settings, greedy = suite.settings, suite.greedy
    first = settings.contexts[0]
    speeds = [partial(suite.speed, context, greedy) for context in settings.contexts if "speed" in parts]
    if "copying" in parts:
        speeds += [partial(suite.copying, greedy), partial(suite.passages, greedy)]
    if "sampling" in parts:
        speeds += [partial(suite.speed, first, suite.sampled(top_p)) for top_p in (1.0, 0.9)]
    for measure in speeds:
        table = measure()
        report.add("speed", table, table.shown())
    efficiencies = []
    if "efficiency" in parts and suite.pair.drafter is not None:
        efficiencies += [partial(suite.efficiency, cost, first, greedy) for cost in settings.draft_costs]
    if "lookup-efficiency" in parts:
        efficiencies.append(partial(suite.lookup_efficiency, greedy))
    for measure_efficiency in efficiencies:
        found = measure_efficiency()
        report.add("efficiency", found, found.shown())
    if "accepted" in parts:
        lengths = []
        for sampling in (greedy, suite.sampled()):
            lengths += suite.accepted(sampling)
            report.keep(accepted=lengths)
        show(report.console, accepted.shown(lengths))
    if "batch" in parts:
        rows = suite.batch(greedy)
        show(report.console, [batch_table(rows)])
        report.keep(batch=rows)
    if "profile" in parts:
        cells = list(suite.profiles([greedy, suite.sampled(0.9)]))
        show(report.console, [profile_table(cells)])
        report.keep(profile=cells)
    if "drafting" in parts:
        with stages() as watch:
            costs = list(suite.drafting(watch))
        show(report.console, [drafting_table(costs)])
        report.keep(drafting=costs)


def _compare_methods(options: BenchOptions, model: str, scale: str, report: Report) -> int:
    """Interrupted, it shows and keeps what the prompts so far have told."""
    from foredraft.bench.candidates import read_candidates
    from foredraft.bench.methods import Methods
    from foredraft.bench.outcome import MethodsOutcome, advise, by_kind
    from foredraft.bench.report import show

    candidates = read_candidates(options.methods or "", options.draft_model, options.num_speculative_tokens)
    settings = options.methods_settings(is_toy=_is_toy(model))
    notes = model_notes(model, candidates)

    def keep(outcome: MethodsOutcome) -> None:
        advice = advise(outcome)
        report.keep(
            methods=outcome,
            by_kind=by_kind(outcome),
            recommended_config=dict(advice.config),
            reason=advice.reason,
            notes=[*advice.notes, *notes],
        )

    def compare(note: Callable[[MethodsOutcome], None]) -> MethodsOutcome:
        with stages() as watch:
            loading = options.loading()
            del loading["execution"]
            methods = Methods(model, loading.pop("dtype"), scale, settings, watch, **loading)
            dtype, execution = _dtype(methods.target), methods.target.execution.describe()
            report.begin({}, settings, model=model, models=methods.label, dtype=dtype, execution=execution)
            return methods.run(candidates, note)

    found, code = _as_far_as_it_came(keep, compare)
    if not found:
        return code
    report.show_conditions()
    show(report.console, found[0].shown(model, notes))
    if options.save_config is not None:
        with writing(options.save_config):
            keep_json(options.save_config, report.results["recommended_config"])
        report.console.print(f"  --speculative-config @{options.save_config}", markup=False, soft_wrap=True)
    return code or (EXIT_DIFFERS if found[0].different else 0)


def _race(options: BenchOptions, model: str, scale: str, report: Report) -> int:
    """Interrupted, it shows and keeps what the prompts so far have told.

    Raises: ForedraftError.
    """
    import torch

    from foredraft.bench.peers.environments import OPENVINO, check_installed, environments, launches, read_peers
    from foredraft.bench.peers.export import export, prompts_of
    from foredraft.bench.peers.outcome import RaceOutcome
    from foredraft.bench.peers.race import Race
    from foredraft.bench.report import show
    from foredraft.errors import ConfigError

    rounding = ("quantization", "weights", "kv_cache_dtype")
    given = [f"--{name.replace('_', '-')}" for name in rounding if getattr(options, name) not in (None, "auto")]
    if given:
        raise ConfigError(
            f"{given[0]} is not for --peers: a race gives all engines the same weights, so that their texts can be "
            "compared; --quantised lets all of them run in fewer bits, too, and --methods measures this library in them"
        )
    peers, folder = read_peers(options.peers or "", "--peers"), environments(options.peers_folder)
    check_installed(peers, folder)
    settings = options.race_settings(options.threads or torch.get_num_threads())

    def race(note: Callable[[RaceOutcome], None]) -> RaceOutcome:
        with Race(exported, dtype, engines, missing, settings, watch) as running:
            length = settings.max_new_tokens
            target = exported.folder / "target"
            prompts = prompts_of(target, settings.kinds, settings.prompts_file, length, running.answer)
            return running.run(prompts, note)

    with stages(say) as watch:
        exported = export(model, options.draft_model, scale, say)
        dtype = exported.dtype if options.dtype == "auto" else options.dtype
        if dtype not in OPENVINO:
            raise ConfigError(f"--dtype is {dtype!r}; other engines run in {', '.join(OPENVINO)}")
        arming = options.arming(exported.has_draft)
        engines, missing = launches(exported, model, scale, dtype, arming, peers, folder)
        for name, reason in missing.items():
            say(f"{name} takes no part: {reason}")
        more = {"model": model, "models": exported.models, "dtype": dtype, "execution": options.execution}
        report.begin({"num_threads": settings.threads}, settings, **more)
        found, code = _as_far_as_it_came(lambda outcome: report.keep(race=outcome), race)
    if not found:
        return code
    report.show_conditions(f"execution {options.execution}")
    show(report.console, found[0].shown())
    return code or (EXIT_DIFFERS if found[0].wrong else 0)


def _as_far_as_it_came(
    keep: Callable[[Found], None], run: Callable[[Callable[[Found], None]], Found]
) -> tuple[list[Found], int]:
    """What a run has found, and the exit code; of one that was interrupted, what the prompts so far have told, if any.

    Args:
      keep: is told of all that is known so far.
      run: takes what is to be told of it.
    """
    latest: list[Found] = []

    def note(outcome: Found) -> None:
        latest[:] = [outcome]
        keep(outcome)

    try:
        note(run(note))
    except KeyboardInterrupt:
        if not latest:
            Console(stderr=True).print("interrupted before the first prompt was done: nothing was measured")
        return latest, EXIT_INTERRUPTED
    return latest, 0


def model_notes(model: str, candidates: list[MethodCandidate]) -> tuple[str, ...]:
    """The zoo's notes on the figures that these methods reach with a model."""
    from foredraft import zoo
    from foredraft.loading.models import is_zoo

    if not is_zoo(model):
        return ()
    named = {part.method for one in candidates for part in one.config.parts}
    return zoo.manifest(model).notes_about(map(str, named))


def _default_model() -> str:
    """The best model available; the user is told which."""
    from foredraft import zoo

    chosen = choose_model(None)
    say(f"measuring {chosen}, {zoo.manifest(chosen).title}")
    return chosen


def _dtype(target: CausalLM) -> str:
    """Of the arithmetic, and of weights, keys and values that are not in it."""
    weights = [] if target.quantization is None else [f"{target.quantization} weights"]
    cells = [] if target.kv_dtype is None else [f"{str(target.kv_dtype).removeprefix('torch.')} keys and values"]
    return ", ".join([str(target.dtype).removeprefix("torch."), *weights, *cells])


def _is_toy(model: str) -> bool:
    from foredraft import zoo

    return model.startswith(zoo.PREFIX) and zoo.manifest(model).is_toy


def _default_scale(model: str, quick: bool) -> str:
    """A toy of the zoo gets the width of a real model; others are measured as they are."""
    return "100m" if _is_toy(model) and not quick else "none"

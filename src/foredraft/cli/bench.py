"""``foredraft bench``: methods compared with plain decoding on a model and prompts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from foredraft.cli.help import DRAFTING, OUTPUT, SAMPLING
from foredraft.cli.options import Exactness, Target, TargetOptions, takes_groups
from foredraft.cli.running import (
    EXIT_DIFFERS,
    EXIT_INTERRUPTED,
    choose_model,
    exit_codes,
    hide_loading,
    hide_progress_of_loading,
    put_json,
    say,
    show_loading,
    writing,
)
from foredraft.config.speculative import SpeculativeConfig
from foredraft.config.written import by_comma
from foredraft.ending import finishing
from foredraft.folders import check_place, keep_json
from foredraft.progress import stages

if TYPE_CHECKING:
    from foredraft.bench.methods import MethodsSettings
    from foredraft.bench.outcome import MethodsOutcome
    from foredraft.bench.report import Report
    from foredraft.model.lm import CausalLM

_QUICK = {"num_prompts": 2, "max_new_tokens": 16}


@dataclass(frozen=True)
class BenchOptions(TargetOptions):
    """Methods, prompts and destination of the results."""

    model: Target = None
    methods: Annotated[
        str,
        typer.Option(
            metavar="NAME,NAME,...|all",
            rich_help_panel=DRAFTING,
            help="Methods to compare, separated by commas. a+b and a>b combine methods; JSON gives settings; all takes "
            "every method that works with the model.",
        ),
    ] = "all"
    draft_model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", rich_help_panel=DRAFTING, help="Smaller model for drafting. zoo:tiny has one."),
    ] = None
    threads: Annotated[int | None, typer.Option(help="Threads. Default: torch decides.", min=1)] = None
    num_prompts: Annotated[int, typer.Option(help="Number of prompts, of all kinds in turn.", min=1)] = 9
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate per prompt.", min=2)] = 48
    repeats: Annotated[int, typer.Option(help="Repetitions per prompt.", min=1)] = 1
    num_speculative_tokens: Annotated[
        int | None,
        typer.Option(
            "--num-speculative-tokens",
            "-k",
            metavar="K",
            rich_help_panel=DRAFTING,
            help="Longest draft in tokens. Default: the method's.",
            min=1,
        ),
    ] = None
    forced: Annotated[
        bool,
        typer.Option(
            "--forced",
            rich_help_panel=DRAFTING,
            help="Turn off the governor, which skips drafts that are not worth their cost; draft lengths are fixed.",
        ),
    ] = False
    stop_at_eos: Annotated[
        bool | None,
        typer.Option(
            "--stop-at-eos/--ignore-eos",
            hidden=True,
            help="End outputs at EOS, or only at --max-new-tokens. Default: at EOS, except for toy models.",
        ),
    ] = None
    prompts_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Spec-Bench's question.jsonl, other JSONL, or .txt. Default: built-in prompts."
        ),
    ] = None
    kinds: Annotated[
        str | None,
        typer.Option(metavar="KIND,...", help="Kinds of prompts, such as chat, code or again (a repeated question)."),
    ] = None
    temperature: Annotated[float, typer.Option(rich_help_panel=SAMPLING, help="0 is greedy.", min=0.0)] = 0.0
    top_p: Annotated[float, typer.Option(hidden=True, rich_help_panel=SAMPLING, help="1 is off.", min=0.0, max=1.0)] = (
        1.0
    )
    exactness: Exactness = "default"
    save_config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", rich_help_panel=OUTPUT, help="Write the best config, for --speculative-config @FILE."
        ),
    ] = None
    seed: Annotated[int, typer.Option(rich_help_panel=SAMPLING, help="Seed of sampling.", min=0)] = 0
    quick: Annotated[bool, typer.Option("--quick", help="Small and fast, to try it; the figures mean little.")] = False
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", rich_help_panel=OUTPUT, help="Write all results and conditions to this file."),
    ] = None
    as_json: Annotated[
        bool, typer.Option("--json", rich_help_panel=OUTPUT, help="Print the results as JSON instead of tables.")
    ] = False

    def settings(self, *, is_toy: bool) -> MethodsSettings:
        """Settings of the comparison. Toy models do not end their output by default."""
        from foredraft.bench.methods import MethodsSettings
        from foredraft.bench.trial import Sampling

        ignore_eos = is_toy if self.stop_at_eos is None else not self.stop_at_eos
        sizes = _QUICK if self.quick else {name: getattr(self, name) for name in _QUICK}
        return MethodsSettings(
            **sizes,
            repeats=self.repeats,
            kinds=None if self.kinds is None else tuple(by_comma(self.kinds)),
            prompts_file=self.prompts_file,
            sampling=Sampling(self.temperature, self.top_p, self.seed, ignore_eos),
            execution=self.execution,
            exactness=self.exactness,
            is_forced=self.forced,
        )


@takes_groups
def bench(options: BenchOptions) -> None:
    """Measure methods against plain decoding on the same prompts.

    Tokens are compared first; methods whose output differs get no speed. The last line is the best speculative config
    as JSON.

    Exit codes: 0 done, 2 refused, 3 outputs differ, 130 interrupted (partial results are kept).

    Examples:
      foredraft bench --quick
      foredraft bench --model path/to/model --methods suffix,ngram
    """
    with exit_codes():
        model = options.model or _default_model()
        show_loading(model)
    from foredraft.bench.report import Report

    report = Report(Console(highlight=False, quiet=options.as_json), options.output, say)
    try:
        with exit_codes():
            code = _measure(options, model, report)
    finally:
        if options.as_json and report.results:
            with finishing():
                put_json(report.results)
    if code:
        raise typer.Exit(code)


def _measure(options: BenchOptions, model: str, report: Report) -> int:
    """Measure, write the report as it grows, and return the exit code."""
    for file in (options.output, options.save_config):
        if file is not None:
            with writing(file):
                file.parent.mkdir(parents=True, exist_ok=True)
            check_place(file)
    import torch

    hide_loading()  # a progress bar is next
    threads = options.threads or (1 if options.quick else None)  # several threads would mostly wait for each other
    if threads is not None:
        torch.set_num_threads(threads)
    hide_progress_of_loading()
    with torch.inference_mode():
        return _compare_methods(options, model, report)


def _compare_methods(options: BenchOptions, model: str, report: Report) -> int:
    """Compare methods, print and write the results. After an interrupt, the partial results are kept."""
    from foredraft.bench.candidates import read_candidates
    from foredraft.bench.methods import Methods
    from foredraft.bench.outcome import advise, by_kind, governor_note
    from foredraft.bench.report import show

    candidates = read_candidates(
        options.methods, options.draft_model, options.num_speculative_tokens, is_forced=options.forced
    )
    settings = options.settings(is_toy=_is_toy(model))
    notes = model_notes(model, candidates.values())
    latest: list[MethodsOutcome] = []

    def note(outcome: MethodsOutcome) -> None:
        latest[:] = [outcome]
        advice = advise(outcome)
        report.keep(
            methods=outcome,
            by_kind=by_kind(outcome),
            recommended_config=dict(advice.config),
            reason=advice.reason,
            notes=[*advice.notes, *filter(None, [governor_note(outcome.rows)]), *notes],
        )

    code = 0
    try:
        with stages() as watch:
            loading = options.loading()
            del loading["execution"]
            methods = Methods(model, loading.pop("dtype"), settings, watch, **loading)
            dtype, execution = _dtype(methods.target), methods.target.execution.describe()
            report.begin(settings, model=model, models=methods.label, dtype=dtype, execution=execution)
            note(methods.run(candidates, note))
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
        if not latest:
            Console(stderr=True).print("interrupted before the first prompt was done; nothing was measured")
            return code
    report.show_conditions()
    show(report.console, latest[0].shown(model, notes))
    if options.save_config is not None:
        with writing(options.save_config):
            keep_json(options.save_config, report.results["recommended_config"])
        report.console.print(f"  --speculative-config @{options.save_config}", markup=False, soft_wrap=True)
    return code or (EXIT_DIFFERS if latest[0].different else 0)


def model_notes(model: str, methods: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Notes of the zoo on the figures of methods with a model.

    Args:
      methods: speculative configs.
    """
    from foredraft import zoo
    from foredraft.loading.models import is_zoo

    if not is_zoo(model):
        return ()
    named = {part.method for given in methods for part in SpeculativeConfig.parse(given).parts}
    return zoo.manifest(model).notes_about(map(str, named))


def _default_model() -> str:
    """Name of the best model available, which is announced."""
    from foredraft import zoo

    chosen = choose_model(None)
    say(f"measuring {chosen}, {zoo.manifest(chosen).title}")
    return chosen


def _dtype(target: CausalLM) -> str:
    """Precision of the arithmetic, and of weights, activations, keys and values if they differ."""
    weights = [] if target.quantization is None else [f"{target.quantization} weights"]
    cells = [] if target.kv_dtype is None else [f"{str(target.kv_dtype).removeprefix('torch.')} keys and values"]
    inputs = [] if target.activations is None else [f"{target.activations} activations"]
    return ", ".join([str(target.dtype).removeprefix("torch."), *weights, *inputs, *cells])


def _is_toy(model: str) -> bool:
    from foredraft import zoo

    return model.startswith(zoo.PREFIX) and zoo.manifest(model).is_toy

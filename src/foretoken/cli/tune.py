"""``foretoken tune``: searches for the settings with which a drafter is fast. Its one verb so far is ``layer-skip``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from foretoken.cli.options import (
    EXIT_INTERRUPTED,
    AsJson,
    Dtype,
    Execution,
    NumSpeculativeTokens,
    choose_model,
    exit_codes,
)
from foretoken.cli.prompts import Raw, ask, read_prompts_file

if TYPE_CHECKING:
    from foretoken.bench.workload import Prompt
    from foretoken.drafters.parts.layer_set import LayerSet
    from foretoken.model.lm import CausalLM
    from foretoken.tune.layer_sets import LayerSearch, SearchResult, Trial
    from foretoken.tune.objective import Task
    from foretoken.tune.space import Space

app = typer.Typer(name="tune", help="Search for the settings with which a drafter is fast.", no_args_is_help=True)

BUILT_IN = "built-in"
OBJECTIVES = ("time", "acceptance")


@app.callback()
def _tune() -> None:
    """Search for the settings with which a drafter is fast."""


@app.command("layer-skip")
def layer_skip(
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE.json", help="The layer set to write.")],
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="PATH|HUB_ID|zoo:NAME",
            help="The model that will draft for itself; zoo:smollm2 where it is installed, else the toy zoo:tiny.",
        ),
    ] = None,
    prompts: Annotated[
        str, typer.Option("--prompts", help="JSONL or .txt file with prompts like those to come, or built-in.")
    ] = BUILT_IN,
    raw: Raw = False,
    num_prompts: Annotated[int, typer.Option(help="Use only this many of them, from the first.", min=1)] = 8,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per prompt; the published search took 32.", min=2)] = 32,
    trials: Annotated[int, typer.Option(help="Different sets to try, resumed ones included.", min=1)] = 100,
    objective: Annotated[
        str,
        typer.Option(help="time: measured, interleaved with plain decoding; acceptance: computed, for noisy machines."),
    ] = "time",
    keep_layers: Annotated[str, typer.Option(help="Layers to keep whole, by comma; -1 is the last.")] = "",
    num_speculative_tokens: NumSpeculativeTokens = None,
    speculative_config: Annotated[
        str | None,
        typer.Option("--speculative-config", metavar="JSON|@FILE", help="Keys of layer_skip besides the set."),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Rounds of plain, set, set, plain per prompt and trial.", min=1)] = 1,
    finalists: Annotated[
        int, typer.Option(help="Best sets that are timed once more, interleaved; 0 for none.", min=0)
    ] = 3,
    scale: Annotated[str, typer.Option(help="Inflate in width for timing: none, 100m or HIDDENxFFN.")] = "none",
    dtype: Dtype = "auto",
    execution: Execution = "auto",
    seed: Annotated[int, typer.Option(help="Seed of the optimiser.", min=0)] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the trials of an earlier search.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Picture of the search; needs matplotlib.")] = None,
    as_json: AsJson = False,
) -> None:
    """Find which attention and MLP sublayers to leave out while drafting (method layer_skip).

    Every trial is kept in FILE.trials beside the output. Ctrl-C ends the search and keeps the best set so far.
    """
    with exit_codes():
        job = _Job.of(
            _Options(
                choose_model(model),
                prompts,
                raw,
                num_prompts,
                max_new_tokens,
                objective,
                keep_layers,
                scale,
                dtype,
                execution,
                seed,
            ),
            _draft_keys(speculative_config, num_speculative_tokens),
            repeats,
        )
        if plot is not None:
            from foretoken.views.traceplot import check_picture

            check_picture(plot)
        search = job.search(_journal(out), resume)
        with _bar(trials) as on_trial:
            result = search.run(trials, on_trial)
        if not result.trials:
            typer.echo("foretoken: interrupted before any set was tried; nothing was written", err=True)
            raise typer.Exit(EXIT_INTERRUPTED)
        report = job.finish(result, finalists)
        report["out"] = str(out)
        _write(job.layer_set(report), out)
        if plot is not None:
            from foretoken.tune.picture import plot_search

            report["plot"] = str(plot_search(result, job.space, plot))
        _show(report, as_json)
        if result.is_interrupted:
            raise typer.Exit(EXIT_INTERRUPTED)


@dataclass(frozen=True)
class _Options:
    """The options that define a search; equal options make trials comparable."""

    model: str
    prompts: str
    raw: bool
    num_prompts: int
    max_new_tokens: int
    objective: str
    keep_layers: str
    scale: str
    dtype: str
    execution: str
    seed: int


@dataclass(frozen=True)
class _Job:
    """A search, ready to run.

    Args:
      timed: the task on the model as it is timed, inflated or not.
      counted: the same on the model as it is; what is accepted is the same.
    """

    options: _Options
    draft_keys: dict[str, Any]
    space: Space
    timed: Task
    counted: Task
    repeats: int

    @classmethod
    def of(cls, options: _Options, draft_keys: dict[str, Any], repeats: int) -> _Job:
        """Load the model and the prompts.

        Raises: ConfigError, CheckpointError, PromptError, UnsupportedModelError.
        """
        from foretoken.bench.models import Pair, scaled
        from foretoken.errors import ConfigError
        from foretoken.loading.models import load_model
        from foretoken.model.lm import CausalLM
        from foretoken.tune.layer_sets import require_optuna
        from foretoken.tune.objective import Task
        from foretoken.tune.space import Space

        require_optuna()
        if options.objective not in OBJECTIVES:
            raise ConfigError(f"objective is {options.objective!r}; choose one of {', '.join(OBJECTIVES)}")
        loaded = load_model(options.model, dtype=options.dtype)
        bigger = scaled(Pair(loaded.model, None, loaded.tokenizer, ()), options.scale).target
        prompts = tuple(_prompts(options, loaded.tokenizer))
        target = CausalLM(loaded.model, execution=options.execution)
        timed = target if bigger is loaded.model else CausalLM(bigger, execution=options.execution)
        space = Space.of(target.num_layers, _integers(options.keep_layers))
        task, counted = (
            Task(lm, prompts, options.max_new_tokens, _drafter_of(lm, draft_keys)) for lm in (timed, target)
        )
        return cls(options, draft_keys, space, task, counted, repeats)

    def search(self, journal: Path, resume: bool) -> LayerSearch:
        """The search, with what an earlier one left."""
        from foretoken.tune.layer_sets import LayerSearch, fingerprint
        from foretoken.tune.objective import Costs, ExpectedTime, MeasuredTime, Objective

        objective: Objective
        if self.options.objective == "time":
            objective = MeasuredTime(self.timed, self.repeats)
        else:
            longest = _config(self.draft_keys, None).num_speculative_tokens or 1
            objective = ExpectedTime(self.counted, Costs.measured(self.timed.target, longest))
        prompts = [prompt.token_ids for prompt in self.timed.prompts]
        options = asdict(self.options)
        del options["seed"]
        identity = {**options, "prompts": fingerprint(prompts), "speculative_config": self.draft_keys}
        return LayerSearch(
            self.space, objective, seed=self.options.seed, journal=journal, resume=resume, identity=identity
        )

    def finish(self, result: SearchResult, finalists: int) -> dict[str, Any]:
        """Choose among the best: by a common timing where time decides and the search was not interrupted."""
        from foretoken.bench.provenance import provenance
        from foretoken.tune.objective import MeasuredTime

        best, final = result.best, {}
        ranking = result.ranking(finalists)
        if self.options.objective == "time" and len(ranking) > 1 and not result.is_interrupted:
            scores = MeasuredTime(self.timed, self.repeats).scores({str(i): t.layer_set for i, t in enumerate(ranking)})
            final = {_words(ranking[int(i)].layer_set): asdict(score) for i, score in scores.items()}
            winner = min(scores, key=lambda i: scores[i].value)
            best = type(best)(ranking[int(winner)].layer_set, scores[winner])
        conditions = provenance()
        return {
            "found_by": "foretoken tune layer-skip",
            **_facts(best),
            "num_trials": len(result.trials),
            "is_interrupted": result.is_interrupted,
            "finalists": final,
            "search": {**asdict(self.options), "speculative_config": self.draft_keys},
            "conditions": {key: conditions[key] for key in ("time", "commit", "versions", "cpu", "num_threads")},
        }

    def layer_set(self, report: dict[str, Any]) -> LayerSet:
        """The result as a file that method layer_skip loads."""
        from foretoken.drafters.parts.layer_set import LayerSet

        details = {key: value for key, value in report.items() if not key.startswith("skipped_") and key != "out"}
        return LayerSet(
            tuple(report["skipped_attention"]), tuple(report["skipped_mlp"]), self.space.num_layers, details
        )


def _facts(best: Trial) -> dict[str, Any]:
    score = asdict(best.score)
    value = score.pop("value")
    return {
        "skipped_attention": list(best.layer_set.attention),
        "skipped_mlp": list(best.layer_set.mlp),
        "speedup": 1 / value,
        "time_per_token": value,
        **score,
    }


def _draft_keys(config: str | None, num_speculative_tokens: int | None) -> dict[str, Any]:
    """Keys of layer_skip that were given, the set aside.

    Raises: ConfigError for a set, or another method.
    """
    from foretoken.errors import ConfigError

    given: dict[str, Any] = {}
    if config is not None:
        try:
            text = Path(config[1:]).expanduser().read_text(encoding="utf-8") if config.startswith("@") else config
            given = dict(json.loads(text))
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"--speculative-config is not a JSON object: {error}; correct it") from None
    if num_speculative_tokens is not None:
        given["num_speculative_tokens"] = num_speculative_tokens
    method = given.pop("method", "layer_skip")
    own = sorted(given.keys() & {"layer_set", "skipped_attention", "skipped_mlp", "exit_layer", "layer_search"})
    if method != "layer_skip" or own:
        raise ConfigError(f"the search chooses the set of method layer_skip itself; leave out {own or method}")
    if given.get("num_draft_branches", 1) != 1:
        raise ConfigError("the search decodes chains; leave out num_draft_branches")
    _config(given, None)
    return given


def _config(draft_keys: dict[str, Any], layer_set: LayerSet | None) -> Any:
    from foretoken.config.speculative import SpeculativeConfig

    attention, mlp = (layer_set.attention, layer_set.mlp) if layer_set else ((), ())
    return SpeculativeConfig(method="layer_skip", skipped_attention=attention, skipped_mlp=mlp, **draft_keys)


def _drafter_of(target: CausalLM, draft_keys: dict[str, Any]) -> Callable[[LayerSet], Any]:
    from foretoken.drafters.materials import Materials, drafter_factory

    return lambda layer_set: drafter_factory(_config(draft_keys, layer_set), Materials(target))()


def _prompts(options: _Options, tokenizer: Any) -> list[Prompt]:
    """Token ids to continue: those of a file as `generate` would have them, built-in questions in chat format.

    Raises: PromptError, ConfigError.
    """
    from foretoken.bench.workload import Prompt, load_prompts, read_questions, select
    from foretoken.errors import ConfigError
    from foretoken.serving.prompts import read_prompt

    if options.prompts != BUILT_IN:
        given = read_prompts_file(options.prompts)[: options.num_prompts]
        asked = ask(tokenizer, options.model, given, raw=options.raw)
        return [Prompt(str(i), "file", read_prompt(one.prompt, tokenizer, i).token_ids) for i, one in enumerate(asked)]
    if tokenizer is None:
        raise ConfigError("the built-in prompts are text, and the model has no tokenizer; give --prompts with ids")
    return load_prompts(tokenizer, select(read_questions(), options.num_prompts))


def _integers(text: str) -> list[int]:
    from foretoken.errors import ConfigError

    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(f"keep-layers is {text!r}; give whole numbers by comma, such as 0,-1") from None


def _journal(out: Path) -> Path:
    """Checks the place of the output, too."""
    from foretoken.errors import ConfigError

    if not out.parent.is_dir() or out.is_dir():
        raise ConfigError(f"{out} cannot be written: it needs to be a file in a folder that exists")
    return out.with_suffix(".trials")


def _write(layer_set: LayerSet, out: Path) -> None:
    from foretoken.errors import ConfigError

    try:
        layer_set.save(out)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}") from None


def _words(layer_set: LayerSet) -> str:
    return f"attention {list(layer_set.attention)}, MLP {list(layer_set.mlp)}"


def _show(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(report) + "\n")
        return
    console = Console(highlight=False, markup=False)
    ended = "interrupted after" if report["is_interrupted"] else "best of"
    console.print(
        f"{ended} {report['num_trials']} sets: leave out attention {report['skipped_attention']}, "
        f"MLP {report['skipped_mlp']}"
    )
    how = "measured" if report["search"]["objective"] == "time" else "computed"
    console.print(
        f"{how} speed {report['speedup']:.3f} of plain decoding; {report['acceptance_rate']:.2f} of the drafted tokens "
        f"accepted, {report['acceptance_length']:.2f} tokens per draft"
    )
    if report["speedup"] < 1:
        console.print("no set that was tried beats plain decoding here")
    again = "; go on with --resume" if report["is_interrupted"] else ""
    console.print(
        f"kept in {report['out']}: --speculative-config "
        f'\'{{"method": "layer_skip", "layer_set": "{report["out"]}"}}\'{again}'
    )


@contextmanager
def _bar(num_trials: int) -> Iterator[Callable[[SearchResult], None]]:
    """Progress on standard error, where it is a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    columns = (
        TextColumn("sets tried"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=num_trials)

        def report(result: SearchResult) -> None:
            best = f"best {result.best.value:.3f} of plain's time, {_words(result.best.layer_set)}"
            progress.update(task, completed=len(result.trials), description=best)

        yield report

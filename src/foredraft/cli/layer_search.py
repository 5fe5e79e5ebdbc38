"""Search of ``foredraft tune layer-skip``: options and report."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foredraft.cli.options import NumSpeculativeTokens, numbers
from foredraft.cli.prompts import NumPrompts, TuneOptions
from foredraft.cli.running import choose_model, hide_loading, say, show_loading
from foredraft.ending import finishing
from foredraft.progress import stages

if TYPE_CHECKING:
    from foredraft.drafters.parts.layer_set import LayerSet
    from foredraft.model.lm import CausalLM
    from foredraft.tune.layer_sets import LayerSearch
    from foredraft.tune.objective import Score, Task

OBJECTIVES = ("time", "acceptance")


@dataclass(frozen=True)
class SearchOptions(TuneOptions):
    """Options of the search for a layer set."""

    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="The model, which drafts for itself. Default: zoo:smollm2 if it is installed, else zoo:tiny.",
        ),
    ] = None
    num_prompts: NumPrompts = 8
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate per prompt.", min=2)] = 32
    trials: Annotated[int, typer.Option(help="Number of layer sets to try.", min=1)] = 100
    objective: Annotated[
        str,
        typer.Option(metavar="|".join(OBJECTIVES), help="time is measured; acceptance is computed, for busy machines."),
    ] = "time"
    keep_layers: Annotated[str, typer.Option(metavar="N,N,...", help="Layers never to skip; -1 is the last.")] = ""
    num_speculative_tokens: NumSpeculativeTokens = None
    speculative_config: Annotated[
        str | None, typer.Option(metavar="JSON|@FILE", help="Other settings of layer_skip.")
    ] = None
    repeats: Annotated[int, typer.Option(help="Timings per prompt and trial.", min=1)] = 1
    finalists: Annotated[int, typer.Option(help="Number of best sets to time again; 0: none.", min=0)] = 3
    scale: Annotated[
        str, typer.Option(metavar="none|100m|HIDDENxFFN", hidden=True, help="Time a wider copy of the model.")
    ] = "none"
    seed: Annotated[int, typer.Option(help="Seed of the optimiser.", min=0)] = 0

    def defining(self) -> dict[str, Any]:
        """Options that identify a search, without its drafter. Trials of equal options are comparable."""
        names = ("model", "prompts", "raw", "num_prompts", "max_new_tokens", "objective", "keep_layers", "scale")
        loading = {name: value for name, value in self.loading().items() if value is not None}
        return {**{name: getattr(self, name) for name in names}, **loading, "seed": self.seed}


def find_layers(options: SearchOptions, journal: Path, resume: bool) -> tuple[LayerSearch, dict[str, Any]]:
    """Try layer sets; return the search and a report of the best set.

    Ctrl-C ends the search and keeps its trials.

    Args:
      journal: file of the trials.
      resume: continue an earlier search.

    Raises: ConfigError, CheckpointError, PromptError, UnsupportedModelError; NothingAcceptedError if no draft of any
      set was accepted; KeyboardInterrupt before the first trial.
    """
    from foredraft.errors import ConfigError
    from foredraft.loading.models import adapter_of
    from foredraft.tune.layer_sets import LayerSearch, Space, fingerprint, require_optuna
    from foredraft.tune.objective import Costs, Task
    from foredraft.tune.scale import load_scaled

    model = choose_model(options.model)
    options = replace(options, model=model)
    show_loading(model)
    hide_loading()
    draft_keys = _draft_keys(options.speculative_config, options.num_speculative_tokens)
    require_optuna()
    if options.objective not in OBJECTIVES:
        raise ConfigError(f"objective is {options.objective!r}; choose one of {', '.join(OBJECTIVES)}")
    loading = options.loading()
    runs_by = loading.pop("execution"), loading.pop("kv_cache_dtype"), loading.pop("activations")
    loaded, bigger = load_scaled(model, options.scale, **loading)
    prompts = tuple(options.read_prompts(model, loaded.tokenizer))
    target = adapter_of(loaded, *runs_by)
    timed = target if bigger is loaded else adapter_of(bigger, *runs_by)
    space = Space.of(target.num_layers, numbers("keep-layers", options.keep_layers, int))
    # the wider copy, on which time is measured, accepts the same tokens as the model
    task, counted = (Task(lm, prompts, options.max_new_tokens, _drafter_of(lm, draft_keys)) for lm in (timed, target))
    identity = {
        **{key: value for key, value in options.defining().items() if key != "seed"},
        "prompts": fingerprint([prompt.token_ids for prompt in prompts]),
        "speculative_config": draft_keys,
    }
    search = LayerSearch(space, seed=options.seed, journal=journal, resume=resume, identity=identity)
    score: Callable[[LayerSet], Score]
    if options.objective == "time":

        def score(layer_set: LayerSet) -> Score:
            return task.measured([layer_set], options.repeats)[0]

    else:
        longest = _config(draft_keys, None).num_speculative_tokens or 1
        score = partial(counted.expected, costs=search.costs(Costs.measured(timed, longest)))

    with stages() as watch:

        def tell() -> None:
            best = f"best: {search.best.value:.3f} of the time of plain decoding, {words(search.best.layer_set)}"
            watch(f"sets tried, {best}", len(search.trials), options.trials)

        search.run(score, options.trials, tell)
    if not search.trials:
        say("interrupted before the first trial; nothing was written")
        raise KeyboardInterrupt
    with finishing() if search.is_interrupted else nullcontext():
        return search, _report(search, task, options, draft_keys)


def _report(search: LayerSearch, task: Task, options: SearchOptions, draft_keys: dict[str, Any]) -> dict[str, Any]:
    """Report on the best set. If time decides and there was no interrupt, the best sets are timed again together."""
    from foredraft.bench.provenance import conditions

    search.check()
    best = search.best
    final: list[Score] = []
    ranking = [trial.layer_set for trial in search.ranking(options.finalists) if trial.is_of_use]
    if options.objective == "time" and len(ranking) > 1 and not search.is_interrupted:
        final = task.measured(ranking, options.repeats)
        best = min(final, key=lambda score: score.value)
    figures = best.figures()
    value = figures.pop("value")
    return {
        "found_by": "foredraft tune layer-skip",
        "skipped_attention": list(best.layer_set.attention),
        "skipped_mlp": list(best.layer_set.mlp),
        "speedup": 1 / value,
        "time_per_token": value,
        **figures,
        "num_trials": len(search.trials),
        "is_interrupted": search.is_interrupted,
        "finalists": {words(score.layer_set): score.figures() for score in final},
        "search": {**options.defining(), "speculative_config": draft_keys},
        "conditions": conditions(),
    }


def layer_set_of(report: dict[str, Any], num_layers: int) -> LayerSet:
    """Layer set for method layer_skip."""
    from foredraft.drafters.parts.layer_set import LayerSet

    details = {key: value for key, value in report.items() if not key.startswith("skipped_") and key != "out"}
    return LayerSet(tuple(report["skipped_attention"]), tuple(report["skipped_mlp"]), num_layers, details)


def _draft_keys(config: str | None, num_speculative_tokens: int | None) -> dict[str, Any]:
    """Settings of layer_skip without the layer set.

    Raises: ConfigError for a layer set or another method.
    """
    from foredraft.config.written import read_text
    from foredraft.errors import ConfigError

    given = {} if config is None else read_text(config)
    if not isinstance(given, dict):
        raise ConfigError(
            f"--speculative-config is {config!r}, which is not a JSON object; give settings of layer_skip"
        )
    if num_speculative_tokens is not None:
        given["num_speculative_tokens"] = num_speculative_tokens
    method = given.pop("method", "layer_skip")
    own = sorted(given.keys() & {"layer_set", "skipped_attention", "skipped_mlp", "exit_layer", "layer_search"})
    if method != "layer_skip" or own:
        raise ConfigError(f"the search chooses the layer set of method layer_skip; leave out {own or method}")
    if given.get("num_draft_branches", 1) != 1:
        raise ConfigError("the search supports one branch only; leave out num_draft_branches")
    _config(given, None)
    return given


def _config(draft_keys: dict[str, Any], layer_set: LayerSet | None) -> Any:
    from foredraft.config.speculative import SpeculativeConfig

    attention, mlp = (layer_set.attention, layer_set.mlp) if layer_set else ((), ())
    return SpeculativeConfig(method="layer_skip", skipped_attention=attention, skipped_mlp=mlp, **draft_keys)


def _drafter_of(target: CausalLM, draft_keys: dict[str, Any]) -> Callable[[LayerSet], Any]:
    from foredraft.drafters import make_drafter
    from foredraft.drafters.context import DrafterContext

    return lambda layer_set: make_drafter(_config(draft_keys, layer_set), DrafterContext(target))


def words(layer_set: LayerSet) -> str:
    return f"attention {list(layer_set.attention)}, MLP {list(layer_set.mlp)}"

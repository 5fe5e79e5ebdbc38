"""Search of ``foredraft tune``: options, and its result as data and as text."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from foredraft.cli.help import DRAFTING, LIMITS, SAMPLING
from foredraft.cli.options import Target, TargetOptions
from foredraft.cli.running import choose_model, load_llm, show_loading
from foredraft.config.written import by_comma
from foredraft.progress import Watch

if TYPE_CHECKING:
    from foredraft.bench.workload import BenchPrompt
    from foredraft.llm import LLM
    from foredraft.prompts.prompt_files import PromptLine
    from foredraft.tune.choosing import Choice
    from foredraft.tune.tuning import Tuning

USUAL = ("ngram", "suffix", "draft_model", "eagle3", "token_recycling", "suffix+eagle3")
"""Methods to try by default, the simplest first: those that are faster without searching for settings (docs/auto.md has
figures)."""

_SHOWN = 12


@dataclass(frozen=True)
class ChoosingOptions(TargetOptions):
    """Model and prompts of the search, and its limits."""

    model: Target = None
    prompts_file: Annotated[
        Path | None,
        typer.Option(
            "--prompts-file",
            "--prompts",
            metavar="FILE",
            help="Typical prompts: JSONL or .txt. Default: built-in prompts of nine kinds.",
        ),
    ] = None
    kinds: Annotated[str | None, typer.Option(metavar="KIND,...", hidden=True, help="Kinds of prompts to use.")] = None
    num_prompts: Annotated[int, typer.Option(help="Limit on prompts, which are of all kinds in turn.", min=2)] = 27
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate per prompt.", min=4)] = 64
    methods: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME,...|all",
            show_default=False,
            rich_help_panel=DRAFTING,
            help=f"Methods to try. Default: {', '.join(USUAL)}, as far as they work with the model.",
        ),
    ] = None
    draft_model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", rich_help_panel=DRAFTING, help="Smaller model or head for methods that need one."
        ),
    ] = None
    batch_size: Annotated[int, typer.Option(help="Sequences that are decoded together.", min=1)] = 1
    temperature: Annotated[float, typer.Option(rich_help_panel=SAMPLING, help="0 is greedy.", min=0.0)] = 0.0
    stop_at_eos: Annotated[
        bool,
        typer.Option("--stop-at-eos/--ignore-eos", hidden=True, help="End with the model, or at --max-new-tokens."),
    ] = True
    budget: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            rich_help_panel=LIMITS,
            help="Time for decoding, without loading and measuring costs.",
            min=1,
        ),
    ] = 120.0
    fresh: Annotated[
        bool,
        typer.Option("--fresh", hidden=True, help="Measure costs again instead of using the costs of an earlier run."),
    ] = False
    seed: Annotated[
        int, typer.Option(hidden=True, rich_help_panel=SAMPLING, help="Seed of sampling and of intervals.", min=0)
    ] = 0


def find_method(options: ChoosingOptions, say: Watch) -> tuple[Choice, Tuning, dict[str, Any]]:
    """Search; return the choice, the search, and details for the report.

    Raises: ConfigError, CheckpointError, UnsupportedModelError.
    """
    model = choose_model(options.model)
    show_loading(model)
    from foredraft.bench.candidates import read_candidates
    from foredraft.bench.provenance import conditions
    from foredraft.bench.workload import AGAIN, check_kinds, read_questions
    from foredraft.config.sampling import SamplingParams
    from foredraft.errors import ConfigError
    from foredraft.tune.tuning import Tuning

    candidates = read_candidates(options.methods or ",".join(USUAL), options.draft_model, None)
    questions = read_questions(options.prompts_file)  # before a model is loaded
    kinds = None if options.kinds is None else by_comma(options.kinds)
    if kinds and AGAIN in kinds:
        raise ConfigError(f"--kinds contains {AGAIN!r}, which only bench supports; put such conversations into a file")
    check_kinds(questions, kinds)
    llm = load_llm(model, None, **options.loading())
    tuning = Tuning(llm, candidates, options.budget, say)
    tuning.measure(is_fresh=options.fresh)
    number = tuning.num_prompts(options.num_prompts, options.max_new_tokens)
    prompts = _prompts(llm, options, questions, number)
    params = SamplingParams(
        temperature=options.temperature,
        max_tokens=options.max_new_tokens,
        ignore_eos=not options.stop_at_eos,
        seed=options.seed,
    )
    choice = tuning.run(prompts, params, num_rows=options.batch_size, seed=options.seed)
    details = {
        "found_by": "foredraft tune",
        "model": model,
        "num_prompts": len(prompts),
        "kinds": list(dict.fromkeys(prompt.category for prompt in prompts)),
        "costs_measured": tuning.prices.measured,
        "costs_are_steady": tuning.prices.is_steady,
        "not_applicable": tuning.refused,
        "left_out": tuning.left_out,
        "is_interrupted": tuning.is_interrupted,
        "options": {name: getattr(options, name) for name in ("max_new_tokens", "temperature", "budget", "seed")},
        "conditions": conditions(),
    }
    return choice, tuning, details


def _prompts(llm: LLM, options: ChoosingOptions, questions: Sequence[PromptLine], number: int) -> list[BenchPrompt]:
    from foredraft.bench.workload import prompts_of_kinds

    context = llm.target.context_length
    kinds = None if options.kinds is None else by_comma(options.kinds)
    room = None if context is None else context - options.max_new_tokens
    found = prompts_of_kinds(llm.tokenizer, questions, kinds, room, lambda ids: ids)
    return list(islice(found, number))


def show_choice(choice: Choice, details: dict[str, Any], out: Path | None) -> None:
    """Print the choice and the next command.

    Args:
      out: file of the result; None if it could not be written.
    """
    console = Console(highlight=False)
    rows = "" if choice.num_rows == 1 else f", {choice.num_rows} rows"
    table = Table(title=f"speed relative to plain decoding, {details['num_prompts']} prompts{rows}")
    for column in ("method", "x plain", "tokens per step", "step cost"):
        table.add_column(column, justify="left" if column == "method" else "right")
    compared = choice.as_dict()["compared"]
    for place, (one, numbers) in enumerate(zip(choice.ranked, compared, strict=True)):
        if place < _SHOWN or one is choice.chosen:
            interval = f"{one.speed:.2f} ({one.low:.2f}-{one.high:.2f})"
            mark = " <" if one is choice.chosen else ""
            table.add_row(
                one.setting.name + mark, interval, f"{numbers['tokens_per_step']:.2f}", f"{numbers['step_cost']:.2f}"
            )
    console.print(table)
    if len(compared) > _SHOWN:
        console.print(f"{len(compared) - _SHOWN} slower settings {'are not shown' if out is None else f'are in {out}'}")
    for name, reason in details["not_applicable"].items():
        console.print(f"without {name}: {reason}", markup=False, style="dim")
    if details["left_out"]:
        console.print(f"not tried for lack of time: {', '.join(details['left_out'])}; raise --budget", markup=False)
    if not details["costs_are_steady"]:
        console.print("the machine was busy during the timing: run it again with --fresh on an idle machine")
    if details["is_interrupted"]:
        console.print("interrupted: the choice is among the methods tried so far")
    console.print(choice.sentence(), markup=False, soft_wrap=True)
    if out is not None:
        model = f"--model {shlex.quote(details['model'])}"
        how = f"written to {out}; use it: foredraft generate {model} --profile-file {shlex.quote(str(out))}"
        console.print(how, markup=False, soft_wrap=True)

"""``foredraft verify``: a check that a decoder is lossless."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foredraft.cli.options import AsJson, DraftingOptions, LoadingOptions, ModelChoice, takes_groups
from foredraft.cli.prompts import Chat, Raw, ask, check_template, read_prompts
from foredraft.cli.running import EXIT_INTERRUPTED, exit_codes, load_llm, put_json, say, show_loading
from foredraft.ending import finishing
from foredraft.errors import ConfigError

if TYPE_CHECKING:
    from foredraft.llm import LLM
    from foredraft.verify import Subject, Verdict

ASSISTED, LOOKUP, PLAIN = "transformers-assisted", "transformers-prompt-lookup", "transformers"
KEY_VARIABLE = "FOREDRAFT_VERIFY_API_KEY"
SIGNS = {"holds": "yes", "broken": "NO", "undecided": "?", "left out": "-"}


@takes_groups
def verify(
    target: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="The model, as in --model.", show_default=False)
    ] = None,
    *,
    model: ModelChoice,
    drafting: DraftingOptions,
    prompts_file: Annotated[
        str | None,
        typer.Option("--prompts-file", "--prompts", metavar="FILE", help="JSONL or .txt. Default: built-in questions."),
    ] = None,
    num_prompts: Annotated[int, typer.Option(help="Number of prompts to use.", min=1)] = 4,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to compare per prompt.", min=3)] = 16,
    budget: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="Start no further check after this time, without loading.",
            min=1,
        ),
    ] = 60.0,
    false_alarm_rate: Annotated[
        float, typer.Option(hidden=True, help="Probability that a lossless decoder fails.")
    ] = 0.01,
    seed: Annotated[int, typer.Option(help="Seed of sampling.", min=0)] = 0,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="DECODER",
            help=f"Check another decoder of the same model: {LOOKUP}, {ASSISTED} (with --draft-model), {PLAIN}, the "
            "URL of an OpenAI-compatible server, or MODULE:FUNCTION with generate(prompt_ids, params).",
        ),
    ] = None,
    chat: Chat = False,
    raw: Raw = False,
    loading: LoadingOptions,
    as_json: AsJson = False,
) -> None:
    """Check that a decoder's output is the output of its model.

    Tokens are compared with plain decoding, greedy and sampled, with the same seeds. The gap between logits separates
    differences from rounding. The distribution of short continuations is tested against the exact one. A decoder that
    is broken on purpose must be found. Exit codes: 0 lossless, 3 not lossless, 4 undecided.

    Examples:
      foredraft verify zoo:tiny --method suffix
      foredraft verify path/to/model --against transformers-prompt-lookup
    """
    with exit_codes():
        check_template(chat, raw)
        name = model.named(target).chosen()
        given = None if prompts_file is None else read_prompts((), prompts_file, raw=raw)
        config = "none" if against is not None else drafting.config(loading.profile_file)
        show_loading(name)
        from foredraft.verify.verifying import check_false_alarm_rate
        from foredraft.verify.verifying import verify as judge

        check_false_alarm_rate(false_alarm_rate)
        subject = None if against is None else _subject(against, drafting, loading.activations)
        llm = load_llm(name, config, gguf_file=model.gguf_file, **vars(loading))
        asked = ask(llm.tokenizer, name, (given or _questions(name))[:num_prompts], chat=chat, raw=raw)
        if against in (PLAIN, LOOKUP, ASSISTED):
            subject = _transformers_subject(against, llm, name, drafting)
        found = judge(
            llm,
            [one.prompt for one in asked],
            subject,
            max_tokens=max_new_tokens,
            budget_seconds=budget,
            false_alarm_rate=false_alarm_rate,
            seed=seed,
            progress=say if sys.stderr.isatty() else None,
        )
        with finishing():
            if as_json:
                put_json(found.as_dict())
            else:
                _show(found)
        raise typer.Exit(EXIT_INTERRUPTED if found.is_interrupted else found.exit_status)


def _questions(name: str) -> list[str]:
    """Built-in prompts, some with repetitions, so that tokens are drafted."""
    from foredraft.cli.comparison import questions_for

    own = questions_for(name)
    return [own[place] for place in (3, 5, 1, 0, 4, 2) if place < len(own)]


def _subject(against: str, drafting: DraftingOptions, activations: str | None) -> Subject | None:
    """The decoder to check; None for a decoder of transformers, which needs the loaded model.

    Raises: ConfigError, CheckpointError for a decoder that does not exist or cannot be used.
    """
    from foredraft.loading.sources import check_exists
    from foredraft.verify import FunctionSubject, ServerSubject

    if against.startswith(("http://", "https://")):
        return ServerSubject(against, api_key=os.environ.get(KEY_VARIABLE))
    if against == ASSISTED and drafting.draft_model is None:
        raise ConfigError(f"{ASSISTED} needs a small model; give one with --draft-model")
    if against in (PLAIN, LOOKUP, ASSISTED):
        if activations is not None:
            raise ConfigError(
                f"transformers does not round activations, so --against {against} cannot check a model with "
                f"{activations} activations; leave --activations out, or leave --against out"
            )
        check_exists(drafting.draft_model)
        return None
    module, _, function = against.partition(":")
    if not function:
        known = ", ".join((LOOKUP, ASSISTED, PLAIN))
        raise ConfigError(f"--against {against!r} is not known; give {known}, a URL, or MODULE:FUNCTION")
    sys.path.insert(0, "")  # as in python -m
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--against {against!r} cannot be imported: {error}") from None
    return FunctionSubject(found, against)


def _transformers_subject(against: str, llm: LLM, name: str, drafting: DraftingOptions) -> Subject:
    """The decoder of transformers to check, over the same weights."""
    from foredraft.model.execution.rounding import ROUNDINGS, round_weights
    from foredraft.verify import TransformersSubject

    model = _loaded(name, llm)
    if llm.target.quantization in ROUNDINGS:
        round_weights(model, llm.target.quantization)
    return TransformersSubject(
        model,
        against,
        eos_token_ids=llm.eos_token_ids,
        options={"prompt_lookup_num_tokens": 3} if against == LOOKUP else None,
        assistant=_loaded(drafting.draft_model, llm) if against == ASSISTED and drafting.draft_model else None,
    )


def _loaded(name: str, llm: LLM) -> Any:
    """The same weights, as transformers computes with them."""
    from foredraft.loading.models import load_model
    from foredraft.model.execution.rounding import DEQUANTIZED

    target = llm.target
    return load_model(name, dtype=target.dtype, device=target.device, weights=DEQUANTIZED, with_tokenizer=False).model


def _show(verdict: Verdict) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, title=f"{verdict.subject}, compared with {verdict.reference}")
    for title in ("setting", "check", "holds", "finding"):
        table.add_column(title, overflow="fold")
    for finding in verdict.findings:
        colour = {"holds": "green", "broken": "bold red", "undecided": "yellow"}.get(finding.status, "dim")
        table.add_row(finding.feature, finding.check, f"[{colour}]{SIGNS[finding.status]}[/]", finding.found)
    console = Console(highlight=False)
    console.print(table)
    if verdict.guarantee:
        console.print(f"Guarantee: {verdict.guarantee}", markup=False)
    console.print(verdict.sentence() + f" ({verdict.seconds:.0f} s)", markup=False)

"""What the verbs of the command line share: options, how they become parameters, and exit codes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.engine.errors import ForetokenError, PromptError
from foretoken.methods import METHODS
from foretoken.params import SPECULATIVE_ALIASES, SamplingParams, SpeculativeConfig

if TYPE_CHECKING:
    from foretoken.llm import LLM

EXIT_REFUSED = 2
EXIT_DIFFERS = 3
EXIT_INTERRUPTED = 130

DEFAULTS = SamplingParams(temperature=0.0, max_tokens=128)
"""Of the command line: greedy, and long enough to see something. Everything else is `SamplingParams`' own."""

DEFAULT_MODEL = "zoo:tiny"

Model = Annotated[
    str, typer.Option("--model", "-m", metavar="PATH|HUB_ID|zoo:NAME", help="The model whose text is wanted.")
]
DraftModel = Annotated[
    str | None,
    typer.Option(
        "--draft-model",
        metavar="PATH|HUB_ID|zoo:NAME",
        help="A smaller model with the same tokenizer. Aliases: --assistant-model, --model-draft, ...",
    ),
]
Method = Annotated[
    str | None,
    typer.Option(
        "--method",
        help=f"{', '.join(METHODS)}. By default the drafter of a zoo model, else ngram.",
    ),
]
NumSpeculativeTokens = Annotated[
    int | None,
    typer.Option(
        "--num-speculative-tokens",
        "-k",
        metavar="K",
        help="Longest draft. Aliases: --num-assistant-tokens, --num-draft-tokens, --draft-max, ...",
    ),
]
SpeculativeOption = Annotated[
    str | None,
    typer.Option("--speculative-config", metavar="JSON|@FILE", help="All keys of speculation, as in vLLM."),
]
Temperature = Annotated[float, typer.Option("--temperature", help="0 is greedy.")]
TopK = Annotated[int, typer.Option("--top-k", help="0 is off.")]
TopP = Annotated[float, typer.Option("--top-p", help="1 is off.")]
MinP = Annotated[float, typer.Option("--min-p", help="0 is off.")]
RepetitionPenalty = Annotated[float, typer.Option("--repetition-penalty", help="1 is off.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Drawn, and reported, when left out.")]
Dtype = Annotated[
    str, typer.Option("--dtype", help="auto: the checkpoint's where the device computes in it, else float32.")
]
Device = Annotated[str, typer.Option("--device", help="auto is the GPU where there is one.")]
Execution = Annotated[
    str, typer.Option("--execution", help="auto (packed on x86, else eager), eager, packed or compiled.")
]
Exactness = Annotated[
    str, typer.Option("--exactness", help="strict makes half precision bit-identical to plain decoding.")
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on standard output, one line per result.")]


def respell(arguments: Sequence[str]) -> list[str]:
    """Options of other tools under their names here: ``--assistant-model=X`` -> ``--draft-model=X``."""
    names = {"model": "--draft-model", "num_speculative_tokens": "--num-speculative-tokens"}
    table = {
        "--" + alias.replace("_", "-"): names[key]
        for alias, key in SPECULATIVE_ALIASES.items()
        if key in names and alias not in ("draft", "draft_model")
    }
    table |= {"-md": "--draft-model", "--draft": "--num-speculative-tokens", "--max-tokens": "--max-new-tokens"}
    spelled: list[str] = []
    for place, argument in enumerate(arguments):
        if argument == "--":
            return [*spelled, *arguments[place:]]
        name, equals, value = argument.partition("=")
        spelled.append(table.get(name, name) + equals + value)
    return spelled


def speculative(
    model: str, config: str | None, method: str | None, draft_model: str | None, num_speculative_tokens: int | None
) -> SpeculativeConfig:
    """One config from the options; the default is the zoo's own drafter, else prompt lookup.

    Raises: ConfigError.
    """
    given: dict[str, Any] = {
        "method": method,
        "model": draft_model,
        "num_speculative_tokens": num_speculative_tokens,
    }
    given = {key: value for key, value in given.items() if value is not None}
    if config is not None:
        if given:
            raise typer.BadParameter(f"leave out {_options(given)}, or put it into --speculative-config")
        return SpeculativeConfig.parse(config)
    if method is None:
        given["method"] = "draft_model" if draft_model is not None or model.startswith("zoo:") else "ngram"
    return SpeculativeConfig.parse(given)


def _options(given: Mapping[str, Any]) -> str:
    names = {"method": "--method", "model": "--draft-model", "num_speculative_tokens": "--num-speculative-tokens"}
    return ", ".join(names[key] for key in given)


def sampling(**given: Any) -> SamplingParams:
    """Parameters from the options that were given."""
    return replace(DEFAULTS, **{key: value for key, value in given.items() if value is not None})


def load_llm(model: str, config: SpeculativeConfig | None, **options: Any) -> LLM:
    """The model behind a verb. Progress of loading shows on terminals only."""
    from transformers.utils import logging

    from foretoken.llm import LLM

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    return LLM(model, config, **options)


def read_prompts(prompts: Sequence[str], file: str | None) -> list[Any]:
    """Prompts of the command line ("-" is standard input) and of a file.

    Raises: PromptError when there is none, or a line cannot be read.
    """
    read: list[Any] = [_stdin() if prompt == "-" else prompt for prompt in prompts]
    if file is not None:
        read += read_prompts_file(file)
    if not read:
        raise PromptError("there is no prompt; give some text, - for standard input, or --prompts-file")
    return read


def read_prompts_file(file: str) -> list[Any]:
    """Prompts of a JSONL file (``turns``, ``prompt``, ``text`` or ``prompt_token_ids``), or one per line of a .txt.

    Of several turns the first is taken. "-" is JSONL on standard input.
    """
    try:
        text = _stdin() if file == "-" else Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PromptError(f"prompts file {file!r} cannot be read: {reason}; check the path") from None
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if file.endswith(".txt"):
        return [line for _, line in lines]
    return [_json_prompt(line, f"{file}, line {number}") for number, line in lines]


def _json_prompt(line: str, place: str) -> Any:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise PromptError(f"{place} is no JSON: {error}; write one object per line, or name the file .txt") from None
    if isinstance(entry, str):
        return entry
    if isinstance(entry, Mapping):
        turns = entry.get("turns")
        if isinstance(turns, list) and turns and isinstance(turns[0], str):
            return turns[0]
        for key in ("prompt", "text"):
            if isinstance(entry.get(key), str):
                return entry[key]
        if isinstance(entry.get("prompt_token_ids"), list):
            return {"prompt_token_ids": entry["prompt_token_ids"]}
    raise PromptError(f"{place} holds no prompt; give turns (a list of text), prompt, text or prompt_token_ids")


def _stdin() -> str:
    return sys.stdin.read()


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turn what is raised on purpose into a message on standard error and a documented exit code."""
    try:
        yield
    except ForetokenError as error:
        typer.echo(f"foretoken: {type(error).__name__}: {error}", err=True)
        raise typer.Exit(EXIT_REFUSED) from None
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit from None

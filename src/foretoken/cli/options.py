"""Shared by the commands of the CLI: options, how they become parameters, and exit codes."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.config.method import methods
from foretoken.config.sampling import SamplingParams
from foretoken.config.speculative import ALIASES, SpeculativeConfig
from foretoken.errors import ForetokenError

if TYPE_CHECKING:
    from foretoken.llm import LLM, SpeculativeLike

_LINE_ENDS = re.compile("[\u0085\u2028\u2029]")

EXIT_REFUSED = 2
EXIT_DIFFERS = 3
EXIT_INTERRUPTED = 130

DEFAULTS = SamplingParams(temperature=0.0, max_tokens=256)
"""Defaults of the command line: greedy, long enough for an answer. All others are those of `SamplingParams`."""

Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="PATH|HUB_ID|zoo:NAME",
        show_default=False,
        help="The model whose text is wanted; zoo:smollm2 where it is installed, else the toy zoo:tiny.",
    ),
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
        help=f"{', '.join(methods())}. By default what suits a zoo model, else ngram.",
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
GgufFile = Annotated[
    str | None,
    typer.Option(metavar="FILE.gguf", help="In a directory or at a hub id; --model takes a path of one as it is."),
]
Dtype = Annotated[
    str, typer.Option("--dtype", help="auto: the checkpoint's where the device computes in it, else float32.")
]
Device = Annotated[str, typer.Option("--device", help="auto is the GPU where there is one.")]
Execution = Annotated[
    str, typer.Option("--execution", help="auto (packed on x86, else eager), eager, packed or compiled.")
]
Exactness = Annotated[
    str, typer.Option("--exactness", help="strict keeps every bit of plain decoding; relaxed lets near-ties differ.")
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on standard output, one line per result.")]


def respell(arguments: Sequence[str]) -> list[str]:
    """Options of other tools under their names here: ``--assistant-model=X`` -> ``--draft-model=X``."""
    names = {"model": "--draft-model", "num_speculative_tokens": "--num-speculative-tokens"}
    table = {
        "--" + alias.replace("_", "-"): names[key]
        for alias, key in ALIASES.items()
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


def choose_model(model: str | None) -> str:
    """The model that was named, else the best one available; where that is a toy, the user is told."""
    from foretoken import zoo

    if model is not None:
        return model
    chosen = zoo.default()
    if zoo.manifest(chosen).is_toy:
        real = next(name for name in zoo.names() if not zoo.manifest(name).is_toy)
        typer.echo(f"foretoken: {chosen} is a toy that babbles. {zoo.why_missing(real)}", err=True)
    return chosen


def speculative(
    model: str, config: str | None, method: str | None, draft_model: str | None, num_speculative_tokens: int | None
) -> SpeculativeConfig:
    """One config from the options; the default is what suits a model of the zoo, else prompt lookup.

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
        given["method"] = "draft_model" if draft_model is not None else _default_method(model)
    return SpeculativeConfig.parse(given)


def _default_method(model: str) -> str:
    from foretoken import zoo
    from foretoken.loading.models import is_zoo

    return zoo.manifest(model).default_method if is_zoo(model) else "ngram"


def _options(given: Mapping[str, Any]) -> str:
    names = {"method": "--method", "model": "--draft-model", "num_speculative_tokens": "--num-speculative-tokens"}
    return ", ".join(names[key] for key in given)


def sampling(**given: Any) -> SamplingParams:
    """Parameters from the options that were given."""
    return replace(DEFAULTS, **{key: value for key, value in given.items() if value is not None})


class _Notices(logging.Handler):
    """Shows what the library says about models, and what was done differently than asked, on standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(f"foretoken: {self.format(record)}\n")  # which a progress display may have replaced


@contextmanager
def notices() -> Iterator[None]:
    """While a verb runs: one line for every model that is loaded, and warnings."""
    logger = logging.getLogger("foretoken")
    handler, level = _Notices(logging.INFO), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


def load_llm(model: str, config: SpeculativeLike, **options: Any) -> LLM:
    """The model behind a verb. Progress of loading shows on terminals only."""
    from transformers.utils import logging as transformers_logging

    from foretoken.llm import LLM

    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    return LLM(model, config, **options)


def put_json(record: Mapping[str, Any]) -> None:
    """One object on a line of standard output: readable where its encoding can hold it, escaped elsewhere.

    What some readers take for a line end (U+2028, U+2029, U+0085) is always escaped.
    """
    text = json.dumps(record, ensure_ascii=False)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(record)
    sys.stdout.write(_LINE_ENDS.sub(lambda found: f"\\u{ord(found[0]):04x}", text) + "\n")
    sys.stdout.flush()


def tolerate_encodings() -> None:
    """No text of a model or a user breaks a stream: what its encoding cannot hold is written as an escape.

    Bytes of standard input that are not text are marked, so that prompts with them are refused by name.
    """
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors=errors)


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

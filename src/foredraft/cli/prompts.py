"""Prompts of the command line: from arguments, standard input and files, with or without the chat template."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foredraft.cli.options import TargetOptions
from foredraft.config.keywords import check_unicode
from foredraft.errors import ConfigError, PromptError
from foredraft.prompts.prompt_files import STDIN, read_prompts_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from foredraft.bench.workload import BenchPrompt


Chat = Annotated[
    bool,
    typer.Option("--chat", hidden=True, help="Use the chat template. This is the default for instruct models."),
]
Raw = Annotated[bool, typer.Option("--raw", help="Do not use the chat template.")]

_INSTRUCT_NAME = re.compile(r"(?:^|[-_. ])(?:instruct|chat|it)(?:$|[-_. ])", re.IGNORECASE)


@dataclass(frozen=True)
class Asked:
    """One prompt.

    Args:
      given: the user's prompt: text, or ``{"prompt_token_ids": [...]}``.
      prompt: prompt for the model.
      is_templated: whether the chat template was applied.
    """

    given: Any
    prompt: Any
    is_templated: bool = False


# -- reading ---------------------------------------------------------------------------------------------------------


def read_prompts(prompts: Sequence[str], file: str | None, *, raw: bool = False) -> list[Any]:
    """Prompts of the command line ("-" is standard input) and of a file.

    Raises: PromptError if there is no prompt, a line cannot be read, or text is not valid Unicode or, without ``raw``,
      empty.
    """
    read: list[Any] = [read_stdin() if prompt == STDIN else prompt for prompt in prompts]
    if file is not None:
        read += [one.given for one in read_prompts_file(file)]
    if not read:
        raise PromptError("there is no prompt; give text, - for standard input, or --prompts-file FILE")
    for place, prompt in enumerate(read):
        if isinstance(prompt, str):
            check_text(prompt, place, raw=raw)
    return read


def check_text(text: str, place: int, *, raw: bool = False) -> None:
    """Raises: PromptError for text that is not valid Unicode, or that is empty without ``raw``."""
    check_unicode(text, f"prompt {place}")
    if not raw and not text.strip():
        raise PromptError(f"prompt {place} is empty: {text!r}; give some text, or --raw to use it as it is")


def read_stdin() -> str:
    """Standard input as one text in the encoding of the terminal, without the final line break that ``echo`` adds."""
    return sys.stdin.read().removeprefix("\ufeff").removesuffix("\n").removesuffix("\r")


# -- the chat template -----------------------------------------------------------------------------------------------


def check_template(chat: bool, raw: bool) -> None:
    """Raises: BadParameter for both at once."""
    if chat and raw:
        raise typer.BadParameter("--chat uses the chat template and --raw does not; leave one out")


def ask(
    tokenizer: PreTrainedTokenizerBase | None,
    model: str,
    given: Iterable[Any],
    *,
    chat: bool = False,
    raw: bool = False,
) -> list[Asked]:
    """Prompts for the model: text as a message for instruct models, token ids unchanged.

    Args:
      model: name of the model as the user gave it.
      chat: use the chat template for any model.
      raw: never use the chat template.

    Raises:
      ConfigError: the tokenizer has no chat template, and one is needed.
      PromptError: a message is empty or not valid Unicode.
    """
    listed = list(given)
    has_text = any(isinstance(prompt, str) for prompt in listed)
    if raw or not has_text or not (chat or is_instruct(tokenizer, model)):
        return [Asked(prompt, prompt) for prompt in listed]
    return [
        _message(tokenizer, one, place) if isinstance(one, str) else Asked(one, one) for place, one in enumerate(listed)
    ]


def _message(tokenizer: PreTrainedTokenizerBase | None, text: str, place: int) -> Asked:
    from foredraft.prompts.prompts import chat_prompt

    check_text(text, place)
    return Asked(text, chat_prompt(tokenizer, [{"role": "user", "content": text}]), True)


def is_instruct(tokenizer: PreTrainedTokenizerBase | None, model: str) -> bool:
    """Whether plain text is a message to this model. The zoo's manifest decides, or else the presence of a template.

    Quantised copies of zoo models keep the entry of the manifest. If a model has the name of an instruct model and no
    template, the user is warned.

    Raises: ConfigError for a zoo model that needs a template and has none.
    """
    from foredraft import zoo
    from foredraft.loading.models import is_zoo
    from foredraft.loading.stored import IS_INSTRUCT

    has_template = tokenizer is not None and bool(tokenizer.chat_template)
    if is_zoo(model):
        is_meant = zoo.manifest(model).is_instruct
        if is_meant and not has_template:
            raise ConfigError(
                f"{model} is an instruct model, but its tokenizer has no chat template; give --raw and a prompt in the "
                "format that it was trained on"
            )
        return is_meant
    noted = None if tokenizer is None else tokenizer.init_kwargs.get(IS_INSTRUCT)
    if isinstance(noted, bool):
        return noted and has_template
    if not has_template and tokenizer is not None and looks_like_instruct(model):
        typer.echo(
            f"foredraft: {model} has the name of an instruct model, but its tokenizer has no chat template. The prompt "
            "is used as it is, and the answer may be empty. Put the model's chat_template.jinja beside its tokenizer, "
            "or give --raw to hide this message",
            err=True,
        )
    return has_template


def looks_like_instruct(model: str) -> bool:
    """Whether the last part of a path or hub id contains "instruct", "chat" or "it" as a separate word."""
    return _INSTRUCT_NAME.search(Path(model).name) is not None


BUILT_IN = "built-in"
NumPrompts = Annotated[int, typer.Option(help="Number of prompts to use.", min=1)]


@dataclass(frozen=True)
class TuneOptions(TargetOptions):
    """Target and prompts of a search."""

    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="The target. Default: zoo:smollm2 if it is installed, else zoo:tiny."),
    ] = None
    prompts: Annotated[
        str, typer.Option(metavar="FILE", help="JSONL or .txt file with typical prompts, or built-in.")
    ] = BUILT_IN
    raw: Raw = False
    num_prompts: NumPrompts = 16
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate per prompt.", min=4)] = 64

    def check_prompts(self) -> None:
        """Raises: PromptError for a file that cannot be read; nothing has been loaded then."""
        if self.prompts not in (BUILT_IN, STDIN):
            read_prompts_file(self.prompts)

    def read_prompts(self, model: str, tokenizer: Any) -> list[BenchPrompt]:
        """Token ids of the prompts: those of a file as in `generate`, or built-in questions in chat format.

        Raises: PromptError, ConfigError.
        """
        from foredraft.bench.workload import BenchPrompt, load_prompts, read_questions, select
        from foredraft.prompts.prompts import read_prompt

        if self.prompts != BUILT_IN:
            given = [one.given for one in read_prompts_file(self.prompts)[: self.num_prompts]]
            asked = ask(tokenizer, model, given, raw=self.raw)
            ids = (read_prompt(one.prompt, tokenizer, place).token_ids for place, one in enumerate(asked))
            return [BenchPrompt(str(place), "file", one) for place, one in enumerate(ids)]
        if tokenizer is None:
            raise ConfigError(
                "the built-in prompts are text, but the model has no tokenizer; give --prompts FILE with token ids"
            )
        return load_prompts(tokenizer, select(read_questions(), self.num_prompts))

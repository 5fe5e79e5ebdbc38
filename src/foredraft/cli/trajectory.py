"""``foredraft trajectory``: the Jacobi iterations behind an output."""

from __future__ import annotations

import sys
from shutil import get_terminal_size
from typing import Annotated

import typer

from foredraft.cli.help import OUTPUT
from foredraft.cli.options import AsJson, Loading, ModelChoice, SamplingOptions, takes_groups
from foredraft.cli.prompts import Chat, Raw, ask, check_template, read_prompts
from foredraft.cli.running import exit_codes, load_llm, put_json, show_loading
from foredraft.folders import check_place
from foredraft.methods.iterate import INITIAL_GUESS


@takes_groups
def trajectory(
    *,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Text to continue; - reads standard input.")],
    model: ModelChoice,
    block: Annotated[int, typer.Option("--block", metavar="N", min=1, help="Tokens per block.")] = 16,
    initial_guess: Annotated[
        str,
        typer.Option(
            metavar="repeat|prompt|random", help="First guess: the last token, tokens of the prompt, or random tokens."
        ),
    ] = "repeat",
    max_new_tokens: Annotated[int, typer.Option(help="Limit on tokens of the output.")] = 64,
    sampling: Annotated[SamplingOptions, "temperature", "top_k", "top_p", "seed"],
    chat: Chat = False,
    raw: Raw = False,
    html: Annotated[
        str | None, typer.Option(metavar="FILE", rich_help_panel=OUTPUT, help="Write an HTML page.")
    ] = None,
    jsonl: Annotated[
        str | None,
        typer.Option(metavar="FILE", rich_help_panel=OUTPUT, help="Write training data: one line per block."),
    ] = None,
    loading: Loading,
    as_json: AsJson = False,
) -> None:
    """Show the iterations of Jacobi decoding behind an output.

    Every block of tokens is guessed and corrected until it no longer changes. The table has one row per iteration.

    Examples:
      foredraft trajectory "Once upon a time"
      foredraft trajectory "Once upon a time" --block 8 --html page.html
    """
    with exit_codes():
        params = sampling.params(max_tokens=max_new_tokens)
        check_template(chat, raw)
        INITIAL_GUESS.read("trajectory", "initial_guess", initial_guess)
        read = read_prompts([prompt], None, raw=raw)
        for file in (html, jsonl):
            if file is not None:
                check_place(file)
        name = model.chosen()
        show_loading(name)
        from foredraft.folders import write_text
        from foredraft.views.trajectory import trajectory as trace

        llm = load_llm(name, "none", gguf_file=model.gguf_file, **vars(loading))
        (asked,) = ask(llm.tokenizer, name, read, chat=chat, raw=raw)
        found = trace(llm, asked.prompt, block, params, initial_guess=initial_guess)
        if html is not None:
            write_text(html, found.html())
        if jsonl is not None:
            found.write_jsonl(jsonl)
        if as_json:
            for record in found.records():
                put_json(record)
        else:
            sys.stdout.write(found.text(get_terminal_size().columns if sys.stdout.isatty() else None))

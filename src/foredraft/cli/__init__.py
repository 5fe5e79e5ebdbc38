"""The command line: ``foredraft VERB``, as ``foredraft --help`` lists them."""

from __future__ import annotations

import inspect
import re
import sys
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from foredraft import __version__
from foredraft.cli.running import notices, respell, standard_streams, tolerate_encodings
from foredraft.ending import end_as_by_ctrl_c, ignore_signals

VERBS = {
    "generate": "Generate text for one prompt or many; tokens appear as they come, coloured by who proposed them.",
    "chat": "Talk to a model. Answers appear as they come; between turns the cache stays, and only new text is fed.",
    "serve": "Serve a model to clients of the OpenAI API: "
    "chat, completions, streams with one token per chunk, metrics.",
    "demo": "Answer the same questions plainly and speculatively, side by side; "
    "then compare the texts, and then the speed.",
    "info": "Show the model, the verdict of the probe, the measured cost curve T(k)/T(1), "
    "memory, methods, and the drafter.",
    "bench": "Measure methods against plain decoding: interleaved on the same prompts, tokens compared first.",
    "verify": "Judge whether a decoder says what its model says: lossless, not lossless, or undecided, and why.",
    "report": "Write one HTML page of what was measured, judged or generated. It loads nothing from anywhere.",
    "train": "Train a drafter for a target, and measure how many of its tokens the target takes.",
    "quantize": "Write a model with its linear layers rounded to 8 or 4 bits, in the layout of compressed-tensors.",
    "trajectory": "Show how Jacobi decoding arrives at a text: every iterate of every block until its fixed point.",
    "datastore": "Build and search the corpora that method rest drafts from.",
    "tune": "Find the best method and settings for a model, this machine and your prompts, and say why.",
}
"""Beginnings of their help, for the list of them. Each stands in the file of its name, as ``app`` or by that name."""


class VerbGroup(TyperGroup):
    """All verbs. Each is imported when it is looked up, and the help of the group needs none of them."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = dict.fromkeys(VERBS)  # type: ignore[assignment]
        self._lists = False

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in VERBS and self._lists:
            return TyperCommand(cmd_name, help=VERBS[cmd_name])
        if cmd_name in VERBS and self.commands[cmd_name] is None:
            self.commands[cmd_name] = _load(cmd_name)
        return super().get_command(ctx, cmd_name)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self._lists = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._lists = False


def _load(name: str) -> Any:
    """A verb as a command."""
    module = import_module(f"{__name__}.{name}")
    verb = getattr(module, "app", None)
    if verb is None:
        verb = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        verb.command(name)(getattr(module, name))
    _unwrap(verb)
    return typer.main.get_command(verb)


app = typer.Typer(
    name="foredraft",
    cls=VerbGroup,
    help="Lossless, batched speculative decoding for unmodified Hugging Face causal language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _unwrap(verbs: typer.Typer) -> None:
    """Let the help of every verb flow at the width of the terminal: its docstring is wrapped for the source."""
    told: list[Any] = [*verbs.registered_commands]
    if verbs.registered_callback is not None:
        told.append(verbs.registered_callback)
    for verb in told:
        verb.help = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(verb.callback) or "") or None
    for group in verbs.registered_groups:
        if group.typer_instance is not None:
            _unwrap(group.typer_instance)


def _version(shown: bool) -> None:
    if shown:
        typer.echo(f"foredraft {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Exit codes: 0 done, 1 unexpected error, 2 usage or refusal, 3 outputs differ, 4 undecided, 130 interrupted."""
    tolerate_encodings()
    context.with_resource(notices())


def main() -> None:
    """Run the command line."""
    end_as_by_ctrl_c()
    try:
        with standard_streams():
            app(respell(sys.argv[1:]))
    finally:
        ignore_signals()

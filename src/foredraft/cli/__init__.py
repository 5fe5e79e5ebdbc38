"""The command line: ``foredraft VERB``, as ``foredraft --help`` lists them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import typer

from foredraft import __version__
from foredraft.cli.help import HelpCommand, HelpGroup, split_docstring
from foredraft.cli.running import notices, respell, standard_streams, tolerate_encodings
from foredraft.ending import end_as_by_ctrl_c, ignore_signals

VERBS = {
    "generate": "Generate text for one prompt or for many.",
    "chat": "Talk to a model in the terminal.",
    "serve": "Serve a model to clients of the OpenAI API.",
    "demo": "Answer questions with and without drafting, side by side, and compare texts and speed.",
    "info": "Show a model, the methods that work with it and their cost, or this machine.",
    "tune": "Find the fastest method and settings for a model, this machine and your prompts.",
    "bench": "Measure methods against plain decoding on the same prompts.",
    "verify": "Check that a decoder's output is the output of its model.",
    "report": "Write measurements, checks or a trace as one HTML page.",
    "train": "Train a drafter for a model.",
    "quantize": "Write a model with its linear layers rounded to 8 or 4 bits.",
    "datastore": "Build and search the corpora that method rest drafts from.",
    "trajectory": "Show the iterations of Jacobi decoding behind an output.",
}
"""First lines of the verbs' help, for the list of verbs. Each verb is in the file of its name, as ``app`` or under that
name."""

GROUPS = {
    "Use": ("generate", "chat", "serve"),
    "Choose": ("demo", "info", "tune", "bench"),
    "Check": ("verify", "report"),
    "Make": ("train", "quantize", "datastore"),
    "Study": ("trajectory",),
}
"""Verbs by purpose."""


class VerbGroup(HelpGroup):
    """All verbs. Each verb is imported when it is looked up; the help of the group imports none of them."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = dict.fromkeys(VERBS)  # type: ignore[assignment]
        self._lists = False

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in VERBS and self._lists:
            panel = next(title for title, names in GROUPS.items() if cmd_name in names)
            return HelpCommand(cmd_name, help=VERBS[cmd_name], rich_help_panel=panel)
        if cmd_name in VERBS and self.commands[cmd_name] is None:
            self.commands[cmd_name] = _load(cmd_name)
        return super().get_command(ctx, cmd_name)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        with self._listing():
            super().format_help(ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with self._listing():
            return super().parse_args(ctx, args)

    @contextmanager
    def _listing(self) -> Iterator[None]:
        self._lists = True
        try:
            yield
        finally:
            self._lists = False


def _load(name: str) -> Any:
    """A verb as a command."""
    module = import_module(f"{__name__}.{name}")
    verb = getattr(module, "app", None)
    if verb is None:
        verb = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        verb.command(name)(getattr(module, name))
    _describe(verb)
    return typer.main.get_command(verb)


EXAMPLES = """\
foredraft chat
foredraft generate "Why is the sky blue?" --model zoo:smollm2
foredraft serve --model path/to/model
foredraft generate --help"""

app = typer.Typer(
    name="foredraft",
    cls=VerbGroup,
    help="Faster decoding of Hugging Face language models by drafting ahead, with unchanged output.",
    epilog=EXAMPLES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _describe(verbs: typer.Typer) -> None:
    """Take description and examples of every verb from its docstring."""
    for verb in verbs.registered_commands:
        verb.cls = HelpCommand
        verb.help, verb.epilog = split_docstring(inspect.getdoc(verb.callback) or "")
    group = verbs.registered_callback
    if group is not None:
        group.help, group.epilog = split_docstring(inspect.getdoc(group.callback) or "")


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

"""The command line: ``foredraft VERB``, as ``foredraft --help`` lists them."""

from __future__ import annotations

import inspect
import re
import sys
from typing import Any

import typer

from foredraft import __version__
from foredraft.cli import bench as cli_bench
from foredraft.cli import chat as cli_chat
from foredraft.cli import datastore as cli_datastore
from foredraft.cli import demo as cli_demo
from foredraft.cli import generate as cli_generate
from foredraft.cli import info as cli_info
from foredraft.cli import quantize as cli_quantize
from foredraft.cli import report as cli_report
from foredraft.cli import serve as cli_serve
from foredraft.cli import train as cli_train
from foredraft.cli import trajectory as cli_trajectory
from foredraft.cli import tune as cli_tune
from foredraft.cli import verify as cli_verify
from foredraft.cli.options import respell
from foredraft.cli.running import notices, standard_streams, tolerate_encodings
from foredraft.ending import end_as_by_ctrl_c, ignore_signals

app = typer.Typer(
    name="foredraft",
    help="Lossless, batched speculative decoding for unmodified Hugging Face causal language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("generate")(cli_generate.generate)
app.command("chat")(cli_chat.chat)
app.command("serve")(cli_serve.serve)
app.command("demo")(cli_demo.demo)
app.command("info")(cli_info.info)
app.command("bench")(cli_bench.run)
app.command("verify")(cli_verify.verify)
app.command("report")(cli_report.report)
app.add_typer(cli_datastore.app)
app.add_typer(cli_tune.app)
app.command("train")(cli_train.train)
app.command("quantize")(cli_quantize.quantize)
app.command("trajectory")(cli_trajectory.trajectory)


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


_unwrap(app)


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

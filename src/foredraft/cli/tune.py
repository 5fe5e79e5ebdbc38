"""``foredraft tune``: a search for the best method, and searches for the settings of one drafter."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from foredraft.cli.choosing import ChoosingOptions, find_method, show_choice
from foredraft.cli.help import OUTPUT, HelpGroup
from foredraft.cli.layer_search import SearchOptions, find_layers, layer_set_of
from foredraft.cli.options import AsJson, takes_groups
from foredraft.cli.profiling import ProfileOptions, find_profile, show_profile
from foredraft.cli.running import EXIT_INTERRUPTED, exit_codes, put_json, say, writing
from foredraft.cli.tree_search import TreeOptions, find_tree, show_tree
from foredraft.ending import finishing
from foredraft.errors import ConfigError
from foredraft.folders import check_place, keep_json
from foredraft.progress import stages


class ModelOrVerb(HelpGroup):
    """A group that accepts a model in place of a verb: ``tune zoo:tiny``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        self.show_whole(ctx, args)
        _, rest, _ = self.make_parser(ctx).parse_args(list(args))
        if rest and rest[0] not in self.commands and is_a_model(rest[0]):
            before = args[: len(args) - len(rest)]
            if any(one.partition("=")[0] in ("--model", "-m") for one in before + rest[1:]):
                raise typer.BadParameter(f"the model is given twice, {rest[0]} and --model; leave one out", ctx)
            args = [*before, "--model", *rest]
        return super().parse_args(ctx, args)


def is_a_model(word: str) -> bool:
    """Whether a word is ``zoo:NAME``, a hub id or a path, and not a misspelt verb."""
    return ":" in word or "/" in word or Path(word).exists()


app = typer.Typer(name="tune", cls=ModelOrVerb, add_completion=False)


@app.callback(invoke_without_command=True)
@takes_groups
def tune(
    context: typer.Context,
    *,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE.json", help="File of the result, for --profile-file.")
    ] = Path("tuned.json"),
    options: ChoosingOptions,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", rich_help_panel=OUTPUT, help="Plot the speed of all settings.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the fastest method and settings for a model, this machine and your prompts.

    The prompts are decoded once. The drafts of every method are counted, and their cost is computed from measured step
    times. The result is therefore reproducible. generate, chat and serve use the result with --profile-file. The
    commands below search for the settings of one drafter.

    Examples:
      foredraft tune zoo:smollm2
      foredraft tune path/to/model --prompts prompts.jsonl --methods suffix,eagle3
    """
    if context.invoked_subcommand is not None:
        return
    with exit_codes():
        check_place(out)
        if plot is not None:
            from foredraft.pictures import check_picture

            check_picture(plot)
        with stages() as watch:
            choice, tuning, details = find_method(options, watch)
        report = tuning.profile(choice, details).as_dict() | _pictured(plot)
        with _kept(tuning.is_interrupted):
            _keep(
                partial(keep_json, out, report),
                out,
                partial(_put, report) if as_json else partial(show_choice, choice, details),
            )
            if plot is not None:
                from foredraft.tune.picture import plot_choice

                plot_choice(choice, plot)


@app.command("layer-skip")
@takes_groups
def layer_skip(
    *,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE.json", help="File of the layer set.")],
    options: SearchOptions,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an earlier search.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", rich_help_panel=OUTPUT, help="Plot the search.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the layers to skip while drafting (method layer_skip).

    Trials are kept in FILE.trials. Ctrl-C ends the search and writes the best set that was found.

    Examples:
      foredraft tune layer-skip zoo:smollm2 --out layers.json
    """
    with exit_codes():
        check_place(out)
        options.check_prompts()
        if plot is not None:
            from foredraft.pictures import check_picture

            check_picture(plot)
        search, report = find_layers(options, out.with_suffix(".trials"), resume)
        report |= _pictured(plot)
        with _kept(search.is_interrupted):
            _keep(
                partial(layer_set_of(report, search.space.num_layers).save, out),
                out,
                partial(_put if as_json else _show, report),
            )
            if plot is not None:
                from foredraft.tune.picture import plot_search

                plot_search(search, plot)


@app.command("tree")
@takes_groups
def tree(
    *,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE.json", help="File of the tree.")],
    options: TreeOptions,
    as_json: AsJson = False,
) -> None:
    """Find the fastest draft tree for heads (methods medusa, hydra and eagle).

    The candidates of the heads are compared with generated text, and steps of every size are timed. Ctrl-C ends the
    generation and uses the generated part of the text.

    Examples:
      foredraft tune tree zoo:tiny --heads path/to/heads --out tree.json
    """
    with exit_codes():
        check_place(out)
        options.check_prompts()
        found, details = find_tree(options)
        report = {"paths": [list(path) for path in found.paths], **details}
        with _kept(details["is_interrupted"]):
            _keep(
                partial(found.save, out, **details),
                out,
                partial(_put, report) if as_json else partial(show_tree, details),
            )


@app.command("profile")
@takes_groups
def profile(
    *,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE.json", help="File of the profile.")],
    options: ProfileOptions,
    as_json: AsJson = False,
) -> None:
    """Measure the best draft length by batch size and context.

    Prompts are decoded with short and long drafts, and steps of every size are timed. generate, chat and serve use the
    result with --profile-file. Ctrl-C ends the decoding and uses the decoded part of the text.

    Examples:
      foredraft tune profile zoo:smollm2 --method ngram --out profile.json
    """
    with exit_codes():
        check_place(out)
        options.check_prompts()

        found, details = find_profile(options, say if sys.stderr.isatty() else lambda _: None)
        report = {**found.as_dict(), **details}
        with _kept(details["is_interrupted"]):
            _keep(
                partial(keep_json, out, report),
                out,
                partial(_put, report) if as_json else partial(show_profile, found, details),
            )


@contextmanager
def _kept(is_interrupted: bool) -> Iterator[None]:
    """Context of writing a result. After an interrupt, a second one is ignored, and the exit code is 130."""
    with finishing() if is_interrupted else nullcontext():
        yield
    if is_interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)


def _keep(write: Callable[[], object], out: Path, tell: Callable[[Path | None], None]) -> None:
    """Write a result and print it. The result is printed even if it cannot be written.

    Args:
      tell: called with the file, or with None if it could not be written.

    Raises: ConfigError if it could not be written.
    """
    try:
        with writing(out):
            write()
    except ConfigError:
        tell(None)
        raise
    tell(out)


def _pictured(plot: Path | None) -> dict[str, str]:
    """Entry of a plot in a report."""
    return {} if plot is None else {"plot": str(plot)}


def _put(report: dict[str, Any], out: Path | None) -> None:
    put_json({"out": None if out is None else str(out), **report})


def _show(report: dict[str, Any], out: Path | None) -> None:
    console = Console(highlight=False, markup=False)
    ended = "interrupted after" if report["is_interrupted"] else "best of"
    console.print(
        f"{ended} {report['num_trials']} sets: skip attention {report['skipped_attention']}, "
        f"MLP {report['skipped_mlp']}"
    )
    how = "measured" if report["search"]["objective"] == "time" else "computed"
    console.print(
        f"{how} speed {report['speedup']:.3f}x plain decoding; {report['acceptance_rate']:.0%} of drafted tokens "
        f"accepted, {report['acceptance_length']:.2f} tokens per draft"
    )
    if report["speedup"] < 1:
        console.print("none of these sets is faster than plain decoding")
    again = "; --resume continues the search" if report["is_interrupted"] else ""
    if out is not None:
        console.print(
            f"written to {out}; use it with --speculative-config "
            f'\'{{"method": "layer_skip", "layer_set": "{out}"}}\'{again}'
        )

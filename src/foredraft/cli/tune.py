"""``foredraft tune``: the best method for a model, a machine and prompts; below it, searches for one drafter."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from foredraft.cli.choosing import ChoosingOptions, find_method, show_choice
from foredraft.cli.layer_search import SearchOptions, find_layers, layer_set_of
from foredraft.cli.options import AsJson, takes_groups
from foredraft.cli.profiling import ProfileOptions, find_profile, show_profile
from foredraft.cli.running import EXIT_INTERRUPTED, exit_codes, put_json, say, writing
from foredraft.cli.tree_search import TreeOptions, find_tree, show_tree
from foredraft.ending import finishing
from foredraft.errors import ConfigError
from foredraft.folders import check_place, keep_json
from foredraft.progress import stages


class ModelOrVerb(TyperGroup):
    """Takes the model where the name of a verb would stand, as other verbs do: ``tune zoo:tiny``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _, rest, _ = self.make_parser(ctx).parse_args(list(args))
        if rest and rest[0] not in self.commands and is_a_model(rest[0]):
            before = args[: len(args) - len(rest)]
            if any(one.partition("=")[0] in ("--model", "-m") for one in before + rest[1:]):
                raise typer.BadParameter(f"the model is named twice: {rest[0]}, and by --model", ctx)
            args = [*before, "--model", *rest]
        return super().parse_args(ctx, args)


def is_a_model(word: str) -> bool:
    """Whether a word can be a model, and no misspelt verb: ``zoo:NAME``, a hub id or a path."""
    return ":" in word or "/" in word or Path(word).exists()


app = typer.Typer(name="tune", cls=ModelOrVerb, add_completion=False)


@app.callback(invoke_without_command=True)
@takes_groups
def tune(
    context: typer.Context,
    *,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE.json", help="The profile to write, for --profile-file.")
    ] = Path("tuned.json"),
    options: ChoosingOptions,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Speed by K, by nodes and by batch; needs matplotlib.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the best method and settings for a model, this machine and your prompts, and say why.

    The prompts are decoded plainly, once. What every method would have drafted is counted along these texts, or by
    decoding them with it, and priced by what forwards cost here, which is measured once and kept: the choice rests on
    no clock, so that it is the same when it is asked for again. Ties are named. The profile that is written holds the
    method and its settings; generate, chat and serve take it by --profile-file. The verbs below search for the
    settings of one drafter.
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
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE.json", help="The layer set to write.")],
    options: SearchOptions,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the trials of an earlier search.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Picture of the search; needs matplotlib.")] = None,
    as_json: AsJson = False,
) -> None:
    """Find which attention and MLP sublayers to leave out while drafting (method layer_skip).

    Every trial is kept in FILE.trials beside the output. Ctrl-C ends the search and keeps the best set so far.
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
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE.json", help="The tree to write.")],
    options: TreeOptions,
    as_json: AsJson = False,
) -> None:
    """Find the draft tree with which heads are fastest here (methods medusa, hydra and eagle).

    The target writes texts of its own; the candidates of the heads are held against them. Trees of every size are grown
    from what was right how often, and steps of every size are timed. Ctrl-C ends the texts and keeps the tree of what
    they said by then.
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
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE.json", help="The profile to write.")],
    options: ProfileOptions,
    as_json: AsJson = False,
) -> None:
    """Measure what drafting costs and brings here, and the length of draft that is best by batch and context.

    The target continues the prompts with drafts of one token and with the longest; steps of every number of nodes are
    timed, interleaved. generate, chat and others begin with what the file holds (--profile-file). Ctrl-C while the
    prompts are decoded keeps the profile of what they said by then.
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
    """Let what a search found be kept and told: after an interrupt no further one ends that, and 130 is the status."""
    with finishing() if is_interrupted else nullcontext():
        yield
    if is_interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)


def _keep(write: Callable[[], object], out: Path, tell: Callable[[Path | None], None]) -> None:
    """Write what was found, and tell of it: it took minutes, and is told where it cannot be written, too.

    Args:
      tell: takes the file that it was written to, or None.

    Raises: ConfigError where it could not be written.
    """
    try:
        with writing(out):
            write()
    except ConfigError:
        tell(None)
        raise
    tell(out)


def _pictured(plot: Path | None) -> dict[str, str]:
    """The entry of a picture in a report."""
    return {} if plot is None else {"plot": str(plot)}


def _put(report: dict[str, Any], out: Path | None) -> None:
    put_json({"out": None if out is None else str(out), **report})


def _show(report: dict[str, Any], out: Path | None) -> None:
    console = Console(highlight=False, markup=False)
    ended = "interrupted after" if report["is_interrupted"] else "best of"
    console.print(
        f"{ended} {report['num_trials']} sets: leave out attention {report['skipped_attention']}, "
        f"MLP {report['skipped_mlp']}"
    )
    how = "measured" if report["search"]["objective"] == "time" else "computed"
    console.print(
        f"{how} speed {report['speedup']:.3f} of plain decoding; {report['acceptance_rate']:.2f} of the drafted tokens "
        f"accepted, {report['acceptance_length']:.2f} tokens per draft"
    )
    if report["speedup"] < 1:
        console.print("no set that was tried beats plain decoding here")
    again = "; go on with --resume" if report["is_interrupted"] else ""
    if out is not None:
        console.print(
            f'kept in {out}: --speculative-config \'{{"method": "layer_skip", "layer_set": "{out}"}}\'{again}'
        )

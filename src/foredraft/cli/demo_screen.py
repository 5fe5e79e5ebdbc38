"""Screen of the demo: both answers side by side, a table at the end, and a picture."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.terminal_theme import MONOKAI
from rich.text import Text

from foredraft.cli.comparison import BothAnswers, DemoReport, Lane
from foredraft.cli.writers import DRAFTED_STYLE, ratio
from foredraft.engine.stats import counted, describe_drafts
from foredraft.errors import ConfigError
from foredraft.folders import check_place

_REFRESH_SECONDS = 0.1
_NARROW = 60  # columns; panels are put below each other
_FRAME = 4  # columns of a panel that are not text
_PICTURE_WIDTH = 100
_LEGEND = "Green tokens were drafted and accepted; the model itself chose the others."
_TURNS = "The two take turns, so both appear at half speed. Each clock counts its own time only."


@contextmanager
def watching(console: Console, number: int, num_questions: int) -> Iterator[Callable[[BothAnswers], None]]:
    """Show an answer while it grows, and keep it on the screen. For terminals only."""
    heading = f"question {number} of {num_questions}"
    with Live(console=console, auto_refresh=False, transient=True) as live:
        drawn = [float("-inf")]
        shown: list[BothAnswers] = []

        def watch(answer: BothAnswers) -> None:
            shown[:] = [answer]
            if perf_counter() - drawn[0] < _REFRESH_SECONDS:
                return
            room = console.height - 8 - len(Text(answer.question).wrap(console, console.width - _FRAME))
            live.update(
                Group(_asked(answer, heading), _lanes(console, answer, room), Text(_TURNS, "dim")), refresh=True
            )
            drawn[0] = perf_counter()

        yield watch
    if shown:
        console.print(Group(_asked(shown[0], heading), _lanes(console, shown[0])))


def show(console: Console, report: DemoReport) -> None:
    """Print the result; without a terminal, the answers too."""
    if not console.is_terminal:
        for number, answer in enumerate(report.answers, 1):
            console.print(_asked(answer, f"question {number} of {len(report.answers)}"))
            if answer.is_identical:
                console.print(Text(answer.plain.text), soft_wrap=True)
            else:
                console.print(_lanes(console, answer))
    else:
        console.print(Text(_LEGEND, "dim"))
    console.print(summary(report, console.width))


def picture(report: DemoReport, path: Path) -> None:
    """Draw one question of median gain, both answers and the table as SVG.

    Raises: ConfigError if the file cannot be written.
    """
    ranked = sorted(report.answers, key=lambda answer: answer.speedup)
    middle = ranked[(len(ranked) - 1) // 2 : len(ranked) // 2 + 1]
    answer = min(middle, key=lambda answer: answer.plain.num_tokens)
    console = Console(
        record=True,
        width=_PICTURE_WIDTH,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
        _environ={},
    )
    place = report.answers.index(answer) + 1
    console.print(_asked(answer, f"question {place} of {len(report.answers)}"))
    console.print(_lanes(console, answer))
    console.print(Text(_LEGEND, "dim"))
    console.print(summary(report, console.width))
    drawn = console.export_svg(title="foredraft demo", theme=MONOKAI, unique_id="demo")
    try:
        path.expanduser().write_text(drawn, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; check the folder") from None


def check_picture(path: Path) -> None:
    """Check the place of a picture before decoding.

    Raises: ConfigError if no SVG can be written there.
    """
    if path.suffix.lower() != ".svg":
        raise ConfigError(f"--svg is {str(path)!r}; the picture is an SVG, so name it FILE.svg")
    check_place(path)


# -- the answers -----------------------------------------------------------------------------------------------------


def _asked(answer: BothAnswers, heading: str) -> Panel:
    return Panel(Text(answer.question), title=heading, title_align="left", border_style="cyan")


def _lanes(console: Console, answer: BothAnswers, room: int | None = None) -> RenderableType:
    """Both answers, side by side if there is space.

    Args:
      room: limit on lines; the last lines are shown.
    """
    if console.width < _NARROW:
        half = None if room is None else max(1, room // 2 - 2)
        bodies = [_body(console, lane, console.width, half) for lane in answer.lanes]
        return Group(*map(partial(_framed, console.width, None), answer.lanes, bodies))
    grid = Table.grid(expand=True)
    widths = (console.width // 2, console.width - console.width // 2)
    texts = [_body(console, lane, width, room) for lane, width in zip(answer.lanes, widths, strict=True)]
    height = max(len(text.wrap(console, width - _FRAME)) for text, width in zip(texts, widths, strict=True)) + 2
    for width in widths:
        grid.add_column(width=width)
    grid.add_row(
        *(_framed(width, height, lane, text) for width, lane, text in zip(widths, answer.lanes, texts, strict=True))
    )
    return grid


def _framed(width: int, height: int | None, lane: Lane, text: Text) -> Panel:
    done = f"done in {lane.seconds:.2f} s" if lane.is_done else f"{lane.seconds:.1f} s"
    return Panel(
        text,
        title=Text(f"{lane.title}: {done}", "bold" if lane.is_done else ""),
        subtitle=f"{lane.num_tokens} tokens, {lane.tokens_per_second:.1f} tokens/s",
        width=width,
        height=height,
        border_style="" if lane.is_done else "dim",
    )


def _body(console: Console, lane: Lane, width: int, room: int | None) -> Text:
    """Coloured text. If it does not fit, only the last lines are shown."""
    text = Text()
    for piece, is_drafted in lane.pieces:
        text.append(piece, DRAFTED_STYLE if is_drafted else "")
    text.rstrip()
    if room is None:
        return text
    lines = text.wrap(console, width - _FRAME)
    return Text("\n").join(lines[-max(1, room) :])


# -- the table -------------------------------------------------------------------------------------------------------


def summary(report: DemoReport, width: int) -> RenderableType:
    """Table with one row per question and one for all questions. It has no speeds if a text differs."""
    is_narrow = width < _NARROW
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, show_edge=False)
    table.add_column("", justify="right")
    if not is_narrow:
        table.add_column("question", overflow="ellipsis", no_wrap=True, ratio=1)
        table.add_column("tokens", justify="right", no_wrap=True)
        table.expand = True
    for heading in ("plain\ntokens/s", f"{report.method}\ntokens/s", "speed", "tokens\nper step", "same\ntext"):
        table.add_column(heading, justify="right", min_width=6, overflow="fold")
    for number, answer in enumerate(report.answers, 1):
        question = [str(number), " ".join(answer.question.split()), str(answer.plain.num_tokens)]
        speeds = [answer.plain.tokens_per_second, answer.drafting.tokens_per_second, answer.speedup]
        steps = ratio(answer.drafting.num_tokens, answer.count("num_steps"))
        same = "yes" if answer.is_identical else f"to {answer.first_difference}"
        is_last = number == len(report.answers)
        table.add_row(*question[: 1 if is_narrow else 3], *_figures(report, speeds, steps, same), end_section=is_last)
    every = ["all" if is_narrow else "", "all", str(sum(lane.num_tokens for lane in report.plain))]
    speeds = [report.tokens_per_second(report.plain), report.tokens_per_second(report.drafting), report.speedup]
    same = f"{report.num_identical} of {len(report.answers)}"
    table.add_row(
        *every[: 1 if is_narrow else 3], *_figures(report, speeds, report.tokens_per_step, same), style="bold"
    )
    return Group(table, *(Text(line) for line in notes(report)))


def _figures(report: DemoReport, speeds: Sequence[float], steps: float, same: str) -> list[str]:
    """Cells of a row; speeds only if all texts are equal."""
    plain, drafting, gain = speeds
    shown = [f"{plain:.1f}", f"{drafting:.1f}", f"{gain:.2f}x"] if report.is_identical else [""] * 3
    return [*shown, f"{steps:.2f}", same]


def _seconds(number: float) -> str:
    """Seconds as text: ``12.3``, and below one second ``0.042``."""
    return f"{number:.1f}" if number >= 1 else f"{number:.2g}"


def notes(report: DemoReport) -> Iterator[str]:
    """Notes below the table."""
    if report.is_identical:
        plain, drafting = (sum(lane.seconds for lane in lanes) for lanes in (report.plain, report.drafting))
        speedups = report.speedups
        singly = f"; single answers {min(speedups):.2f}x to {max(speedups):.2f}x" if len(speedups) > 1 else ""
        yield (
            f"Same text: {report.num_identical} of {len(report.answers)} identical, token for token "
            f"({report.llm.guarantee.describe()}). "
            f"Speed: {report.speedup:.2f}x plain decoding, {_seconds(drafting)} s for all answers instead of "
            f"{_seconds(plain)}{singly}."
        )
    else:
        differing = len(report.answers) - report.num_identical
        yield (
            f"{differing} of {len(report.answers)} texts differ between plain and {report.method}: no speed is given; "
            f"the guarantee is: {report.llm.guarantee.describe()}. --dtype float32 makes such differences rare, and "
            "foredraft verify judges the texts."
        )
    said, facts = ", ".join(describe_drafts(report.counts)), report.conditions
    yield (
        f"{said[:1].upper()}{said[1:]}{'. ' if said else ''}{report.model}, {facts['dtype']}, {facts['execution']}; "
        f"{facts['cpu']}, {counted(facts['num_threads'], 'thread')}."
    )

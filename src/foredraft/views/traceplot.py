"""Pictures of what length policies did, step by step. Needs matplotlib, which is an optional dependency."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from foredraft.engine.stats import StepTrace
from foredraft.errors import ConfigError
from foredraft.extras import install_command
from foredraft.folders import check_place, part_of, replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_PANELS = 8
"""More samples than that in one picture can no longer be told apart."""


def require_matplotlib() -> ModuleType:
    """`matplotlib.figure`, which draws into files without a display.

    Raises: ConfigError when it is not installed.
    """
    try:
        import matplotlib.figure
    except ImportError:
        raise ConfigError(f"pictures need matplotlib, which is not installed: {install_command('plot')}") from None
    figure: ModuleType = matplotlib.figure
    return figure


def check_picture(file: str | Path) -> Path:
    """A place where a picture can be written.

    Raises: ConfigError for a place that cannot be written, a format that matplotlib does not write, or no matplotlib.
    """
    path = Path(file).expanduser()
    supported = sorted(require_matplotlib().Figure().canvas.get_supported_filetypes())
    if path.suffix.lstrip(".").lower() not in supported:
        raise ConfigError(
            f"the picture {str(file)!r} has no known format; name it .png, or one of {', '.join(supported)}"
        )
    return check_place(path)


def keep_picture(figure: Figure, file: Path) -> None:
    """Write a picture that others see whole or not at all; the ending of the file is its format.

    Raises: ConfigError where it cannot be written; a file is then what it was before.
    """
    part = part_of(file)
    try:
        with replacing(file, part):
            figure.savefig(part, dpi=120, format=file.suffix.lstrip(".").lower())
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}; choose another place") from None


def plot_traces(traces: Sequence[tuple[str, Sequence[StepTrace]]], file: str | Path) -> Path:
    """One panel per sample over the positions of its text: planned and drafted lengths, what was accepted, entropy.

    Args:
      traces: a title and the steps of one sample; the first `MAX_PANELS` are drawn.
      file: where to; its ending is the format.

    Returns: the file that was written.
    Raises: ConfigError, see `check_picture`, and when there is no step to draw.
    """
    path = check_picture(file)
    shown = [(title, steps) for title, steps in traces if steps][:MAX_PANELS]
    if not shown:
        raise ConfigError("there is no step to draw; generate at least one token")
    figure = require_matplotlib().Figure(figsize=(10, 2.8 * len(shown)), layout="constrained")
    panels = figure.subplots(len(shown), 1, squeeze=False)
    for panel, (title, steps) in zip(panels[:, 0], shown, strict=True):
        _draw(panel, title, steps)
    panels[0, 0].legend(loc="upper left", ncols=3, fontsize="small")
    panels[-1, 0].set_xlabel("position in the text")
    if len(traces) > len(shown):
        figure.suptitle(f"{len(shown)} of {len(traces)} samples")
    keep_picture(figure, path)
    return path


def _draw(panel: Axes, title: str, steps: Sequence[StepTrace]) -> None:
    positions = [step.position for step in steps]
    panel.bar(positions, [step.drafted for step in steps], width=0.8, color="#c6d3e1", label="drafted")
    panel.bar(positions, [step.accepted for step in steps], width=0.8, color="#2f6f4f", label="accepted")
    planned = [(step.position, step.gamma) for step in steps if step.gamma is not None]
    if planned:
        panel.plot(*zip(*planned, strict=True), ".", color="#1b1b1b", markersize=4, label="gamma")
    panel.set_title(title, fontsize="small", loc="left")
    panel.set_ylabel("tokens")
    entropies = [(step.position, step.entropy) for step in steps if step.entropy is not None]
    if entropies:
        other = panel.twinx()
        other.plot(*zip(*entropies, strict=True), color="#c0562f", linewidth=0.9)
        other.set_ylabel("entropy / log V", color="#c0562f")
        other.set_ylim(0.0, 1.0)

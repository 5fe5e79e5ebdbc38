"""What reports are made of: sections of charts, tables and paragraphs, which write themselves as HTML.

Marks have CSS classes, so that they follow the page's colours, and figures are text. They are drawn into
picture files by matplotlib, an optional dependency.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from foredraft.errors import ConfigError
from foredraft.views.traceplot import check_picture, keep_picture, require_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes


WIDTH, LABEL, RIGHT, ROW = 720, 190, 160, 26
"""Of a chart of bars, in units of its own, which the page scales: labels, figures, and one bar."""

HEIGHT, MARGIN = 240, 48
"""Of a chart of lines."""


def check_numbers(*values: float) -> None:
    """Raises: ValueError, OverflowError for what cannot be drawn."""
    for value in values:
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"{value!r:.40} is not a number that can be drawn")


@dataclass(frozen=True)
class Bar:
    """One bar.

    Args:
      low, high: its interval; None where it has none.
      said: beside it.
    """

    label: str
    value: float
    low: float | None = None
    high: float | None = None
    said: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.label, str):
            raise TypeError(f"{self.label!r:.40} is not the name of a bar")
        check_numbers(self.value, *(end for end in (self.low, self.high) if end is not None))

    @property
    def told(self) -> str:
        """What stands beside it."""
        return self.said or f"{self.value:.2f}"


@dataclass(frozen=True)
class Paragraph:
    """A sentence or two."""

    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise TypeError(f"{self.text!r:.40} is not a sentence")

    def html(self) -> str:
        return f"<p>{escape(self.text)}</p>"


@dataclass(frozen=True)
class FigureTable:
    """The first column is text and the others are figures."""

    heads: Seq[str]
    rows: Seq[Seq[object]]

    def html(self) -> str:
        made = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in self.rows)
        top = "".join(f'<th scope="col">{escape(head)}</th>' for head in self.heads)
        name = escape(self.heads[0], quote=True)
        scroll = f'<div class="scroll" tabindex="0" role="region" aria-label="{name}, a table">'
        return f"{scroll}<table><thead><tr>{top}</tr></thead><tbody>{made}</tbody></table></div>" if made else ""


@dataclass(frozen=True)
class Bars:
    """Horizontal bars with their intervals.

    Args:
      mark: a value that a line stands at, such as 1 for the speed of plain decoding.
    """

    title: str
    found: Seq[Bar]
    mark: float | None = None

    def html(self) -> str:
        if not self.found:
            return ""
        most = max([self.mark or 0.0, *(max(bar.value, bar.high or 0.0) for bar in self.found)]) or 1.0
        room = WIDTH - LABEL - RIGHT

        def at(value: float) -> float:
            return LABEL + room * (max(0.0, value) / most)

        height = ROW * len(self.found) + 8
        parts = []
        for place, bar in enumerate(self.found):
            top = 4 + place * ROW
            middle = top + ROW / 2
            parts.append(f'<text x="{LABEL - 8}" y="{middle + 4}" class="label">{escape(bar.label)}</text>')
            parts.append(f'<rect x="{LABEL}" y="{top + 4}" width="{at(bar.value) - LABEL:.1f}" height="{ROW - 8}"/>')
            if bar.low is not None and bar.high is not None:
                left, right = at(bar.low), at(bar.high)
                ends = "".join(f"M{x:.1f} {middle - 5}V{middle + 5}" for x in (left, right))
                parts.append(f'<path class="interval" d="M{left:.1f} {middle}H{right:.1f}{ends}"/>')
            parts.append(f'<text x="{WIDTH - RIGHT + 8}" y="{middle + 4}">{escape(bar.told)}</text>')
        if self.mark is not None:
            parts.append(f'<path class="mark" d="M{at(self.mark):.1f} 0V{height}"/>')
        return _figure(self.title, WIDTH, height, parts, [(bar.label, bar.told) for bar in self.found])


@dataclass(frozen=True)
class Lines:
    """Curves from the origin of y, their points marked; each is named at its end.

    Args:
      found: points (x, y) by the name of their curve.
      across: what x counts.
    """

    title: str
    found: Mapping[str, Seq[tuple[float, float]]]
    across: str

    def __post_init__(self) -> None:
        for points in self.found.values():
            for point in points:
                check_numbers(*point)

    @property
    def curves(self) -> dict[str, list[tuple[float, float]]]:
        """Those that have points, in the order of x."""
        return {name: sorted(points) for name, points in self.found.items() if points}

    def html(self) -> str:
        curves = self.curves
        if not curves:
            return ""
        places = [x for points in curves.values() for x, _ in points]
        least, most = min(places), max(places)
        top = max(y for points in curves.values() for _, y in points) or 1.0

        def at(x: float, y: float) -> tuple[float, float]:
            share = (x - least) / (most - least) if most > least else 0.5
            return MARGIN + (WIDTH - MARGIN - RIGHT) * share, HEIGHT - 36 - (HEIGHT - 60) * (y / top)

        parts = [f'<path class="axis" d="M{MARGIN} 12V{HEIGHT - 36}H{WIDTH - RIGHT}"/>']
        parts.append(f'<text x="{MARGIN}" y="{HEIGHT - 4}">{escape(self.across)}</text>')
        for x in sorted(set(places)):
            parts.append(f'<text class="tick" x="{at(x, 0)[0]:.1f}" y="{HEIGHT - 20}">{x:g}</text>')
        for y in (0.0, top / 2, top):
            parts.append(f'<text class="label" x="{MARGIN - 6}" y="{at(least, y)[1] + 4:.1f}">{y:.2g}</text>')
        for place, (name, points) in enumerate(curves.items()):
            drawn = [at(x, y) for x, y in points]
            path = "L".join(f"{x:.1f} {y:.1f}" for x, y in drawn)
            parts.append(f'<path class="curve c{place % 4}" d="M{path}"/>')
            parts += [f'<circle class="c{place % 4}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in drawn]
            parts.append(f'<text x="{drawn[-1][0] + 8:.1f}" y="{drawn[-1][1] + 4:.1f}">{escape(name)}</text>')
        rows = [(f"{name}, {x:g}", f"{y:.3g}") for name, points in curves.items() for x, y in points]
        return _figure(self.title, WIDTH, HEIGHT, parts, rows)


Part: TypeAlias = Paragraph | FigureTable | Bars | Lines


@dataclass(frozen=True)
class Section:
    """Parts under a heading."""

    title: str
    parts: Seq[Part]

    @property
    def charts(self) -> list[Bars | Lines]:
        """Those that there is something to draw of."""
        return [part for part in self.parts if isinstance(part, (Bars, Lines)) and any(part.found)]

    def html(self) -> str:
        """Nothing where no part has anything to show."""
        shown = "".join(part.html() for part in self.parts)
        return f"<section><h2>{escape(self.title)}</h2>{shown}</section>" if shown else ""


def section(title: str, *parts: Part | None) -> Section:
    """Parts under a heading, None left out."""
    return Section(title, tuple(part for part in parts if part is not None))


def _figure(title: str, width: int, height: int, parts: Seq[str], rows: Seq[tuple[str, str]]) -> str:
    """A chart that is read aloud as its figures."""
    told = escape(f"{title}: " + "; ".join(f"{name} {value}" for name, value in rows), quote=True)
    drawn = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{told}">{"".join(parts)}</svg>'
    return f"<figure><figcaption>{escape(title)}</figcaption>{drawn}</figure>"


PICTURE_WIDTH, BAR, FRAME = 9.0, 0.3, 0.9
"""In inches: of the picture, and the heights of one bar and of what stands around bars."""
LINES_HEIGHT = 3.2
"""Of a chart of lines."""


def plot_report(sections: Seq[Section], title: str, file: str | Path) -> int:
    """Draw the charts of all sections, one below the other; tables, sentences and tokens are on the page alone.

    Args:
      file: where to; its ending is the format.

    Returns: how many charts were drawn.
    Raises: ConfigError, see `check_picture`, and where there is no chart.
    """
    path = check_picture(file)
    found = [(section.title, chart) for section in sections for chart in section.charts]
    if not found:
        raise ConfigError("there is no chart in these results; write the page instead, --out FILE.html")
    heights = [BAR * len(chart.found) + FRAME if isinstance(chart, Bars) else LINES_HEIGHT for _, chart in found]
    figure = require_matplotlib().Figure(figsize=(PICTURE_WIDTH, sum(heights) + 0.5), layout="constrained")
    figure.suptitle(title.encode("utf-8", "replace").decode())
    panels = figure.subplots(len(found), 1, squeeze=False, height_ratios=heights)[:, 0]
    for panel, (name, chart) in zip(panels, found, strict=True):
        panel.set_title(f"{name}\n{chart.title}", fontsize="small", loc="left")
        panel.spines[["top", "right"]].set_visible(False)
        if isinstance(chart, Bars):
            _draw_bars(panel, chart)
        else:
            _draw_lines(panel, chart)
    keep_picture(figure, path)
    return len(found)


def _draw_bars(panel: Axes, chart: Bars) -> None:
    places = range(len(chart.found))
    panel.barh(places, [bar.value for bar in chart.found], color="#4f7cac", height=0.7)
    for place, bar in zip(places, chart.found, strict=True):
        if bar.low is not None and bar.high is not None:
            panel.plot([bar.low, bar.high], [place, place], color="#1b1b1b", linewidth=1.2, marker="|")
        panel.text(1.02, place, bar.told, transform=panel.get_yaxis_transform(), va="center", fontsize="small")
    panel.set_yticks(places, [bar.label for bar in chart.found], fontsize="small")
    panel.invert_yaxis()
    panel.set_xlim(left=0.0)
    if chart.mark is not None:
        panel.axvline(chart.mark, color="#888888", linewidth=0.8, linestyle="--")


def _draw_lines(panel: Axes, chart: Lines) -> None:
    for name, points in chart.curves.items():
        panel.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
    panel.set_ylim(bottom=0.0)
    panel.set_xlabel(chart.across, fontsize="small")
    panel.legend(fontsize="small", frameon=False)

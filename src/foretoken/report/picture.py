"""The charts of a report in one picture. Needs matplotlib, an optional dependency."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING

from foretoken.errors import ConfigError
from foretoken.report.charts import Bars, Lines, Section
from foretoken.views.traceplot import check_picture, keep_picture, require_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, BAR, FRAME = 9.0, 0.3, 0.9
"""In inches: of the picture, and the heights of one bar and of what stands around bars."""
HEIGHT = 3.2
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
    heights = [BAR * len(chart.found) + FRAME if isinstance(chart, Bars) else HEIGHT for _, chart in found]
    figure = require_matplotlib().Figure(figsize=(WIDTH, sum(heights) + 0.5), layout="constrained")
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

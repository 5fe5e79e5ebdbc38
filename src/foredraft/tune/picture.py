"""Pictures of a search over layer sets and of a choice among methods. Pictures need matplotlib, an optional
dependency."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from foredraft.pictures import check_picture, keep_picture, require_matplotlib
from foredraft.tune.choosing import Choice
from foredraft.tune.layer_sets import LayerSearch

if TYPE_CHECKING:
    from matplotlib.axes import Axes


ROWS = (1, 2, 4, 8, 16)


def plot_search(search: LayerSearch, file: str | Path) -> Path:
    """Plot the score of every trial and the best score up to it. A second panel shows the sublayers that the best sets
    skip.

    Raises: ConfigError, see `check_picture`.
    """
    path = check_picture(file)
    figure = require_matplotlib().Figure(figsize=(9, 6.5), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(2, 1))
    _draw_trials(above, search)
    _draw_sets(below, search)
    keep_picture(figure, path)
    return path


def _draw_trials(panel: Axes, search: LayerSearch) -> None:
    values = [trial.value for trial in search.trials]
    numbers = range(1, len(values) + 1)
    dots = panel.scatter(numbers, values, c=[len(trial.layer_set) for trial in search.trials], s=16, cmap="viridis")
    panel.step(numbers, list(accumulate(values, min)), where="post", color="#c0562f", linewidth=1.2)
    panel.axhline(1.0, color="#888888", linewidth=0.8, linestyle="--")
    panel.set_xlabel("trial")
    panel.set_ylabel("time per token, plain = 1")
    figure = panel.figure
    figure.colorbar(dots, ax=panel, label="skipped sublayers")


def _draw_sets(panel: Axes, search: LayerSearch, count: int = 10) -> None:
    """Plot one row per kind of sublayer: the share of the best sets that skip it, by layer."""
    best = search.ranking(count)
    shares = [
        [
            sum(layer in getattr(trial.layer_set, kind) for trial in best) / len(best)
            for layer in range(search.space.num_layers)
        ]
        for kind in ("attention", "mlp")
    ]
    panel.imshow(shares, aspect="auto", cmap="Blues", vmin=0.0, vmax=1.0)
    panel.set_yticks([0, 1], ["attention", "MLP"])
    panel.set_xticks(range(search.space.num_layers))
    panel.set_xlabel(f"layer; share of the best {len(best)} sets that skip it")


def plot_choice(choice: Choice, file: str | Path) -> Path:
    """Plot speed by draft length, by nodes of trees, and, for the best settings, by rows of a batch.

    Raises: ConfigError, see `check_picture`.
    """
    path = check_picture(file)
    figure = require_matplotlib().Figure(figsize=(13, 4.2), layout="constrained")
    by_length, by_nodes, by_rows = figure.subplots(1, 3)
    for panel, size, label in ((by_length, "length", "K, longest draft"), (by_nodes, "nodes", "nodes of the tree")):
        _draw_sizes(panel, choice, size)
        panel.set_xlabel(label)
    for one in choice.best_of_methods():
        panel_speeds = [(rows, choice.speed_at(one, rows)) for rows in ROWS]
        by_rows.plot(*zip(*panel_speeds, strict=True), marker="o", markersize=3, label=one.setting.name)
    by_rows.set_xscale("log", base=2)
    by_rows.set_xticks(ROWS, [str(rows) for rows in ROWS])
    by_rows.set_xlabel("rows of a batch, from the cost curve")
    for panel in (by_length, by_nodes, by_rows):
        panel.axhline(1.0, color="#888888", linewidth=0.8, linestyle="--")
        panel.set_ylabel("speed, plain = 1")
        if panel.get_legend_handles_labels()[0]:
            panel.legend(fontsize="small")
    keep_picture(figure, path)
    return path


def _draw_sizes(panel: Axes, choice: Choice, size: str) -> None:
    """Draw a line per method over its settings with this kind of size."""
    titles = dict.fromkeys(one.setting.title for one in choice.ranked)
    for title in titles:
        several = sorted(
            (getattr(one.setting, size), one) for one in choice.of_method(title) if getattr(one.setting, size)
        )
        if not several:
            continue
        sizes = [value for value, _ in several]
        (line,) = panel.plot(sizes, [one.speed for _, one in several], marker="o", markersize=3, label=title)
        low, high = [one.low for _, one in several], [one.high for _, one in several]
        panel.fill_between(sizes, low, high, color=line.get_color(), alpha=0.12)

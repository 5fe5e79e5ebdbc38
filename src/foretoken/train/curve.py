"""The picture of a training: what grows, and what it costs in tokens."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

from foretoken.views.traceplot import require_matplotlib


def draw(metrics: Path, file: Path) -> bool:
    """Draw tokens per step, and how often the first token is right in training, against tokens.

    Args:
      metrics: JSON lines of a run.
      file: the picture, whose name says its format.

    Returns: False where matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        return False
    records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    figure = require_matplotlib().Figure(figsize=(7, 4), layout="constrained")
    left = figure.subplots()
    measured = [record for record in records if "tau" in record]
    left.plot([record["num_tokens"] for record in measured], [record["tau"] for record in measured], "o-")
    left.set_xlabel("answer tokens")
    left.set_ylabel("tokens per step, held-out prompts")
    right = left.twinx()
    first = [record["accuracies"][0] for record in records]
    right.plot([record["num_tokens"] for record in records], first, color="0.7", linewidth=0.8)
    right.set_ylabel("first token right, in training")
    figure.savefig(file)
    return True

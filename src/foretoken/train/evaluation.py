"""How many of a drafter's tokens the target takes: measured by decoding, on prompts that training does not see."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from foretoken.config.sampling import SamplingParams
from foretoken.llm import LLM
from foretoken.views.traceplot import require_matplotlib

DEPTH = 5
_METHOD = {"eagle": "eagle2"}


@dataclass(frozen=True)
class Evaluation:
    """What decoding with a head has shown.

    Args:
      tokens_per_step: tau, the target's own token included.
      by_position: share of drafts of which at least 1, 2, .. tokens were accepted.
      num_steps: of the target.
    """

    tokens_per_step: float
    by_position: tuple[float, ...]
    num_steps: int


def chain_config(method: str, folder: Path, depth: int = DEPTH) -> dict[str, Any]:
    """A config that drafts chains with the drafter in a folder."""
    method = _METHOD.get(method, method)
    config: dict[str, Any] = {"method": method, "model": str(folder), "num_speculative_tokens": depth}
    if method == "draft_model":
        return config
    if method in ("eagle2", "eagle3"):
        return {**config, "num_draft_branches": 1, "max_draft_nodes": depth + 1}
    return {**config, "speculative_token_tree": "x".join(["1"] * depth)}


def measure(llm: LLM, config: dict[str, Any], prompts: Seq[Seq[int]], max_new_tokens: int = 48) -> Evaluation:
    """Decode prompts greedily with a config.

    Args:
      llm: of the target, however it drafts.
      prompts: token ids.

    Exactness: the acceptance of every draft that the config makes; no governor leaves any out.
    """
    drafting = llm.with_speculative_config(config).drafting
    params = SamplingParams(temperature=0.0, max_tokens=max_new_tokens)
    with llm.engine(drafting.new_drafter()) as engine:
        rows = [engine.add_request(tuple(prompt), params)[0] for prompt in prompts]
        while any(not row.is_finished for row in rows):
            engine.step()
    histogram: Counter[int] = Counter()
    for row in rows:
        histogram.update(row.stats.acceptance_histogram)
    num_drafts = max(1, histogram.total())
    deepest = max((*histogram, DEPTH))
    num_steps = sum(row.stats.num_steps for row in rows)
    return Evaluation(
        tokens_per_step=sum(row.stats.num_emitted_tokens for row in rows) / max(1, num_steps),
        by_position=tuple(
            sum(count for length, count in histogram.items() if length >= depth) / num_drafts
            for depth in range(1, deepest + 1)
        ),
        num_steps=num_steps,
    )


def noted(metrics: Path) -> Iterator[dict[str, Any]]:
    """The records of a run; lines that a kill or a full disk cut off are left out."""
    for line in metrics.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue


def draw(metrics: Path, file: Path) -> bool:
    """Draw tokens per step, and how often the first token is right in training, against tokens.

    Args:
      metrics: JSON lines of a run.
      file: the picture, whose name says its format.

    Returns: False where matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        return False
    records = list(noted(metrics))
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

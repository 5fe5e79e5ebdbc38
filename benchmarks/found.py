"""What one measurement of acceptance has found: tau with intervals over prompts, by position and kind, and times."""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from foretoken.engine.stats import SequenceStats

NUM_POSITIONS, NUM_RESAMPLES = 5, 2000


@dataclass
class Found:
    """Counters of one method, by prompt, and the processor time of its drafts and steps.

    Args:
      kinds: of the prompts.
      counts: emitted tokens and steps, by prompt.
      accepted: number of accepted tokens -> number of steps, over all prompts.
      num_drafted: drafted tokens of all steps.
      outputs: token ids, by prompt; none where a record was read.
      draft_seconds, step_seconds: of one step each.
    """

    kinds: Seq[str]
    counts: list[tuple[int, int]] = field(default_factory=list)
    accepted: Counter[int] = field(default_factory=Counter)
    num_drafted: int = 0
    outputs: list[list[int]] = field(default_factory=list)
    draft_seconds: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)

    def add(self, stats: Iterable[SequenceStats]) -> None:
        for one in stats:
            self.counts.append((one.num_emitted_tokens, one.num_steps))
            self.accepted.update(one.acceptance_histogram)
            self.num_drafted += one.num_draft_tokens

    def tau(self, places: Iterable[int] | None = None) -> float:
        several = self.counts if places is None else [self.counts[place] for place in places]
        return sum(emitted for emitted, _ in several) / max(1, sum(steps for _, steps in several))

    def interval(self) -> tuple[float, float]:
        """Of tau over all prompts, 95 %, by bootstrap over them."""
        return _middle([self.tau(sample) for sample in _samples(len(self.counts))])

    def gain_over(self, other: Found) -> tuple[float, float, float]:
        """Difference of tau, with its interval by bootstrap over prompts, the same ones on both sides."""
        gains = [self.tau(sample) - other.tau(sample) for sample in _samples(len(self.counts))]
        return (self.tau() - other.tau(), *_middle(gains))

    def by_position(self) -> list[float]:
        """Share of steps in which at least 1, 2, .. drafted tokens were accepted."""
        steps = max(1, sum(steps for _, steps in self.counts))
        deeper = (
            sum(count for length, count in self.accepted.items() if length >= k) for k in range(1, NUM_POSITIONS + 1)
        )
        return [round(count / steps, 3) for count in deeper]

    def record(self) -> dict[str, Any]:
        """What is printed and kept; times in milliseconds of one step, the least and the median."""
        places: dict[str, list[int]] = defaultdict(list)
        for place, kind in enumerate(self.kinds):
            places[kind].append(place)
        low, high = self.interval()
        steps = max(1, sum(steps for _, steps in self.counts))
        record: dict[str, Any] = {
            "tau": round(self.tau(), 3), "low": round(low, 3), "high": round(high, 3),
            "by_position": self.by_position(),
            "by_kind": {kind: round(self.tau(several), 2) for kind, several in places.items()},
            "nodes_per_step": round(1 + self.num_drafted / steps, 1),
        }  # fmt: skip
        for name, seconds in (("draft_ms", self.draft_seconds), ("step_ms", self.step_seconds)):
            if seconds:
                record[name] = [round(1000 * min(seconds), 2), round(1000 * median(seconds), 2)]
        return record


def kept(file: Path | None, cell: dict[str, Any]) -> dict[str, Any] | None:
    """The record of a cell that was measured before under the same settings, the newest one; None where none was."""
    if file is None or not file.exists():
        return None
    records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    return next((record for record in reversed(records) if cell.items() <= record.items()), None)


def of_record(kinds: Seq[str], record: dict[str, Any]) -> Found:
    """Enough of a measurement to compare others with."""
    return Found(kinds, [(emitted, steps) for emitted, steps in record["by_prompt"]])


def _samples(size: int) -> list[list[int]]:
    drawn = random.Random(0)
    return [drawn.choices(range(size), k=size) for _ in range(NUM_RESAMPLES)]


def _middle(values: list[float]) -> tuple[float, float]:
    """The middle 95 %."""
    ordered, cut = sorted(values), round(0.025 * NUM_RESAMPLES)
    return ordered[cut], ordered[-1 - cut]

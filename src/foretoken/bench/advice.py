"""The conclusion of a comparison of methods: the one to use, why, and how sure that is."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foretoken.bench.measure import bootstrap_median
from foretoken.bench.outcome import MethodRow, Outcome

MIN_PROMPTS = 6
"""With fewer, not even the smallest and largest ratio enclose the median with a chance of 95 % (1 - 2 / 2^n)."""

_LOOPING = 0.25
"""Share of repeated text from which lookups look better than they are."""

NO_DRAFTING: Mapping[str, Any] = {"method": "none"}


@dataclass(frozen=True)
class Advice:
    """The recommended config.

    Args:
      config: for ``--speculative-config`` or ``speculative_config=``; plain decoding where no method is faster.
      reason: why, in a sentence.
      notes: reasons not to take it for granted.
    """

    config: Mapping[str, Any]
    reason: str
    notes: tuple[str, ...]

    @property
    def as_json(self) -> str:
        return json.dumps(self.config)


@dataclass(frozen=True)
class KindRow:
    """The methods on the prompts of one kind, the fastest first: medians of their ratios by plain decoding."""

    kind: str
    num_prompts: int
    ratios: tuple[tuple[str, float], ...]


def advise(outcome: Outcome) -> Advice:
    """Choose the method with the largest median ratio, if it is clearly above 1; plain decoding otherwise."""
    timed = ranked(outcome)
    notes = []
    if outcome.num_prompts < outcome.num_prompts_planned:
        notes.append(f"interrupted after {outcome.num_prompts} of {outcome.num_prompts_planned} prompts")
    if not timed:
        return Advice(NO_DRAFTING, "nothing was timed, so there is nothing to recommend", tuple(notes))
    best = timed[0]
    assert best.comparison is not None
    ratio, num_timed = best.comparison.ratio, best.comparison.num_prompts
    if num_timed < MIN_PROMPTS:
        notes.append(
            f"{num_timed} {'prompt is' if num_timed == 1 else 'prompts are'} too few to be sure of anything; take "
            f"--num-prompts {2 * MIN_PROMPTS} or more"
        )
    if outcome.repeated_share > _LOOPING:
        notes.append(
            f"{outcome.repeated_share:.0%} of the text lies inside repeated 8-grams: this model loops here, which "
            "flatters methods that look text up"
        )
    if ratio <= 1:
        reason = f"no method beats plain decoding here: the best, {best.method}, runs at {best.comparison} of its speed"
        return Advice(NO_DRAFTING, reason, tuple(notes))
    if best.comparison.low <= 1 and num_timed > 1:
        reason = (
            f"no method clearly beats plain decoding here: the best, {best.method}, runs at {best.comparison} of its "
            "speed, which may be chance"
        )
        if num_timed >= MIN_PROMPTS:
            notes.append(f"more prompts may tell: --num-prompts {2 * num_timed}")
        return Advice(NO_DRAFTING, reason, tuple(notes))
    notes += [note for other in timed[1:] if (note := _tie(best, other)) is not None]
    return Advice(best.given, f"{best.method} runs at {best.comparison} of plain decoding's speed", tuple(notes))


def ranked(outcome: Outcome) -> list[MethodRow]:
    """The methods that were timed, the fastest first."""
    timed = [row for row in outcome.rows if row.is_timed]
    return sorted(timed, key=lambda row: -row.comparison.ratio if row.comparison else 0.0)


def by_kind(outcome: Outcome) -> list[KindRow]:
    """The gain of the methods on each kind of prompt, which tells whether they suit one's own prompts."""
    rows = []
    for kind in dict.fromkeys(outcome.kinds):
        places = [place for place, other in enumerate(outcome.kinds) if other == kind]
        found = []
        for row in ranked(outcome):
            ratios = [ratio for place in places if (ratio := row.prompt_ratios[place]) is not None]
            if ratios:
                found.append((row.method, statistics.median(ratios)))
        rows.append(KindRow(kind, len(places), tuple(sorted(found, key=lambda pair: -pair[1]))))
    return rows


def _tie(best: MethodRow, other: MethodRow) -> str | None:
    """A sentence where the prompts do not tell two methods apart; paired, since prompts differ more than methods."""
    pairs = zip(best.prompt_ratios, other.prompt_ratios, strict=True)
    ratios = [one / two for one, two in pairs if one is not None and two is not None]
    if len(ratios) < 2:
        return None
    low, high = bootstrap_median(ratios)
    if low > 1 and len(ratios) >= MIN_PROMPTS:
        return None
    middle = statistics.median(ratios)
    return (
        f"{len(ratios)} prompts do not tell {best.method} from {other.method} "
        f"({middle:.2f} times as fast, {low:.2f}-{high:.2f})"
    )

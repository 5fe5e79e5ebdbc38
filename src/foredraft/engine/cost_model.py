"""What steps cost: a measured curve, and what this process has seen of steps and drafts."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from statistics import fmean
from typing import Any

from foredraft.config.keywords import integer, real

FEW = 3
"""Times that something was seen, below which the least of them counts: first calls compile and warm up. Three, since
a pause of the machine meets one in a hundred steps (dev/log, 2026-11-24: first drafts took three times as long)."""

FAR = 0.3
"""Of a logarithm: how far one time can pull an estimate, and beyond which a curve is wrong. Six times the spread of
steps on an idle machine, 5 %."""

RATE = 0.05
"""What the newest of many times weighs: twenty steps are half a second, in which a machine becomes busy or idle."""

RESOLUTION = 16
"""Numbers of nodes that are told apart one by one, about: above it those alike within 6 % count as one."""

SHARE = 0.01
"""Of the time of steps that may go into each of: deciding, drafts that only show whether they would pay, and drafters
that are attended to once more. Together with what drifts in between, 3 % at most (issue 26)."""

MEMORY = 128
"""Outcomes and steps that count; what was not seen for so long is looked at again. About one answer."""

STALE = MEMORY // 2
"""Drafts of other depths after which the seconds of a depth are measured anew."""


@dataclass(frozen=True)
class CostCurve:
    """Seconds of a forward.

    Args:
      seconds: by its number of nodes per row, chains; at least for one node.
      context: tokens before them.
      per_token: seconds that a step takes longer for every token more that a row of it has.
      num_rows: of the batch.
    """

    seconds: Mapping[int, float]
    context: int = 0
    per_token: float = 0.0
    num_rows: int = 1

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> CostCurve:
        """A curve as JSON has it.

        Raises: KeyError, TypeError, AttributeError, ValueError, OverflowError where it is none.
        """
        seconds = read_seconds(data["seconds"])
        if 1 not in seconds:
            raise ValueError("one node was not measured")
        return cls(
            seconds,
            integer("a curve", "context", data["context"], 0),
            real("a curve", "per_token", data.get("per_token", 0.0), 0.0),
            integer("a curve", "num_rows", data.get("num_rows", 1), 1),
        )

    @classmethod
    def mean(cls, curves: Sequence[CostCurve]) -> CostCurve:
        """Several measurements of one curve, as far as all of them went."""
        first = curves[0]
        shared = [count for count in first.seconds if all(count in curve.seconds for curve in curves)]
        seconds = {count: fmean(curve.seconds[count] for curve in curves) for count in shared}
        return replace(first, seconds=seconds, per_token=fmean(curve.per_token for curve in curves))

    def rising(self) -> CostCurve:
        """No number of nodes counts for more than a larger one: what disturbs a machine only ever adds."""
        known = self.seconds
        seconds = {count: min(known[other] for other in known if other >= count) for count in known}
        return replace(self, seconds=seconds)

    @cached_property
    def _nodes(self) -> list[int]:
        return sorted(self.seconds)

    def at(self, num_nodes: int) -> float:
        """Seconds of so many nodes: lines between what was measured, and on beyond it."""
        nodes = self._nodes
        if len(nodes) == 1:
            return self.seconds[nodes[0]]
        right = min(max(bisect_left(nodes, num_nodes), 1), len(nodes) - 1)
        low, high = nodes[right - 1], nodes[right]
        slope = (self.seconds[high] - self.seconds[low]) / (high - low)
        if num_nodes > high:
            slope = max(slope, 0.0)
        return self.seconds[high] + slope * (num_nodes - high)


def read_seconds(data: Mapping[str, Any]) -> dict[int, float]:
    """Seconds by a number of nodes or levels, as JSON has them.

    Raises: TypeError, AttributeError, ValueError, OverflowError where they are none.
    """
    seconds = {
        integer("a curve", "count", int(key), 0): real("a curve", "time", taken, 0.0) for key, taken in data.items()
    }
    if not all(seconds.values()):
        raise ValueError("seconds must be above 0")
    return seconds


class Average:
    """A running average of logarithms: of the first times the least, then all, the newest weighing most."""

    __slots__ = ("count", "value")

    def __init__(self) -> None:
        self.count = 0
        self.value = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        if self.count <= FEW:
            self.value = value if self.count == 1 else min(self.value, value)
        else:
            self.value += max(RATE, 1.0 / self.count) * max(-FAR, min(FAR, value - self.value))


@cache
def place_of(count: int) -> int:
    """The class of a number of nodes or rows: small ones are told apart, large ones by their logarithm."""
    return round(RESOLUTION * math.log2(1.0 + count / RESOLUTION))


def count_at(place: int) -> int:
    """A number of nodes or rows of a class."""
    return max(1, round(RESOLUTION * (math.exp(place / RESOLUTION * math.log(2.0)) - 1.0)))


class CostModel:
    """Seconds of verifying so many nodes of so many rows, and of drafting so many levels.

    It begins with a measured curve and learns how steps differ from it: all of them, as the machine is busier or less,
    and those of a kind (a number of rows, chains or trees) by their nodes. What is known of some numbers of nodes holds
    for those between and beyond. What verifying costs is learned from all steps; what drafting costs, for each way to
    draft by itself.

    Args:
      curve: of forwards; seconds by the number of nodes stand for one that knows nothing of contexts.
      disprove: called where steps show that the curve is wrong.

    Attributes:
      scale: average logarithm of how much slower steps are at present than the curve says.
    """

    def __init__(self, curve: CostCurve | Mapping[int, float], disprove: Callable[[], None] | None = None) -> None:
        self.scale = Average()
        self._curve = curve if isinstance(curve, CostCurve) else CostCurve(curve)
        self._at: dict[int, float] = {}  # seconds of the curve by nodes, as far as they were asked for
        self._disprove = disprove
        self._kinds: dict[tuple[int, bool], dict[int, Average]] = {}  # rows, chains -> nodes -> time by curve and scale
        self._of_context = 0.0  # seconds per row
        self._known: dict[tuple[int, int, bool], float] = {}  # seconds of steps, without the scale
        self._drift = 0.0  # change since these were worked out
        self._drafting: dict[int, dict[int, _Levels]] = {}  # by way and rows, of times by the scale
        self._first: dict[int, dict[int, _Levels]] = {}  # of drafts that some row got for the first time

    # -- verifying -------------------------------------------------------------------------------------------------

    def set_context(self, num_tokens: float) -> None:
        """Set the mean number of tokens before a step: how much longer steps take is known beforehand."""
        before = self._of_context
        self._of_context = self._curve.per_token * max(num_tokens - self._curve.context, 0.0)
        if self._of_context != before:
            self._note_change(abs(self._of_context - before) / self.curve(1))

    def verified(self, num_rows: int, num_nodes: int, seconds: float, *, are_chains: bool = True) -> None:
        """Take in a step that has verified these nodes; its seconds without those of drafting."""
        if seconds <= 0.0:
            return
        ratio = math.log(seconds / (self.curve(num_nodes) + num_rows * self._of_context))
        kind = self._kinds.setdefault((place_of(num_rows), are_chains), {})
        average = kind.get(place_of(num_nodes))
        if average is None:
            average = kind[place_of(num_nodes)] = Average()
        before = average.value
        self.scale.add(ratio - before)
        average.add(ratio - self.scale.value)
        self._note_change(abs(average.value - before) if average.count > FEW else 1.0)
        if are_chains and average.count == FEW:
            plain = kind.get(place_of(num_rows))
            if plain is not None and plain.count >= FEW:
                self._judge(num_rows, num_nodes, average.value - plain.value)

    def verify(self, num_rows: int, num_nodes: int, *, are_chains: bool = True) -> float:
        """Expected seconds of a step that verifies these nodes."""
        key = num_rows, num_nodes, are_chains
        known = self._known.get(key)
        if known is None:
            ratio = self._ratio(place_of(num_rows), place_of(num_nodes), are_chains)
            known = self._known[key] = (self.curve(num_nodes) + num_rows * self._of_context) * math.exp(ratio)
        return known * math.exp(self.scale.value)

    def curve(self, num_nodes: int) -> float:
        """Seconds of verifying by the curve alone."""
        seconds = self._at.get(num_nodes)
        if seconds is None:
            seconds = self._at[num_nodes] = self._curve.at(num_nodes)
        return seconds

    def times_seen(self, num_rows: int, num_nodes: int) -> int:
        """Number of steps that verified these nodes, as chains."""
        average = self._kinds.get((place_of(num_rows), True), {}).get(place_of(num_nodes))
        return 0 if average is None else average.count

    def knows_drafts(self, num_rows: int) -> bool:
        """Whether so many rows have verified drafts a few times: what those cost is more than what a curve says."""
        rows = place_of(num_rows)
        kinds = [self._kinds.get((rows, are_chains), {}) for are_chains in (True, False)]
        return any(place > rows and one.count >= FEW for kind in kinds for place, one in kind.items())

    def _judge(self, num_rows: int, num_nodes: int, difference: float) -> None:
        """Tell that the curve is wrong where a draft plainly does not take what it says beside a plain step.

        Where drafts are cheaper the curve is bent: larger ones, that nobody would try, are cheaper, too.

        Args:
          difference: of the logarithms of what these have taken by the curve.
        """
        if abs(difference) < FAR:
            return
        if self._disprove is not None:
            self._disprove()
        said = self._expected(num_rows, num_nodes) / self._expected(num_rows, num_rows) - 1.0
        if difference > 0.0 or said <= 0.0:
            return
        bent, first = max((1.0 + said) * math.exp(difference) - 1.0, 0.0) / said, self.curve(1)
        seen = [
            (average, count_at(rows), count_at(place))
            for (rows, _), kind in self._kinds.items()
            for place, average in kind.items()
        ]
        before = [self._expected(rows, nodes) for _, rows, nodes in seen]
        seconds = {nodes: first + bent * (taken - first) for nodes, taken in self._curve.seconds.items()}
        self._curve = replace(self._curve, seconds=seconds)
        self._at.clear()
        for (average, rows, nodes), said_before in zip(seen, before, strict=True):  # what was seen stays what it was
            average.value += math.log(said_before / self._expected(rows, nodes))

    def _note_change(self, change: float) -> None:
        """Forget the seconds of steps that were worked out once they have changed by a hundredth."""
        self._drift += change
        if self._drift > 0.01:
            self._known.clear()
            self._drift = 0.0

    def _expected(self, num_rows: int, num_nodes: int) -> float:
        """Seconds by the curve and the context alone."""
        return self.curve(num_nodes) + num_rows * self._of_context

    def _ratio(self, rows: int, nodes: int, are_chains: bool) -> float:
        """How much longer steps take than the curve and the scale say, from what was seen of such nodes or near."""
        averages = self._kinds.get((rows, are_chains), {})
        own = averages.get(nodes)
        if own is not None and own.count >= FEW:
            return own.value
        seen = {place: one.value for place, one in averages.items() if one.count >= FEW}
        if not seen:
            known = [kind for kind, others in self._kinds.items() if max(one.count for one in others.values()) >= FEW]
            if not known:
                return 0.0
            kind = min(known, key=lambda other: (other[1] != are_chains, abs(other[0] - rows), other))
            seen = {place: one.value for place, one in self._kinds[kind].items() if one.count >= FEW}
        if nodes in seen:
            return seen[nodes]
        places = sorted(seen)
        right = bisect_left(places, nodes)
        total = weights = 0.0
        for place in places[max(right - 1, 0) : right + 1]:  # on either side, as far as there are any
            weight = 1.0 / abs(place - nodes)
            total += weight * seen[place]
            weights += weight
        return total / weights

    # -- drafting --------------------------------------------------------------------------------------------------

    def drafted(self, num_rows: int, num_levels: int, seconds: float, *, way: int = 0, is_first: bool = False) -> None:
        """Take in the seconds of drafting so many levels for rows.

        Args:
          way: number of the way to draft, see `DrafterFacts.arms`.
          is_first: whether one of the rows got its first draft: that takes longer for many drafters, and counts only
            as long as there is no other.
        """
        if seconds <= 0.0:
            return
        of_way = (self._first if is_first else self._drafting).setdefault(way, {})
        levels = of_way.get(place_of(num_rows))
        if levels is None:
            levels = of_way[place_of(num_rows)] = _Levels()
        levels.add(num_levels, math.log(seconds) - self.scale.value)

    def knows_drafting(self, way: int = 0) -> bool:
        """Whether there were drafts of a way that were no row's first one."""
        return way in self._drafting

    def draft(self, num_rows: int, num_levels: int, way: int = 0) -> float | None:
        """Expected seconds of drafting so many levels; None where nothing like it was seen."""
        if num_levels <= 0:
            return 0.0
        by_rows, rows = self._drafting.get(way) or self._first.get(way), place_of(num_rows)
        if by_rows is None:
            return None
        levels = by_rows.get(rows) or by_rows[min(by_rows, key=lambda other: (abs(other - rows), other))]
        return levels.seconds(num_levels) * math.exp(self.scale.value)


class _Levels:
    """Logarithms of seconds of drafts, by their number of levels.

    Numbers that were not seen for long begin anew, and those that were seen less than `FEW` times are believed only
    where they are cheaper than the others let expect: what they took when they were tried, the first time of all or
    while the machine paused, would keep them from being tried again.
    """

    def __init__(self) -> None:
        self._averages: dict[int, Average] = {}
        self._last: dict[int, int] = {}  # draft in which it was seen
        self._count = 0
        self._fitted: tuple[dict[int, float], dict[int, float], tuple[int, float, float]] | None = None

    def add(self, num_levels: int, value: float) -> None:
        average = self._averages.get(num_levels)
        if average is None or self._count - self._last[num_levels] >= STALE:
            average = self._averages[num_levels] = Average()
        average.add(value)
        self._count += 1
        self._last[num_levels] = self._count
        self._fitted = None

    def seconds(self, num_levels: int) -> float:
        """Seconds of so many levels, on a line through those that were seen of late, and often if any were."""
        self._fitted = self._fitted or self._fit()
        sure, seen, (first, least, slope) = self._fitted
        if num_levels in sure:
            return sure[num_levels]
        return min(max(least + slope * (num_levels - first), 0.0), seen.get(num_levels, math.inf))

    def _fit(self) -> tuple[dict[int, float], dict[int, float], tuple[int, float, float]]:
        """Seconds of levels that are sure, of all that were seen, and a line."""
        seen: dict[int, float] = {}
        fresh: dict[int, float] = {}
        often: dict[int, float] = {}
        for levels, average in self._averages.items():
            seen[levels] = math.exp(average.value)
            if self._count - self._last[levels] < STALE:
                fresh[levels] = seen[levels]
                if average.count >= FEW:
                    often[levels] = seen[levels]
        if not often or len(often) == len(fresh):
            return fresh, seen, _line(fresh)
        first, least, slope = _line(often)
        believed = {
            levels: min(seconds, max(least + slope * (levels - first), 0.0))
            for levels, seconds in fresh.items()
            if levels not in often
        }
        return often, seen, _line(often | believed)


def _line(seconds: Mapping[int, float]) -> tuple[int, float, float]:
    """The fewest levels, their seconds, and those of one level more, by what the fewest and the most have taken."""
    fewest, most = min(seconds), max(seconds)
    if fewest == most:  # all of it is by the level, until that is tried
        return most, seconds[most], seconds[most] / most
    return fewest, seconds[fewest], max(0.0, (seconds[most] - seconds[fewest]) / (most - fewest))

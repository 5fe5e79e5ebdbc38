"""Time of steps: a measured curve, corrected by the steps and drafts of this process."""

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
"""Number of measurements up to which the smallest one counts, because first calls compile and warm up. The number is
three, since a pause of the machine meets one in a hundred steps (dev/log, 2026-11-24: first drafts took three times as
long).
"""

FAR = 0.3
"""Difference of logarithms: the most by which one time changes an estimate, and the difference beyond which a curve
counts as wrong. Six times the spread of steps on an idle machine, 5 %.
"""

RATE = 0.05
"""Weight of the newest of many times. Twenty steps are half a second, in which a machine may become busy or idle."""

RESOLUTION = 16
"""Approximate number of nodes up to which counts are distinguished one by one. Larger counts share classes of 6 %.
"""

SHARE = 0.01
"""Share of step time for each of three overheads: deciding, drafts that only test whether drafting is worth its cost,
and trials of drafting modes that are not the best. Together with the drift in between, at most 3 % (issue 26).
"""

MEMORY = 128
"""Number of outcomes and steps that count. An entry that is older is measured again. About one answer."""

STALE = MEMORY // 2
"""Number of drafts of other depths after which the time of a depth is measured again."""


@dataclass(frozen=True)
class CostCurve:
    """Time of a forward pass, in seconds, by its number of nodes.

    Args:
      seconds: seconds by the number of nodes per row, for chains; must include one node.
      context: number of tokens before the nodes.
      per_token: additional seconds of a step for every further token of context in one row.
      num_rows: number of rows of the batch.
    """

    seconds: Mapping[int, float]
    context: int = 0
    per_token: float = 0.0
    num_rows: int = 1

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> CostCurve:
        """Read a curve from JSON data.

        Raises: KeyError, TypeError, AttributeError, ValueError, OverflowError for invalid data.
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
        """Average several measurements of one curve, over the node counts that all of them contain."""
        first = curves[0]
        shared = [count for count in first.seconds if all(count in curve.seconds for curve in curves)]
        seconds = {count: fmean(curve.seconds[count] for curve in curves) for count in shared}
        return replace(first, seconds=seconds, per_token=fmean(curve.per_token for curve in curves))

    def rising(self) -> CostCurve:
        """Return the curve with every value lowered to the smallest one at or beyond it. Disturbances only add time."""
        known = self.seconds
        seconds = {count: min(known[other] for other in known if other >= count) for count in known}
        return replace(self, seconds=seconds)

    @cached_property
    def _nodes(self) -> list[int]:
        return sorted(self.seconds)

    def at(self, num_nodes: int) -> float:
        """Seconds for ``num_nodes`` nodes, interpolated linearly and extrapolated beyond the measurements."""
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
    """Read seconds by number of nodes or levels from JSON data.

    Raises: TypeError, AttributeError, ValueError, OverflowError for invalid data.
    """
    seconds = {
        integer("a curve", "count", int(key), 0): real("a curve", "time", taken, 0.0) for key, taken in data.items()
    }
    if not all(seconds.values()):
        raise ValueError("seconds must be above 0")
    return seconds


class Average:
    """Running average of logarithms.

    The estimate is the minimum of the first `FEW` values, then a mean in which new values weigh most.
    """

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
    """Class of a number of nodes or rows.

    Each small number is a separate class. Large numbers share logarithmic classes.
    """
    return round(RESOLUTION * math.log2(1.0 + count / RESOLUTION))


def count_at(place: int) -> int:
    """A number of nodes or rows that belongs to a class."""
    return max(1, round(RESOLUTION * (math.exp(place / RESOLUTION * math.log(2.0)) - 1.0)))


class CostModel:
    """Expected seconds of verifying a number of nodes in a number of rows, and of drafting a number of levels.

    The model starts with a measured curve and learns the deviation of steps from it. One factor, the scale, applies to
    all steps, because the machine may be more or less busy. Further factors depend on the number of rows, chains or
    trees, and the number of nodes; they are interpolated between measured numbers of nodes. Verification costs are
    learned from all steps, drafting costs separately for each drafting mode.

    Args:
      curve: time of forward passes; a mapping of seconds by number of nodes is a curve without context dependence.
      disprove: function to call when steps show that the curve is wrong.

    Attributes:
      scale: average logarithm of the factor by which steps are currently slower than the curve.
    """

    def __init__(self, curve: CostCurve | Mapping[int, float], disprove: Callable[[], None] | None = None) -> None:
        self.scale = Average()
        self._curve = curve if isinstance(curve, CostCurve) else CostCurve(curve)
        self._at: dict[int, float] = {}  # cached seconds of the curve, by nodes
        self._disprove = disprove
        self._kinds: dict[tuple[int, bool], dict[int, Average]] = {}  # rows, chains -> nodes -> time by curve and scale
        self._of_context = 0.0  # seconds per row
        self._known: dict[tuple[int, int, bool], float] = {}  # cached seconds of steps, without the scale
        self._drift = 0.0  # change since these were computed
        self._drafting: dict[int, dict[int, _Levels]] = {}  # by mode and rows; times are relative to the scale
        self._first: dict[int, dict[int, _Levels]] = {}  # the same, for steps in which some row got its first draft

    # -- verifying -------------------------------------------------------------------------------------------------

    def set_context(self, num_tokens: float) -> None:
        """Set the mean context length of the rows in tokens. The step times change accordingly."""
        before = self._of_context
        self._of_context = self._curve.per_token * max(num_tokens - self._curve.context, 0.0)
        if self._of_context != before:
            self._note_change(abs(self._of_context - before) / self.curve(1))

    def verified(self, num_rows: int, num_nodes: int, seconds: float, *, are_chains: bool = True) -> None:
        """Learn from a step that verified ``num_nodes`` nodes. ``seconds`` excludes the time of drafting."""
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
        """Expected seconds of a step that verifies ``num_nodes`` nodes in all."""
        key = num_rows, num_nodes, are_chains
        known = self._known.get(key)
        if known is None:
            ratio = self._ratio(place_of(num_rows), place_of(num_nodes), are_chains)
            known = self._known[key] = (self.curve(num_nodes) + num_rows * self._of_context) * math.exp(ratio)
        return known * math.exp(self.scale.value)

    def curve(self, num_nodes: int) -> float:
        """Seconds of a forward pass according to the curve alone."""
        seconds = self._at.get(num_nodes)
        if seconds is None:
            seconds = self._at[num_nodes] = self._curve.at(num_nodes)
        return seconds

    def times_seen(self, num_rows: int, num_nodes: int) -> int:
        """Number of steps that verified this many nodes, as chains."""
        average = self._kinds.get((place_of(num_rows), True), {}).get(place_of(num_nodes))
        return 0 if average is None else average.count

    def knows_drafts(self, num_rows: int) -> bool:
        """Return whether drafts were verified a few times with this many rows, so that their cost is measured."""
        rows = place_of(num_rows)
        kinds = [self._kinds.get((rows, are_chains), {}) for are_chains in (True, False)]
        return any(place > rows and one.count >= FEW for kind in kinds for place, one in kind.items())

    def _judge(self, num_rows: int, num_nodes: int, difference: float) -> None:
        """Report that the curve is wrong, if the cost of a draft relative to a plain step differs much from it.

        If drafts are cheaper than predicted, the whole curve is lowered, since larger drafts would otherwise never be
        tried.

        Args:
          difference: logarithm of the measured cost ratio of draft and plain step, relative to that of the curve.
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
        for (average, rows, nodes), said_before in zip(seen, before, strict=True):  # keep these estimates
            average.value += math.log(said_before / self._expected(rows, nodes))

    def _note_change(self, change: float) -> None:
        """Clear the cached step times once they have changed by one percent."""
        self._drift += change
        if self._drift > 0.01:
            self._known.clear()
            self._drift = 0.0

    def _expected(self, num_rows: int, num_nodes: int) -> float:
        """Seconds according to the curve and the context alone."""
        return self.curve(num_nodes) + num_rows * self._of_context

    def _ratio(self, rows: int, nodes: int, are_chains: bool) -> float:
        """Logarithm of the deviation of steps from curve and scale, from the nearest measured numbers of nodes."""
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
        for place in places[max(right - 1, 0) : right + 1]:  # the neighbours on both sides, if they exist
            weight = 1.0 / abs(place - nodes)
            total += weight * seen[place]
            weights += weight
        return total / weights

    # -- drafting --------------------------------------------------------------------------------------------------

    def drafted(self, num_rows: int, num_levels: int, seconds: float, *, way: int = 0, is_first: bool = False) -> None:
        """Learn from the time of drafting ``num_levels`` levels.

        Args:
          way: index of the drafting mode, see `DrafterFacts.arms`.
          is_first: True if this is the first draft of a row. Such drafts take longer with many drafters, so they count
            only until there are other measurements.
        """
        if seconds <= 0.0:
            return
        of_way = (self._first if is_first else self._drafting).setdefault(way, {})
        levels = of_way.get(place_of(num_rows))
        if levels is None:
            levels = of_way[place_of(num_rows)] = _Levels()
        levels.add(num_levels, math.log(seconds) - self.scale.value)

    def knows_drafting(self, way: int = 0) -> bool:
        """Return whether a drafting mode has made any draft that was not a row's first one."""
        return way in self._drafting

    def draft(self, num_rows: int, num_levels: int, way: int = 0) -> float | None:
        """Expected seconds of drafting ``num_levels`` levels; None if the mode has never drafted."""
        if num_levels <= 0:
            return 0.0
        by_rows, rows = self._drafting.get(way) or self._first.get(way), place_of(num_rows)
        if by_rows is None:
            return None
        levels = by_rows.get(rows) or by_rows[min(by_rows, key=lambda other: (abs(other - rows), other))]
        return levels.seconds(num_levels) * math.exp(self.scale.value)


class _Levels:
    """Logarithms of drafting times, by number of levels.

    A number of levels that was not drafted for long is measured again. A number of levels that was measured fewer than
    `FEW` times counts only if it is cheaper than the others predict. Otherwise a slow first draft, or a pause of the
    machine, would prevent it from being tried again.
    """

    def __init__(self) -> None:
        self._averages: dict[int, Average] = {}
        self._last: dict[int, int] = {}  # number of the last draft with these levels
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
        """Seconds for a number of levels, on a line through recent measurements; frequent ones have priority."""
        self._fitted = self._fitted or self._fit()
        sure, seen, (first, least, slope) = self._fitted
        if num_levels in sure:
            return sure[num_levels]
        return min(max(least + slope * (num_levels - first), 0.0), seen.get(num_levels, math.inf))

    def _fit(self) -> tuple[dict[int, float], dict[int, float], tuple[int, float, float]]:
        """Return the seconds of reliable levels, of all measured levels, and a line through them."""
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
    """Return the smallest number of levels, its seconds, and the seconds per further level."""
    fewest, most = min(seconds), max(seconds)
    if fewest == most:  # assume that all of the time is proportional to the levels
        return most, seconds[most], seconds[most] / most
    return fewest, seconds[fewest], max(0.0, (seconds[most] - seconds[fewest]) / (most - fewest))

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

    It begins with a curve that was measured and learns how steps differ from it: all of them, as the machine is busier
    or less, and those of a kind (a number of rows, chains or trees) by their nodes. What is known of some numbers of
    nodes holds for those between and beyond.

    Args:
      curve: of forwards; seconds by the number of nodes stand for one that knows nothing of contexts.
      disprove: called where steps show that the curve is wrong.
    """

    def __init__(self, curve: CostCurve | Mapping[int, float], disprove: Callable[[], None] | None = None) -> None:
        self._verifying = _Verifying(curve if isinstance(curve, CostCurve) else CostCurve(curve), disprove)
        self._drafting: dict[int, _Levels] = {}  # by rows, of times by the scale
        self._first: dict[int, _Levels] = {}  # of drafts that some row got for the first time

    def beside(self) -> CostModel:
        """Costs of another way of drafting: what verifying costs is learned together, what drafting costs is not."""
        other = CostModel(self._verifying.curve)
        other._verifying = self._verifying
        return other

    # -- verifying -------------------------------------------------------------------------------------------------

    def after(self, context: float) -> None:
        """From now on rows have so many tokens, on average: how much longer steps take is known beforehand."""
        self._verifying.after(context)

    def verified(self, num_rows: int, num_nodes: int, seconds: float, *, are_chains: bool = True) -> None:
        """A step has verified these; all of its time but that of drafting."""
        if seconds > 0.0:
            self._verifying.add(num_rows, num_nodes, seconds, are_chains)

    def verify(self, num_rows: int, num_nodes: int, *, are_chains: bool = True) -> float:
        """Seconds that a step is expected to take which verifies these."""
        return self._verifying.seconds(num_rows, num_nodes, are_chains)

    def curve(self, num_nodes: int) -> float:
        """Seconds of verifying by the curve alone."""
        return self._verifying.curve.at(num_nodes)

    def times_seen(self, num_rows: int, num_nodes: int) -> int:
        """How many steps there were which verified these, as chains."""
        return self._verifying.times_seen(num_rows, num_nodes)

    def knows_drafts(self, num_rows: int) -> bool:
        """Whether so many rows have verified drafts a few times: what those cost is more than what a curve says."""
        return self._verifying.knows_drafts(num_rows)

    # -- drafting --------------------------------------------------------------------------------------------------

    def drafted(self, num_rows: int, num_levels: int, seconds: float, *, is_first: bool = False) -> None:
        """Drafting so many levels for rows has taken so long.

        Args:
          is_first: whether one of the rows got its first draft: that takes longer for many drafters, and counts only
            as long as there is no other.
        """
        if seconds > 0.0:
            of_rows = (self._first if is_first else self._drafting).setdefault(place_of(num_rows), _Levels())
            of_rows.add(num_levels, math.log(seconds) - self._verifying.scale.value)

    @property
    def knows_drafting(self) -> bool:
        """Whether there were drafts that were no row's first one."""
        return bool(self._drafting)

    def draft(self, num_rows: int, num_levels: int) -> float | None:
        """Seconds that drafting is expected to take; None where nothing like it was seen."""
        if num_levels <= 0:
            return 0.0
        of_rows = _nearest(self._drafting or self._first, place_of(num_rows))
        return None if of_rows is None else of_rows.seconds(num_levels) * math.exp(self._verifying.scale.value)


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
        if num_levels not in self._averages or not self._is_fresh(num_levels):
            self._averages[num_levels] = Average()
        self._averages[num_levels].add(value)
        self._count += 1
        self._last[num_levels] = self._count
        self._fitted = None

    def _is_fresh(self, num_levels: int) -> bool:
        return self._count - self._last[num_levels] < MEMORY // 2

    def seconds(self, num_levels: int) -> float:
        """Of so many levels, from those that were seen of late, often if any were: on a line through them."""
        self._fitted = self._fitted or self._fit()
        sure, seen, (first, least, slope) = self._fitted
        if num_levels in sure:
            return sure[num_levels]
        return min(max(least + slope * (num_levels - first), 0.0), seen.get(num_levels, math.inf))

    def _fit(self) -> tuple[dict[int, float], dict[int, float], tuple[int, float, float]]:
        """Seconds of levels that are sure, of all that were seen, and a line."""
        seen = {levels: math.exp(one.value) for levels, one in self._averages.items()}
        fresh = [levels for levels in seen if self._is_fresh(levels)]
        often = [levels for levels in fresh if self._averages[levels].count >= FEW] or fresh
        sure = {levels: seen[levels] for levels in often}
        first, least, slope = _line(sure)
        believed = {
            levels: min(seen[levels], max(least + slope * (levels - first), 0.0))
            for levels in fresh
            if levels not in sure
        }
        return sure, seen, _line(sure | believed)


def _line(seconds: Mapping[int, float]) -> tuple[int, float, float]:
    """The fewest levels, their seconds, and those of one level more, by what the fewest and the most have taken."""
    fewest, most = min(seconds), max(seconds)
    if fewest == most:  # all of it is by the level, until that is tried
        return most, seconds[most], seconds[most] / most
    return fewest, seconds[fewest], max(0.0, (seconds[most] - seconds[fewest]) / (most - fewest))


class _Verifying:
    """Seconds of verifying by rows and nodes; see `CostModel`."""

    def __init__(self, curve: CostCurve, disprove: Callable[[], None] | None) -> None:
        self.curve = curve
        self.scale = Average()  # of how much slower steps are at present than the curve says
        self._disprove = disprove
        self._kinds: dict[tuple[int, bool], dict[int, Average]] = {}  # rows, chains -> nodes -> time by curve and scale
        self._of_context = 0.0  # seconds per row
        self._known: dict[tuple[int, int, bool], float] = {}  # without the scale
        self._drift = 0.0  # since these were worked out

    def after(self, context: float) -> None:
        before = self._of_context
        self._of_context = self.curve.per_token * max(context - self.curve.context, 0.0)
        self._moved(abs(self._of_context - before) / self.curve.at(1))

    def add(self, num_rows: int, num_nodes: int, seconds: float, are_chains: bool) -> None:
        ratio = math.log(seconds / self._expected(num_rows, num_nodes))
        kind = self._kinds.setdefault((place_of(num_rows), are_chains), {})
        average = kind.setdefault(place_of(num_nodes), Average())
        before = average.value
        self.scale.add(ratio - before)
        average.add(ratio - self.scale.value)
        self._moved(abs(average.value - before) if average.count > FEW else 1.0)
        plain = kind.get(place_of(num_rows))
        if are_chains and plain is not None and plain.count >= FEW == average.count:
            self._judge(num_rows, num_nodes, average.value - plain.value)

    def _judge(self, num_rows: int, num_nodes: int, difference: float) -> None:
        """Say that the curve is wrong where a draft plainly does not take what it says beside a plain step.

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
        bent, first = max((1.0 + said) * math.exp(difference) - 1.0, 0.0) / said, self.curve.at(1)
        seen = [
            (average, count_at(rows), count_at(place))
            for (rows, _), kind in self._kinds.items()
            for place, average in kind.items()
        ]
        before = [self._expected(rows, nodes) for _, rows, nodes in seen]
        seconds = {nodes: first + bent * (taken - first) for nodes, taken in self.curve.seconds.items()}
        self.curve = replace(self.curve, seconds=seconds)
        for (average, rows, nodes), said_before in zip(seen, before, strict=True):  # what was seen stays what it was
            average.value += math.log(said_before / self._expected(rows, nodes))
        self._known.clear()

    def _moved(self, change: float) -> None:
        """Work out anew what steps take once they have changed by a hundredth."""
        self._drift += change
        if self._drift > 0.01:
            self._known.clear()
            self._drift = 0.0

    def _expected(self, num_rows: int, num_nodes: int) -> float:
        """Seconds by the curve and the context alone."""
        return self.curve.at(num_nodes) + num_rows * self._of_context

    def seconds(self, num_rows: int, num_nodes: int, are_chains: bool) -> float:
        key = num_rows, num_nodes, are_chains
        known = self._known.get(key)
        if known is None:
            ratio = self._ratio(place_of(num_rows), place_of(num_nodes), are_chains)
            known = self._known[key] = self._expected(num_rows, num_nodes) * math.exp(ratio)
        return known * math.exp(self.scale.value)

    def times_seen(self, num_rows: int, num_nodes: int) -> int:
        average = self._kinds.get((place_of(num_rows), True), {}).get(place_of(num_nodes))
        return 0 if average is None else average.count

    def knows_drafts(self, num_rows: int) -> bool:
        rows = place_of(num_rows)
        kinds = [self._kinds.get((rows, are_chains), {}) for are_chains in (True, False)]
        return any(place > rows and one.count >= FEW for kind in kinds for place, one in kind.items())

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


def _nearest(by_rows: Mapping[int, _Levels], rows: int) -> _Levels | None:
    """What was seen with the number of rows that is nearest to this one."""
    if rows in by_rows or not by_rows:
        return by_rows.get(rows)
    return by_rows[min(by_rows, key=lambda other: (abs(other - rows), other))]

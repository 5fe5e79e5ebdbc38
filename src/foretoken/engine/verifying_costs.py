"""What verifying costs: a measured curve, and what is learned of it while steps run."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Mapping
from dataclasses import dataclass

FEW = 3  # times that something was seen, below which the least of them counts: the first ones warm up
TRUSTED = 2  # times, from which on it says something of what is near: the first of a kind is often slow
MANY = 8  # times, beyond which it says no more of it
DISTRUST = 0.25  # what nothing seen nearby weighs, beside as many times by the distance
DOUBTFUL = 0.4  # of a logarithm, by which a draft may be cheaper or dearer than a curve says
LARGEST_STEP = 0.3  # of a logarithm: how far one time can pull an estimate, so that a pause of the machine cannot
WARM_UPS = 1  # steps at the very first that say nothing of later ones
SLOWEST_RATE = 0.05
SCALE_RATE = 0.1
NOTICED = 0.01  # of a time: changes that are smaller do not count
EXACT_NODES = 32
COARSENESS = 1.08
"""Steps of more than `EXACT_NODES` nodes count as alike within 8 %."""


LEAST_SHARE = 0.5  # of the time of one node, below which no step is expected to get

TREES = 1000
"""Added to the class of a number of rows where they verify trees: these run otherwise than chains."""


def _rows(num_rows: int, are_chains: bool) -> int:
    """The class of a number of rows."""
    return place_of(num_rows) + (0 if are_chains else TREES)


def place_of(count: int) -> int:
    """The class of a number of nodes or rows: itself if it is small, else that of its logarithm."""
    if count <= EXACT_NODES:
        return count
    return EXACT_NODES + round(math.log(count / EXACT_NODES) / math.log(COARSENESS))


def _count_at(place: int) -> int:
    """A number of nodes or rows of a class."""
    return place if place <= EXACT_NODES else round(EXACT_NODES * COARSENESS ** (place - EXACT_NODES))


@dataclass(frozen=True)
class CostCurve:
    """Seconds of a forward of one row.

    Args:
      seconds: by its number of nodes, at least for one node.
      context: tokens before them.
      per_token: seconds that a step takes longer for every token more that a row of it has.
    """

    seconds: Mapping[int, float]
    context: int = 0
    per_token: float = 0.0


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
            return
        error = max(-LARGEST_STEP, min(LARGEST_STEP, value - self.value))
        self.value += max(SLOWEST_RATE, 1.0 / self.count) * error


class VerifyingCosts:
    """Seconds of verifying so many nodes of so many rows.

    Args:
      curve: of forwards.
      disprove: called where steps show that it is wrong.
    """

    def __init__(self, curve: CostCurve, disprove: Callable[[], None] | None = None) -> None:
        self._disprove = disprove
        self._nodes = sorted(curve.seconds)
        self._seconds = [curve.seconds[count] for count in self._nodes]
        self._context = curve.context
        self._per_token = curve.per_token
        self._num_steps = 0
        self._ratios: dict[int, dict[int, Average]] = {}  # rows -> nodes -> logarithm of time by curve and scale
        self._places: dict[int, list[int]] = {}  # rows -> nodes that were seen more than once, ascending
        self._known: dict[tuple[int, int, bool], float] = {}
        self._drift = 0.0  # since these were worked out
        self._of_context = 0.0  # seconds per row
        self.scale = 0.0
        """Logarithm of how much slower steps are at present than the curve says."""
        self.factor = 1.0
        """The same, not as a logarithm."""

    def after(self, context: float) -> None:
        """From now on rows have so many tokens, on average."""
        before, self._of_context = self._of_context, self._per_token * (context - self._context)
        self._moved(abs(self._of_context - before) / self._seconds[0])

    def add(self, num_rows: int, num_nodes: int, seconds: float, *, are_chains: bool = True) -> None:
        """A step has verified these."""
        if seconds <= 0.0:
            return
        ratio = math.log(seconds / self._expected(num_rows, num_nodes))
        if self._num_steps < WARM_UPS + 1:  # the first steps take what a first call takes
            self.scale = ratio if self._num_steps == 0 else min(self.scale, ratio)
            self.factor = math.exp(self.scale)
        self._num_steps += 1
        if self._num_steps <= WARM_UPS:
            return
        average = self._average(_rows(num_rows, are_chains), place_of(num_nodes))
        error = ratio - self.scale - average.value
        self.scale += SCALE_RATE * max(-LARGEST_STEP, min(LARGEST_STEP, error))
        before = average.value
        average.add(ratio - self.scale)
        if average.count == TRUSTED:
            insort(self._places.setdefault(_rows(num_rows, are_chains), []), place_of(num_nodes))
        self.factor = math.exp(self.scale)
        self._moved(abs(average.value - before) if average.count > FEW else 1.0)
        if are_chains and num_nodes > num_rows and average.count == FEW:
            self._doubt(num_rows, num_nodes, average.value)

    def _doubt(self, num_rows: int, num_nodes: int, ratio: float) -> None:
        """Bend the curve where what a draft costs by it is plainly not what such a step was seen to take."""
        plain = self._ratios.get(_rows(num_rows, True), {}).get(place_of(num_rows))
        said = self._expected(num_rows, num_nodes) / self._expected(num_rows, num_rows) - 1.0
        if plain is None or plain.count < FEW or abs(ratio - plain.value) < DOUBTFUL or said <= 0.0:
            return
        bent = max((1.0 + said) * math.exp(ratio - plain.value) - 1.0, 0.0) / said
        seen = [
            (average, _count_at(rows % TREES), _count_at(place))
            for rows, averages in self._ratios.items()
            for place, average in averages.items()
        ]
        before = [self._expected(rows, nodes) for _, rows, nodes in seen]
        first = self._seconds[0]
        self._seconds = [first + bent * (seconds - first) for seconds in self._seconds]
        for (average, rows, nodes), said_before in zip(seen, before, strict=True):  # what was seen stays what it was
            average.value += math.log(said_before / self._expected(rows, nodes))
        self._known.clear()
        if self._disprove is not None:
            self._disprove()

    def _moved(self, change: float) -> None:
        """Work out anew what steps take where something has changed by so much of it, what was before included."""
        self._drift += change
        if self._drift > NOTICED:
            self._known.clear()
            self._drift = 0.0

    def _average(self, rows: int, nodes: int) -> Average:
        return self._ratios.setdefault(rows, {}).setdefault(nodes, Average())

    def curve(self, num_nodes: int) -> float:
        """Seconds as they were measured in the beginning: lines between what was, and on beyond it."""
        nodes, seconds = self._nodes, self._seconds
        if len(nodes) == 1:
            return seconds[0]
        right = min(max(bisect_left(nodes, num_nodes), 1), len(nodes) - 1)
        low, high = nodes[right - 1], nodes[right]
        slope = (seconds[right] - seconds[right - 1]) / (high - low)
        return max(seconds[right - 1] + slope * (num_nodes - low), LEAST_SHARE * seconds[0])

    def _expected(self, num_rows: int, num_nodes: int) -> float:
        """Seconds by the curve and the context alone."""
        of_nodes = self.curve(num_nodes)
        return max(of_nodes + num_rows * self._of_context, LEAST_SHARE * of_nodes)

    def seconds(self, num_rows: int, num_nodes: int, *, are_chains: bool = True) -> float:
        """What a step is expected to take."""
        key = num_rows, num_nodes, are_chains
        known = self._known.get(key)
        if known is None:
            ratio = self._ratio(_rows(num_rows, are_chains), place_of(num_nodes))
            known = self._known[key] = self._expected(num_rows, num_nodes) * math.exp(ratio)
        return known * self.factor

    def times_seen(self, num_rows: int, num_nodes: int) -> int:
        """How many steps of this kind there were."""
        average = self._ratios.get(place_of(num_rows), {}).get(place_of(num_nodes))
        return 0 if average is None else average.count

    def knows_drafts(self, num_rows: int) -> bool:
        """Whether some number of nodes above that of the rows was seen a few times."""
        rows = place_of(num_rows)
        return any(
            place > rows and average.count >= FEW
            for key in (rows, rows + TREES)
            for place, average in self._ratios.get(key, {}).items()
        )

    def _ratio(self, rows: int, nodes: int) -> float:
        """How much longer steps take than the curve and the scale say, from what was seen nearby."""
        if not self._places:
            return 0.0
        if rows not in self._places:
            rows = min(self._places, key=lambda other: (abs(other - rows), other))
        seen, places = self._ratios[rows], self._places[rows]
        exact = seen.get(nodes)
        if exact is not None and exact.count >= FEW:
            return exact.value
        right = bisect_left(places, nodes)
        near = [places[i] for i in (right - 1, right) if 0 <= i < len(places)]
        weights = [min(seen[place].count, MANY) / (1.0 + abs(place - nodes)) for place in near]
        values = [seen[place].value for place in near]
        return sum(w * v for w, v in zip(weights, values, strict=True)) / (sum(weights) + DISTRUST)

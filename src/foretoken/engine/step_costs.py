"""What the parts of a step cost, learned while steps run."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

FEW = 3  # times that something was seen, below which the least of them counts: the first ones warm up
LARGEST_STEP = 0.3  # of a logarithm: how far one time can pull an estimate, so that a pause of the machine cannot
WARM_UPS = 1  # steps at the very first that say nothing of later ones
SLOWEST_RATE = 0.05
SCALE_RATE = 0.1
EXACT_NODES = 32
COARSENESS = 1.08
"""Steps of more than `EXACT_NODES` nodes count as alike within 8 %."""


LEAST_SHARE = 0.5  # of the time of one node, below which no step is expected to get

TREES = 1000
"""Added to the class of a number of rows where they verify trees: these run otherwise than chains."""


def _rows(num_rows: int, are_chains: bool) -> int:
    """The class of a number of rows."""
    return _place(num_rows) + (0 if are_chains else TREES)


def _place(count: int) -> int:
    """The class of a number of nodes or rows: itself if it is small, else that of its logarithm."""
    if count <= EXACT_NODES:
        return count
    return EXACT_NODES + round(math.log(count / EXACT_NODES) / math.log(COARSENESS))


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
    """

    def __init__(self, curve: CostCurve) -> None:
        self._nodes = sorted(curve.seconds)
        self._seconds = [curve.seconds[count] for count in self._nodes]
        self._context = curve.context
        self._per_token = curve.per_token
        self._num_steps = 0
        self._ratios: dict[int, dict[int, Average]] = {}  # rows -> nodes -> logarithm of time by curve and scale
        self._places: dict[int, list[int]] = {}  # rows -> nodes that were seen, ascending
        self._known: dict[tuple[int, int, bool], float] = {}
        self._of_context = 0.0  # seconds per row
        self.scale = 0.0
        """Logarithm of how much slower steps are at present than the curve says."""
        self.factor = 1.0
        """The same, not as a logarithm."""

    def after(self, context: float) -> None:
        """From now on rows have so many tokens, on average."""
        self._of_context = self._per_token * (context - self._context)

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
        average = self._average(_rows(num_rows, are_chains), _place(num_nodes))
        error = ratio - self.scale - average.value
        self.scale += SCALE_RATE * max(-LARGEST_STEP, min(LARGEST_STEP, error))
        average.add(ratio - self.scale)
        self.factor = math.exp(self.scale)
        self._known.clear()

    def _average(self, rows: int, nodes: int) -> Average:
        of_rows = self._ratios.setdefault(rows, {})
        if nodes not in of_rows:
            of_rows[nodes] = Average()
            self._places[rows] = sorted(of_rows)
        return of_rows[nodes]

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
            ratio = self._ratio(_rows(num_rows, are_chains), _place(num_nodes))
            known = self._known[key] = math.exp(ratio)
        return self._expected(num_rows, num_nodes) * known * self.factor

    def times_seen(self, num_rows: int, num_nodes: int) -> int:
        """How many steps of this kind there were."""
        average = self._ratios.get(_place(num_rows), {}).get(_place(num_nodes))
        return 0 if average is None else average.count

    def _ratio(self, rows: int, nodes: int) -> float:
        """How much longer steps take than the curve and the scale say, from what was seen nearby."""
        if not self._ratios:
            return 0.0
        if rows not in self._ratios:
            rows = min(self._ratios, key=lambda other: (abs(other - rows), other))
        seen = self._ratios[rows]
        exact = seen.get(nodes)
        if exact is not None and exact.count >= FEW:
            return exact.value
        places = self._places[rows]
        right = bisect_left(places, nodes)
        near = [places[i] for i in (right - 1, right) if 0 <= i < len(places)]
        weights = [seen[place].count / (1.0 + abs(place - nodes)) for place in near]
        values = [seen[place].value for place in near]
        return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)


class StepCosts:
    """Seconds of verifying so many nodes of so many rows, and of drafting so many levels.

    It begins with a curve that was measured and learns how steps differ from it, by the number of rows and by host
    time. How busy the machine is moves all estimates together.

    Args:
      curve: of forwards; seconds by the number of nodes stand for one that knows nothing of contexts. Or what is known
        of it, to share it.
    """

    def __init__(self, curve: CostCurve | Mapping[int, float] | VerifyingCosts) -> None:
        if not isinstance(curve, VerifyingCosts):
            curve = VerifyingCosts(curve if isinstance(curve, CostCurve) else CostCurve(curve))
        self._verifying = curve
        self._first: dict[int, dict[int, Average]] = {}  # as the next, of drafts that some row got for the first time
        self._drafting: dict[int, dict[int, Average]] = {}  # rows -> levels -> logarithm of time by scale
        self._known: dict[tuple[int, int], float] = {}

    def beside(self) -> StepCosts:
        """Costs of another way of drafting: what verifying costs is learned together, what drafting costs is not."""
        return StepCosts(self._verifying)

    def verified(self, num_rows: int, num_nodes: int, seconds: float, *, are_chains: bool = True) -> None:
        """A step has verified these; all of its time but that of drafting."""
        self._verifying.add(num_rows, num_nodes, seconds, are_chains=are_chains)

    def after(self, context: float) -> None:
        """From now on rows have so many tokens, on average: how much longer steps take is known beforehand."""
        self._verifying.after(context)

    def drafted(self, num_rows: int, num_levels: int, seconds: float, *, is_first: bool = False) -> None:
        """Drafting so many levels for rows has taken so long.

        Args:
          is_first: whether one of the rows got its first draft: that takes longer for many drafters, and counts only
            as long as there is no other.
        """
        if seconds > 0.0:
            of_rows = (self._first if is_first else self._drafting).setdefault(_place(num_rows), {})
            of_rows.setdefault(num_levels, Average()).add(math.log(seconds) - self._verifying.scale)
            self._known.clear()

    def curve(self, num_nodes: int) -> float:
        """Seconds of verifying as they were measured in the beginning."""
        return self._verifying.curve(num_nodes)

    def verify(self, num_rows: int, num_nodes: int, *, are_chains: bool = True) -> float:
        """Seconds that a step is expected to take which verifies these."""
        return self._verifying.seconds(num_rows, num_nodes, are_chains=are_chains)

    def times_seen(self, num_rows: int, num_nodes: int) -> int:
        """How many steps there were which verified these."""
        return self._verifying.times_seen(num_rows, num_nodes)

    def draft(self, num_rows: int, num_levels: int) -> float | None:
        """Seconds that drafting is expected to take; None where nothing like it was seen."""
        if num_levels <= 0:
            return 0.0
        known = self._known.get((num_rows, num_levels))
        if known is None:
            of_rows = _nearest(self._drafting or self._first, _place(num_rows))
            if not of_rows:
                return None
            known = self._known[num_rows, num_levels] = _by_level(of_rows, num_levels)
        return known * self._verifying.factor

    def times_drafted(self, num_rows: int) -> int:
        """How often drafts were made for so many rows, or the number of rows that is nearest to it."""
        return sum(average.count for average in _nearest(self._drafting or self._first, _place(num_rows)).values())

    @property
    def knows_later_drafts(self) -> bool:
        """Whether there were drafts that were no row's first one."""
        return bool(self._drafting)


def _by_level(of_rows: Mapping[int, Average], num_levels: int) -> float:
    """Seconds of so many levels, from those that were seen: on a line through the fewest and the most."""
    seen = {levels: math.exp(average.value) for levels, average in of_rows.items()}
    if num_levels in seen:
        return seen[num_levels]
    fewest, most = min(seen), max(seen)
    if fewest == most:  # the dearest that it can be: all of it is by the level
        return seen[most] * max(1.0, num_levels / most)
    slope = max(0.0, (seen[most] - seen[fewest]) / (most - fewest))
    return max(seen[fewest] + slope * (num_levels - fewest), 0.0)


def _nearest(by_rows: Mapping[int, dict[int, Average]], rows: int) -> dict[int, Average]:
    """What was seen with the number of rows that is nearest to this one."""
    if not by_rows:
        return {}
    return by_rows[min(by_rows, key=lambda other: (abs(other - rows), other))]

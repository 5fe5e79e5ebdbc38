"""What the parts of a step cost, learned while steps run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from foretoken.engine.verifying_costs import Average, CostCurve, VerifyingCosts, place_of

FRESH = 64
"""Drafts, after which what a number of levels took says less than what was seen since."""


class _Levels:
    """Logarithms of seconds of drafts, by their number of levels.

    Numbers that were not seen for long begin anew: what they took when they were last tried, the first time perhaps,
    would keep them from being tried again.
    """

    def __init__(self) -> None:
        self.count = 0
        self._averages: dict[int, Average] = {}
        self._last: dict[int, int] = {}  # draft in which it was seen

    def add(self, num_levels: int, value: float) -> None:
        if num_levels not in self._averages or not self._is_fresh(num_levels):
            self._averages[num_levels] = Average()
        self._averages[num_levels].add(value)
        self.count += 1
        self._last[num_levels] = self.count

    def _is_fresh(self, num_levels: int) -> bool:
        return self.count - self._last[num_levels] < FRESH

    def seconds(self, num_levels: int) -> float:
        """Of so many levels, from those that were seen of late: on a line through the fewest and the most."""
        seen = {levels: math.exp(one.value) for levels, one in self._averages.items() if self._is_fresh(levels)}
        if num_levels in seen:
            return seen[num_levels]
        fewest, most = min(seen), max(seen)
        if fewest == most:  # the dearest that it can be: all of it is by the level
            expected = seen[most] * max(1.0, num_levels / most)
        else:
            slope = max(0.0, (seen[most] - seen[fewest]) / (most - fewest))
            expected = max(seen[fewest] + slope * (num_levels - fewest), 0.0)
        old = self._averages.get(num_levels)
        return expected if old is None else min(expected, math.exp(old.value))


class StepCosts:
    """Seconds of verifying so many nodes of so many rows, and of drafting so many levels.

    It begins with a curve that was measured and learns how steps differ from it, by the number of rows and by host
    time. How busy the machine is moves all estimates together.

    Args:
      curve: of forwards; seconds by the number of nodes stand for one that knows nothing of contexts. Or what is known
        of it, to share it.
      disprove: called where steps show that the curve is wrong.
    """

    def __init__(
        self, curve: CostCurve | Mapping[int, float] | VerifyingCosts, disprove: Callable[[], None] | None = None
    ) -> None:
        if not isinstance(curve, VerifyingCosts):
            curve = VerifyingCosts(curve if isinstance(curve, CostCurve) else CostCurve(curve), disprove)
        self._verifying = curve
        self._first: dict[int, _Levels] = {}  # as the next, of drafts that some row got for the first time
        self._drafting: dict[int, _Levels] = {}  # by rows, of times by the scale
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
            of_rows = (self._first if is_first else self._drafting).setdefault(place_of(num_rows), _Levels())
            of_rows.add(num_levels, math.log(seconds) - self._verifying.scale)
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

    def knows_drafts(self, num_rows: int) -> bool:
        """Whether so many rows have verified drafts a few times: what those cost is more than what a curve says."""
        return self._verifying.knows_drafts(num_rows)

    def draft(self, num_rows: int, num_levels: int) -> float | None:
        """Seconds that drafting is expected to take; None where nothing like it was seen."""
        if num_levels <= 0:
            return 0.0
        known = self._known.get((num_rows, num_levels))
        if known is None:
            of_rows = _nearest(self._drafting or self._first, place_of(num_rows))
            if of_rows is None:
                return None
            known = self._known[num_rows, num_levels] = of_rows.seconds(num_levels)
        return known * self._verifying.factor

    def times_drafted(self, num_rows: int) -> int:
        """How often drafts were made for so many rows, or the number of rows that is nearest to it; first ones not."""
        of_rows = _nearest(self._drafting, place_of(num_rows))
        return 0 if of_rows is None else of_rows.count


def _nearest(by_rows: Mapping[int, _Levels], rows: int) -> _Levels | None:
    """What was seen with the number of rows that is nearest to this one."""
    return by_rows[min(by_rows, key=lambda other: (abs(other - rows), other))] if by_rows else None

"""Acceptance by position: the chance of a drafted token whose predecessors in the draft were all accepted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


def wilson(found: float, total: int) -> tuple[float, float]:
    """95 % interval of a share (Wilson 1927)."""
    share, z = found / total, 1.96
    middle = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z / (1 + z * z / total) * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return max(0.0, middle - half), min(1.0, middle + half)


@dataclass(frozen=True)
class Position:
    """The outcome of the drafted tokens in one place of their drafts, where all before them were accepted.

    Args:
      position: 1 for the first drafted token.
      num_tested: drafts that came so far.
    """

    position: int
    num_tested: int
    rate: float

    @property
    def interval(self) -> tuple[float, float]:
        """95 % for the rate (Wilson's), as if steps were independent of each other. For 1 of 2: 0.095 to 0.905."""
        return wilson(self.rate * self.num_tested, self.num_tested)


def by_position(steps: Iterable[tuple[int, int, int]]) -> Iterator[Position]:
    """The chance of every position, as deep as anything was tried.

    Args:
      steps: tokens drafted on a chain, accepted ones, and the number of such steps; each with a draft.
    """
    known = list(steps)
    for position in range(1, max((drafted for drafted, _, _ in known), default=0) + 1):
        reached = [(kept, count) for drafted, kept, count in known if drafted >= position and kept >= position - 1]
        num_tested = sum(count for _, count in reached)
        if num_tested:
            yield Position(position, num_tested, sum(count for kept, count in reached if kept >= position) / num_tested)

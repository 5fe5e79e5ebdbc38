"""Shares of outcomes, the newest of which count most."""

from __future__ import annotations

import math
from dataclasses import dataclass

MEMORY = 128.0
"""Outcomes that a rate remembers: older ones fade."""

HALF_LIFE = 96.0  # drafts, after which what was seen at a depth counts half if it was not seen again
PRIOR_WEIGHT = 3.0
ROW_MEMORY = 0.9
ROW_WEIGHT = 5.0
FADING = 0.97
LEAST_RATE = 0.02


class Rate:
    """A share of outcomes, the newest `MEMORY` of which count.

    Args:
      prior: the rate before there is experience, which is worth `PRIOR_WEIGHT` outcomes.
    """

    __slots__ = ("hits", "last", "trials")

    def __init__(self, prior: float) -> None:
        self.trials = PRIOR_WEIGHT
        self.hits = PRIOR_WEIGHT * prior
        self.last = 0

    def add(self, is_hit: bool, now: int) -> None:
        """Count an outcome."""
        self.last = now
        self.trials += 1.0
        self.hits += is_hit
        if self.trials > MEMORY:
            self.trials *= 0.5
            self.hits *= 0.5

    @property
    def value(self) -> float:
        """0..1."""
        return self.hits / self.trials

    def beside(self, above: float, now: int) -> float:
        """The rate where the level above has another: what was seen long ago gives way to that.

        So a depth that was bad once and is not drafted any more is tried again where drafts have become good.
        """
        weight = math.exp2((self.last - now) / HALF_LIFE)
        return (weight * self.hits + PRIOR_WEIGHT * above) / (weight * self.trials + PRIOR_WEIGHT)


@dataclass
class Luck:
    """How a row fares, by what the rates of all rows let expect: its own rate, which begins with theirs."""

    trials: float = 0.0
    hits: float = 0.0
    expected: float = 0.0

    def add(self, is_hit: bool, expected: float) -> None:
        """Take in whether the next token was drafted."""
        self.trials = ROW_MEMORY * self.trials + 1.0
        self.hits = ROW_MEMORY * self.hits + is_hit
        self.expected = ROW_MEMORY * self.expected + expected

    def fade(self) -> None:
        """Nothing was drafted: what was seen grows old."""
        self.trials *= FADING
        self.hits *= FADING
        self.expected *= FADING

    @property
    def factor(self) -> float:
        """By which rates are multiplied."""
        if self.trials < 0.1:
            return 1.0
        expected = max(self.expected / self.trials, LEAST_RATE)
        own = (self.hits + ROW_WEIGHT * expected) / (self.trials + ROW_WEIGHT)
        return own / expected

"""How often a governor decides anew, by what that takes of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from foretoken.engine.verifying_costs import Average

OWN_SHARE = 0.008
"""Of the time of steps, that a governor aims to take at most; of steps below 10 ms following alone takes more."""

LONGEST = 64  # steps between two decisions, at most
LEARNED_BY = 4  # decisions, by which the steps between two of them may grow by one


@dataclass
class _Meter:
    """Logarithms of seconds of steps like one another: whole ones, and what governing took where it decided or not."""

    step: Average = field(default_factory=Average)
    deciding: Average = field(default_factory=Average)
    following: Average = field(default_factory=Average)

    @property
    def interval(self) -> int:
        """Steps from one decision to the next."""
        most = min(1 + self.deciding.count // LEARNED_BY, LONGEST)
        deciding = math.exp(self.deciding.value)
        following = math.exp(self.following.value) if self.following.count else 0.0
        allowed = OWN_SHARE * math.exp(self.step.value) - following
        if most == 1 or allowed <= 0.0:
            return most
        return max(1, min(math.ceil((deciding - following) / allowed), most))


class Attention:
    """Spends a governor's time: as often as it may, it decides; in the steps between, the last decision is followed.

    Decisions are close together at first, when most is learned by them, and made anew where the number of rows has
    doubled or halved.
    """

    def __init__(self) -> None:
        self._meters: dict[int, _Meter] = {}
        self._class = 0
        self._left = 0  # steps to the next decision
        self.is_deciding = True

    def begin(self, num_rows: int) -> bool:
        """Whether the step that begins is one to decide in."""
        size = num_rows.bit_length()
        self.is_deciding = self._left <= 0 or size != self._class
        self._class = size
        return self.is_deciding

    def end(self, own_seconds: float, step_seconds: float) -> None:
        """A step has taken so long; governing alone, and all the rest."""
        if not self.is_deciding:
            self._left -= 1
            if self._left <= 0:
                self._meters[self._class].following.add(math.log(own_seconds))
            return
        meter = self._meters.setdefault(self._class, _Meter())
        meter.deciding.add(math.log(own_seconds))
        meter.step.add(math.log(step_seconds))
        self._left = meter.interval - 1

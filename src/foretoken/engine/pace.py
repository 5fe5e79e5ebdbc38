"""How fast steps have been, and how much they drafted."""

from __future__ import annotations

from dataclasses import dataclass

from foretoken.engine.stats import Totals

MEMORY = 0.97
"""What a step counts for, one step later."""


@dataclass(slots=True)
class Steps:
    """What steps have brought and taken.

    Args:
      num_drafted: of them that verified a draft.
      num_tokens: emitted, by all rows together.
      tokens_per_row, nodes_per_row: emitted, and drafted and verified; sums over the steps.
      plain_seconds: of those that verified none, without what was spent on drafting.
    """

    num_steps: int = 0
    num_drafted: int = 0
    num_tokens: int = 0
    tokens_per_row: float = 0.0
    nodes_per_row: float = 0.0
    seconds: float = 0.0
    plain_seconds: float = 0.0

    def add(self, num_rows: int, num_nodes: int, num_tokens: int, drafting: float, other: float) -> None:
        """Count one step.

        Args:
          num_nodes: of drafts that were verified, the pending ones left out.
          drafting, other: seconds.
        """
        self.num_steps += 1
        self.num_drafted += num_nodes > 0
        self.num_tokens += num_tokens
        self.tokens_per_row += num_tokens / num_rows
        self.nodes_per_row += num_nodes / num_rows
        self.seconds += drafting + other
        if not num_nodes:
            self.plain_seconds += other


class Pace:
    """Speed by plain decoding and lengths of drafts, of late and of all steps.

    Attributes:
      share: of the last steps that verified a draft.
      length: how many nodes per row those had, the pending one left out.
    """

    def __init__(self) -> None:
        self.totals = Totals()
        self.share = self.length = 0.0
        self._tokens = self._time = 0.0

    def add(self, steps: Steps, plain: float) -> None:
        """Count steps, of which one without a draft would have taken ``plain`` seconds."""
        totals, num_steps = self.totals, steps.num_steps
        faded = MEMORY**num_steps
        self._tokens = faded * self._tokens + steps.tokens_per_row
        self._time = faded * self._time + steps.seconds / plain
        drafted = steps.num_drafted
        self.share += max(1.0 - faded, num_steps / (totals.num_steps + num_steps)) * (drafted / num_steps - self.share)
        if drafted:
            moved = max(1.0 - MEMORY**drafted, drafted / (totals.num_drafted + drafted))
            self.length += moved * (steps.nodes_per_row / drafted - self.length)
        totals.num_steps += num_steps
        totals.num_drafted += drafted
        totals.num_tokens += steps.num_tokens
        totals.seconds += steps.seconds
        num_plain = num_steps - drafted  # which took what plain ones take: one token per row each
        totals.plain_seconds += steps.plain_seconds + plain * (steps.tokens_per_row - num_plain)

    @property
    def gain(self) -> float:
        """Speed of late by that of plain decoding, as far as is known."""
        return self._tokens / self._time if self._time > 0.0 else 1.0

"""How fast steps have been, and how much they drafted."""

from __future__ import annotations

from foretoken.engine.stats import Totals

GAIN_MEMORY = 0.97
RECENT = 0.97


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

    def add(self, num_rows: int, num_tokens: float, length: float, seconds: float, plain: float) -> None:
        """Count a step.

        Args:
          num_tokens: that it emitted, per row.
          length: nodes of drafts that it verified, per row.
          plain: seconds of a step without a draft.
        """
        totals = self.totals
        self._tokens = GAIN_MEMORY * self._tokens + num_tokens
        self._time = GAIN_MEMORY * self._time + seconds / plain
        has_draft = length > 0.0
        self.share += max(1.0 - RECENT, 1.0 / (totals.num_steps + 1)) * (has_draft - self.share)
        if has_draft:
            self.length += max(1.0 - RECENT, 1.0 / (totals.num_drafted + 1)) * (length - self.length)
        totals.num_steps += 1
        totals.num_drafted += has_draft
        totals.num_tokens += round(num_tokens * num_rows)
        totals.seconds += seconds
        totals.plain_seconds += plain * num_tokens

    @property
    def gain(self) -> float:
        """Speed of late by that of plain decoding, as far as is known."""
        return self._tokens / self._time if self._time > 0.0 else 1.0

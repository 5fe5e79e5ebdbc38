"""Stops after a token that the drafter was not sure of."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from foretoken.drafters.lengths.base import CONFIDENCE, LengthPolicy, checked_length, required, within

if TYPE_CHECKING:
    from torch import Tensor

    from foretoken.engine.sequence import Sequence


class Confidence(LengthPolicy):
    """Ends the draft after the first token before which the drafter's largest probability was below a threshold.

    Source: ``assistant_confidence_threshold`` of transformers' assisted generation, the training-free form of DISCO
    (Mamou et al. 2024, arXiv:2405.04304). Deviation: the largest probability of the law decides, not that of the token
    drawn. The unsure token itself is drafted, as in the source: its forward has been made, it costs one node more.

    Args:
      num_tokens: longest draft.
      threshold: 0 never stops, 1 nearly always.

    Exactness: a stopping time; whether there is a next token depends on laws of earlier ones. Randomness: none.
    """

    name = "confidence"
    looks_at = CONFIDENCE

    def __init__(self, num_tokens: int, threshold: float = 0.4) -> None:
        self.num_tokens = checked_length(num_tokens)
        self.threshold = within("draft_threshold", threshold, 0.0, 1.0)
        self._confidence_of: dict[int, float] = {}

    def begin(self, row: Sequence) -> int:
        return self.plan(row, self.num_tokens)

    def keep_drafting(self, row: Sequence, depth: int, draft_log_probs: Tensor | None) -> bool:
        self._confidence_of[row.id] = confidence(required(self, draft_log_probs))
        return True

    def go_on(self, row: Sequence, depth: int) -> bool:
        if self._confidence_of[row.id] >= self.threshold_of(row):
            return True
        self.note(row, depth)
        return False

    def threshold_of(self, row: Sequence) -> float:
        """The threshold that holds for this row now."""
        return self.threshold

    def forget(self, row: Sequence) -> None:
        super().forget(row)
        self._confidence_of.pop(row.id, None)


def confidence(draft_log_probs: Tensor) -> float:
    """The largest probability of a log-law (V,); NaN, which is below every threshold, where there is no law."""
    return math.exp(float(draft_log_probs.max()))

"""Lengths that do not look at any law: always the same, or moved by the outcome of the last step."""

from __future__ import annotations

from foretoken.drafters.lengths.base import LengthPolicy, checked_length
from foretoken.engine.sequence import Sequence


class Fixed(LengthPolicy):
    """The same number of tokens in every step.

    Args:
      num_tokens: 0 or more.
    """

    name = "fixed"

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = checked_length(num_tokens)

    def begin(self, row: Sequence) -> int:
        return self.plan(row, self.num_tokens)


MAX_LENGTH = 32
"""Longest draft that the heuristic grows to: a row that loops accepts everything, and logits are (B, N, V)."""


class Heuristic(LengthPolicy):
    """Two tokens more after a step in which all were accepted, one fewer (but one) after any other.

    Source: the "heuristic" schedule of transformers' assisted generation. Deviations: the length belongs to
    one row and ends with it, nothing is written to anyone's generation_config; a draft that fell short of the
    length (end of budget, no match in the context) and was accepted as far as it went says nothing, and
    changes nothing.

    Args:
      num_tokens: the length a row starts with, 0 (stays 0) or more.
    """

    name = "heuristic"

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = checked_length(num_tokens)
        self._length_of: dict[int, int] = {}

    def begin(self, row: Sequence) -> int:
        return self.plan(row, self._length_of.get(row.id, self.num_tokens))

    def end(self, row: Sequence, num_drafted: int, num_accepted: int) -> None:
        length = self._length_of.get(row.id, self.num_tokens)
        if num_accepted < num_drafted:
            self._length_of[row.id] = max(1, length - 1)
        elif num_drafted >= length > 0:
            self._length_of[row.id] = min(length + 2, max(self.num_tokens, MAX_LENGTH))

    def forget(self, row: Sequence) -> None:
        super().forget(row)
        self._length_of.pop(row.id, None)

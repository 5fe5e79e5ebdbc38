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


class Bass(LengthPolicy):
    """One length for all rows of a batch, which follows the row that accepts most.

    Source: BASS (Qian et al. 2024, arXiv:2404.15778), algorithm 1: after a round in which some row accepted the whole
    length, two tokens more, up to 32; otherwise shorter by a tenth, rounded up, and by one more after another such
    round, but never below what the best row accepted, nor below 1. Published: the first length is 7. Deviation: a round
    in which no row drafted so far as it was to (end of budget, no match) and all that was drafted was accepted changes
    nothing.

    Args:
      num_tokens: the length to begin with, 0 (stays 0) or more.

    Exactness: a stopping time: it looks at the outcomes of earlier rounds alone. Randomness: none.
    """

    name = "bass"

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = checked_length(num_tokens)
        self._length = num_tokens
        self._has_shrunk = False
        self._outcomes: list[tuple[int, int]] = []

    def begin(self, row: Sequence) -> int:
        if self._outcomes:
            self._update()
        return self.plan(row, self._length)

    def end(self, row: Sequence, num_drafted: int, num_accepted: int) -> None:
        if num_drafted:
            self._outcomes.append((num_drafted, num_accepted))

    def _update(self) -> None:
        """Take in the round that has ended."""
        outcomes, self._outcomes = self._outcomes, []
        most = max(accepted for _, accepted in outcomes)
        if most >= self._length:
            self._length, self._has_shrunk = min(self._length + 2, max(self.num_tokens, MAX_LENGTH)), False
        elif any(accepted < drafted for drafted, accepted in outcomes):
            shorter = self._length - -(-self._length // 10) - self._has_shrunk
            self._length, self._has_shrunk = max(1, most, shorter), True

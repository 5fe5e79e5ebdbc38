"""The n-grams of lookahead decoding: a few recent continuations per token."""

from __future__ import annotations

from collections.abc import Sequence as Seq


class NgramPool:
    """Token -> the last ``limit`` different continuations of ``length`` tokens seen after it.

    Source: the pool of lookahead decoding (Fu et al. 2024, arXiv:2402.02057): seen again means most recent, and the
    least recent leaves first.
    """

    def __init__(self, length: int, limit: int) -> None:
        self._length = length
        self._limit = limit
        self._continuations_of: dict[int, dict[tuple[int, ...], None]] = {}  # the most recent last

    def add(self, token: int, continuation: tuple[int, ...]) -> None:
        """Record what was seen after a token."""
        known = self._continuations_of.setdefault(token, {})
        known.pop(continuation, None)
        known[continuation] = None
        if len(known) > self._limit:
            del known[next(iter(known))]

    def add_text(self, tokens: Seq[int], first: int) -> None:
        """Record the n-grams of a text whose last token stands at ``first`` or later.

        Of 1 2 3 4 from 3 on, with two tokens after the first of each: 2 -> 3 4.
        """
        for end in range(max(first, self._length), len(tokens)):
            start = end - self._length
            self.add(tokens[start], tuple(tokens[start + 1 : end + 1]))

    def continuations(self, token: int) -> list[tuple[int, ...]]:
        """The continuations that were seen after a token, the most recent first."""
        return list(reversed(self._continuations_of.get(token, {})))

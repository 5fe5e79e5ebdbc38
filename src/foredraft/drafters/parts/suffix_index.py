"""Where the suffixes of a growing text have occurred before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from foredraft.errors import ConfigError
from foredraft.methods.lookup import MATCHES

_MAX_OCCURRENCES = 32  # looked at per n-gram and step, so that a text of one repeated token costs no more than another


class SuffixIndex:
    """Where every n-gram of a growing text ends, for n in ``orders``.

    An n-gram counts from the moment its next token is known, so the end of the text never matches itself.

    Args:
      match: see `MATCHES`.

    Raises: ConfigError for another word.
    """

    def __init__(self, orders: Sequence[int], *, match: str = MATCHES[0]) -> None:
        if match not in MATCHES:
            raise ConfigError(f"match is {match!r}; choose one of {', '.join(MATCHES)}")
        self._is_latest_first = match == "latest"
        self._ends: dict[int, dict[tuple[int, ...], list[int]]] = {order: {} for order in orders}
        self._num_tokens = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in the tokens of the text that are new since the last call."""
        for end in range(max(self._num_tokens, 1), len(tokens)):
            for order, ends in self._ends.items():
                if order <= end:
                    ends.setdefault(tuple(tokens[end - order : end]), []).append(end)
        self._num_tokens = len(tokens)

    def continuations(self, tokens: Sequence[int], length: int, limit: int) -> list[tuple[int, ...]]:
        """At most ``limit`` distinct continuations of the text, each of ``length`` tokens, best first."""
        found: dict[tuple[int, ...], None] = {}
        for end in self.occurrences(tokens):
            found[continuation(tokens, end, length)] = None
            if len(found) == limit:
                break
        return list(found)

    def occurrences(self, tokens: Sequence[int]) -> Iterator[int]:
        """Ends of earlier occurrences of the text's suffixes: longest suffix first, then as ``match`` says."""
        for order in sorted(self._ends, reverse=True):
            if order < len(tokens):
                ends = self._ends[order].get(tuple(tokens[-order:]), [])
                yield from islice(reversed(ends) if self._is_latest_first else ends, _MAX_OCCURRENCES)


def continuation(tokens: Sequence[int], start: int, length: int) -> tuple[int, ...]:
    """``length`` tokens of the text from ``start`` on; past its end the copy goes on with itself.

    (1, 2, 3) from 1 for 5 tokens: 2 3 2 3 2.
    """
    copy = tokens[start : start + length]
    repeats = -(-length // len(copy))
    return (tuple(copy) * repeats)[:length]

"""Token history of a row for logits processors, extended token by token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np


class TokenCounts:
    """Counts of tokens, as arrays. Adding a token is O(1), and memory does not depend on the vocabulary size."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._slot_of: dict[int, int] = {}
        self._ids = np.empty(64, dtype=np.int64)
        self._counts = np.zeros(64, dtype=np.float32)
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            slot = self._slot_of.get(token)
            if slot is None:
                slot = self._slot_of[token] = len(self._slot_of)
                if slot == len(self._ids):
                    self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
                    self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
                self._ids[slot] = token
            self._counts[slot] += 1

    def __len__(self) -> int:
        """Number of different tokens."""
        return len(self._slot_of)

    def with_path(self, path: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return distinct tokens and their counts, including those of the path: int64 (S,), float32 (S,)."""
        size = len(self)
        ids, counts = self._ids[:size], self._counts[:size]
        if not path:
            return ids, counts
        counts = counts.copy()
        added: dict[int, int] = {}
        for token, count in Counter(path).items():
            slot = self._slot_of.get(token)
            if slot is None:
                added[token] = count
            else:
                counts[slot] += count
        new_ids = np.fromiter(added.keys(), dtype=np.int64, count=len(added))
        new_counts = np.fromiter(added.values(), dtype=np.float32, count=len(added))
        return np.concatenate((ids, new_ids)), np.concatenate((counts, new_counts))


class Followers:
    """Tokens indexed by the run of tokens before them: the last tokens of n-grams or of bad words.

    Example: once 3 is added after [1, 2] and 4 after [2], both may follow [9, 1, 2].
    """

    def __init__(self) -> None:
        self._by_run: dict[tuple[int, ...], set[int]] = {}
        self._lengths: set[int] = set()

    @property
    def longest(self) -> int:
        """Length of the longest run."""
        return max(self._lengths, default=0)

    def add(self, run: Sequence[int], token: int) -> None:
        """Add a token that follows a run, which may be empty."""
        self._by_run.setdefault(tuple(run), set()).add(token)
        self._lengths.add(len(run))

    def add_ngrams(self, size: int, tokens: Sequence[int], start: int) -> None:
        """Add every token from index ``start`` on that has ``size - 1`` tokens before it, together with these."""
        for last in range(max(start, size - 1), len(tokens)):
            self.add(tokens[last + 1 - size : last], tokens[last])

    def after(self, tokens: Sequence[int]) -> set[int]:
        """Return the tokens that follow any run with which ``tokens`` ends."""
        found: set[int] = set()
        for length in self._lengths:
            if length <= len(tokens):
                found.update(self._by_run.get(tuple(tokens[len(tokens) - length :]), ()))
        return found

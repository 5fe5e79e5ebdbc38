"""The facts about the tokens before a node that processors need: kept per row, extended token by token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np


class TokenCounts:
    """Counts of tokens, as arrays; O(1) per added token, nothing per vocabulary entry."""

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
        """Different tokens and their counts, those of the path added: int64 (S,), float32 (S,)."""
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


class TokenArray:
    """Tokens as an array that grows; what asks for all of them copies memory and converts no numbers."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._array = np.array(tokens, dtype=np.int64)
        self._length = len(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        needed = self._length + len(tokens)
        if needed > len(self._array):
            self._array = np.concatenate((self._array[: self._length], np.empty(needed, dtype=np.int64)))
        self._array[self._length : needed] = tokens
        self._length = needed

    def with_paths(self, paths: Sequence[Sequence[int]]) -> np.ndarray:
        """All tokens and each of b paths of one length d behind them: int64 (b, T + d), a copy."""
        found = np.empty((len(paths), self._length + len(paths[0])), dtype=np.int64)
        found[:, : self._length] = self._array[: self._length]
        found[:, self._length :] = paths
        return found


class NgramIndex:
    """Tokens that followed each run of n - 1 tokens.

    Args:
      size: n, 1 or more.
      tokens: the row's tokens; the list is shared with its owner and read, never changed.
    """

    def __init__(self, size: int, tokens: list[int]) -> None:
        self.size = size
        self._tokens = tokens
        self._followers: dict[tuple[int, ...], set[int]] = {}
        self._num_indexed = 0
        self.update()

    def update(self) -> None:
        """Take in the tokens that were appended since the last call."""
        for last in range(max(self._num_indexed, self.size - 1), len(self._tokens)):
            run = tuple(self._tokens[last + 1 - self.size : last])
            self._followers.setdefault(run, set()).add(self._tokens[last])
        self._num_indexed = len(self._tokens)

    def followers(self, path: Sequence[int]) -> set[int]:
        """Tokens that would complete an n-gram for the second time after the row's tokens and the path.

        For n = 2, tokens [1, 2, 1] and path [3, 1]: 1 was followed by 2 in the row and by 3 where the path begins, so
        the answer is {2, 3}.
        """
        width = self.size - 1
        tail = [*self._tokens[max(0, len(self._tokens) - width) :], *path] if width else list(path)
        if len(self._tokens) + len(path) < width:
            return set()
        run = tuple(tail[len(tail) - width :])
        found = set(self._followers.get(run, ()))
        first = len(tail) - len(path)  # the path's first token in the tail
        for last in range(max(first, width), len(tail)):
            if tuple(tail[last - width : last]) == run:
                found.add(tail[last])
        return found


class BadWords:
    """Token sequences that may not occur.

    Source: transformers' NoBadWordsLogitsProcessor, single EOS tokens exempt as there.
    """

    def __init__(self, sequences: Iterable[Sequence[int]], eos_token_ids: Iterable[int]) -> None:
        exempt = set(eos_token_ids)
        self.single: tuple[int, ...] = ()
        self._completing: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        self.longest_prefix = 0
        for words in sequences:
            *prefix, last = words
            if prefix:
                self._completing.setdefault(prefix[-1], []).append((tuple(prefix), last))
                self.longest_prefix = max(self.longest_prefix, len(prefix))
            elif last not in exempt:
                self.single += (last,)

    def completing(self, tail: Sequence[int]) -> list[int]:
        """Tokens that would complete a sequence after ``tail``, the last ``longest_prefix`` tokens or more."""
        banned = list(self.single)
        for prefix, last in self._completing.get(tail[-1], ()) if tail else ():
            if tuple(tail[-len(prefix) :]) == prefix:
                banned.append(last)
        return banned

"""Store of keys and values of finished rows, for prompts that begin with the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

from foredraft.beginnings import bytes_of, shared_length
from foredraft.errors import ConfigError
from foredraft.model.cache.ragged import KVCache, RowStates


@dataclass(frozen=True, eq=False)
class Prefix:
    """The beginning of a finished row: its tokens, copies of its keys and values, and the drafter's state for it.

    Args:
      token_ids: tokens of the row.
      num_columns: number of copied columns.
      states: copied keys and values.
      memory: state of the drafter, with an attribute ``num_bytes``; None without one.
      owner: drafter that made ``memory``; None without one. A prefix without an owner is usable for every drafter.
      salt: cache salt of the request; only requests with the same salt may use the prefix. None for no salt.
    """

    token_ids: tuple[int, ...]
    num_columns: int
    states: RowStates
    memory: Any = None
    owner: object = None
    salt: object = None

    @property
    def num_bytes(self) -> int:
        """Memory of the copies and of the drafter's state, in bytes."""
        return bytes_of(self.states) + (0 if self.memory is None else int(self.memory.num_bytes))

    def covers(self, token_ids: tuple[int, ...], num_columns: int, salt: object = None) -> bool:
        """Return whether this prefix contains another prefix of the same salt. It does if its tokens begin with those
        of the other one and it has at least as many columns."""
        is_beginning = num_columns <= self.num_columns and self.token_ids[: len(token_ids)] == token_ids
        return is_beginning and salt == self.salt

    def load(
        self, cache: KVCache, row: int, recall: Callable[[object, int], int], grain: int, shared: int | None = None
    ) -> int:
        """Copy columns into an empty row and return their number: all, or a multiple of ``grain`` if the drafter has
        fewer.

        Args:
          recall: function of the drafter's state and a number of tokens; returns the number that the drafter can use.
          grain: step to which a partial prefix is cut.
          shared: number of tokens that the row has in common with this prefix; all by default.
        """
        known, length = partial(recall, self.memory), self.num_columns
        if shared is not None or known(length) < length:
            most = length if shared is None else shared
            length = _recalled(known, min(most, length) // grain * grain, most, grain)
        cache.load(row, self.states, length)
        return length


class PrefixStore:
    """Store of the most recently finished rows, each with the columns that its cache contained.

    A prompt takes over the longest beginning that it shares with any of them, so a continued conversation only runs its
    new tokens. A prefix of another stored prefix is not stored twice. The exception is a drafter that needs its own
    state: a drafter uses a shorter prefix of its own if a longer prefix of another drafter would make it read more
      tokens.

    Args:
      limit: maximum number of prefixes, at least 1; the least recently used one is removed first.

    Attributes:
      max_bytes: maximum memory of all prefixes in bytes; None for no limit. A larger single prefix is not stored.

    Exactness: the store copies columns bit for bit. `Scheduler` decides which columns may be stored and loaded.
    """

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ConfigError(f"the number of kept prefixes is {limit}; it must be 1 or more")
        self.limit = limit
        self.max_bytes: int | None = None
        self._kept: list[Prefix] = []  # least recently used first

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_tokens(self) -> int:
        """Number of stored columns, of all prefixes together."""
        return sum(prefix.num_columns for prefix in self._kept)

    @property
    def num_bytes(self) -> int:
        """Memory of all prefixes, in bytes."""
        return sum(prefix.num_bytes for prefix in self._kept)

    def keep(
        self,
        token_ids: Sequence[int],
        cache: KVCache,
        row: int,
        num_columns: int,
        remember: Callable[[], object] = lambda: None,
        owner: object = None,
        salt: object = None,
    ) -> None:
        """Store copies of the first columns of a row, which contain the first of these tokens.

        Args:
          remember: function that returns the drafter's state for these tokens; called only if the store does not have
            it.
          owner: drafter of this state. Only this drafter can use the state.
          salt: cache salt of the row's request, see `Prefix`.
        """
        tokens = tuple(token_ids)
        if not num_columns or num_columns * cache.column_bytes > self._most:
            return
        covering = [prefix for prefix in self._kept if prefix.covers(tokens, num_columns, salt)]
        known = next((prefix for prefix in covering if prefix.owner is owner), None)
        if known is None:
            memory = remember()
            owner = None if memory is None else owner
            known = covering[0] if covering and owner is None else None
        if known is not None:
            self._touch(known)
            return
        new = Prefix(tokens, num_columns, cache.export(row, num_columns), memory, owner, salt)
        if new.num_bytes > self._most:
            return
        self._kept = [
            prefix
            for prefix in self._kept
            if prefix.owner not in (None, owner) or not new.covers(prefix.token_ids, prefix.num_columns, prefix.salt)
        ]
        del self._kept[: max(0, len(self._kept) - self.limit + 1)]
        self._kept.append(new)
        while self.num_bytes > self._most:
            del self._kept[0]

    @property
    def _most(self) -> float:
        return inf if self.max_bytes is None else self.max_bytes

    def load(
        self,
        token_ids: Sequence[int],
        cache: KVCache,
        row: int,
        recall: Callable[[object, int], int] = lambda memory, num_tokens: num_tokens,
        grain: int = 1,
        owner: object = None,
        salt: object = None,
    ) -> int:
        """Fill an empty row with the longest stored beginning of these tokens, and return the number of columns.

        Args:
          recall: function of the drafter's state and a number of tokens; returns the number that the drafter can use.
          grain: number of which the result is a multiple.
          owner: drafter of the row. It does not receive the state of another drafter.
          salt: cache salt of the row's request, see `Prefix`.
        """
        tokens = tuple(token_ids)
        found = []
        for prefix in self._kept:
            if prefix.salt != salt:
                continue
            shared = shared_length(prefix.token_ids, tokens)
            usable = min(shared, prefix.num_columns) // grain * grain
            found.append((usable, prefix.owner is owner, shared, prefix))
        longest = max(found, key=lambda each: each[:2], default=None)
        if longest is None or not longest[0]:
            return 0
        count = self._load(longest[3], cache, row, recall, grain, longest[2], owner)
        own = max((each for each in found if each[1]), key=lambda each: each[0], default=longest)
        if own is not longest and own[0] > count:
            count = self._load(own[3], cache, row, recall, grain, own[2], owner)
        return count

    def _load(
        self,
        prefix: Prefix,
        cache: KVCache,
        row: int,
        recall: Callable[[object, int], int],
        grain: int,
        shared: int,
        owner: object,
    ) -> int:
        self._touch(prefix)
        is_own = prefix.owner is owner
        return prefix.load(cache, row, recall if is_own else lambda _, count: recall(None, count), grain, shared)

    def clear(self) -> None:
        """Remove all prefixes."""
        self._kept = []

    def _touch(self, prefix: Prefix) -> None:
        self._kept.remove(prefix)
        self._kept.append(prefix)


def _recalled(recall: Callable[[int], int], wanted: int, shared: int, grain: int) -> int:
    """Return the largest number of tokens up to ``wanted`` that the drafter can use, in whole grains.

    A drafter may need one token more: heads make the entry of a token from the next token, so of n ``shared`` tokens
    they can use at most n - 1.
    """
    known = recall(wanted)
    while known % grain:
        if wanted < shared and recall(wanted + 1) == wanted:
            return wanted
        wanted = min(wanted - grain, known // grain * grain)
        known = recall(wanted)
    return known

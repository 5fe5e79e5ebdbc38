"""Keys and values of rows that have ended, for prompts that begin like them."""

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
    """The beginning of a text, copies of keys and values of its first columns, and what a drafter knew of it.

    Args:
      memory: of the drafter, with its ``num_bytes``; None where it kept nothing.
      owner: the drafter that has left the memory; None where there is none, which every engine has a use for.
      salt: of its request, the only ones that it is handed out to; None for those without.
    """

    token_ids: tuple[int, ...]
    num_columns: int
    states: RowStates
    memory: Any = None
    owner: object = None
    salt: object = None

    @property
    def num_bytes(self) -> int:
        """Of the copies, and of what the drafter knew."""
        return bytes_of(self.states) + (0 if self.memory is None else int(self.memory.num_bytes))

    def covers(self, token_ids: tuple[int, ...], num_columns: int, salt: object = None) -> bool:
        """Whether another text of the same salt is its beginning, with as many columns or fewer."""
        is_beginning = num_columns <= self.num_columns and self.token_ids[: len(token_ids)] == token_ids
        return is_beginning and salt == self.salt

    def load(
        self, cache: KVCache, row: int, recall: Callable[[object, int], int], grain: int, shared: int | None = None
    ) -> int:
        """Fill an empty row with all columns, or, where not all are recalled, with whole grains; how many.

        Args:
          shared: tokens that the text of the row begins with, too, of which whole grains are wanted; all by default.
        """
        known, length = partial(recall, self.memory), self.num_columns
        if shared is not None or known(length) < length:
            most = length if shared is None else shared
            length = _recalled(known, min(most, length) // grain * grain, most, grain)
        cache.load(row, self.states, length)
        return length


class PrefixStore:
    """The most recent rows that have ended, each as far as a cache held it.

    A prompt takes over the longest beginning that it shares with any of them, so a conversation that goes on is fed its
    new text only. Texts that another one begins with are not kept twice, but for what several drafters know
    of them: one that must know a beginning takes over what its own rows have left, where it would have to
    read more of a longer beginning that another one left.

    Args:
      limit: how many texts are kept, 1 or more; the least recently used one makes room.

    Attributes:
      max_bytes: memory that all of them may take; None for any. A text that does not fit alone is not kept.

    Exactness: states are as good as the columns that the scheduler lets in and out (`Scheduler`).
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
        """Columns kept, of all texts together."""
        return sum(prefix.num_columns for prefix in self._kept)

    @property
    def num_bytes(self) -> int:
        """Memory of what is kept."""
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
        """Copy the first columns of a row, which hold the first tokens of this text.

        Args:
          remember: makes what is to be handed out together with them; called only where it is not known yet.
          owner: of what is remembered, the only one who has a use for it.
          salt: of the row's request, see `Prefix`.
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
        """Fill an empty row with the longest known beginning of this text; the number of its tokens.

        Args:
          recall: is given what was to be remembered and the number of tokens, and says how many of them are wanted.
          grain: of which the number is to be a multiple.
          owner: who asks; what others have remembered is given to nobody else.
          salt: of the row's request, see `Prefix`.
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
        """Drop everything."""
        self._kept = []

    def _touch(self, prefix: Prefix) -> None:
        self._kept.remove(prefix)
        self._kept.append(prefix)


def _recalled(recall: Callable[[int], int], wanted: int, shared: int, grain: int) -> int:
    """The most that is recalled of ``wanted`` tokens, in whole grains, where ``shared`` ones are alike.

    Heads make the entry of a token from the one that follows, so of n shared tokens they recall n - 1 at most.
    """
    known = recall(wanted)
    while known % grain:
        if wanted < shared and recall(wanted + 1) == wanted:
            return wanted
        wanted = min(wanted - grain, known // grain * grain)
        known = recall(wanted)
    return known

"""Keys and values of rows that have ended, for prompts that begin like them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from foretoken.errors import ConfigError
from foretoken.model.cache.ragged import KVCache, RowStates


@dataclass(frozen=True, eq=False)
class Prefix:
    """The beginning of a text and its keys and values, in copies of their own, and what a drafter knew of it."""

    token_ids: tuple[int, ...]
    states: RowStates
    memory: object = None


class PrefixStore:
    """The most recent rows that have ended, each as far as a cache held it.

    A prompt takes over the longest beginning that it shares with any of them, token by token, so a conversation that
    goes on is fed its new text only. Texts that another one begins with are not kept twice.

    Args:
      limit: how many texts are kept, 1 or more; the least recently used one makes room.

    Exactness: states are those that decoding wrote. They equal a prompt's own up to the rounding of forwards of
    another width, as rows of different batches do.
    """

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ConfigError(f"the number of kept prefixes is {limit}; it must be 1 or more")
        self.limit = limit
        self._kept: list[Prefix] = []  # least recently used first

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_tokens(self) -> int:
        """Columns kept, of all texts together."""
        return sum(len(prefix.token_ids) for prefix in self._kept)

    @property
    def num_bytes(self) -> int:
        """Memory of what is kept."""
        pairs = [pair for prefix in self._kept for pair in prefix.states if pair is not None]
        return sum(states.numel() * states.element_size() for pair in pairs for states in pair)

    def keep(
        self,
        token_ids: Sequence[int],
        cache: KVCache,
        row: int,
        length: int,
        remember: Callable[[], object] = lambda: None,
    ) -> None:
        """Copy the first ``length`` columns of a row, which hold the first tokens of this text.

        Args:
          remember: makes what is to be handed out together with them; called only where they are not known yet.
        """
        tokens = tuple(token_ids[:length])
        if not tokens:
            return
        for prefix in self._kept:
            if prefix.token_ids[:length] == tokens:
                self._touch(prefix)
                return
        self._kept = [prefix for prefix in self._kept if tokens[: len(prefix.token_ids)] != prefix.token_ids]
        del self._kept[: max(0, len(self._kept) - self.limit + 1)]
        self._kept.append(Prefix(tokens, cache.export(row, length), remember()))

    def load(
        self,
        token_ids: Sequence[int],
        cache: KVCache,
        row: int,
        recall: Callable[[object, int], int] = lambda memory, num_tokens: num_tokens,
    ) -> int:
        """Fill an empty row with the longest known beginning of this text; the number of its tokens.

        Args:
          recall: is given what was to be remembered and the number of tokens, and says how many of them are wanted.
        """
        tokens = tuple(token_ids)
        best, longest = None, 0
        for prefix in self._kept:
            shared = shared_length(prefix.token_ids, tokens)
            if shared > longest:
                best, longest = prefix, shared
        if best is not None:
            self._touch(best)
            longest = recall(best.memory, longest)
            cache.load(row, best.states, longest)
        return longest

    def clear(self) -> None:
        """Drop everything."""
        self._kept = []

    def _touch(self, prefix: Prefix) -> None:
        self._kept.remove(prefix)
        self._kept.append(prefix)


def shared_length(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """Length of the longest common beginning, by bisection over slices: (1, 2, 3) and (1, 2, 4, 5) share 2."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low

"""Tokens to start from where nothing is known yet: what fixed-point methods guess before their first iteration."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

from foretoken.engine.sequence import Sequence
from foretoken.lazy import Lazy

if TYPE_CHECKING:
    from foretoken.law import noise
else:
    noise = Lazy("foretoken.law.noise")


class PromptTokens:
    """Tokens of a row's prompt, drawn at random, as many as are asked for.

    Randomness: the draft stream of the row's seed, apart from every number that decides what is emitted.
    """

    def __init__(self, row: Sequence) -> None:
        self._tokens = row.token_ids
        self._num_tokens = row.num_prompt_tokens
        self._seed = row.seed
        self._draws = count()

    def next(self) -> int:
        """One more token."""
        key = noise.stream_key(self._seed, next(self._draws), 0, noise.Purpose.DRAFT)
        return self._tokens[int(noise.uniform(key) * self._num_tokens)]


class RandomTokens:
    """Tokens of the whole vocabulary, drawn at random, each for one position.

    Args:
      seed: of the row.
      vocab_size: V; every token is as likely as any other.

    Randomness: the draft stream of the seed, keyed by position and node, so that what is drafted again gets the same
    token whatever ran beside it.
    """

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._seed = seed
        self._vocab_size = vocab_size

    def at(self, position: int, node: int = 0) -> int:
        """The token for a position of the text, or for a node of the draft that begins there."""
        key = noise.stream_key(self._seed, position, node, noise.Purpose.DRAFT)
        return int(noise.uniform(key) * self._vocab_size)

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


def random_token(seed: int, vocab_size: int, position: int, node: int = 0) -> int:
    """A token of the whole vocabulary, for a position of a text or a node of the draft that begins there.

    Randomness: the draft stream of the seed of a row, keyed by position and node, so that what is drafted again gets
    the same token whatever ran beside it; every token is as likely as any other.
    """
    key = noise.stream_key(seed, position, node, noise.Purpose.DRAFT)
    return int(noise.uniform(key) * vocab_size)

"""Counts of which token has followed which others: a drafter without a model.

The storage of `nasd` in the engine counts by the same rule, and keeps chances and runners-up for its trees. These keep
the two dictionaries of the description instead, which programs read and write.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from foredraft.classic.request import check_least
from foredraft.errors import ConfigError, PromptError, ShapeError

__all__ = ["INgramStorage", "NGramStorage", "OneLevelNGramStorage"]

Gram = tuple[int, ...]
Counts = dict[Gram, dict[int, float]]
"""Context -> token -> how often it followed, or was likely to. Fillers may weigh a fraction."""
Best = dict[Gram, int]
"""Context -> the token with the highest count, the one that had it first among equals."""


class NgramOrderError(ConfigError, AssertionError):
    """n is below 2, which the description asserts: programs that expect its error get it."""


class INgramStorage(ABC):
    """The n-gram table that `ngram_assisted_speculative_generate` drafts from.

    Args:
      n: tokens of the longest n-gram, the predicted one included; 2 or more.
      vocab_size: of the model; tokens for unknown contexts are drawn from it.

    Raises: ConfigError, of n below 2 one that is an AssertionError, too.
    """

    def __init__(self, n: int, vocab_size: int) -> None:
        try:
            check_least("n", n, 2)
        except ConfigError as error:
            raise NgramOrderError(str(error)) from None
        check_least("vocab_size", vocab_size, 1)
        self.n = n
        self.vocab_size = vocab_size

    @abstractmethod
    def next_token(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """The most frequent successor of the last tokens.

        Args:
          input_ids: int64 (batch, T).
        Returns: tokens int64 (batch, 1), and bool (batch, 1) whether the context is known; a random token where not.
        Randomness: torch's global generator, for unknown contexts only.
        """

    def has_gram(self, ngram: Tensor) -> bool:
        """Whether an n-gram, (n,) with its predicted token last, is stored.

        Generation never calls it, so a storage of your own may leave it out.
        """
        raise ConfigError(f"{type(self).__name__} has no has_gram; define it to ask for n-grams")

    @abstractmethod
    def update(self, input_ids: Tensor, next_tokens: Tensor) -> None:
        """Count tokens that may follow a text, once each.

        Args:
          input_ids: int64 (batch, T), the text.
          next_tokens: int64 (batch, k), alternatives for the place after it, the likeliest first.
        """

    def fill(self, input_ids: Tensor, next_tokens: Tensor, weight: float = 1.0) -> None:
        """Count what the target ranked high; `update` does where each of them counts 1.

        Raises: ConfigError for another weight, which a storage of your own has to override this for.
        """
        if weight != 1.0:
            raise ConfigError(
                f"filler_weight is {weight}, and {type(self).__name__} counts by update alone, 1 each; define fill, or "
                "leave filler_weight at 1"
            )
        self.update(input_ids, next_tokens)

    @abstractmethod
    def initialize(self, input_ids: Tensor) -> None:
        """Count every n-gram of a text (batch, T). Adds to what is stored; `reset` clears."""

    def reset(self) -> None:
        """Forget everything. Generation never calls it, so a storage of your own may leave it out."""
        raise ConfigError(f"{type(self).__name__} has no reset; define it, or make a new storage")


class _CountingStorage(INgramStorage):
    """Base of both storages, which differ in the orders of n-grams they keep, and in where they keep them."""

    def __init__(self, n: int, vocab_size: int) -> None:
        super().__init__(n, vocab_size)
        self.reset()

    @abstractmethod
    def _orders(self) -> Sequence[int]:
        """Sizes of the n-grams that are kept, the longest first."""

    @abstractmethod
    def _tables(self, order: int) -> tuple[Counts, Best]:
        """Tables to which n-grams of one size are written."""

    @abstractmethod
    def _best(self, order: int) -> Best:
        """Table in which n-grams of one size are looked up; empty if there are none."""

    def next_token(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        tokens = [self._successor(row) for row in _tails(input_ids, self.n - 1)]
        known = torch.tensor([[token is not None] for token in tokens], device=input_ids.device)
        drawn = [
            int(torch.randint(self.vocab_size, (1,))) if token is None else token for token in tokens
        ]  # only where it is needed
        return torch.tensor(drawn, device=input_ids.device).view(-1, 1), known.view(-1, 1)

    def _successor(self, tail: Gram) -> int | None:
        for order in self._orders():
            if order - 1 <= len(tail):
                found = self._best(order).get(tail[len(tail) - order + 1 :])
                if found is not None:
                    return found
        return None

    def update(self, input_ids: Tensor, next_tokens: Tensor) -> None:
        self._add(input_ids, next_tokens, 1)

    def fill(self, input_ids: Tensor, next_tokens: Tensor, weight: float = 1.0) -> None:
        self._add(input_ids, next_tokens, weight)

    def _add(self, input_ids: Tensor, next_tokens: Tensor, weight: float) -> None:
        self._check(next_tokens)
        if next_tokens.shape[0] != input_ids.shape[0]:
            raise ShapeError(f"{input_ids.shape[0]} texts and next tokens for {next_tokens.shape[0]}; want as many")
        for tail, tokens in zip(_tails(input_ids, self.n - 1), next_tokens.tolist(), strict=True):
            self._count(tail, tokens, weight)

    def initialize(self, input_ids: Tensor) -> None:
        self._check(input_ids)
        for row in input_ids.tolist():
            for place in range(1, len(row)):
                self._count(tuple(row[max(0, place - self.n + 1) : place]), row[place : place + 1], 1)

    def _count(self, tail: Gram, tokens: Sequence[int], weight: float) -> None:
        """Count tokens after every context that ends ``tail``; the best one gives way only to a higher count."""
        for order in self._orders():
            if order - 1 <= len(tail):
                counts, best = self._tables(order)
                gram = tail[len(tail) - order + 1 :]
                followers = counts.setdefault(gram, {})
                for token in tokens:
                    followers[token] = followers.get(token, 0) + weight
                    if followers[token] > followers[best.setdefault(gram, token)]:
                        best[gram] = token

    def has_gram(self, ngram: Tensor) -> bool:
        gram = tuple(int(token) for token in ngram.reshape(-1).tolist())
        if len(gram) not in self._orders():
            return False
        return gram[-1] in self._followers(gram)

    @abstractmethod
    def _followers(self, gram: Gram) -> dict[int, float]:
        """Counts after the context of an n-gram; empty if there are none."""

    def _check(self, ids: Tensor) -> None:
        if ids.ndim != 2:
            raise ShapeError(f"token ids of shape {tuple(ids.shape)}; want (batch, number of tokens)")
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
            worst = int(ids.max()) if int(ids.max()) >= self.vocab_size else int(ids.min())
            raise PromptError(
                f"token id {worst} lies outside the storage's vocabulary, 0..{self.vocab_size - 1}; build it with "
                "the vocab_size of the model, or the rows of its input embedding where these are more"
            )


class OneLevelNGramStorage(_CountingStorage):
    """N-grams of exactly n tokens: the last n - 1 are the context, and nothing shorter is tried.

    ``counts`` maps context -> token -> count, ``ngrams`` context -> most frequent token.
    """

    def reset(self) -> None:
        self.counts: Counts = {}
        self.ngrams: Best = {}

    def _orders(self) -> Sequence[int]:
        return (self.n,)

    def _tables(self, order: int) -> tuple[Counts, Best]:
        return self.counts, self.ngrams

    def _best(self, order: int) -> Best:
        return self.ngrams

    def _followers(self, gram: Gram) -> dict[int, float]:
        return self.counts.get(gram[:-1], {})


class NGramStorage(_CountingStorage):
    """N-grams of 2 to n tokens: the longest known context wins, n - 1 tokens down to one.

    ``counts`` maps order -> context -> token -> count, ``ngrams`` order -> context -> most frequent token.
    """

    def reset(self) -> None:
        self.counts: dict[int, Counts] = {}
        self.ngrams: dict[int, Best] = {}

    def _orders(self) -> Sequence[int]:
        return range(self.n, 1, -1)

    def _tables(self, order: int) -> tuple[Counts, Best]:
        return self.counts.setdefault(order, {}), self.ngrams.setdefault(order, {})

    def _best(self, order: int) -> Best:
        return self.ngrams.get(order, {})

    def _followers(self, gram: Gram) -> dict[int, float]:
        return self.counts.get(len(gram), {}).get(gram[:-1], {})


def _tails(input_ids: Tensor, length: int) -> list[Gram]:
    """The last tokens of every row; one transfer from the device for all of them."""
    if input_ids.ndim != 2:
        raise ShapeError(f"token ids of shape {tuple(input_ids.shape)}; want (batch, number of tokens)")
    return [tuple(row) for row in input_ids[:, max(0, input_ids.shape[1] - length) :].tolist()]

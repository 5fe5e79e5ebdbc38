"""Counts of the tokens that followed n-grams: a drafter without a model.

The storage of `nasd` in the engine counts by the same rule, and stores probabilities and alternatives for its trees.
The storages in this module have the two dictionaries of the description, which programs read and write.
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
"""Context -> token -> how often it followed or was likely to. Fillers may have a fractional weight."""
Best = dict[Gram, int]
"""Context -> the token with the highest count. Among equal counts, the token that reached the count first."""


class NgramOrderError(ConfigError, AssertionError):
    """n below 2. The error is also an AssertionError, because the original modules assert n, and programs may expect
    that error."""


class INgramStorage(ABC):
    """The n-gram table from which `ngram_assisted_speculative_generate` drafts.

    Args:
      n: length of the longest n-gram, the predicted token included; 2 or more.
      vocab_size: vocabulary size of the model; tokens for unknown contexts are drawn from it.

    Raises: ConfigError; for n below 2 it is an AssertionError as well.
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
        """Return the most frequent successor of the last tokens.

        Args:
          input_ids: int64 (batch, T).
        Returns: tokens int64 (batch, 1), and bool (batch, 1), True if the context is known. For an unknown context, the
          token is random.
        Randomness: torch's global generator, for unknown contexts only.
        """

    def has_gram(self, ngram: Tensor) -> bool:
        """Return whether an n-gram, (n,) with its predicted token last, is stored.

        Generation never calls `has_gram`, so subclasses need not define it.
        """
        raise ConfigError(f"{type(self).__name__} has no has_gram; define it to look up n-grams")

    @abstractmethod
    def update(self, input_ids: Tensor, next_tokens: Tensor) -> None:
        """Count tokens that may follow a text, once each.

        Args:
          input_ids: int64 (batch, T), the text.
          next_tokens: int64 (batch, k), alternatives for the next position, the most likely first.
        """

    def fill(self, input_ids: Tensor, next_tokens: Tensor, weight: float = 1.0) -> None:
        """Count the target's likely tokens. By default `fill` calls `update`, which counts 1 each.

        Raises: ConfigError for another weight, unless a subclass overrides this method.
        """
        if weight != 1.0:
            raise ConfigError(
                f"filler_weight is {weight}, but {type(self).__name__} can only count 1 each; define fill, or "
                "leave filler_weight at 1"
            )
        self.update(input_ids, next_tokens)

    @abstractmethod
    def initialize(self, input_ids: Tensor) -> None:
        """Count every n-gram of a text (batch, T). Earlier counts are kept; `reset` clears them."""

    def reset(self) -> None:
        """Clear the storage. Generation never calls `reset`, so subclasses need not define it."""
        raise ConfigError(f"{type(self).__name__} has no reset; define it, or create a new storage")


class _CountingStorage(INgramStorage):
    """Base of both storages, which differ in the lengths of their n-grams and in the layout of their tables."""

    def __init__(self, n: int, vocab_size: int) -> None:
        super().__init__(n, vocab_size)
        self.reset()

    @abstractmethod
    def _orders(self) -> Sequence[int]:
        """Return the lengths of the stored n-grams, the longest first."""

    @abstractmethod
    def _tables(self, order: int) -> tuple[Counts, Best]:
        """Return the tables to which n-grams of one length are written."""

    @abstractmethod
    def _best(self, order: int) -> Best:
        """Return the table in which n-grams of one length are looked up; empty if there are none."""

    def next_token(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        tokens = [self._successor(row) for row in _tails(input_ids, self.n - 1)]
        known = torch.tensor([[token is not None] for token in tokens], device=input_ids.device)
        drawn = [
            int(torch.randint(self.vocab_size, (1,))) if token is None else token for token in tokens
        ]  # random numbers are drawn only for unknown contexts
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
            raise ShapeError(
                f"input_ids has {input_ids.shape[0]} rows, but next_tokens has {next_tokens.shape[0]}; use as many"
            )
        for tail, tokens in zip(_tails(input_ids, self.n - 1), next_tokens.tolist(), strict=True):
            self._count(tail, tokens, weight)

    def initialize(self, input_ids: Tensor) -> None:
        self._check(input_ids)
        for row in input_ids.tolist():
            for place in range(1, len(row)):
                self._count(tuple(row[max(0, place - self.n + 1) : place]), row[place : place + 1], 1)

    def _count(self, tail: Gram, tokens: Sequence[int], weight: float) -> None:
        """Count tokens after every suffix of ``tail`` in use. The best token is replaced only by a higher count."""
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
        """Return the counts after the context of an n-gram; empty if there are none."""

    def _check(self, ids: Tensor) -> None:
        if ids.ndim != 2:
            raise ShapeError(f"token ids have the shape {tuple(ids.shape)}; it must be (batch, number of tokens)")
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
            worst = int(ids.max()) if int(ids.max()) >= self.vocab_size else int(ids.min())
            raise PromptError(
                f"token id {worst} is outside the storage's vocabulary, 0..{self.vocab_size - 1}; create it with "
                "the model's vocab_size, or with the number of rows of its input embedding if that is larger"
            )


class OneLevelNGramStorage(_CountingStorage):
    """N-grams of exactly n tokens: the context is the last n - 1 tokens, and shorter contexts are not tried.

    ``counts`` maps context -> token -> count, and ``ngrams`` maps context -> most frequent token.
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
    """N-grams of 2 to n tokens: the longest known context is used, from n - 1 tokens down to one.

    ``counts`` maps order -> context -> token -> count, and ``ngrams`` maps order -> context -> most frequent token.
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
    """Return the last tokens of every row, with one transfer from the device."""
    if input_ids.ndim != 2:
        raise ShapeError(f"token ids have the shape {tuple(input_ids.shape)}; it must be (batch, number of tokens)")
    return [tuple(row) for row in input_ids[:, max(0, input_ids.shape[1] - length) :].tolist()]

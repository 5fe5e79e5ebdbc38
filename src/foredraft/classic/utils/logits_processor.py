"""Conversion of logits to probabilities and tokens: the processors of the classic interface, and their base class."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from foredraft.classic.request import check_least
from foredraft.errors import ConfigError

__all__ = [
    "GreedyProcessor",
    "LogitsProcessor",
    "MultinomialProcessor",
    "NucleusProcessor",
    "TopKNucleusProcessor",
    "TopKProcessor",
    "draws_from_probs",
]

Method = TypeVar("Method", bound=Callable[..., Tensor])


def draws_from_probs(sample: Method) -> Method:
    """Mark a ``sample`` method that samples from exactly the probabilities that it gets.

    Speculative decoding may then use the rejection rule. For any other ``sample`` (an argmax, or a rule of the user),
    drafts are compared with its result. Comparison is exact for any rule, but accepts less. An override of a marked
    method is not marked.
    """
    sample.draws_from_probs = True  # type: ignore[attr-defined]
    return sample


class LogitsProcessor(ABC):
    """Conversion of logits to probabilities, and of probabilities to a token.

    Subclasses filter logits in ``_process``, which must not change its argument, and choose a token in ``sample``. The
    temperature is applied after the filter.

    Args:
      temperature: temperature above 0. For greedy decoding use `GreedyProcessor`.

    Raises: ConfigError.
    """

    def __init__(self, temperature: float) -> None:
        if not 0.0 < temperature < math.inf:
            raise ConfigError(f"temperature is {temperature}; it must be above 0 (use GreedyProcessor for the argmax)")
        self.temperature = temperature

    def __call__(self, logits: Tensor) -> Tensor:
        """Return probabilities (..., V) of logits (..., V), in their dtype. The logits are not changed."""
        return torch.softmax(self._process(logits) / self.temperature, dim=-1)

    @abstractmethod
    def _process(self, logits: Tensor) -> Tensor:
        """Return filtered logits (..., V), as a new tensor if anything changes."""

    @abstractmethod
    def sample(self, probs: Tensor) -> Tensor:
        """Return token ids (..., 1) for probabilities (..., V)."""


class GreedyProcessor(LogitsProcessor):
    """The most probable token. The temperature only changes the probabilities. Randomness: none."""

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__(temperature)

    def __call__(self, logits: Tensor) -> Tensor:
        """Return probabilities with the argmax of the logits, even if a high temperature rounds them to be equal."""
        scores = self._process(logits)
        probs = torch.softmax(scores / self.temperature, dim=-1)
        best = scores.argmax(dim=-1, keepdim=True)
        peak = probs.gather(-1, best)
        is_hidden = probs.argmax(dim=-1, keepdim=True) != best
        return probs.scatter(-1, best, torch.where(is_hidden, torch.nextafter(peak, torch.ones_like(peak)), peak))

    def _process(self, logits: Tensor) -> Tensor:
        return logits

    def sample(self, probs: Tensor) -> Tensor:
        return probs.argmax(dim=-1, keepdim=True)


class MultinomialProcessor(LogitsProcessor):
    """A sample of the whole distribution. Randomness: torch's global generator."""

    def _process(self, logits: Tensor) -> Tensor:
        return logits

    @draws_from_probs
    def sample(self, probs: Tensor) -> Tensor:
        rows = probs.reshape(-1, probs.shape[-1])
        return torch.multinomial(rows, num_samples=1).view(*probs.shape[:-1], 1)


class TopKProcessor(MultinomialProcessor):
    """A sample of the ``top_k`` most likely tokens, including ties with the last of them.

    Args:
      top_k: number of tokens, 1 or more; a number above the vocabulary size keeps all.
    """

    def __init__(self, temperature: float, top_k: int) -> None:
        super().__init__(temperature)
        check_least("top_k", top_k, 1)
        self.top_k = top_k

    def _process(self, logits: Tensor) -> Tensor:
        return keep_top_k(logits, self.top_k)


class NucleusProcessor(MultinomialProcessor):
    """Processor that samples from the smallest set of most likely tokens whose probability exceeds ``top_p``.

    Source: Holtzman et al. 2019, arXiv:1904.09751. The set is determined before the temperature is applied.

    Args:
      top_p: probability above 0, at most 1; 1 keeps all.
    """

    def __init__(self, temperature: float, top_p: float) -> None:
        super().__init__(temperature)
        self.top_p = _checked_top_p(top_p)

    def _process(self, logits: Tensor) -> Tensor:
        return keep_nucleus(logits, self.top_p)


class TopKNucleusProcessor(MultinomialProcessor):
    """A sample with both filters: the ``top_k`` most likely tokens, then the nucleus of these.

    Args:
      top_k, top_p: see `TopKProcessor` and `NucleusProcessor`.
    """

    def __init__(self, temperature: float, top_k: int, top_p: float) -> None:
        super().__init__(temperature)
        check_least("top_k", top_k, 1)
        self.top_k = top_k
        self.top_p = _checked_top_p(top_p)

    def _process(self, logits: Tensor) -> Tensor:
        return keep_nucleus(keep_top_k(logits, self.top_k), self.top_p)


def keep_top_k(logits: Tensor, top_k: int) -> Tensor:
    """Return a copy (..., V) with -inf below the k-th largest logit."""
    least = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[..., -1:]
    return logits.masked_fill(logits < least, -torch.inf)


def keep_nucleus(logits: Tensor, top_p: float) -> Tensor:
    """Return a copy (..., V) with -inf after the first token at which the cumulative probability exceeds ``top_p``.

    Probabilities (0.5, 0.3, 0.2) keep two tokens at 0.5, and one at 0.4.
    """
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    before = ordered.softmax(dim=-1).cumsum(dim=-1).roll(1, dims=-1)  # probability of all more likely tokens
    before[..., 0] = 0.0
    drop = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before > top_p)
    return logits.masked_fill(drop, -torch.inf)


def _checked_top_p(top_p: float) -> float:
    if not 0.0 < top_p <= 1.0:
        raise ConfigError(f"top_p is {top_p}; it must be above 0 and at most 1")
    return top_p

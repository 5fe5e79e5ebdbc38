"""Models that read one growing text, or several of one length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from foretoken.classic.adapters import ready
from foretoken.classic.modules import PlainModule
from foretoken.config.engine import EngineConfig
from foretoken.loading.adapters import Adapter
from foretoken.model.cache.ragged import KVCache
from foretoken.model.lm import Nodes


class Readable(Protocol):
    """What a call has to know of a model."""

    name: str
    vocab_size: int
    context_length: int | None
    device: torch.device


class TextReader(Protocol):
    """Reads one growing text."""

    @property
    def model(self) -> Readable:
        """Whose logits they are."""
        ...

    def read(self, text: Sequence[int], num_last: int = 1) -> Tensor:
        """Logits (num_last, V) after the last tokens of the text."""
        ...


def reader_of(model: nn.Module, *, keeps_cache: bool) -> TextReader:
    """A reader of any model; where a cache is asked for and the model's is not known, that is said.

    Raises: UnsupportedModelError, UnsupportedStateError, ProbeError.
    """
    found = ready(model)
    if isinstance(found, PlainModule):
        if keeps_cache:
            found.say_once()
        return ModuleReader(found)
    return Reader(found, keeps_cache=keeps_cache)


class ModuleReader:
    """Reads every text from its beginning, through the module as it is."""

    def __init__(self, module: PlainModule) -> None:
        self.model = module

    def read(self, text: Sequence[int], num_last: int = 1) -> Tensor:
        """Logits (num_last, V) after the last ``num_last`` tokens of the text, in the dtype of the module."""
        return self.model.read([text], num_last)[0]


class Reader:
    """Gives logits after the last tokens of a text, and feeds only what the cache does not hold.

    The cache is known by the very tokens it was made from: what differs from the text at hand is rolled back first,
    so no count of accepted, rejected or unseen tokens can go wrong.

    Args:
      adapter: of the model.
      keeps_cache: False reads every text from its beginning.
    """

    def __init__(self, adapter: Adapter, *, keeps_cache: bool) -> None:
        self.model = adapter.target
        self._adapter = adapter
        self._keeps_cache = keeps_cache
        self._cache = self.model.new_cache(1)
        self._held: list[int] = []

    def read(self, text: Sequence[int], num_last: int = 1) -> Tensor:
        """Logits (num_last, V) after the last ``num_last`` tokens of the text, in the dtype of the model.

        Tokens that the model has no embedding for are read as its last one.
        """
        tokens = list(text)
        self._roll_back(tokens, len(tokens) - num_last)
        logits = feed(self._adapter, self._cache, tokens[len(self._held) :], num_last)
        self._held = tokens
        return logits

    def _roll_back(self, tokens: Sequence[int], most: int) -> None:
        """Keep what the cache and the first ``most`` tokens have in common."""
        length = common_length(self._held, tokens[:most]) if self._keeps_cache else 0
        self._cache.rollback([length])
        del self._held[length:]


def feed(adapter: Adapter, cache: KVCache, tokens: Sequence[int], num_last: int = 1) -> Tensor:
    """Run and commit tokens at the end of row 0 of a cache; logits (num_last, V) after the last of them."""
    size = EngineConfig.prefill_chunk_size
    tokens = [min(token, adapter.target.vocab_size - 1) for token in tokens]
    while len(tokens) - num_last >= size:
        _forward(adapter, cache, tokens[:size], 0)
        tokens = tokens[size:]
    return _forward(adapter, cache, tokens, num_last)


def _forward(adapter: Adapter, cache: KVCache, tokens: Sequence[int], num_last: int) -> Tensor:
    kept = slice(len(tokens) - num_last, len(tokens))
    with adapter.lock:
        logits = adapter.target.forward(Nodes.from_chains([tokens]), cache, keep=kept)
    cache.commit([range(len(tokens))])
    return logits[0]


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common beginning: 2 for (1, 2, 3) and (1, 2, 4, 5)."""
    limit = min(len(first), len(second))
    if first[:limit] == second[:limit]:
        return limit
    return next(i for i in range(limit) if first[i] != second[i])

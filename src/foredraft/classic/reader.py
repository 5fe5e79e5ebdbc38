"""Readers of one growing text, or of the beams of one text."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from foredraft.beginnings import shared_length
from foredraft.classic.adapters import Model, PlainModule, ready
from foredraft.config.engine import EngineConfig
from foredraft.loading.adapters import Adapter
from foredraft.model.cache.ragged import KVCache
from foredraft.model.lm import CausalLM, Nodes

Readable = CausalLM | PlainModule
"""A model with a name, a vocabulary, a context length and a device."""


def reader_of(model: Model, *, keeps_cache: bool) -> TextReader:
    """Return a reader for any model. Warn if a cache is requested but the model's cache is not supported.

    Raises: UnsupportedModelError, UnsupportedStateError, ProbeError.
    """
    found = ready(model)
    if isinstance(found, PlainModule):
        if keeps_cache:
            found.say_once()
        return found
    return Reader(found, keeps_cache=keeps_cache)


class Reader:
    """A reader that returns logits after the last tokens of a text and feeds only tokens that are not in the cache.

    The tokens in the cache are compared with the text, and the cache is rolled back to the first difference. No count
    of accepted or rejected tokens is needed, so none can be wrong.

    Args:
      adapter: adapter of the model.
      keeps_cache: False to read every text from its beginning.
    """

    def __init__(self, adapter: Adapter, *, keeps_cache: bool) -> None:
        self.model = adapter.target
        self._adapter = adapter
        self._keeps_cache = keeps_cache
        self._cache = self.model.new_cache(1)
        self._held: tuple[int, ...] = ()

    def read(self, text: Sequence[int], num_last: int = 1) -> Tensor:
        """Return logits (num_last, V) after the last ``num_last`` tokens of the text, in the dtype of the model.

        Token ids that the model has no embedding for are replaced by its largest id.
        """
        tokens = tuple(text)
        kept = shared_length(self._held, tokens[: len(tokens) - num_last]) if self._keeps_cache else 0
        self._held = self._held[:kept]
        self._cache.rollback([kept])
        logits = feed(self._adapter, self._cache, tokens[kept:], num_last)
        self._held = tokens
        return logits

    def read_beams(self, texts: Sequence[Sequence[int]], parents: Sequence[int]) -> Tensor:
        """Return logits (B, V) after texts of one length, of which only the last token is fed.

        Args:
          parents: for every text, the row of the previous call that contains the text without its last token.
        """
        self._cache.reorder(parents)
        nodes = Nodes.from_chains([text[-1:] for text in texts])
        with self._adapter.lock:
            logits = self.model.forward(nodes, self._cache)[:, 0]
        self._cache.commit([(0,)] * len(texts))
        return logits


TextReader = Reader | PlainModule


def feed(adapter: Adapter, cache: KVCache, tokens: Sequence[int], num_last: int = 1) -> Tensor:
    """Run and commit tokens at the end of row 0 of a cache. Return logits (num_last, V) after the last of them."""
    size = EngineConfig.prefill_chunk_size
    tokens = [min(token, adapter.target.num_embeddings - 1) for token in tokens]
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

"""Models that read one growing text, or the beams of one."""

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
"""Has a name, a vocabulary, a context length and a device."""


def reader_of(model: Model, *, keeps_cache: bool) -> TextReader:
    """A reader of any model; where a cache is asked for and the model's is not known, that is said.

    Raises: UnsupportedModelError, UnsupportedStateError, ProbeError.
    """
    found = ready(model)
    if isinstance(found, PlainModule):
        if keeps_cache:
            found.say_once()
        return found
    return Reader(found, keeps_cache=keeps_cache)


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
        self._held: tuple[int, ...] = ()

    def read(self, text: Sequence[int], num_last: int = 1) -> Tensor:
        """Logits (num_last, V) after the last ``num_last`` tokens of the text, in the dtype of the model.

        Tokens that the model has no embedding for are read as its last one.
        """
        tokens = tuple(text)
        kept = shared_length(self._held, tokens[: len(tokens) - num_last]) if self._keeps_cache else 0
        self._held = self._held[:kept]
        self._cache.rollback([kept])
        logits = feed(self._adapter, self._cache, tokens[kept:], num_last)
        self._held = tokens
        return logits

    def read_beams(self, texts: Sequence[Sequence[int]], parents: Sequence[int]) -> Tensor:
        """Logits (B, V) after texts of one length, of which only the last token is fed.

        Args:
          parents: the row of the cache, by the call before, that holds all of a text but its last token.
        """
        self._cache.reorder(parents)
        nodes = Nodes.from_chains([text[-1:] for text in texts])
        with self._adapter.lock:
            logits = self.model.forward(nodes, self._cache)[:, 0]
        self._cache.commit([(0,)] * len(texts))
        return logits


TextReader = Reader | PlainModule


def feed(adapter: Adapter, cache: KVCache, tokens: Sequence[int], num_last: int = 1) -> Tensor:
    """Run and commit tokens at the end of row 0 of a cache; logits (num_last, V) after the last of them."""
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

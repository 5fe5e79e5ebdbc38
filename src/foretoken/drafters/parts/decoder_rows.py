"""Rows of a drafter's cache that a small model reads in one call, see `foretoken.model.execution.decoder`."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from foretoken.drafters.parts.rows import frontier_list
from foretoken.lazy import Lazy

if TYPE_CHECKING:
    import torch

    import foretoken.model.execution.decodable as decodable
    import foretoken.model.execution.decoder_calls as calls
    import foretoken.model.execution.node_lists as node_lists
    from foretoken.drafters.parts.draft import GrowingDraft
    from foretoken.drafters.parts.growth import Argmaxes
    from foretoken.drafters.parts.rows import CachedRow
    from foretoken.model.cache.ragged import KVCache
    from foretoken.model.execution.decoder import Decoder
    from foretoken.model.lm import CausalLM
else:
    torch = Lazy("torch")
    decodable = Lazy("foretoken.model.execution.decodable")
    calls = Lazy("foretoken.model.execution.decoder_calls")
    node_lists = Lazy("foretoken.model.execution.node_lists")


class DecoderRows:
    """What `DraftModelDrafter` asks of its model, in one call each where the model and the nodes are few enough.

    Draft i lies in row i of the cache.

    Args:
      cache: that is written to; what is fed is committed.
    """

    def __init__(self, model: CausalLM, cache: KVCache) -> None:
        self._model = model
        self._cache = cache

    def takes(self, counts: Seq[int]) -> bool:
        """Whether so many nodes of every row are for this."""
        return calls.are_few(counts) and decodable.decoder_of(self._model) is not None

    def open(self, places: Seq[CachedRow], chains: Seq[Seq[int]]) -> torch.Tensor:
        """Feed the next tokens of texts, one at least of each; logits (B, V) after the last of each."""
        fed = node_lists.NodeList.chains(chains, self._cache.row_lengths(0, len(chains)))
        ends = [sum(fed.counts[: row + 1]) - 1 for row in range(len(chains))]
        logits = self._decoder.logits(fed, self._cache, ends)
        self._model.num_forwards += 1
        self._cache.commit([range(count) for count in fed.counts])
        for place, count in zip(places, fed.counts, strict=True):
            place.trunk += count
        return logits

    def grow(self, drafts: Seq[GrowingDraft], places: Seq[CachedRow], chains: Seq[Seq[int]], wanted: Argmaxes) -> None:
        """Feed the next tokens of texts, and add the likeliest tokens behind them to the drafts, one after another."""
        fed = node_lists.NodeList.chains(chains, self._cache.row_lengths(0, len(chains)))
        found, num_forwards = self._decoder.chains(fed, self._cache, wanted.depths, wanted.num_columns, wanted.names)
        self._model.num_forwards += num_forwards
        num_fed = [max(len(tokens) - 1, 0) for tokens in found]  # nobody has asked what follows the last
        self._cache.commit([range(count + more) for count, more in zip(fed.counts, num_fed, strict=True)])
        for draft, place, tokens, count, more in zip(drafts, places, found, fed.counts, num_fed, strict=True):
            place.trunk += count
            place.offset_of.update(zip(range(1, more + 1), range(more), strict=True))
            for node, token in enumerate(tokens):
                draft.add(node, token)

    def feed(self, drafts: Seq[GrowingDraft], places: Seq[CachedRow], *, are_chains: bool) -> torch.Tensor:
        """Feed the frontier of every draft, as `foretoken.drafters.parts.rows.feed` does; logits (M, V)."""
        width = max(len(draft.frontier) for draft in drafts)
        fed = frontier_list(self._cache, drafts, places, width, are_chains=are_chains)
        found = self._decoder.logits(fed, self._cache, range(len(fed.tokens)))
        self._model.num_forwards += 1
        self._cache.commit([range(width)] * len(drafts))
        return found

    @property
    def _decoder(self) -> Decoder:
        decoder = decodable.decoder_of(self._model)
        assert decoder is not None
        return decoder

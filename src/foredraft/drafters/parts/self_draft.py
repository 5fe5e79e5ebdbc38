"""Drafting with a cheaper form of the target, over the target's own cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from foredraft.drafters.parts.growth import GrowingDraft, Growth, growing
from foredraft.drafters.parts.layer_set import LayerSet, quantized, skipping
from foredraft.drafters.parts.rows import FedNodes, chains_by_slot, reach
from foredraft.drafters.parts.sparse_view import SparseView
from foredraft.engine.drafter import Drafter, DrafterFacts, DraftSize, Needs, StepResult
from foredraft.engine.memory import bytes_per_token
from foredraft.engine.row import Row
from foredraft.model.cache.ragged import KVCache
from foredraft.model.lm import CausalLM, Nodes
from foredraft.tree import DraftTree


class SelfDrafter(Drafter):
    """Drafter that uses a variant of the target with shared tensors and cache: no second prefill and no second cache.

    Columns that the variant writes after the committed ones are rolled back before verification, which writes the same
    columns again in every layer.

    Args:
      name: name of the method.
      layer_set: sublayers that are skipped while drafting.
      group_size: number of inputs that share a scale in 4-bit copies of the weights; None to draft with the weights
        themselves.
      with_head: True to quantise the output embedding, too; see `quantize_linears`.
      view: selected columns of the target's cache to attend to while drafting; None for all columns.
      usual_acceptance: see `DrafterFacts`.
      growth: arguments of `Growth`.

    Exactness: lossless for any variant; the target, its modules and its committed cache are never changed.
    Randomness: keyed, see ``acceptance`` of `Growth`; none when greedy.
    """

    model: CausalLM
    _cache: KVCache

    def __init__(
        self,
        name: str,
        *,
        layer_set: LayerSet | None = None,
        group_size: int | None = None,
        with_head: bool = False,
        view: SparseView | None = None,
        usual_acceptance: float | None = None,
        **growth: Any,
    ) -> None:
        self.facts = DrafterFacts(name, usual_acceptance=usual_acceptance)
        self.layer_set = layer_set or LayerSet()
        self._group_size, self._with_head = group_size, with_head
        self.growth = Growth(**growth)
        self._view = view
        self._target: CausalLM | None = None
        self._fed: FedNodes  # while drafts grow
        self._spoilt: set[int] = set()  # slots where drafting has written NaN into the cache

    def _variant(self, target: CausalLM) -> CausalLM:
        """Return the cheaper form of the target."""
        if self._group_size is not None:
            return quantized(target, self._group_size, self.layer_set, with_head=self._with_head)
        if len(self.layer_set):
            return skipping(target, self.layer_set)
        return target.variant("as it is", lambda *_: None)

    def needs(self, target: CausalLM, cache: KVCache) -> Needs:
        self._cache = cache if self._view is None else self._view.bind(target, cache)
        if target is not self._target:
            self._target, self.model = target, self._variant(target)
        self.growth.takes_trees = target.supports_trees
        if self._view is None:
            return Needs()
        return Needs(caches=(self._view.own_cache(lambda: bytes_per_token(self.model)),))

    def propose(self, rows: Sequence[Row], budgets: Sequence[DraftSize]) -> list[DraftTree]:
        drafts = [
            self.growth.begin(row, budget, reach(self.model, row)) for row, budget in zip(rows, budgets, strict=True)
        ]
        if grown := growing(drafts):
            if self._view is not None:
                self._view.follow(grown)
            lengths = list(self._cache.lengths)
            try:
                self.growth.grow(grown, self)  # nodes have the same cache layout as the target's
            finally:
                self._cache.rollback(lengths)
                while self._spoilt:
                    slot = self._spoilt.pop()
                    self._cache.erase(slot, lengths[slot])
        return [self.growth.finish(draft, self.name) for draft in drafts]

    def open(self, drafts: Sequence[GrowingDraft]) -> torch.Tensor:
        """Feed the pending tokens."""
        first, chains = drafts[0].row.slot, chains_by_slot(drafts, [[draft.row.pending] for draft in drafts])
        logits = self.model.forward(Nodes.from_chains(chains), self._cache, first_row=first)
        self._cache.commit(list(map(range, map(len, chains))), first)
        self._fed = FedNodes(self._cache, drafts)
        return self._fed.listed(self._watched(logits, first), drafts)

    def expand(self, drafts: Sequence[GrowingDraft]) -> torch.Tensor:
        """Feed the frontier of every draft."""
        logits = self._fed.feed(self.model, drafts, are_chains=self.growth.drafts_chains)
        return self._fed.listed(self._watched(logits, self._fed.first), drafts)

    def _watched(self, logits: torch.Tensor, first: int) -> torch.Tensor:
        """Return the logits (B, F, V) of rows from ``first`` on, after recording the slots that have NaN.

        All logits of a node are NaN if its hidden state is NaN, and so are its cache columns. From the cache, NaN would
        reach the target's own nodes and later rows in this slot.
        """
        nodes = logits[..., 0].isnan()
        if bool(nodes.any()):
            self._spoilt.update(first + place for place in nodes.any(1).nonzero()[:, 0].tolist())
        return logits

    def observe(self, rows: Sequence[Row], results: Sequence[StepResult]) -> None:
        for row, result in zip(rows, results, strict=True):
            self.growth.end(row, result)

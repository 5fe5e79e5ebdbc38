"""The part of a cache that a drafter attends to: of constant size, chosen row by row."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from foredraft.drafters.parts.growth import GrowingDraft
from foredraft.engine.drafter import DraftCache
from foredraft.engine.row import Row, RowState
from foredraft.methods.selfdraft import SNAPKV, SparseKVOptions
from foredraft.model.cache.ragged import KVCache
from foredraft.model.cache.views import Columns, ViewCache
from foredraft.model.lm import CausalLM
from foredraft.model.masks import FULL
from foredraft.model.votes import SnapKVScorer


class SparseView(RowState):
    """A view of a cache that follows its rows: constant in size, however long they are.

    The cache is the target's, which grows by what the target commits, or one of a drafter's own. Its rows grow in the
    view: what the drafter reads there is put into the whole cache when columns are chosen anew.

    A row that is not longer than the budget is kept whole. One that is gets as many columns as the budget has;
    tokens that are committed later are kept besides, until there are as many as ``refresh``, and then columns are
    chosen anew. Sliding layers keep their last columns under every selection. As the state of a row, a view gives back
    what was read in it when the row ends.

    Args:
      budget: columns that are chosen.
      selector: "streaming": the first and the last columns. "snapkv": the first ones, the last ``window`` ones, and of
        those between for every layer and head the ones with the most votes of the last ``window`` tokens, which cost
        a forward of these tokens.
      sinks: first columns that are always kept.
      window: last columns that are always kept.
      refresh: see above.

    Source: StreamingLLM (Xiao et al. 2023, arXiv:2309.17453); SnapKV (Li et al. 2024, arXiv:2404.14469); both as caches
    of drafters: MagicDec (Sadhukhan et al. 2024, arXiv:2408.11049). Deviations: keys keep their positions under both;
    first columns are kept under both; columns are chosen anew as the text grows.
    """

    def __init__(self, *, budget: int, selector: str, sinks: int, window: int, refresh: int) -> None:
        self.budget = budget
        self.selector = selector
        self.sinks = sinks
        self.window = window
        self.refresh = refresh
        self.num_choices = 0

    @classmethod
    def of(cls, options: SparseKVOptions) -> SparseView:
        """As the options of a method say."""
        return cls(
            budget=options.kv_budget,
            selector=options.kv_selector,
            sinks=options.kv_sinks,
            window=options.window,
            refresh=options.kv_refresh,
        )

    def bind(self, model: CausalLM, source: KVCache) -> ViewCache:
        """The cache of the view, to draft over.

        Args:
          model: that has written the whole cache.
          source: the whole cache.

        Raises: UnsupportedModelError for a model whose votes cannot be taken, where they are needed.
        """
        self._source = source
        self._kinds = model.layer_types
        self._last_token = model.num_embeddings - 1
        self._voter = SnapKVScorer(model) if self.selector == SNAPKV else None
        room = self.budget + self.refresh + 32  # for a draft, too
        self.cache = ViewCache(model.num_layers, capacity=room, device=model.device, dtype=source.dtype)
        return self.cache

    def own_cache(self, column_bytes: Callable[[], int]) -> DraftCache:
        """The cache of the view, whose rows do not grow with their text."""
        return DraftCache(self.cache, column_bytes, self.cache.capacity)

    def follow(self, drafts: Sequence[GrowingDraft]) -> None:
        """Bring the rows of drafts up to date."""
        spans = {}
        for draft in drafts:
            slot = draft.row.slot
            if not self.renew(draft.row):
                end, length = self.cache.end(slot), self._source.lengths[slot]
                spans[slot] = range(end, max(end, length))
        self.cache.append(self._source, spans)

    def renew(self, row: Row) -> bool:
        """Choose the columns of a row anew where it would hold too many; whether it was necessary."""
        slot = row.slot
        end, held = self.cache.end(slot), self.cache.lengths[slot]
        length = max(end, self._source.lengths[slot])
        if held + length - end <= self.budget + (self.refresh if held else 0):
            return False
        self.give_back(row)
        self.cache.choose(slot, self._source, self._chosen(row, length))
        self.num_choices += 1
        return True

    def ended(self, row: Row, *, is_kept: bool) -> None:
        if is_kept:
            self.give_back(row)

    def give_back(self, row: Row) -> None:
        """Put what was read in the view behind what the whole cache holds of a row."""
        self.cache.give_back(row.slot, self._source)

    def _chosen(self, row: Row, length: int) -> list[Columns]:
        """Columns of every layer of a row that is longer than the budget."""
        recent = (range(length - self.budget, length),)
        if self._voter is None:
            ends = (range(self.sinks), range(length - self.budget + self.sinks, length))
            return [ends if kind == FULL else recent for kind in self._kinds]
        last_tokens = [min(token, self._last_token) for token in row.token_ids[length - self.window : length]]
        found = self._voter.votes(last_tokens, self._source, row.slot)
        return [
            self._elected(of_layer, length) if kind == FULL else recent
            for kind, of_layer in zip(self._kinds, found, strict=True)
        ]

    def _elected(self, of_layer: torch.Tensor, length: int) -> torch.Tensor:
        """(H_kv, budget): of 9 columns, a budget of 5, one sink and a window of 2, for instance 0 3 6 7 8."""
        of_layer[:, : self.sinks] = float("inf")
        best = of_layer.topk(self.budget - self.window, dim=1).indices.sort(dim=1).values
        last = torch.arange(length - self.window, length, device=best.device).expand(len(best), -1)
        return torch.cat([best, last], 1)

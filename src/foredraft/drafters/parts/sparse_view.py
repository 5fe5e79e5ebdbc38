"""Selection of cache columns, of constant size and made row by row, that a drafter attends to."""

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
    """View of a cache with a constant number of columns per row, however long the row is.

    The cache is the target's, which grows with the target's commits, or a drafter's own. Rows of a drafter's own cache
    grow in the view, and tokens read there are written back to the whole cache when columns are reselected.

    A row that is not longer than the budget is kept whole. A longer row keeps as many columns as the budget. Tokens
    that are committed later are kept in addition until there are ``refresh`` of them; then columns are reselected.
    Sliding-window layers always keep their last columns. As the state of a row, a view writes its tokens back when the
    row ends.

    Args:
      budget: number of selected columns.
      selector: "streaming" keeps the first and the last columns. "snapkv" keeps the first columns and the last
        ``window`` ones. Between them it keeps, for every layer and head, the columns with the most attention from the
        last ``window`` tokens, which costs a forward pass over these tokens.
      sinks: number of first columns that are always kept.
      window: number of last columns that are always kept.
      refresh: number of new tokens after which columns are reselected.

    Source: StreamingLLM (Xiao et al. 2023, arXiv:2309.17453); SnapKV (Li et al. 2024, arXiv:2404.14469); both as
    caches of drafters: MagicDec (Sadhukhan et al. 2024, arXiv:2408.11049). Deviations, for both selectors: keys keep
    their positions, first columns are kept, and columns are reselected as the row grows.
    """

    scorer: SnapKVScorer | None
    """Scorer of columns, after `bind`; None for "streaming"."""

    def __init__(self, *, budget: int, selector: str, sinks: int, window: int, refresh: int) -> None:
        self.budget = budget
        self.selector = selector
        self.sinks = sinks
        self.window = window
        self.refresh = refresh
        self.num_choices = 0

    @classmethod
    def of(cls, options: SparseKVOptions) -> SparseView:
        """Make a view from the options of a method."""
        return cls(
            budget=options.kv_budget,
            selector=options.kv_selector,
            sinks=options.kv_sinks,
            window=options.window,
            refresh=options.kv_refresh,
        )

    def bind(self, model: CausalLM, source: KVCache) -> ViewCache:
        """Create and return the cache of the view, which drafts attend to.

        Args:
          model: model that writes the whole cache.
          source: whole cache.

        Raises: UnsupportedModelError if the selector needs attention scores and the model does not provide them.
        """
        self._source = source
        self._kinds = model.layer_types
        self._last_token = model.num_embeddings - 1
        self.scorer = SnapKVScorer(model) if self.selector == SNAPKV else None
        room = self.budget + self.refresh + 32  # 32 columns for a draft
        self.cache = ViewCache(model.num_layers, capacity=room, device=model.device, dtype=source.dtype)
        return self.cache

    def own_cache(self, column_bytes: Callable[[], int]) -> DraftCache:
        """Return the cache of the view. The rows of the view do not grow with the text."""
        return DraftCache(self.cache, column_bytes, self.cache.capacity)

    def follow(self, drafts: Sequence[GrowingDraft]) -> None:
        """Update the view's rows to the current state of the drafts' rows."""
        spans = {}
        for draft in drafts:
            slot = draft.row.slot
            if not self.renew(draft.row):
                end, length = self.cache.end(slot), self._source.lengths[slot]
                spans[slot] = range(end, max(end, length))
        self.cache.append(self._source, spans)

    def renew(self, row: Row) -> bool:
        """Reselect the columns of a row if the view has too many; returns whether this was necessary."""
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
        """Append the tokens that were read in the view to the whole cache's row."""
        self.cache.give_back(row.slot, self._source)

    def _chosen(self, row: Row, length: int) -> list[Columns]:
        """Return the columns of every layer for a row that is longer than the budget."""
        recent = (range(length - self.budget, length),)
        if self.scorer is None:
            ends = (range(self.sinks), range(length - self.budget + self.sinks, length))
            return [ends if kind == FULL else recent for kind in self._kinds]
        last_tokens = [min(token, self._last_token) for token in row.token_ids[length - self.window : length]]
        found = self.scorer.votes(last_tokens, self._source, row.slot)
        return [
            self._elected(of_layer, length) if kind == FULL else recent
            for kind, of_layer in zip(self._kinds, found, strict=True)
        ]

    def _elected(self, of_layer: torch.Tensor, length: int) -> torch.Tensor:
        """Return the selected columns (H_kv, budget): for 9 columns, budget 5, one sink and window 2, for instance 0 3
        6 7 8.
        """
        of_layer[:, : self.sinks] = float("inf")
        best = of_layer.topk(self.budget - self.window, dim=1).indices.sort(dim=1).values
        last = torch.arange(length - self.window, length, device=best.device).expand(len(best), -1)
        return torch.cat([best, last], 1)

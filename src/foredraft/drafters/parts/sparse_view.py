"""The part of a cache that a drafter attends to: of constant size, chosen row by row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from foredraft.config.options import one_of, option, whole
from foredraft.drafters.parts.growth import GrowthOptions
from foredraft.engine.drafter import DraftCache
from foredraft.errors import ConfigError
from foredraft.lazy import Lazy

if TYPE_CHECKING:
    import torch

    from foredraft.drafters.parts.draft import GrowingDraft
    from foredraft.engine.row import Row
    from foredraft.model import masks, votes
    from foredraft.model.cache import views
    from foredraft.model.cache.ragged import KVCache
    from foredraft.model.lm import CausalLM
else:
    torch = Lazy("torch")
    masks = Lazy("foredraft.model.masks")
    votes = Lazy("foredraft.model.votes")
    views = Lazy("foredraft.model.cache.views")

STREAMING, SNAPKV = "streaming", "snapkv"


@dataclass(frozen=True, kw_only=True)
class ViewOptions(GrowthOptions):
    """Which columns of a cache a drafter attends to."""

    kv_budget: int = option(whole(1), 256, "columns of the cache that drafts attend to")
    kv_selector: str = option(
        one_of((STREAMING, SNAPKV), {"streamingllm": STREAMING, "streaming_llm": STREAMING, "snap_kv": SNAPKV}),
        STREAMING,
        "streaming keeps the first and the last columns, snapkv those that the last tokens attend to",
    )
    kv_sinks: int = option(whole(0), 4, "first columns that are always kept")
    kv_window: int | None = option(whole(1), help="of snapkv: last tokens, which vote and are kept; 32 by default")
    kv_refresh: int = option(whole(1), 64, "new tokens that are kept besides before columns are chosen anew")

    @property
    def window(self) -> int:
        """Last columns that are always kept."""
        if self.kv_selector == STREAMING:
            return self.kv_budget - self.kv_sinks
        return 32 if self.kv_window is None else self.kv_window

    def check(self) -> None:
        super().check()
        if self.kv_selector == STREAMING and self.kv_window is not None:
            raise ConfigError(
                "kv_window is the number of tokens that vote, and kv_selector='streaming' takes no votes: it keeps "
                "kv_sinks first and the rest of kv_budget last columns; leave kv_window out, or take 'snapkv'"
            )
        if self.kv_sinks >= self.kv_budget:
            raise ConfigError(
                f"kv_budget is {self.kv_budget} columns and kv_sinks is {self.kv_sinks}, which leaves none for the "
                "text before the draft; raise kv_budget, or lower kv_sinks"
            )
        if self.kv_selector == SNAPKV and self.kv_sinks + self.window >= self.kv_budget:
            raise ConfigError(
                f"kv_budget is {self.kv_budget} columns, and kv_sinks={self.kv_sinks} and kv_window={self.window} "
                "leave none of them to be voted for; raise kv_budget, or lower the others"
            )


class SparseView:
    """A view of a cache that follows its rows: constant in size, however long they are.

    The cache is the target's, which grows by what the target commits, or one of a drafter's own. Its rows grow in the
    view: what the drafter reads there is put into the whole cache when columns are chosen anew.

    A row that is not longer than the budget is kept whole. One that is gets as many columns as the budget has;
    tokens that are committed later are kept besides, until there are as many as ``refresh``, and then columns are
    chosen anew. Sliding layers keep their last columns under every selection.

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
    def of(cls, options: ViewOptions) -> SparseView:
        """As the options of a method say."""
        return cls(
            budget=options.kv_budget,
            selector=options.kv_selector,
            sinks=options.kv_sinks,
            window=options.window,
            refresh=options.kv_refresh,
        )

    def bind(self, model: CausalLM, source: KVCache) -> views.ViewCache:
        """The cache of the view, to draft over.

        Args:
          model: that has written the whole cache.
          source: the whole cache.

        Raises: UnsupportedModelError for a model whose votes cannot be taken, where they are needed.
        """
        self._source = source
        self._kinds = model.layer_types
        self._last_token = model.num_embeddings - 1
        self._voter = votes.SnapKVScorer(model) if self.selector == SNAPKV else None
        room = self.budget + self.refresh + 32  # for a draft, too
        self.cache = views.ViewCache(model.num_layers, capacity=room, device=model.device, dtype=source.dtype)
        return self.cache

    def own_cache(self, column_bytes: Callable[[], int]) -> DraftCache:
        """The cache of the view, whose rows do not grow with their text."""
        return DraftCache(self.cache, column_bytes, self.cache.capacity)

    def follow(self, drafts: Sequence[GrowingDraft]) -> None:
        """Bring the rows of drafts up to date."""
        pieces = []
        for draft in drafts:
            slot = draft.row.slot
            if not self.renew(draft.row):
                end, length = self.cache.end(slot), self._source.lengths[slot]
                pieces.append(views.Piece(slot, slot, end, max(end, length)))
        self.cache.append(self._source, pieces)

    def renew(self, row: Row) -> bool:
        """Choose the columns of a row anew where it would hold too many; whether it was necessary."""
        slot = row.slot
        end, held = self.cache.end(slot), self.cache.lengths[slot]
        length = max(end, self._source.lengths[slot])
        if held + length - end <= self.budget + (self.refresh if held else 0):
            return False
        self.give_back(row)
        self.cache.choose(slot, self._source, slot, self._chosen(row, length))
        self.num_choices += 1
        return True

    def give_back(self, row: Row) -> None:
        """Put what was read in the view behind what the whole cache holds of a row."""
        self.cache.give_back(row.slot, self._source, row.slot)

    def _chosen(self, row: Row, length: int) -> list[views.Columns]:
        """Columns of every layer of a row that is longer than the budget."""
        recent = (range(length - self.budget, length),)
        if self._voter is None:
            ends = (range(self.sinks), range(length - self.budget + self.sinks, length))
            return [ends if kind == masks.FULL else recent for kind in self._kinds]
        last_tokens = [min(token, self._last_token) for token in row.token_ids[length - self.window : length]]
        found = self._voter.votes(last_tokens, self._source, row.slot)
        return [
            self._elected(of_layer, length) if kind == masks.FULL else recent
            for kind, of_layer in zip(self._kinds, found, strict=True)
        ]

    def _elected(self, of_layer: torch.Tensor, length: int) -> torch.Tensor:
        """(H_kv, budget): of 9 columns, a budget of 5, one sink and a window of 2, for instance 0 3 6 7 8."""
        of_layer[:, : self.sinks] = float("inf")
        best = of_layer.topk(self.budget - self.window, dim=1).indices.sort(dim=1).values
        last = torch.arange(length - self.window, length, device=best.device).expand(len(best), -1)
        return torch.cat([best, last], 1)

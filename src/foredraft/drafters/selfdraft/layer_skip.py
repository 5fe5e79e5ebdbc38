"""Drafting with the target itself, skipping some of its layers.

Source: Draft & Verify (Zhang et al. 2023, arXiv:2309.08168); early exit as in LayerSkip (Elhoushi et al. 2024,
  arXiv:2404.16710), without the training that the paper describes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from foredraft.drafters.context import DrafterContext
from foredraft.drafters.parts.layer_set import FEWEST_LAYERS, NUM_SCORED, LayerSet, SwiftSearch, run_once
from foredraft.drafters.parts.self_draft import SelfDrafter
from foredraft.engine.drafter import DraftSize
from foredraft.engine.row import Row
from foredraft.errors import ConfigError, UnsupportedModelError
from foredraft.methods.selfdraft import LayerSkipOptions
from foredraft.model.cache.ragged import KVCache
from foredraft.model.lm import CausalLM, Nodes, fit_vocabulary
from foredraft.model.sublayers import SkippableLayers, sublayers
from foredraft.sampling import distribution
from foredraft.tree import DraftTree


class SwiftDrafter(SelfDrafter):
    """Drafter that skips layers and improves the set of skipped layers while decoding, without data or an earlier
    search.

    While the search lasts, every step scores one candidate set. The score is the share of tokens that the candidate
    would have drafted: its argmax, or in sampled rows its choice with the row's own noise. A score costs one forward
    pass over the latest generated tokens of a row, in the target's own cache; the overwritten columns are saved and
    restored. A candidate that seems better costs a second forward pass, which scores the current set on the same
    tokens. The set outlives the requests; nothing else of their text is kept.

    Source: see `SwiftSearch`. Deviations from the published program: only the overwritten columns are cloned; drafts
    follow the length policy and branches of the config instead of a fixed comb of siblings.

    Args:
      start: first set; None for the published one.
      num_scored: number of tokens that a candidate is scored on.
      seed: seed of the search.
      options: see `SelfDrafter`.

    Exactness, randomness: as in `SelfDrafter`; the search uses ``seed``.
    """

    def __init__(
        self, start: LayerSet | None = None, *, num_scored: int = NUM_SCORED, seed: int = 0, **options: Any
    ) -> None:
        super().__init__(LayerSkipOptions.method, layer_set=start, **options)
        self._start = start
        self._num_scored = num_scored
        self._seed = seed
        self.search: SwiftSearch | None = None
        self.num_scoring_passes = 0

    def _variant(self, target: CausalLM) -> CausalLM:
        """Return a variant whose set of skipped layers can be changed, and start a search for a better set."""
        if self._start is not None:
            self._start.check(target.num_layers, target.name)
        self.search = SwiftSearch(target.num_layers, self._start, self._seed)

        def edit(variant: CausalLM, _: Any) -> None:
            self._layers = SkippableLayers(variant.layers, lambda: run_once(variant), variant.changed)

        variant = target.variant("some sublayers left out", edit)
        self.use(self.search.best)
        return variant

    def use(self, layer_set: LayerSet) -> None:
        """Draft with the target without these sublayers."""
        self.layer_set = layer_set
        self._layers.leave_out(layer_set.attention, layer_set.mlp)

    def propose(self, rows: Sequence[Row], budgets: Sequence[DraftSize]) -> list[DraftTree]:
        if self.search is not None and not self.search.is_over:
            self._try_one(self.search, rows)
        return super().propose(rows, budgets)

    def _try_one(self, search: SwiftSearch, rows: Sequence[Row]) -> None:
        """Score a candidate on a row with enough generated tokens. The rows take turns."""
        ready = [row for row in rows if row.num_output_tokens > self._num_scored]
        if not ready:
            return
        row = ready[self.num_scoring_passes % len(ready)]

        def score_again(layer_set: LayerSet) -> float:
            self._layers.leave_out(layer_set.attention, layer_set.mlp)
            return self.score(row, self._cache, row.slot)

        candidate = search.candidate()
        self._layers.leave_out(candidate.attention, candidate.mlp)
        try:
            search.tell(self.score(row, self._cache, row.slot), score_again)
        finally:
            self.use(search.best)

    def score(self, row: Row, cache: KVCache, slot: int) -> float:
        """Return the share of the latest tokens that the variant would have drafted, each after the true tokens.

        Example with 40 tokens, the last one pending, and 32 to score: columns 7..38 are overwritten by tokens 7..38,
        and their successors 8..39 are compared.
        """
        first = cache.lengths[slot] - self._num_scored
        fed, true = row.token_ids[first:-1], row.token_ids[first + 1 :]
        self.num_scoring_passes += 1
        with cache.kept(slot, first, cache.lengths[slot]):
            logits = fit_vocabulary(
                self.model.forward(Nodes.from_chains([fed]), cache, first_row=slot)[0], row.sampler.vocab_size
            )
        if row.sampler.is_greedy:
            found = distribution.argmax(logits)
        else:
            size = len(true)
            found = distribution.choose(
                logits, [row.sampler] * size, [()] * size, list(range(first + 1, first + 1 + size))
            )
        num_right: int = (found == torch.tensor(true, device=found.device)).sum().item()  # type: ignore[assignment]
        return num_right / len(true)


def build(options: LayerSkipOptions, context: DrafterContext) -> SelfDrafter:
    """Make a drafter that skips the configured layers, or the set included with a zoo target, or the layers that a
    search finds.
    """
    target = context.target
    for layer in target.layers:
        sublayers(layer)  # raise errors for unsupported layers now, not at the first draft
    if target.shares_keys:
        raise UnsupportedModelError(
            f"method 'layer_skip' skips layers, and layers of {target.name} use keys and values of earlier layers "
            "(num_kv_shared_layers), which would be missing; choose another method, such as suffix"
        )
    layer_set, brought = LayerSet.given(options, target.num_layers), context.asset("layer_set")
    if layer_set is None and brought is not None and options.layer_search is None:
        layer_set = LayerSet.load(brought)
    if layer_set is not None:
        layer_set.check(target.num_layers, target.name)
    if options.layer_search is not None or (layer_set is None and target.num_layers >= FEWEST_LAYERS):
        SwiftSearch(target.num_layers, layer_set)  # raise errors for an invalid first set now, not at the first draft
        return SwiftDrafter(layer_set, **options.growth(target.vocab_size))
    if layer_set is None:
        raise ConfigError(
            f"method 'layer_skip' needs a set of layers to skip among {target.num_layers}{context.without_asset}; give "
            "layer_set=FILE (from foredraft tune layer-skip), skipped_attention and skipped_mlp, or exit_layer"
        )
    return SelfDrafter(options.method, layer_set=layer_set, **options.growth(target.vocab_size))

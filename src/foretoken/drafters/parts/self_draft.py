"""The target as its own drafter: a cheaper form of it, over its own cache."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

from foretoken.drafters.parts.growing import Draft, GrowingDrafter
from foretoken.engine.drafter import Budget, Features, StepResult
from foretoken.engine.sequence import Sequence
from foretoken.lazy import Lazy

if TYPE_CHECKING:
    import torch

    import foretoken.model.lm as lm
    from foretoken.model.cache.ragged import KVCache
    from foretoken.model.lm import CausalLM
else:
    lm = Lazy("foretoken.model.lm")


class SelfDrafter(GrowingDrafter):
    """Drafts with a variant of the target that shares its tensors and its cache: no second prefill, no second cache.

    What the variant writes after the committed columns is forgotten before the verification, which writes the same
    columns again in every layer.

    Args: see `GrowingDrafter`.

    Exactness: lossless for any variant; the target, its modules and its committed cache are never changed.
    Randomness: as of `GrowingDrafter`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._wanted_branches = self.num_branches
        self._target: CausalLM | None = None

    @abstractmethod
    def _variant(self, target: CausalLM) -> CausalLM:
        """The cheaper form of the target."""

    def bind(self, target: CausalLM, cache: KVCache) -> None:
        self._cache = cache
        if target is not self._target:
            self._target, self.model = target, self._variant(target)
        self.num_branches = self._wanted_branches if target.supports_trees else 1

    def start(self, rows: Seq[Sequence], features: Seq[Features]) -> None:
        """Nothing to feed: the target has read the prompt."""

    def propose(self, rows: Seq[Sequence], budgets: Seq[Budget]) -> list[Any]:
        lengths = self._cache.lengths[: len(rows)]
        self._drafts = {row.id: Draft(slot, trunk=lengths[slot]) for slot, row in enumerate(rows)}
        try:
            return super().propose(rows, budgets)
        finally:
            self._cache.rollback(lengths)

    def _rows_to_feed(self, rows: Seq[Sequence], drafts: Seq[Draft]) -> list[Sequence]:
        """All rows up to the last that drafts: they lie in the cache as they do for the target."""
        last = max((slot for slot, draft in enumerate(drafts) if draft.cap > 0), default=-1)
        return list(rows[: last + 1])

    def _first_logits(self, rows: Seq[Sequence], drafts: Seq[Draft]) -> torch.Tensor:
        logits = self.model.forward(lm.Nodes.from_chains([[row.pending] for row in rows]), self._cache)
        self._cache.commit([range(1)] * len(rows))
        for draft in drafts:
            draft.trunk += 1
        return logits

    def observe(self, rows: Seq[Sequence], results: Seq[StepResult]) -> None:
        for row, result in zip(rows, results, strict=True):
            self.policy.end(row, result.tree.depth, result.num_accepted)

    def forget(self, rows: Seq[Sequence]) -> None:
        for row in rows:
            self.policy.forget(row)
            self._drafts.pop(row.id, None)

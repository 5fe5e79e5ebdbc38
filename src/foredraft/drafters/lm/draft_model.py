"""A smaller causal language model as drafter: chains or trees, batched, with a cache of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from foredraft.config.drafting import ModelOptions, draft_length
from foredraft.config.method import Method
from foredraft.drafters.lengths import Fixed, LengthPolicy
from foredraft.drafters.parts.growth import Growth, GrowthOptions
from foredraft.drafters.parts.reduced_output import VocabularyOptions, chosen_vocabulary, reduced_model
from foredraft.drafters.parts.rows import (
    CachedRow,
    CachedRows,
    CacheMemory,
    feed,
    known_tokens,
    reach,
    spans,
    unpadded,
)
from foredraft.engine.drafter import Drafter, DraftSize, OwnCache, PromptChunk, Requirements, StepResult
from foredraft.engine.row import Row
from foredraft.errors import ConfigError
from foredraft.lazy import Lazy
from foredraft.tree import DraftPlan, DraftTree

if TYPE_CHECKING:
    import torch

    import foredraft.engine.memory as memory_of
    import foredraft.model.lm as lm
    from foredraft.drafters.context import DrafterContext
    from foredraft.drafters.parts.draft import GrowingDraft
    from foredraft.drafters.parts.sparse_view import SparseView
    from foredraft.model.cache.ragged import KVCache
    from foredraft.model.lm import CausalLM
else:
    torch = Lazy("torch")
    lm = Lazy("foredraft.model.lm")
    memory_of = Lazy("foredraft.engine.memory")


@dataclass(frozen=True, kw_only=True)
class DraftModelOptions(GrowthOptions, ModelOptions, VocabularyOptions):
    """Keys of drafting with a smaller model."""

    method: ClassVar[str] = "draft_model"
    num_speculative_tokens: int = draft_length(5)


PREFILL_CHUNK = 512


class DraftModelDrafter(Drafter):
    """Drafts with a causal language model that shares the target's tokenizer.

    Source: speculative sampling, Leviathan et al. 2022 (arXiv:2211.17192) and Chen et al. 2023 (arXiv:2302.01318);
    trees as in SpecInfer (Miao et al. 2023, arXiv:2305.09781), siblings by Gumbel-top-k (Kool et al. 2019,
    arXiv:1903.06059) under the target's own keyed noise. Over a view, as sparse_kv does: MagicDec (Sadhukhan et al.
    2024, arXiv:2408.11049), whose small drafters have caches of constant size.

    Args:
      model: the drafter; its vocabulary may be padded differently from the target's.
      num_speculative_tokens: K, depth of the draft, where no policy is given.
      policy: decides how deep to draft.
      view: chosen columns of the drafter's cache, over which it drafts, and reads what the target has accepted,
        instead of over all of them: what a step costs does not grow with the text. Prompts are read over all, and keys
        of later tokens are those that the drafter has computed over the view.
      name: of the method.
      growth: further arguments of `Growth`.

    Exactness: lossless for any drafter.
    Randomness: keyed, see ``acceptance`` of `Growth`; none when greedy.
    """

    drafts_from_text = True
    requires = Requirements(prompts=True)

    def __init__(
        self,
        model: CausalLM,
        *,
        target_vocab_size: int,
        num_speculative_tokens: int = DraftModelOptions.num_speculative_tokens,
        policy: LengthPolicy | None = None,
        view: SparseView | None = None,
        name: str = DraftModelOptions.method,
        **growth: Any,
    ) -> None:
        self.name = name
        self.growth = Growth(
            target_vocab_size=target_vocab_size, policy=policy or Fixed(num_speculative_tokens), **growth
        )
        self.growth.takes_trees = model.supports_trees
        self.model = model
        self._cache = model.new_cache()
        self._rows = CachedRows(self._cache)
        self._view = view
        self._seen: KVCache = self._cache if view is None else view.bind(model, self._cache)  # by drafts
        self._drafts: dict[int, GrowingDraft] = {}

    # -- rows --------------------------------------------------------------------------------------------------

    def own_caches(self) -> list[OwnCache]:
        column_bytes = memory_of.bytes_per_token(self.model)
        found = [OwnCache(self._cache, column_bytes)]
        return found if self._view is None else [*found, self._view.own_cache(column_bytes)]

    def recall(self, row: Row, memory: object, num_tokens: int) -> int:
        """Load what an earlier row has left; what is missing of the prompt is fed at the start."""
        if isinstance(memory, CacheMemory) and memory.writer == self._writer and self._fits(row):
            self._rows.recall(row.id, memory, num_tokens)
        return num_tokens

    def read(self, rows: Sequence[Row], chunks: Sequence[PromptChunk]) -> None:
        """Feed as much of the prompts as the target has just read, so that no step waits for a whole one."""
        self._catch_up(rows, [(chunk.num_tokens, chunk.start + chunk.num_tokens) for chunk in chunks])

    def start(self, rows: Sequence[Row]) -> None:
        """Feed what is missing of the prompts, all but the last token."""
        self._catch_up(rows, [(len(row.token_ids), len(row.token_ids) - 1) for row in rows])

    def _catch_up(self, rows: Sequence[Row], limits: Sequence[tuple[int, int]]) -> None:
        """Feed the next tokens of texts: how many at most, and up to which."""
        texts = {}
        for row, (most, last) in zip(rows, limits, strict=True):
            place = self._rows.enter(row.id)
            first = place.trunk
            texts[place.slot] = row.token_ids[first : min(first + most, last)] if self._fits(row) else []
        self._feed(texts)
        for row in rows:
            place = self._rows[row.id]
            place.trunk = self._cache.lengths[place.slot]

    def fork(self, row: Row, copies: Sequence[Row]) -> None:
        for copy in copies:
            self._rows.fork(row.id, copy.id)

    def keep(self, row: Row) -> CacheMemory | None:
        if self._view is not None and row.id in self._rows:
            place = self._rows[row.id]
            self._view.give_back(row, place.slot)
            place.trunk = self._cache.lengths[place.slot]
        return self._rows.keep(row.id, self._writer)

    @property
    def _writer(self) -> object:
        """The model as it is now; see `CausalLM.num_changes`."""
        return self.model, self.model.num_changes

    def forget(self, rows: Sequence[Row]) -> None:
        self.growth.forget(rows)
        self._rows.remove(row.id for row in rows)
        if self._view is not None:
            self._view.forget(rows)
        for row in rows:
            self._drafts.pop(row.id, None)

    def _fits(self, row: Row) -> bool:
        """Whether the drafter's context has room for the text and a draft."""
        return reach(self.model, row) > 0

    def _feed(self, texts: Mapping[int, Sequence[int]]) -> None:
        """Run texts, by slot, through the drafter, chunk by chunk; those of neighbouring slots side by side."""
        for slots in spans((slot for slot, text in texts.items() if text), max_gap=0):
            several = [texts[slot] for slot in slots]
            for start in range(0, max(map(len, several)), PREFILL_CHUNK):
                chunks = [text[start : start + PREFILL_CHUNK] for text in several]
                self.model.forward(self._chains(chunks), self._cache, first_row=slots[0], keep=slice(0, 0))
                self._cache.commit([range(len(chunk)) for chunk in chunks], slots[0])

    def _chains(self, chains: Sequence[Sequence[int]]) -> lm.Nodes:
        """Rows of tokens that the drafter knows."""
        nodes = lm.Nodes.from_chains(chains)
        known_tokens(self.model, nodes.tokens)
        return nodes

    # -- propose -----------------------------------------------------------------------------------------------

    def propose(self, rows: Sequence[Row], budgets: Sequence[DraftSize]) -> list[DraftTree]:
        pairs = zip(rows, budgets, strict=True)
        drafts = [self.growth.begin(row, budget, reach(self.model, row)) for row, budget in pairs]
        self._drafts.update((draft.row.id, draft) for draft in drafts)
        growing = [draft for draft in drafts if draft.cap > 0]
        if growing and not self._grow_at_once(growing):
            self.growth.grow(growing, self)
        return [self._finished(draft) for draft in drafts]

    def _finished(self, draft: GrowingDraft) -> DraftTree:
        tree = self.growth.finish(draft, self.name)
        return tree if draft.cap > 0 or self._fits(draft.row) else tree.planned(DraftPlan(0, cause="context"))

    def _grow_at_once(self, drafts: Sequence[GrowingDraft]) -> bool:
        """Grow drafts in one call where these are chains of the model's likeliest tokens; whether they are."""
        depths = self.growth.argmax_depths(drafts) if self._view is None else None
        if depths is None or max(depths) < 1:
            return False
        places, chains = self._unseen(drafts)
        found = self.model.chains(chains, self._cache, depths, *self.growth.columns)
        if found is None:
            return False
        num_fed = [max(len(tokens) - 1, 0) for tokens in found]  # nobody has asked what follows the last
        counts = list(map(len, chains))
        self._cache.commit([range(count + more) for count, more in zip(counts, num_fed, strict=True)])
        for draft, place, tokens, count, more in zip(drafts, places, found, counts, num_fed, strict=True):
            place.trunk += count
            place.offset_of.update(zip(range(1, more + 1), range(more), strict=True))
            for node, token in enumerate(tokens):
                draft.add(node, token)
        return True

    def open(self, drafts: Sequence[GrowingDraft]) -> torch.Tensor:
        """Feed what the cache has not seen of every text."""
        places, chains = self._unseen(drafts) if self._view is None else self._unseen_in(self._view, drafts)
        counts = [len(chain) for chain in chains]
        first = min(counts) - 1
        logits = self.model.forward(self._chains(chains), self._seen, keep=slice(first, max(counts)))
        self._seen.commit([range(count) for count in counts])
        for place, count in zip(places, counts, strict=True):
            place.trunk += count
        last = torch.tensor([count - 1 - first for count in counts], device=logits.device)
        return logits[torch.arange(len(drafts), device=logits.device), last]

    def _unseen(self, drafts: Sequence[GrowingDraft]) -> tuple[list[CachedRow], list[list[int]]]:
        """Places of rows in front, and what is to be fed of their texts, which is short."""
        places = self._rows.align([draft.row.id for draft in drafts])
        for draft, place in zip(drafts, places, strict=True):
            tokens = draft.row.token_ids
            if len(tokens) - place.trunk > PREFILL_CHUNK:
                self._feed({place.slot: tokens[place.trunk : -1]})
                place.trunk = self._cache.lengths[place.slot]
        return places, [draft.row.token_ids[place.trunk :] for draft, place in zip(drafts, places, strict=True)]

    def _unseen_in(self, view: SparseView, drafts: Sequence[GrowingDraft]) -> tuple[list[CachedRow], list[list[int]]]:
        """The same over a view. A longer text is fed in pieces, between which columns are chosen anew."""
        source_rows = [self._rows[draft.row.id].slot for draft in drafts]
        places = view.follow(drafts, source_rows)
        for draft, place, source_row in zip(drafts, places, source_rows, strict=True):
            tokens = draft.row.token_ids
            while len(tokens) - (end := view.cache.end(place.slot)) > view.refresh:
                piece = tokens[end : end + view.refresh]
                self.model.forward(self._chains([piece]), view.cache, first_row=place.slot, keep=slice(0, 0))
                view.cache.commit([range(len(piece))], place.slot)
                place.trunk += len(piece)
                view.renew(draft.row, source_row)
        chains = [
            draft.row.token_ids[view.cache.end(place.slot) :] for draft, place in zip(drafts, places, strict=True)
        ]
        return places, chains

    def _place(self, row: Row) -> CachedRow | None:
        """Where a row lies in the cache that drafts see; None as long as it has not been drafted for."""
        return (self._rows if self._view is None else self._view.rows).get(row.id)

    def expand(self, drafts: Sequence[GrowingDraft]) -> torch.Tensor:
        """Feed the frontier of every draft."""
        places = [place for draft in drafts if (place := self._place(draft.row)) is not None]
        logits = feed(self.model, self._seen, drafts, places, are_chains=self.growth.drafts_chains)
        return unpadded(logits, drafts)

    def observe(self, rows: Sequence[Row], results: Sequence[StepResult]) -> None:
        """Keep the accepted nodes that were fed; the next catch-up brings the rest."""
        for row, result in zip(rows, results, strict=True):
            place = self._place(row)
            if place is not None:
                kept = place.fed_along(self._drafts[row.id], (result.tree.tokens[node] for node in result.path[1:]))
                self._seen.rollback([place.trunk], place.slot)
                self._seen.commit([kept], place.slot)
                place.trunk += len(kept)
                place.offset_of = {}
            self.growth.end(row, result)


def build(options: DraftModelOptions, context: DrafterContext) -> DraftModelDrafter:
    """Drafts with the model that was loaded for it."""
    if context.draft_model is None:
        raise ConfigError(
            f"method 'draft_model' needs a drafter{context.brings_none}; add model (a directory, a hub id, zoo:NAME "
            "or a loaded model), or use zoo:tiny, which brings its own"
        )
    model = context.draft_model
    vocabulary = chosen_vocabulary(options, context, trained_as=model.config)
    if vocabulary is not None:
        whole = model
        model = context.keep(("reduced output", whole.num_changes), lambda: reduced_model(whole, vocabulary))
    return DraftModelDrafter(model, vocabulary=vocabulary, **options.growth(context.target.vocab_size))


METHOD = Method(
    DraftModelOptions,
    build,
    summary="with a smaller model of the same tokenizer",
    aliases=("draft", "draft_simple", "assisted", "standalone"),
)

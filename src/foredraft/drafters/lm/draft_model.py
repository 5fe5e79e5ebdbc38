"""Drafting with a smaller causal language model in chains or trees, for several rows at once and with its own cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from foredraft.drafters.context import DrafterContext
from foredraft.drafters.parts.growth import GrowingDraft, Growth, growing
from foredraft.drafters.parts.reduced_output import chosen_vocabulary, reduced_model
from foredraft.drafters.parts.rows import FedNodes, chains_by_slot, known_tokens, reach, spans
from foredraft.drafters.parts.sparse_view import SparseView
from foredraft.engine.drafter import (
    DraftCache,
    Drafter,
    DrafterFacts,
    DraftSize,
    Needs,
    PromptChunk,
    StepResult,
)
from foredraft.engine.memory import bytes_per_token
from foredraft.engine.row import Row
from foredraft.errors import ConfigError
from foredraft.methods.lengths import LengthPolicy
from foredraft.methods.lm import DraftModelOptions
from foredraft.model.cache.ragged import KVCache
from foredraft.model.lm import CausalLM, Nodes
from foredraft.tree import DraftPlan, DraftTree

PREFILL_CHUNK = 512


class DraftModelDrafter(Drafter):
    """Drafter that uses a causal language model with the target's tokenizer.

    Source: speculative sampling, Leviathan et al. 2022 (arXiv:2211.17192) and Chen et al. 2023 (arXiv:2302.01318);
    trees as in SpecInfer (Miao et al. 2023, arXiv:2305.09781), siblings by Gumbel-top-k (Kool et al. 2019,
    arXiv:1903.06059) under the target's own keyed noise. With a view, as in sparse_kv: MagicDec (Sadhukhan et al.
    2024, arXiv:2408.11049), whose small drafters have caches of constant size.

    Args:
      model: draft model; its vocabulary may be padded differently from the target's.
      target_vocab_size: vocabulary size of the target.
      num_speculative_tokens: K, the depth of the draft if no policy is given.
      policy: length policy.
      view: selected columns of the drafter's cache. With a view, the drafter attends only to these columns, both when
        it drafts and when it reads accepted tokens. The cost of a step then does not grow with the context. Prompts are
        read with attention to all columns. Keys of later tokens are those computed over the view.
      name: name of the method.
      growth: further arguments of `Growth`.

    Exactness: lossless for any drafter.
    Randomness: keyed, see ``acceptance`` of `Growth`; none when greedy.
    """

    facts = DrafterFacts(DraftModelOptions.method, drafts_from_text=True)
    cache: KVCache
    """All keys and values of the draft model, one row per slot."""

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
        self.facts = replace(self.facts, name=name)
        self.growth = Growth(
            target_vocab_size=target_vocab_size, policy=policy or LengthPolicy(num_speculative_tokens), **growth
        )
        self.growth.takes_trees = model.supports_trees
        self.model = model
        self.cache = model.new_cache()
        self._view = view
        self._seen: KVCache = self.cache if view is None else view.bind(model, self.cache)  # cache for drafting
        self._fed: FedNodes | None = None  # while drafts grow

    # -- rows --------------------------------------------------------------------------------------------------

    def needs(self, target: CausalLM, cache: KVCache) -> Needs:
        """Return the needs: prompts in chunks. Each chunk is fed when the target has read it, so no step waits for a
        whole prompt.
        """
        caches = [DraftCache(self.cache, self._column_bytes, writer=lambda: (self.model, self.model.num_changes))]
        if self._view is not None:
            caches.append(self._view.own_cache(self._column_bytes))
        return Needs(prompts=True, partial_prompts=True, caches=tuple(caches))

    def _column_bytes(self) -> int:
        return bytes_per_token(self.model)

    def start(self, rows: Sequence[Row], chunks: Sequence[PromptChunk]) -> None:
        """Feed the next tokens of prompts; the last chunk feeds all missing tokens."""
        texts = {}
        for row, chunk in zip(rows, chunks, strict=True):
            first, end = self.cache.lengths[row.slot], chunk.start + chunk.num_tokens
            if not chunk.is_last:
                end = min(end, first + chunk.num_tokens)
            elif self._view is not None:
                row.state[self._view] = self._view
            texts[row.slot] = row.token_ids[first:end] if self._fits(row) else []
        self._feed(texts)

    def _fits(self, row: Row) -> bool:
        """Return whether the row and a draft fit into the drafter's context."""
        return reach(self.model, row) > 0

    def _feed(self, texts: Mapping[int, Sequence[int]]) -> None:
        """Run token lists, by slot, through the drafter, chunk by chunk, with neighbouring slots batched."""
        for slots in spans((slot for slot, text in texts.items() if text), max_gap=0):
            several = [texts[slot] for slot in slots]
            for start in range(0, max(map(len, several)), PREFILL_CHUNK):
                chunks = [text[start : start + PREFILL_CHUNK] for text in several]
                self.model.forward(self._chains(chunks), self.cache, first_row=slots[0], keep=slice(0, 0))
                self.cache.commit([range(len(chunk)) for chunk in chunks], slots[0])

    def _chains(self, chains: Sequence[Sequence[int]]) -> Nodes:
        """Return chains of nodes, with tokens clamped to the drafter's vocabulary."""
        nodes = Nodes.from_chains(chains)
        known_tokens(self.model, nodes.tokens)
        return nodes

    # -- propose -----------------------------------------------------------------------------------------------

    def propose(self, rows: Sequence[Row], budgets: Sequence[DraftSize]) -> list[DraftTree]:
        pairs = zip(rows, budgets, strict=True)
        drafts = [self.growth.begin(row, budget, reach(self.model, row)) for row, budget in pairs]
        grown = growing(drafts)
        if grown and not self._grow_at_once(grown):
            try:
                self.growth.grow(grown, self)
            finally:
                self._close()
        for draft in drafts:
            draft.row.state[self] = draft
        return [self._finished(draft) for draft in drafts]

    def _finished(self, draft: GrowingDraft) -> DraftTree:
        tree = self.growth.finish(draft, self.name)
        return tree if draft.cap > 0 or self._fits(draft.row) else tree.planned(DraftPlan(0, cause="context"))

    def _close(self) -> None:
        if self._fed is not None:
            self._fed.close()
            self._fed = None

    def _grow_at_once(self, drafts: Sequence[GrowingDraft]) -> bool:
        """Grow the drafts in one call if they are chains of the model's likeliest tokens; returns whether this was
        possible.
        """
        depths = self.growth.argmax_depths(drafts) if self._view is None else None
        slots = [draft.row.slot for draft in drafts]
        if depths is None or max(depths) < 1 or slots[-1] - slots[0] >= len(slots):
            return False
        chains = self._unseen(drafts)
        found = self.model.chains(chains, self.cache, depths, *self.growth.columns, first_row=slots[0])
        if found is None:
            return False
        self.cache.commit(list(map(range, map(len, chains))), slots[0])
        for draft, tokens in zip(drafts, found, strict=True):
            # the last token was not fed, because its successor is not drafted
            draft.column_of.update(zip(range(1, len(tokens)), range(len(tokens)), strict=False))
            for node, token in enumerate(tokens):
                draft.add(node, token)
        return True

    def open(self, drafts: Sequence[GrowingDraft]) -> torch.Tensor:
        """Feed the tokens of every row that are not in the cache."""
        unseen = self._unseen(drafts) if self._view is None else self._unseen_in(self._view, drafts)
        first_row, chains = drafts[0].row.slot, chains_by_slot(drafts, unseen)
        counts = list(map(len, unseen))
        first = min(counts) - 1
        logits = self.model.forward(
            self._chains(chains), self._seen, first_row=first_row, keep=slice(first, max(counts))
        )
        self._seen.commit(list(map(range, map(len, chains))), first_row)
        self._fed = FedNodes(self._seen, drafts)
        places = [draft.row.slot - first_row for draft in drafts]
        return logits[places, [count - 1 - first for count in counts]]

    def _unseen(self, drafts: Sequence[GrowingDraft]) -> list[list[int]]:
        """Return the tokens of every row that are still to be fed; the beginning of a long remainder is fed here."""
        lengths = self.cache.lengths
        self._feed(
            {
                draft.row.slot: draft.row.token_ids[lengths[draft.row.slot] : -1]
                for draft in drafts
                if len(draft.row.token_ids) - lengths[draft.row.slot] > PREFILL_CHUNK
            }
        )
        return [draft.row.token_ids[lengths[draft.row.slot] :] for draft in drafts]

    def _unseen_in(self, view: SparseView, drafts: Sequence[GrowingDraft]) -> list[list[int]]:
        """Return the tokens still to be fed over a view; a long remainder is fed in pieces, with reselection between
        them.
        """
        view.follow(drafts)
        for draft in drafts:
            tokens, slot = draft.row.token_ids, draft.row.slot
            while len(tokens) - (end := view.cache.end(slot)) > view.refresh:
                piece = tokens[end : end + view.refresh]
                self.model.forward(self._chains([piece]), view.cache, first_row=slot, keep=slice(0, 0))
                view.cache.commit([range(len(piece))], slot)
                view.renew(draft.row)
        return [draft.row.token_ids[view.cache.end(draft.row.slot) :] for draft in drafts]

    def expand(self, drafts: Sequence[GrowingDraft]) -> torch.Tensor:
        """Feed the frontier of every draft."""
        assert self._fed is not None
        return self._fed.listed(self._fed.feed(self.model, drafts, are_chains=self.growth.drafts_chains), drafts)

    def observe(self, rows: Sequence[Row], results: Sequence[StepResult]) -> None:
        """Keep the accepted nodes that were fed; the next `open` feeds the rest."""
        for row, result in zip(rows, results, strict=True):
            draft: GrowingDraft | None = row.state.pop(self, None)
            if draft is not None:
                kept = draft.columns_along(result.tree.tokens[node] for node in result.path[1:])
                self._seen.commit([kept], row.slot)
            self.growth.end(row, result)


def build(options: DraftModelOptions, context: DrafterContext) -> DraftModelDrafter:
    """Make the drafter from the loaded draft model."""
    if context.draft_model is None:
        raise ConfigError(
            f"method 'draft_model' needs a draft model{context.without_asset}; set model to a directory, a hub id, "
            "zoo:NAME or a loaded model, or use zoo:tiny as the target, which includes one"
        )
    model = context.draft_model
    vocabulary = chosen_vocabulary(options, context, trained_as=model.config)
    if vocabulary is not None:
        whole = model
        model = context.keep(("reduced output", whole.num_changes), lambda: reduced_model(whole, vocabulary))
    return DraftModelDrafter(model, vocabulary=vocabulary, **options.growth(context.target.vocab_size))

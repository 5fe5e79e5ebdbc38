"""A smaller causal language model as drafter: chains or trees, batched, with a cache of its own."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from foretoken.config.drafting import ModelOptions, draft_length
from foretoken.config.method import Method
from foretoken.drafters.lengths import Fixed, LengthPolicy
from foretoken.drafters.parts.growing import Draft, GrowingDrafter
from foretoken.drafters.parts.growth_options import GrowthOptions
from foretoken.engine.drafter import Features, StepResult
from foretoken.engine.sequence import Sequence
from foretoken.errors import ConfigError
from foretoken.lazy import Lazy

if TYPE_CHECKING:
    import torch

    import foretoken.model.lm as lm
    from foretoken.drafters.materials import Materials
    from foretoken.model.cache import prefixes
    from foretoken.model.lm import CausalLM
else:
    torch = Lazy("torch")
    lm = Lazy("foretoken.model.lm")
    prefixes = Lazy("foretoken.model.cache.prefixes")


@dataclass(frozen=True, kw_only=True)
class DraftModelOptions(GrowthOptions, ModelOptions):
    """Keys of drafting with a smaller model."""

    method: ClassVar[str] = "draft_model"
    num_speculative_tokens: int = draft_length(5)


PREFILL_CHUNK = 512


class DraftModelDrafter(GrowingDrafter):
    """Drafts with a causal language model that shares the target's tokenizer.

    Source: speculative sampling, Leviathan et al. 2022 (arXiv:2211.17192) and Chen et al. 2023 (arXiv:2302.01318);
    trees as in SpecInfer (Miao et al. 2023, arXiv:2305.09781), siblings by Gumbel-top-k (Kool et al. 2019,
    arXiv:1903.06059) under the target's own keyed noise.

    Args:
      model: the drafter; its vocabulary may be padded differently from the target's.
      num_speculative_tokens: K, depth of the draft, where no policy is given.
      num_branches, sample_method, acceptance, max_nodes, policy: see `GrowingDrafter`.

    Exactness: lossless for any drafter.
    Randomness: keyed, see ``acceptance``; none when greedy.
    """

    name = "draft_model"

    def __init__(
        self,
        model: CausalLM,
        *,
        target_vocab_size: int,
        num_speculative_tokens: int = 4,
        num_branches: int = 1,
        sample_method: str = "probabilistic",
        acceptance: str = "match",
        max_nodes: int | None = None,
        policy: LengthPolicy | None = None,
    ) -> None:
        super().__init__(
            target_vocab_size=target_vocab_size,
            policy=policy or Fixed(num_speculative_tokens),
            num_branches=num_branches if model.supports_trees else min(1, num_branches),
            sample_method=sample_method,
            acceptance=acceptance,
            max_nodes=max_nodes,
        )
        self.model = model
        self._cache = model.new_cache()
        self._order: list[int] = []  # row ids in cache order
        self._prefixes: prefixes.PrefixStore | None = None

    # -- rows --------------------------------------------------------------------------------------------------

    def start(self, rows: Seq[Sequence], features: Seq[Features]) -> None:
        """Feed the prompts, all but the last token; samples of one prompt share the work."""
        first_slot = self._cache.num_rows
        slot_of: dict[tuple[int, ...], int] = {}
        forks = []
        for row in rows:
            prompt = tuple(row.token_ids[:-1])
            if prompt in slot_of:
                forks.append((row, slot_of[prompt]))
            else:
                slot_of[prompt] = self._enter(row, self._cache.add_rows())
        self._feed(first_slot, [self._unknown(prompt, slot) for prompt, slot in slot_of.items()])
        for row, slot in forks:
            self._enter(row, self._cache.fork(slot))
        for row in rows:
            draft = self._drafts[row.id]
            draft.trunk = self._cache.lengths[draft.slot]

    def _unknown(self, prompt: tuple[int, ...], slot: int) -> tuple[int, ...]:
        """The tokens of a prompt still to be fed: none beyond the drafter's context, none kept from an earlier row."""
        if self._reach(len(prompt) + 1) <= 0:
            return ()
        known = self._prefixes.load(prompt, self._cache, slot) if self._prefixes is not None else 0
        return prompt[known:]

    def retain(self, rows: Seq[Sequence], limit: int) -> None:
        if self._prefixes is None:
            self._prefixes = prefixes.PrefixStore(limit)
        for row in rows:
            draft = self._drafts[row.id]
            self._prefixes.keep(row.token_ids, self._cache, draft.slot, draft.trunk)

    def _enter(self, row: Sequence, slot: int) -> int:
        self._order.append(row.id)
        self._drafts[row.id] = Draft(slot)
        return slot

    def _feed(self, first_slot: int, texts: Seq[Seq[int]]) -> None:
        """Run texts through the drafter, chunk by chunk, all rows at once."""
        for start in range(0, max(map(len, texts)), PREFILL_CHUNK):
            chunks = [text[start : start + PREFILL_CHUNK] for text in texts]
            self.model.forward(self._chains(chunks), self._cache, first_row=first_slot, keep=slice(0, 0))
            self._cache.commit([range(len(chunk)) for chunk in chunks], first_slot)

    def forget(self, rows: Seq[Sequence]) -> None:
        for row in rows:
            self.policy.forget(row)
        if self._drafts.keys() <= {row.id for row in rows}:  # no need to move anything, nor to trust the order
            self._drafts, self._order = {}, []
            self._cache.clear()
            return
        for row in rows:
            draft = self._drafts.pop(row.id, None)
            if draft is None:
                continue
            self._cache.remove(draft.slot)
            last = self._order.pop()
            if last != row.id:
                self._order[draft.slot] = last
                self._drafts[last].slot = draft.slot

    def _align(self, rows: Seq[Sequence]) -> None:
        """Bring the rows to the front of the cache, in order. Moves nothing as long as the engine keeps its order."""
        for place, row in enumerate(rows):
            draft = self._drafts[row.id]
            other = self._order[place]
            if other != row.id:
                self._cache.swap(draft.slot, place)
                self._order[draft.slot], self._order[place] = other, row.id
                self._drafts[other].slot, draft.slot = draft.slot, place

    def _first_logits(self, rows: Seq[Sequence], drafts: Seq[Draft]) -> torch.Tensor:
        """Feed what the cache has not seen of every sequence."""
        self._align(rows)
        self._cache.rollback([draft.trunk for draft in drafts])
        for row, draft in zip(rows, drafts, strict=True):
            if len(row.token_ids) - draft.trunk > PREFILL_CHUNK:
                self._feed(draft.slot, [row.token_ids[draft.trunk : -1]])
                draft.trunk = self._cache.lengths[draft.slot]
        chains = [row.token_ids[draft.trunk :] for row, draft in zip(rows, drafts, strict=True)]
        counts = [len(chain) for chain in chains]
        first = min(counts) - 1
        logits = self.model.forward(self._chains(chains), self._cache, keep=slice(first, max(counts)))
        self._cache.commit([range(count) for count in counts])
        for draft, count in zip(drafts, counts, strict=True):
            draft.trunk += count
        last = torch.tensor([count - 1 - first for count in counts], device=logits.device)
        return logits[torch.arange(len(drafts), device=logits.device), last][:, None]

    def _chains(self, chains: Seq[Seq[int]]) -> lm.Nodes:
        """Rows of tokens; the drafter's last token stands for those of a larger vocabulary that it does not know."""
        nodes = lm.Nodes.from_chains(chains)
        nodes.tokens.clamp_(max=self.model.vocab_size - 1)
        return nodes

    # -- observe -----------------------------------------------------------------------------------------------

    def observe(self, rows: Seq[Sequence], results: Seq[StepResult]) -> None:
        """Keep the accepted nodes that were fed; the next catch-up brings the rest."""
        for row, result in zip(rows, results, strict=True):
            draft = self._drafts[row.id]
            kept = draft.fed_along(result.tree.tokens[node] for node in result.path[1:])
            self._cache.rollback([draft.trunk], draft.slot)
            self._cache.commit([kept], draft.slot)
            draft.trunk += len(kept)
            draft.offset_of = {}
            self.policy.end(row, result.tree.depth, result.num_accepted)


def build(options: DraftModelOptions, materials: Materials) -> DraftModelDrafter:
    """Drafts with the model that was loaded for it."""
    if materials.draft_model is None:
        raise ConfigError(
            f"method 'draft_model' needs a drafter{materials.brings_none}; add model (a directory, a hub id, zoo:NAME "
            "or a loaded model), or use zoo:tiny, which brings its own"
        )
    return DraftModelDrafter(materials.draft_model, **options.growth(materials.target.vocab_size))


METHOD = Method(
    DraftModelOptions,
    build,
    summary="with a smaller model of the same tokenizer",
    aliases=("draft", "draft_simple", "assisted", "standalone"),
)

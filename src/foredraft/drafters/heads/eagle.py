"""EAGLE, EAGLE-2 and EAGLE-3: a head that is fed its own predictions of what the target computes.

A head of generation 1 extrapolates the last hidden state, one of generation 3 fuses three layers; a checkpoint tells
which it is. Methods ``eagle`` and ``eagle2`` are two uses of the former, in a static tree and in one that grows where
the head is sure; ``eagle3`` grows trees with the latter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from foredraft.drafters.context import DrafterContext
from foredraft.drafters.heads.loading import load_head, static_tree
from foredraft.drafters.parts.draft import GrowingDraft
from foredraft.drafters.parts.eagle_rows import EagleRows
from foredraft.drafters.parts.growth import Growth
from foredraft.drafters.parts.head_states import HeadDrafter
from foredraft.drafters.parts.reduced_output import chosen_vocabulary, output_of
from foredraft.engine.drafter import DrafterFacts, Needs
from foredraft.heads.checkpoint import Checkpoint
from foredraft.heads.eagle import EagleHead
from foredraft.heads.eagle_layouts import TargetFacts, check_fits, read_eagle
from foredraft.heads.vocabulary import DraftVocabulary
from foredraft.methods.heads import Eagle2Options, EagleHeadOptions, EagleOptions
from foredraft.model.cache.ragged import KVCache
from foredraft.model.execution.packing import embedding_weight
from foredraft.model.lm import CausalLM

USUAL_ACCURACIES = [[0.75, 0.11, 0.04, 0.025, 0.015, 0.01]] * 5
"""How often the candidate of each rank is right at each depth, for the tree where none is given. First ranks are about
those of the published heads, which lose little from depth to depth; the others are assumed."""

MAX_DEPTH = 64
"""Of a tree: one head drafts as deep as it is asked to, and nobody can want more."""

MOST_CAP = 60
"""Levels of a draft that is grown in one call."""

MOST_GROWN = 16
"""Rows that are grown one after the other, each in one call; more are fed together, level by level."""

SMALL_BYTES = 20e6
"""Of a head that stays in caches: larger ones are read for all rows together, level by level (8 rows of a head of 10
MB took half as long one by one, 2 of one of 40 MB a fifth longer)."""

PUBLISHED: dict[tuple[int, int, int], dict[int, tuple[str, ...]]] = {
    (4096, 32, 32000): {1: ("yuhuili/EAGLE-Vicuna-7B-v1.3", "yuhuili/EAGLE-llama2-chat-7B")},
    (5120, 40, 32000): {
        1: ("yuhuili/EAGLE-Vicuna-13B-v1.3", "yuhuili/EAGLE-llama2-chat-13B"),
        3: ("yuhuili/EAGLE3-Vicuna1.3-13B",),
    },
    (8192, 80, 32000): {1: ("yuhuili/EAGLE-llama2-chat-70B",)},
    (4096, 32, 128256): {
        1: ("yuhuili/EAGLE-LLaMA3-Instruct-8B",),
        3: ("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B"),
    },
    (8192, 80, 128256): {
        1: ("yuhuili/EAGLE-LLaMA3-Instruct-70B",),
        3: ("yuhuili/EAGLE3-LLaMA3.3-Instruct-70B",),
    },
}
"""(hidden size, layers, vocabulary) of targets -> generation -> hub ids of heads for one of this size.

Others do not fit. Provenance: the README of SafeAILab/EAGLE (2026-02-19).
"""

LEAST_MASS = 0.05
"""Chances of the nodes of a level together, below which it has no children: a further level takes about a fiftieth of a
step on a CPU, and would bring fewer tokens than that time does."""


class EagleDrafter(HeadDrafter[EagleRows]):
    """Drafts with a head of EAGLE, a static tree or one that takes shape by what the head is sure of.

    Source: EAGLE (Li et al. 2024, arXiv:2401.15077), whose tree is ``speculative_token_tree="eagle"``; EAGLE-2 (Li et
    al. 2024, arXiv:2406.16858) for trees that grow; EAGLE-3 (Li et al. 2025, arXiv:2503.01840). Deviations: where the
    target draws tokens, siblings share its noise under "match" (see `Growth`); "standard" draws as published; children,
    frontier and final nodes have limits of their own.

    Args:
      head: on the device of the target, in its dtype.
      target: whose features it reads.
      vocabulary: tokens that may be drafted, of a head without an output layer of its own; None for all.
      growth: arguments of `Growth`.

    Exactness: lossless for any head, but for acceptance="typical".
    Randomness: keyed, see ``acceptance`` of `Growth`; none when greedy.
    Cost: a step runs the head once over the committed tokens and once per further level, for all rows together.
    """

    def __init__(
        self, head: EagleHead, target: CausalLM, *, vocabulary: DraftVocabulary | None = None, **growth: Any
    ) -> None:
        kept, output = output_of(head, target, vocabulary)
        self.growth = Growth(vocabulary=kept, **growth)
        self.growth.takes_trees = target.supports_trees
        self.states = EagleRows(head, target, output, kept)
        uses = {1: "eagle2" if self.growth.tree is None else "eagle", 3: "eagle3"}
        name, validated = uses[head.shape.generation], head.first_token_acceptance
        self.facts = DrafterFacts(name, validated_acceptance={} if validated is None else {name: validated})

    def needs(self, target: CausalLM, cache: KVCache) -> Needs:
        return self.states.needs

    def _grow(self, drafts: Sequence[GrowingDraft]) -> None:
        if self._grows_by_rows(len(drafts)) and all(self._grows_at_once(draft) for draft in drafts):
            for draft in drafts:
                self.states.grow(draft, self.growth.least_mass, self.growth.sharpness)
            return
        try:
            self.growth.grow(drafts, self)
        finally:
            self.states.close()

    def _grows_by_rows(self, num_rows: int) -> bool:
        """Whether reading the head anew for every row takes less than what feeding rows together costs."""
        native = self.states.native
        return num_rows == 1 or (native is not None and native.num_bytes <= SMALL_BYTES and num_rows <= MOST_GROWN)

    def _grows_at_once(self, draft: GrowingDraft) -> bool:
        """Whether a draft can be grown by the library's own kernels: by the head and by noise alone."""
        has_room = draft.cap <= MOST_CAP and self.growth.is_unconditional
        return self.states.native is not None and has_room and self.growth.ranks_by_scores(draft.row.sampler)

    def open(self, drafts: Sequence[GrowingDraft]) -> torch.Tensor:
        """What follows the pending tokens was computed when these became known; the output layer is missing."""
        return self.states.logits(self.states.open(drafts))

    def expand(self, drafts: Sequence[GrowingDraft]) -> torch.Tensor:
        """Feed the frontier of every draft, each node with the output of its parent."""
        return self.states.logits(self.states.feed(drafts, are_chains=self.growth.drafts_chains))


def build(options: EagleOptions | Eagle2Options, context: DrafterContext) -> EagleDrafter:
    """Drafts with the head that the config names."""
    target = context.target
    if isinstance(options, EagleOptions):
        context.check_trees(options.method)
    head = eagle_head(options, context, 3 if options.method == "eagle3" else 1)
    vocabulary = chosen_vocabulary(options, context)
    if isinstance(options, EagleOptions):
        growth = options.growth(static_tree(options, target, USUAL_ACCURACIES, MAX_DEPTH), target.vocab_size)
    else:
        growth = {**options.growth(target.vocab_size), "least_mass": LEAST_MASS}
    return EagleDrafter(head, target, vocabulary=vocabulary, **growth)


def eagle_head(options: EagleHeadOptions, context: DrafterContext, generation: int) -> EagleHead:
    """The head of this generation that the config names, fitted to the target.

    Raises: ConfigError, CheckpointError; see `load_head`.
    """
    target = context.target
    facts = _facts(context)

    def read(found: Checkpoint) -> tuple[EagleHead, Sequence[str]]:
        return read_eagle(found, facts, generation=generation, rope_theta=options.draft_rope_theta)

    sizes = facts.hidden_size, target.num_layers, target.vocab_size
    known = PUBLISHED.get(sizes, {}).get(generation, ())
    head = load_head(options, context, EagleHead, read, known)
    check_fits(head, facts, generation)
    return head


def _facts(context: DrafterContext) -> TargetFacts:
    """What a head must fit."""
    target = context.target
    eos = getattr(context.tokenizer, "eos_token_id", None)
    return TargetFacts(
        name=target.name,
        hidden_size=int(target.config.hidden_size),
        vocab_size=target.vocab_size,
        num_layers=target.num_layers,
        eos_token_ids=() if eos is None else (int(eos),),
        embedding=embedding_weight(target.shadow.get_input_embeddings()),
    )

"""Keys of the methods that draft with a head of EAGLE, and how such a head is found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from foretoken.config.drafting import ModelOptions, branches, draft_length, node_limit
from foretoken.config.options import flag, number, option
from foretoken.drafters.parts.growth_options import GrowthOptions
from foretoken.drafters.parts.head_loading import load_head
from foretoken.drafters.parts.reduced_output import VocabularyOptions
from foretoken.lazy import Lazy

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    import foretoken.heads.eagle as eagle
    import foretoken.heads.eagle_layouts as layouts
    import foretoken.heads.eagle_structure as structure
    import foretoken.heads.published as published
    from foretoken.drafters.context import DrafterContext
    from foretoken.heads.checkpoint import Checkpoint
    from foretoken.heads.eagle import EagleHead
else:
    eagle = Lazy("foretoken.heads.eagle")
    layouts = Lazy("foretoken.heads.eagle_layouts")
    structure = Lazy("foretoken.heads.eagle_structure")
    published = Lazy("foretoken.heads.published")


LEAST_MASS = 0.05
"""Chances of the nodes of a level together, below which it has no children: a further level takes about a fiftieth of a
step on a CPU, and would bring fewer tokens than that time does."""


@dataclass(frozen=True, kw_only=True)
class EagleHeadOptions(ModelOptions, VocabularyOptions):
    """The head.

    Attributes:
      model_is_head: that ``model`` names a head, not a causal language model.
    """

    model_is_head: ClassVar[bool] = True

    draft_rope_theta: float | None = option(
        number(0.0, above=True),
        help="base of the head's rotary positions; by default its config's, which some heads were not trained with",
    )


@dataclass(frozen=True, kw_only=True)
class DynamicTreeOptions(GrowthOptions, EagleHeadOptions):
    """Keys of dynamic trees: wide where the head is in doubt, deep where it is sure."""

    num_speculative_tokens: int = draft_length(5)
    num_draft_branches: int = branches(4)
    max_draft_nodes: int | None = node_limit(12)
    draft_rerank: bool = option(
        flag(), True, "keep all siblings while a draft grows, and the likeliest max_draft_nodes of them in the end"
    )

    def growth(self, target_vocab_size: int) -> dict[str, Any]:
        return {**super().growth(target_vocab_size), "least_mass": LEAST_MASS}


def eagle_head(options: EagleHeadOptions, context: DrafterContext, generation: int) -> EagleHead:
    """The head of this generation that the config names, fitted to the target.

    Raises: ConfigError, CheckpointError; see `load_head`.
    """
    target = context.target
    facts = _facts(context)

    def read(found: Checkpoint) -> tuple[EagleHead, Seq[str]]:
        layout = layouts.read_eagle(found, facts, generation=generation, rope_theta=options.draft_rope_theta)
        return layout.head, layout.notes

    known = published.published_eagle(facts.hidden_size, target.num_layers, target.vocab_size, generation)
    head = load_head(options, context, eagle.EagleHead, read, known)
    layouts.check_fits(head, facts, generation)
    return head


def _facts(context: DrafterContext) -> structure.TargetFacts:
    """What a head must fit."""
    target = context.target
    eos = getattr(context.tokenizer, "eos_token_id", None)
    embedding = target.shadow.get_input_embeddings().weight
    return structure.TargetFacts(
        name=target.name,
        hidden_size=int(target.config.hidden_size),
        vocab_size=target.vocab_size,
        num_layers=target.num_layers,
        eos_token_ids=() if eos is None else (int(eos),),
        embedding=embedding.detach(),
    )

"""Methods that draft with small networks over the target's own features: their options and entries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from foredraft.config.acceptance import POSTERIOR_ALPHA, POSTERIOR_THRESHOLD, RULES
from foredraft.config.drafting import (
    DraftOptions,
    ModelOptions,
    VocabularyOptions,
    acceptance,
    branches,
    draft_length,
    draft_sampling,
    node_limit,
)
from foredraft.config.options import anything, flag, number, option
from foredraft.errors import ConfigError
from foredraft.heads.recognition import eagle_generation, has_prefix, is_hydra, is_medusa
from foredraft.methods import Method
from foredraft.methods.growth import GrowthOptions
from foredraft.methods.rank_tree import RankTree


@dataclass(frozen=True, kw_only=True)
class HeadOptions(DraftOptions, ModelOptions, VocabularyOptions):
    """Keys of heads that draft static trees."""

    drafts_trees: ClassVar[bool] = True

    num_speculative_tokens: int = draft_length(5)
    max_draft_nodes: int | None = node_limit(
        help="nodes of the tree, root included; by default all nodes of a given tree, else 16 on a CPU in half "
        "precision, 8 on a CPU in float32, 64 elsewhere"
    )
    speculative_token_tree: Any = option(
        anything("name, widths, paths or file"),
        help="draft tree: a published one (mc_sim_7b_63, ...), widths such as 4x2x1, paths of ranks such as "
        "[[0], [0, 0], [1]], or a file of foredraft tune tree; by default the best tree for typical head accuracies",
    )
    draft_sample_method: str = draft_sampling(
        "greedy takes the likeliest tokens of a head, probabilistic draws from its distribution with the target's "
        "noise",
    )
    rejection_sample_method: str = acceptance(
        RULES.values(),
        "rule that accepts drafts: match (same tokens for any draft), standard (rejection sampling), or typical, which "
        "changes the distribution of the output",
    )
    posterior_threshold: float = option(
        number(0.0, 1.0),
        POSTERIOR_THRESHOLD,
        "for typical: target probability from which a drafted token is always accepted",
    )
    posterior_alpha: float = option(
        number(0.0),
        POSTERIOR_ALPHA,
        "for typical: factor of exp(-entropy) in the acceptance threshold where the target is uncertain",
    )

    def check(self) -> None:
        super().check()
        if self.speculative_token_tree is not None:
            RankTree.parse(self.speculative_token_tree)  # raise errors in the tree now, not when the drafter is built
        changed = (self.posterior_threshold, self.posterior_alpha) != (POSTERIOR_THRESHOLD, POSTERIOR_ALPHA)
        if changed and self.rule.is_lossless:
            raise ConfigError(
                "posterior_threshold and posterior_alpha need rejection_sample_method='typical', and it is "
                f"{self.rule.name!r}; set it to 'typical', or leave them out"
            )

    def growth(self, tree: RankTree, target_vocab_size: int) -> dict[str, Any]:
        """Return keyword arguments for `foredraft.drafters.parts.growth.Growth`."""
        return {
            "tree": tree,
            "target_vocab_size": target_vocab_size,
            "max_depth": self.num_speculative_tokens,
            "max_nodes": self.max_draft_nodes,
            "sample_method": self.draft_sample_method,
            "acceptance": self.rejection_sample_method,
        }


def rope_theta() -> Any:
    """Return the field ``draft_rope_theta`` of EAGLE heads."""
    help = "rotary base of the head; by default the one in its config, which is wrong for some published heads"
    return option(number(0.0, above=True), help=help)


@dataclass(frozen=True, kw_only=True)
class Eagle2Options(GrowthOptions, ModelOptions, VocabularyOptions):
    """Keys of EAGLE-2, whose trees are wide where the head is uncertain and deep where it is confident."""

    method: ClassVar[str] = "eagle2"
    num_speculative_tokens: int = draft_length(5)
    num_draft_branches: int = branches(4)
    max_draft_nodes: int | None = node_limit(12)
    draft_rerank: bool = option(
        flag(), True, "keep all siblings while a draft grows, and the likeliest max_draft_nodes nodes at the end"
    )
    draft_rope_theta: float | None = rope_theta()


@dataclass(frozen=True, kw_only=True)
class EagleOptions(HeadOptions):
    """Keys of EAGLE."""

    method: ClassVar[str] = "eagle"
    draft_rope_theta: float | None = rope_theta()


@dataclass(frozen=True, kw_only=True)
class Eagle3Options(Eagle2Options):
    """Keys of EAGLE-3, the same as those of EAGLE-2."""

    method: ClassVar[str] = "eagle3"


@dataclass(frozen=True, kw_only=True)
class MedusaOptions(HeadOptions):
    """Keys of Medusa heads."""

    method: ClassVar[str] = "medusa"


@dataclass(frozen=True, kw_only=True)
class HydraOptions(HeadOptions):
    """Keys of Hydra heads."""

    method: ClassVar[str] = "hydra"


@dataclass(frozen=True, kw_only=True)
class HydraPlusPlusOptions(HydraOptions):
    """Keys of Hydra++ heads, the same as those of Hydra."""

    method: ClassVar[str] = "hydra++"


def _is_of(generation: int, config: Mapping[str, Any], names: frozenset[str]) -> bool:
    """Return whether a head is of an EAGLE generation; a head of generation 1 is recognized as "eagle2", the faster
    method.
    """
    return eagle_generation(config, names) == generation


def _is_hydra(has_prefix_layer: bool, config: Mapping[str, Any], names: frozenset[str]) -> bool:
    """Return whether these are Hydra heads, with or without a prefix layer."""
    return is_hydra(config, names) and has_prefix(config, names) == has_prefix_layer


METHODS = (
    Method(
        EagleOptions,
        "foredraft.drafters.heads.eagle:build",
        summary="with a head that extrapolates the target's features, along a static tree",
        aliases=("eagle1", "eagle_1"),
        head="eagle",
    ),
    Method(
        Eagle2Options,
        "foredraft.drafters.heads.eagle:build",
        summary="with a head that extrapolates the target's features, in a tree that grows where the head is confident",
        aliases=("eagle_2",),
        head="eagle",
        recognizes=partial(_is_of, 1),
    ),
    Method(
        Eagle3Options,
        "foredraft.drafters.heads.eagle:build",
        summary="with a head that fuses three layers of the target, in a tree that grows where the head is confident",
        aliases=("draft_eagle3", "eagle_3"),
        head="eagle3",
        recognizes=partial(_is_of, 3),
    ),
    Method(
        HydraOptions,
        "foredraft.drafters.heads.medusa_hydra:build",
        summary="with heads that see the tokens drafted before them",
        head="hydra",
        recognizes=partial(_is_hydra, False),
    ),
    Method(
        HydraPlusPlusOptions,
        "foredraft.drafters.heads.medusa_hydra:build",
        summary="with Hydra's heads, four layers deep, over a layer that attends to the text",
        aliases=("hydra_plus_plus",),
        head="hydra++",
        recognizes=partial(_is_hydra, True),
    ),
    Method(
        MedusaOptions,
        "foredraft.drafters.heads.medusa_hydra:build",
        summary="with heads that each guess one of the next tokens",
        head="medusa",
        recognizes=is_medusa,
    ),
)

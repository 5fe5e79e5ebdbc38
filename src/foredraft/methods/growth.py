"""Options of drafts that grow level by level."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from foredraft.config.drafting import BranchOptions, depth_within, draft_sampling, node_limit
from foredraft.config.options import flag, number, option, whole
from foredraft.errors import ConfigError
from foredraft.methods.lengths import ANY_LOOK, LengthOptions


@dataclass(frozen=True, kw_only=True)
class GrowthOptions(LengthOptions, BranchOptions):
    """Options that control how a draft grows."""

    looks: ClassVar[frozenset[str]] = ANY_LOOK
    max_draft_nodes: int | None = node_limit()
    draft_beam_width: int | None = option(
        whole(1), help="nodes per level that get children; by default num_draft_branches"
    )
    draft_rerank: bool = option(
        flag(), False, "keep all siblings while a draft grows, and the likeliest max_draft_nodes nodes at the end"
    )
    draft_sharpness: float | None = option(
        number(0.0, above=True),
        help="exponent applied to the drafter's distribution when draft_rerank ranks nodes for a greedy target; 1 "
        "changes nothing. By default the exponent that calibrates the drafter's first choices",
    )
    draft_sample_method: str = draft_sampling(
        "greedy takes the argmax of the drafter, probabilistic draws from its distribution",
    )

    def check(self) -> None:
        super().check()
        if self.draft_rerank and self.max_draft_nodes is None:
            raise ConfigError(
                "draft_rerank keeps the best max_draft_nodes nodes of a draft, and max_draft_nodes is not set; set it"
            )
        if self.draft_rerank and not self.rule.shares_noise:
            raise ConfigError(
                f"rejection_sample_method={self.rule.name!r} needs every node that was drawn, and draft_rerank drops "
                "the unlikely ones; use 'match'"
            )

    @property
    def num_branches(self) -> int:
        return max(self.num_draft_branches, self.draft_beam_width or 1)

    def growth(self, target_vocab_size: int) -> dict[str, Any]:
        """Return keyword arguments for `foredraft.drafters.parts.growth.Growth`."""
        depth = self.num_speculative_tokens
        if not self.draft_rerank:
            depth = depth_within(depth, self.max_draft_nodes, self.draft_beam_width or self.num_draft_branches)
        return {
            "target_vocab_size": target_vocab_size,
            "num_branches": self.num_draft_branches,
            "beam_width": self.draft_beam_width,
            "reranks": self.draft_rerank,
            "max_nodes": self.max_draft_nodes if self.draft_rerank else None,
            "sample_method": self.draft_sample_method,
            "acceptance": self.rejection_sample_method,
            "sharpness": self.draft_sharpness,
            "policy": self.new_policy(depth),
        }

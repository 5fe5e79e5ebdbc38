"""Keys of methods that grow a draft with a language model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from foretoken.config.drafting import BranchOptions, node_limit
from foretoken.config.options import one_of, option
from foretoken.drafters.lengths import policy_of
from foretoken.drafters.lengths.options import ANY_LOOK, LengthOptions
from foretoken.drafters.parts.depth import depth_within


@dataclass(frozen=True, kw_only=True)
class GrowthOptions(LengthOptions, BranchOptions):
    """How a draft is grown."""

    looks: ClassVar[frozenset[str]] = ANY_LOOK
    max_draft_nodes: int | None = node_limit()
    draft_sample_method: str = option(
        one_of(("greedy", "probabilistic"), {"gumbel": "probabilistic"}),
        "probabilistic",
        "greedy takes the argmax of the drafter, probabilistic draws from its law",
    )

    def growth(self, target_vocab_size: int) -> dict[str, Any]:
        """Arguments of `foretoken.drafters.parts.growing.GrowingDrafter`."""
        depth = depth_within(self.num_speculative_tokens, self.max_draft_nodes, self.num_draft_branches)
        return {
            "target_vocab_size": target_vocab_size,
            "num_branches": self.num_draft_branches,
            "sample_method": self.draft_sample_method,
            "acceptance": self.rejection_sample_method,
            "policy": policy_of(self, depth),
        }

"""Keys of drafters that are trained heads with a static tree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from foretoken.config.acceptance import POSTERIOR_ALPHA, POSTERIOR_THRESHOLD, RULES
from foretoken.config.drafting import DraftOptions, ModelOptions, acceptance, draft_length, node_limit
from foretoken.config.options import anything, number, one_of, option
from foretoken.drafters.parts.rank_tree import RankTree
from foretoken.drafters.parts.reduced_output import VocabularyOptions
from foretoken.errors import ConfigError

if TYPE_CHECKING:
    from foretoken.model.lm import CausalLM

DEFAULT_NODES = {"float32": 8, "half": 16, "accelerator": 64}
"""Nodes of the tree, root included, where nothing is said: as many as are cheap to verify. On a CPU a forward over 16
takes 1.1 to 1.5 times as long as over one, and over 64 two to three times; see docs/methods/token_recycling.md."""


@dataclass(frozen=True, kw_only=True)
class HeadOptions(DraftOptions, ModelOptions, VocabularyOptions):
    """Keys of heads whose drafts are static trees.

    Attributes:
      model_is_head: that ``model`` names heads, not a causal language model.
    """

    drafts_trees: ClassVar[bool] = True
    model_is_head: ClassVar[bool] = True

    num_speculative_tokens: int = draft_length(5)
    max_draft_nodes: int | None = node_limit(
        help="nodes of the tree, root included; by default those of the tree that was given, else 16 on a CPU that "
        "computes in half precision, 8 in float32, 64 elsewhere"
    )
    speculative_token_tree: Any = option(
        anything("name, widths, paths or file"),
        help="the tree: a published one (mc_sim_7b_63, ...), widths such as 4x2x1, paths of ranks such as "
        "[[0], [0, 0], [1]], or a file of foretoken tune tree; by default the best one for usual accuracies",
    )
    draft_sample_method: str = option(
        one_of(("greedy", "probabilistic"), {"gumbel": "probabilistic"}),
        "probabilistic",
        "greedy takes the likeliest tokens of a head, probabilistic draws from its law, with the target's noise",
    )
    rejection_sample_method: str = acceptance(
        RULES.values(),
        "how drafts are accepted: match (equal tokens for any draft), standard (rejection), or typical, which changes "
        "the law of what is sampled",
    )
    posterior_threshold: float = option(
        number(0.0, 1.0), POSTERIOR_THRESHOLD, "typical: probability that is always enough for a drafted token"
    )
    posterior_alpha: float = option(
        number(0.0), POSTERIOR_ALPHA, "typical: times exp(-entropy), what is enough where the target is unsure"
    )

    def check(self) -> None:
        super().check()
        if self.speculative_token_tree is not None:
            RankTree.parse(self.speculative_token_tree)  # refuse now, not later
        changed = (self.posterior_threshold, self.posterior_alpha) != (POSTERIOR_THRESHOLD, POSTERIOR_ALPHA)
        if changed and self.rule.is_lossless:
            raise ConfigError(
                "posterior_threshold and posterior_alpha belong to rejection_sample_method='typical', which was not "
                f"chosen ({self.rule.name!r}); add it, or leave them out"
            )

    def tree(self, target: CausalLM, accuracies: list[list[float]], num_heads: int) -> RankTree:
        """The tree that is drafted.

        Args:
          accuracies: usual ones of such heads, for the tree where none was given.
          num_heads: how deep they can draft.

        Raises: ConfigError for a tree that is deeper than there are heads, or has too many siblings for the vocabulary.
        """
        if self.speculative_token_tree is None:
            return RankTree.grown(accuracies[:num_heads], self.max_draft_nodes or default_nodes(target), name="default")
        given = RankTree.parse(self.speculative_token_tree)
        if given.depth > num_heads:
            raise ConfigError(
                f"the tree {given.name!r} is {given.depth} levels deep, and there are {num_heads} heads, one per "
                "level; choose another tree, or leave speculative_token_tree out"
            )
        widest = max(path[-1] for path in given.paths) + 1
        if widest > target.vocab_size:
            raise ConfigError(
                f"the tree {given.name!r} has {widest} siblings, and the vocabulary {target.vocab_size} tokens; "
                "narrow it"
            )
        return given

    def growth(self, tree: RankTree, target: CausalLM) -> dict[str, Any]:
        """Arguments of `foretoken.drafters.parts.growth.Growth`."""
        return {
            "tree": tree,
            "target_vocab_size": target.vocab_size,
            "max_depth": self.num_speculative_tokens,
            "max_nodes": self.max_draft_nodes,
            "sample_method": self.draft_sample_method,
            "acceptance": self.rejection_sample_method,
        }


def default_nodes(target: CausalLM) -> int:
    """Nodes of the tree where nothing is said, root included."""
    if target.device.type != "cpu":
        return DEFAULT_NODES["accelerator"]
    return DEFAULT_NODES["half" if target.dtype.itemsize == 2 else "float32"]

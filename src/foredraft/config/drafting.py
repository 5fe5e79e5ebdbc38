"""Keys that several methods share. Each method takes the keys that have a meaning for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from foredraft.config.acceptance import MATCH, RULES, AcceptanceRule
from foredraft.config.options import Options, anything, one_of, option, whole
from foredraft.errors import ConfigError


def acceptance(rules: Iterable[AcceptanceRule], help: str) -> Any:
    """Define the field ``rejection_sample_method`` of methods that support these rules."""
    rules = tuple(rules)
    aliases = {alias: rule.name for rule in rules for alias in rule.aliases}
    return option(one_of(tuple(rule.name for rule in rules), aliases), MATCH.name, help)


def draft_sampling(help: str) -> Any:
    """Define the field ``draft_sample_method`` of a method. Such a method can sample drafts from its own
    distribution."""
    return option(one_of(("greedy", "probabilistic"), {"gumbel": "probabilistic"}), "probabilistic", help)


GOVERNED = "governed"
FIXED = "fixed"


def policy_choice(names: tuple[str, ...], aliases: Mapping[str, str]) -> Any:
    """Define the field ``length_policy`` of methods that support these policies."""
    help = (
        "who decides the draft size: governed, which maximises speed by measured cost (under match), or one of the "
        "other policies, which is then always followed"
    )
    return option(one_of(names, aliases), GOVERNED, help)


def draft_length(default: int, least: int = 0) -> Any:
    """Define the field ``num_speculative_tokens``."""
    plain = "" if least else "; 0 is plain decoding"
    return option(
        whole(least), default, f"limit on drafted tokens per step along one path, bonus token excluded{plain}"
    )


def node_limit(default: int | None = None, help: str = "limit on nodes of a draft tree, root included") -> Any:
    """Define the field ``max_draft_nodes``."""
    return option(whole(2), default, help)


def branches(default: int = 1) -> Any:
    """Define the field ``num_draft_branches``."""
    return option(whole(1), default, "limit on siblings per drafted position; 1 drafts chains")


def depth_within(length: int, max_nodes: int | None, num_branches: int) -> int:
    """Return the draft length that the node limit allows. A tree level has as many nodes as there are branches.

    For example, 10 nodes, root included, are enough for 4 levels of 2 branches.

    Raises: ConfigError if the limit is too small for one level.
    """
    if max_nodes is None:
        return length
    depth = (max_nodes - 1) // num_branches
    if depth == 0:
        raise ConfigError(
            f"max_draft_nodes={max_nodes} is too small for one level of num_draft_branches={num_branches}; raise "
            f"max_draft_nodes to {num_branches + 1} or more"
        )
    return min(length, depth)


@dataclass(frozen=True, kw_only=True)
class DraftOptions(Options):
    """Keys that every drafting method has."""

    num_speculative_tokens: int = draft_length(0)
    rejection_sample_method: str = acceptance(
        [rule for rule in RULES.values() if rule.is_lossless],
        "rule that accepts drafts: match (same tokens for any draft), standard (rejection sampling) or block",
    )
    length_policy: str = option(
        one_of((GOVERNED, FIXED), {"constant": FIXED}),
        GOVERNED,
        "who decides the draft size: governed, which maximises speed by measured cost (under match), or fixed",
    )

    @property
    def num_branches(self) -> int:
        """Limit on siblings per drafted position."""
        return 1

    @property
    def rule(self) -> AcceptanceRule:
        """The acceptance rule."""
        return RULES[self.rejection_sample_method]

    @property
    def is_governed(self) -> bool:
        """Whether measured costs decide the draft size; only where tokens do not depend on it."""
        return self.length_policy == GOVERNED and self.rule.keeps_tokens

    def check(self) -> None:
        super().check()
        if self.drafts_trees and not self.rule.takes_trees:
            raise ConfigError(
                f"rejection_sample_method={self.rule.name!r} accepts only chains, and method {self.method!r} drafts "
                "trees; use 'match' or 'standard'"
            )
        if self.num_branches > 1 and not self.rule.takes_trees:
            raise ConfigError(
                f"rejection_sample_method={self.rule.name!r} accepts only chains, and this config drafts "
                f"{self.num_branches} branches; use 'match' or 'standard', or one branch"
            )


@dataclass(frozen=True, kw_only=True)
class BranchOptions(DraftOptions):
    """Keys of methods whose drafts may be trees."""

    num_draft_branches: int = branches()

    @property
    def num_branches(self) -> int:
        return self.num_draft_branches


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Options):
    """Keys of methods that draft with a model or with heads."""

    model: Any = option(
        anything("path, hub id, zoo:NAME or a loaded model"),
        help="the drafter; by default the drafter that is included with a model of the zoo",
    )
    revision: Any = option(anything("branch, tag or commit"), help="revision of a drafter from the hub")
    dtype: Any = option(
        anything("name of a dtype"),
        help="dtype of a drafter that is loaded by name; by default chosen as for the target",
    )
    quantization: str | None = option(
        one_of(("int8", "int4")),
        help="round linear layers of the draft model or head to 8 or 4 bits, output layers to 8; not for GGUF files",
    )


@dataclass(frozen=True, kw_only=True)
class VocabularyOptions(Options):
    """Keys that restrict the tokens that may be drafted.

    Source: FR-Spec (Zhao et al. 2025, arXiv:2502.14856).
    """

    draft_vocabulary: Any = option(
        anything("file with a JSON list of token ids"),
        help="tokens that may be drafted; only their rows of the output layer are read; by default all",
    )

"""Keys that several methods have in common; each takes those that mean something for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from foredraft.config.acceptance import MATCH, RULES, AcceptanceRule
from foredraft.config.options import Options, anything, one_of, option, whole
from foredraft.errors import ConfigError


def acceptance(rules: Iterable[AcceptanceRule], help: str) -> Any:
    """The field ``rejection_sample_method`` of methods that take these rules."""
    rules = tuple(rules)
    aliases = {alias: rule.name for rule in rules for alias in rule.aliases}
    return option(one_of(tuple(rule.name for rule in rules), aliases), MATCH.name, help)


def draft_sampling(help: str) -> Any:
    """The field ``draft_sample_method`` of methods that can draw from a distribution of their own."""
    return option(one_of(("greedy", "probabilistic"), {"gumbel": "probabilistic"}), "probabilistic", help)


GOVERNED = "governed"
FIXED = "fixed"


def policy_choice(names: tuple[str, ...], aliases: Mapping[str, str]) -> Any:
    """The field ``length_policy`` of methods whose lengths these policies can decide."""
    help = "who decides how much is drafted: governed, by measured cost (under match), or a policy that is then kept to"
    return option(one_of(names, aliases), GOVERNED, help)


def draft_length(default: int, least: int = 0) -> Any:
    """The field ``num_speculative_tokens``."""
    plain = "" if least else "; 0 decodes plainly"
    return option(whole(least), default, f"longest draft, the bonus not counted{plain}")


def node_limit(default: int | None = None, help: str = "most nodes of a draft, root included") -> Any:
    """The field ``max_draft_nodes``."""
    return option(whole(2), default, help)


def branches(default: int = 1) -> Any:
    """The field ``num_draft_branches``."""
    return option(whole(1), default, "most siblings per drafted position; 1 drafts chains")


def depth_within(length: int, max_nodes: int | None, num_branches: int) -> int:
    """Draft length within the node limit: a level of a tree has as many nodes as there are branches.

    10 nodes, root included, hold 4 levels of 2 branches.

    Raises: ConfigError where there is no room for one level.
    """
    if max_nodes is None:
        return length
    depth = (max_nodes - 1) // num_branches
    if depth == 0:
        raise ConfigError(
            f"max_draft_nodes={max_nodes} leaves no room for one level of num_draft_branches={num_branches}; raise the "
            f"first to {num_branches + 1} or more"
        )
    return min(length, depth)


@dataclass(frozen=True, kw_only=True)
class DraftOptions(Options):
    """Keys of every method that drafts."""

    num_speculative_tokens: int = draft_length(0)
    rejection_sample_method: str = acceptance(
        [rule for rule in RULES.values() if rule.is_lossless],
        "how drafts are accepted: match (equal tokens for any draft), standard (rejection) or block",
    )
    length_policy: str = option(
        one_of((GOVERNED, FIXED), {"constant": FIXED}),
        GOVERNED,
        "who decides how much is drafted: governed, by measured cost (under match), or fixed",
    )

    @property
    def num_branches(self) -> int:
        """Most siblings of a draft."""
        return 1

    @property
    def rule(self) -> AcceptanceRule:
        """The acceptance rule."""
        return RULES[self.rejection_sample_method]

    @property
    def is_governed(self) -> bool:
        """Whether measured costs decide how much is drafted; only where tokens do not depend on it."""
        return self.length_policy == GOVERNED and self.rule.keeps_tokens

    def check(self) -> None:
        super().check()
        if self.drafts_trees and not self.rule.takes_trees:
            raise ConfigError(
                f"rejection_sample_method={self.rule.name!r} takes chains, and method {self.method!r} drafts trees; "
                "use 'match' or 'standard'"
            )
        if self.num_branches > 1 and not self.rule.takes_trees:
            raise ConfigError(
                f"rejection_sample_method={self.rule.name!r} takes chains, and this config drafts {self.num_branches} "
                "branches; use 'match' or 'standard', or one branch"
            )


@dataclass(frozen=True, kw_only=True)
class BranchOptions(DraftOptions):
    """Keys of methods whose drafts may branch."""

    num_draft_branches: int = branches()

    @property
    def num_branches(self) -> int:
        return self.num_draft_branches


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Options):
    """Keys of methods that draft with a model or heads of their own."""

    model: Any = option(
        anything("path, hub id, zoo:NAME or a loaded model"),
        help="the drafter; by default what a model of the zoo brings",
    )
    revision: Any = option(anything("branch, tag or commit"), help="of a drafter from the hub")
    dtype: Any = option(
        anything("name of a dtype"), help="of a drafter that is loaded by name; by default the target's choice"
    )


@dataclass(frozen=True, kw_only=True)
class VocabularyOptions(Options):
    """Which tokens may be drafted at all.

    Source: FR-Spec (Zhao et al. 2025, arXiv:2502.14856).
    """

    draft_vocabulary: Any = option(
        anything("file with a JSON list of token ids"),
        help="tokens that may be drafted, so that only their rows of the output layer are read; by default all",
    )

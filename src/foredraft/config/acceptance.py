"""The acceptance rules as data: names, and properties that decide which options a rule can be combined with."""

from __future__ import annotations

from dataclasses import dataclass

POSTERIOR_THRESHOLD, POSTERIOR_ALPHA = 0.09, 0.3
"""Medusa's defaults, as in its ``generate``. The helper functions of Medusa have the two values the other way round."""


@dataclass(frozen=True)
class TypicalLimits:
    """Limits of the rule ``typical``: a token x is accepted if p(x) > min(threshold, alpha exp(-H(p))).

    p is the target's distribution and H its entropy.

    Args:
      threshold: 0 to 1. A lower threshold accepts more tokens.
      alpha: 0 or more. Factor of the entropy term, which lowers the bound where the target is unsure. Medusa advises
        about sqrt(threshold).
    """

    threshold: float = POSTERIOR_THRESHOLD
    alpha: float = POSTERIOR_ALPHA


@dataclass(frozen=True)
class AcceptanceRule:
    """A rule that decides which drafted tokens are accepted. `foredraft.accept` implements the rules.

    Args:
      name: name of the rule in configs.
      takes_trees: whether drafts may be trees.
      shares_noise: whether the drafter may sample with the target's own noise, because the rule uses no other noise.
      needs_probs: whether a sampled draft must carry the distribution that it was sampled from.
      is_lossless: whether the output has the distribution of plain decoding.
      keeps_tokens: whether the output has exactly the tokens of plain decoding with the same seed.
      aliases: names that other tools use.
    """

    name: str
    takes_trees: bool
    shares_noise: bool
    needs_probs: bool
    is_lossless: bool
    keeps_tokens: bool
    aliases: tuple[str, ...] = ()


MATCH = AcceptanceRule(
    "match", takes_trees=True, shares_noise=True, needs_probs=False, is_lossless=True, keeps_tokens=True
)
STANDARD = AcceptanceRule(
    "standard",
    takes_trees=True,
    shares_noise=False,
    needs_probs=True,
    is_lossless=True,
    keeps_tokens=False,
    aliases=("rejection", "rejection_sampler"),
)
BLOCK = AcceptanceRule(
    "block", takes_trees=False, shares_noise=False, needs_probs=True, is_lossless=True, keeps_tokens=False
)
TYPICAL = AcceptanceRule(
    "typical",
    takes_trees=True,
    shares_noise=False,
    needs_probs=False,
    is_lossless=False,
    keeps_tokens=False,
    aliases=("typical_acceptance", "typical_acceptance_sampler"),
)

RULES = {rule.name: rule for rule in (MATCH, STANDARD, BLOCK, TYPICAL)}
"""Every rule by its name."""

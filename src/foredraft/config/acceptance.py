"""The acceptance rules as data: names, and the properties that decide what goes together with them."""

from __future__ import annotations

from dataclasses import dataclass

POSTERIOR_THRESHOLD, POSTERIOR_ALPHA = 0.09, 0.3
"""Medusa's numbers, as its ``generate`` has them; its helper functions have them the other way round."""


@dataclass(frozen=True)
class TypicalLimits:
    """When ``typical`` accepts a token of the target's distribution p: if p(x) > min(threshold, alpha exp(-H(p))).

    Args:
      threshold: 0 to 1; the lower, the more is accepted.
      alpha: 0 or more; how much less a token may have where the target is unsure. Medusa advises about sqrt(threshold).
    """

    threshold: float = POSTERIOR_THRESHOLD
    alpha: float = POSTERIOR_ALPHA


@dataclass(frozen=True)
class AcceptanceRule:
    """One way to decide which drafted tokens stay; `foredraft.accept` carries them out.

    Args:
      name: by which it is chosen.
      takes_trees: drafts may branch.
      shares_noise: the drafter may draw by the target's own noise, since nothing else is random.
      needs_probs: a draft that was sampled carries the distribution it was drawn from.
      is_lossless: the output follows the distribution of plain decoding.
      keeps_tokens: the output has the very tokens of plain decoding with the same seed.
      aliases: names of other tools.
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

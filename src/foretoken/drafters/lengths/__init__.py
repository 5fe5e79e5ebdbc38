"""How long a draft should be. A policy is asked before every drafted token, never after."""

from __future__ import annotations

from collections.abc import Callable

from foretoken.drafters.lengths.adaptive import Acceptance, AdaEDL
from foretoken.drafters.lengths.base import CONFIDENCE, LAW, NOTHING, LengthPolicy
from foretoken.drafters.lengths.confidence import Confidence
from foretoken.drafters.lengths.entropy import Egag
from foretoken.drafters.lengths.options import LengthOptions
from foretoken.drafters.lengths.schedules import MAX_LENGTH, Bass, Fixed, Heuristic
from foretoken.errors import ConfigError

__all__ = [
    "CONFIDENCE",
    "LAW",
    "MAX_LENGTH",
    "NOTHING",
    "POLICIES",
    "Acceptance",
    "AdaEDL",
    "Bass",
    "Confidence",
    "Egag",
    "Fixed",
    "Heuristic",
    "LengthPolicy",
    "make_policy",
    "policy_of",
]

POLICIES: dict[str, Callable[..., LengthPolicy]] = {
    policy.name: policy for policy in (Fixed, Heuristic, Bass, Confidence, Egag, AdaEDL, Acceptance)
}
"""Every policy by its name; the first argument is the longest draft."""


def policy_of(options: LengthOptions, longest: int) -> LengthPolicy:
    """The policy that options ask for, around a longest draft."""
    return make_policy(options.policy, longest, **options.policy_settings)


def make_policy(name: str, num_tokens: int, **settings: float | str) -> LengthPolicy:
    """The policy called ``name`` around ``num_tokens`` draft tokens.

    Args:
      settings: further arguments of the policy.

    Raises: ConfigError for an unknown name, a negative number, or a setting out of range.
    """
    if name not in POLICIES:
        raise ConfigError(f"unknown length policy {name!r}; known: {', '.join(sorted(POLICIES))}")
    return POLICIES[name](num_tokens, **settings)

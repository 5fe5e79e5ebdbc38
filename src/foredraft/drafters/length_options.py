"""The keys of length policies, and of all methods whose drafts have a length that a policy may choose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from foredraft.config.drafting import GOVERNED, policy_choice
from foredraft.config.options import Options, number, one_of, option, whole
from foredraft.drafters.lengths import CONFIDENCE, LAW, NOTHING, POLICIES, LengthPolicy, make_policy
from foredraft.errors import ConfigError

ANY_LOOK = frozenset({NOTHING, CONFIDENCE, LAW})


POLICY_KEYS = frozenset(name for policy in POLICIES.values() for name in policy.keys)

_ALIASES = {"constant": "fixed", "heuristic_transient": "heuristic"}
_MODES = tuple(sorted({mode for policy in POLICIES.values() for mode in policy.modes}))


def policies_for(looks: frozenset[str]) -> list[str]:
    """Names of the policies that a drafter which shows so much can serve."""
    return [name for name, policy in POLICIES.items() if policy.looks_at in looks]


@dataclass(frozen=True, kw_only=True)
class LengthOptions(Options):
    """Who decides how long a draft gets; see docs/drafting_length.md.

    Attributes:
      looks: what the drafter can show a policy of the token it is about to draft.
      own_policy: which of them decides where none is asked for, below the governor if that is at work.
    """

    looks: ClassVar[frozenset[str]] = frozenset({NOTHING})
    own_policy: ClassVar[str] = "fixed"

    length_policy: str = policy_choice((GOVERNED, *POLICIES), _ALIASES)
    length_policy_mode: str | None = option(
        one_of(_MODES), help='"egag": calibrated, paper; "acceptance": code, paper, static'
    )
    draft_threshold: float | None = option(number(0.0, 1.0), help="confidence below which a draft ends")
    min_draft_tokens: int | None = option(whole(0), help="shortest draft of egag")
    egag_ema_beta: float | None = option(number(0.0, 1.0), help="weight of the past in the lengths of egag")
    reference_entropy: float | None = option(
        number(0.0, above=True), help="entropy in nats that counts as 1 in calibrated egag"
    )
    entropy_scale: float | None = option(number(0.0), help="factor of the entropy in the bound of adaedl")
    initial_acceptance_rate: float | None = option(number(0.0, 1.0), help="acceptance rate to start from")
    target_acceptance_rate: float | None = option(
        number(0.0, 1.0), help="acceptance rate at which the threshold stays unchanged"
    )
    threshold_step: float | None = option(number(0.0, 1.0), help="amount by which the threshold moves")
    acceptance_momentum: float | None = option(number(0.0, 1.0), help="weight of the past in the rate")
    threshold_momentum: float | None = option(number(0.0, 1.0), help="weight of the past in the threshold")

    def check(self) -> None:
        super().check()
        policy, name = POLICIES[self.policy], self.policy
        if policy.looks_at not in self.looks:
            raise ConfigError(
                f"length_policy {name!r} looks at the {policy.looks_at} of the drafter, and method {self.method!r} has "
                f"none; choose one of {', '.join(policies_for(self.looks))}"
            )
        for given in sorted(POLICY_KEYS - policy.keys.keys()):
            if getattr(self, given) is not None:
                owners = [other for other, its in POLICIES.items() if given in its.keys]
                raise ConfigError(
                    f"key {given!r} has no meaning for length_policy {name!r}, only for {', '.join(owners)}; leave it "
                    "out, or set length_policy"
                )
        mode = self.length_policy_mode
        if mode is not None and mode not in policy.modes:
            raise ConfigError(f"length_policy {name!r} has no mode {mode!r}; choose one of {', '.join(policy.modes)}")

    @property
    def policy(self) -> str:
        """The name of the policy that drafts are asked with."""
        return self.own_policy if self.length_policy == GOVERNED else self.length_policy

    @property
    def policy_settings(self) -> dict[str, float | str]:
        """The arguments of the policy that are given."""
        given = {argument: getattr(self, key) for key, argument in POLICIES[self.policy].keys.items()}
        return {argument: value for argument, value in given.items() if value is not None}

    def new_policy(self, longest: int) -> LengthPolicy:
        """The policy that is asked for, around a longest draft."""
        return make_policy(self.policy, longest, **self.policy_settings)

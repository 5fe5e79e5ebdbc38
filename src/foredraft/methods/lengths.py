"""Length policies, which decide the length of each draft, and their options.

A policy ends a draft before a token is drawn, never after: a token that was drawn stays in the draft."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, ClassVar

from foredraft.config.drafting import GOVERNED, policy_choice
from foredraft.config.options import Options, number, one_of, option, whole
from foredraft.errors import ConfigError
from foredraft.tree import DraftPlan

if TYPE_CHECKING:
    from torch import Tensor

    from foredraft.engine.row import Row

NOTHING, CONFIDENCE, DISTRIBUTION = "nothing", "confidence", "distribution"
"""Information about the next draft token that a drafter provides and a length policy needs."""

ANY_LOOK = frozenset({NOTHING, CONFIDENCE, DISTRIBUTION})

MAX_LENGTH = 32
"""Longest draft that a schedule grows to. The limit is needed because a row in a loop accepts every draft, and logits
take (B, N, V) memory."""

FIRST_REFERENCE = 2.0
"""Reference entropy in nats for a row with fewer than 16 recorded entropies."""


@dataclass(eq=False)
class LengthPolicy:
    """Fixed draft length; subclasses choose the length per row and step.

    The fields of a policy are its options, with the same names as in the config.

    Args:
      num_tokens: longest draft of a step, or of the first step; 0 for no draft.

    Attributes:
      looks_at: input that ``stop`` needs: nothing (then ``stop`` is not called), the confidence, or the distribution.
      modes: allowed values of ``length_policy_mode``.

    Exactness: the length is a stopping time. The input of ``stop`` does not depend on the token that would be drawn
    next.
    Randomness: none.
    """

    name: ClassVar[str] = "fixed"
    looks_at: ClassVar[str] = NOTHING
    modes: ClassVar[tuple[str, ...]] = ()

    num_tokens: int

    def __post_init__(self) -> None:
        if self.num_tokens < 0:
            raise ConfigError(f"num_speculative_tokens is {self.num_tokens}; it must be 0 (no draft) or more")
        mode = getattr(self, "length_policy_mode", None)
        if mode is not None and mode not in self.modes:
            raise ConfigError(
                f"length_policy {self.name!r} has no mode {mode!r}; choose one of {', '.join(self.modes)}"
            )
        for name in ("egag_ema_beta", "acceptance_momentum", "threshold_momentum"):
            weight = getattr(self, name, 0.0)
            if not 0.0 <= weight < 1.0:
                raise ConfigError(f"{name} is {weight}; it must be at least 0 and less than 1")

    def longest(self, row: Row) -> int:
        """Return the largest number of tokens to draft in this step."""
        return self.num_tokens

    def looks(self, depth: int) -> bool:
        """Return whether to call ``stop`` when ``depth`` tokens have been drafted."""
        return self.looks_at != NOTHING

    def stop(self, row: Row, plan: DraftPlan, depth: int, log_probs: Tensor) -> None:
        """Lower ``plan.gamma`` to the length at which the draft should end, if this length is known.

        Args:
          row: row that the draft is for.
          plan: plan of the draft. Setting ``plan.gamma = depth`` adds no token, ``depth + 1`` adds one more.
          depth: number of drafted tokens.
          log_probs: (V,) log-probabilities of the next draft token; in a tree, those at the best node to expand next.
            A drafter that has only the probability of its best token passes (1,) to policies that need the
            confidence.
        """

    def update(self, row: Row, num_drafted: int, num_accepted: int) -> None:
        """Record the outcome of a step: the depth of the draft, and the number of accepted tokens."""


class Heuristic(LengthPolicy):
    """Two more tokens after a step in which all were accepted, one less (but at least one) after any other step.

    Source: the "heuristic" schedule of assisted generation in transformers. Deviations: the length is state of one row,
      and no generation_config is changed. A draft changes nothing if it was shorter than the length (end of budget, no
      match in the context) and was accepted in full. A length of 0 stays 0.
    """

    name = "heuristic"

    def longest(self, row: Row) -> int:
        length: int = row.state.get(self, self.num_tokens)
        return length

    def update(self, row: Row, num_drafted: int, num_accepted: int) -> None:
        length = self.longest(row)
        if num_accepted < num_drafted:
            row.state[self] = max(1, length - 1)
        elif num_drafted >= length > 0:
            row.state[self] = min(length + 2, max(self.num_tokens, MAX_LENGTH))


@dataclass(eq=False)
class Bass(LengthPolicy):
    """One draft length for all rows of a batch, which follows the row that accepts the most.

    Source: BASS (Qian et al. 2024, arXiv:2404.15778), algorithm 1. After a round in which some row accepted the whole
    length, the length grows by two tokens, up to 32. After any other round it shrinks by a tenth, rounded up, and by
    one more if the round before shrank it, too. The draft length never falls below the largest number of accepted
    tokens, nor below 1. The published first length is 7. Deviation: a round changes nothing if every draft was shorter
    than the length (end of budget, no match) and was accepted in full. A length of 0 stays 0.
    """

    name = "bass"

    _has_shrunk: bool = field(default=False, init=False)
    _outcomes: list[tuple[int, int]] = field(default_factory=list, init=False)  # (drafted, accepted) in this round

    def __post_init__(self) -> None:
        super().__post_init__()
        self._length = self.num_tokens

    def longest(self, row: Row) -> int:
        if self._outcomes:
            self._end_round()
        return self._length

    def update(self, row: Row, num_drafted: int, num_accepted: int) -> None:
        if num_drafted:
            self._outcomes.append((num_drafted, num_accepted))

    def _end_round(self) -> None:
        outcomes, self._outcomes = self._outcomes, []
        most = max(accepted for _, accepted in outcomes)
        if most >= self._length:
            self._length, self._has_shrunk = min(self._length + 2, max(self.num_tokens, MAX_LENGTH)), False
        elif any(accepted < drafted for drafted, accepted in outcomes):
            shorter = self._length - -(-self._length // 10) - self._has_shrunk
            self._length, self._has_shrunk = max(1, most, shorter), True


@dataclass(eq=False)
class Confidence(LengthPolicy):
    """End of the draft after the first token that was drafted while the drafter's largest probability was below a
    threshold.

    Source: ``assistant_confidence_threshold`` of assisted generation in transformers, the training-free form of DISCO
      (Mamou et al. 2024, arXiv:2405.04304). Deviation: the largest probability of the distribution decides, not the
      probability of the drawn token. The uncertain token itself is drafted, as in the source: its forward pass is
      already done, so it costs only one more node.

    Args:
      draft_threshold: threshold of the largest probability; 0 never ends a draft, 1 nearly always does.
    """

    name = "confidence"
    looks_at = CONFIDENCE

    draft_threshold: float = 0.4

    def stop(self, row: Row, plan: DraftPlan, depth: int, log_probs: Tensor) -> None:
        if not confidence(log_probs) >= self.draft_threshold:
            plan.gamma = depth + 1


@dataclass(eq=False)
class Egag(LengthPolicy):
    """Entropy-guided adaptive gamma: long drafts where the drafter is certain, short ones where it is not.

    Source: TbK0ng/Speculative-Decoding: g = clip(floor((1 - H / log V) * gamma_max), gamma_min, gamma_max); ema = beta
    * ema + (1 - beta) * g; round(ema). The mode "paper" computes the length once per step, from the entropy of the
      first distribution divided by log V. With today's vocabularies this length is nearly constant. The mode
      "calibrated"
    divides by a reference entropy that real text reaches, rounds to the nearest length, and computes the length again
    before every token. A token is drawn while the length from its own distribution exceeds the draft.

    Args:
      num_tokens: gamma_max, the longest draft.
      length_policy_mode: "paper" or "calibrated".
      min_draft_tokens: gamma_min, at most ``num_tokens``; None for 1, or for 0 if ``num_tokens`` is 0.
      egag_ema_beta: weight of the past in the moving average of the length, from 0 (off) to below 1.
      reference_entropy: entropy in nats that counts as 1 in the mode "calibrated"; None for the 95th percentile of the
        row's last 128 entropies (2 nats for the first 16).

    Raises: ConfigError for a number out of range or an unknown mode.
    """

    name = "egag"
    looks_at = DISTRIBUTION
    modes = ("paper", "calibrated")

    length_policy_mode: str = "calibrated"
    min_draft_tokens: int | None = None
    egag_ema_beta: float = 0.0
    reference_entropy: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.gamma_min = min(1, self.num_tokens) if self.min_draft_tokens is None else self.min_draft_tokens
        if self.gamma_min < 0:
            raise ConfigError(f"gamma_min (min_draft_tokens) is {self.gamma_min}; it must be 0 or more")
        if self.num_tokens < self.gamma_min:
            raise ConfigError(
                f"gamma_min (min_draft_tokens) is {self.gamma_min} and gamma_max (num_speculative_tokens) is "
                f"{self.num_tokens}; lower gamma_min, or raise gamma_max"
            )

    def looks(self, depth: int) -> bool:
        return depth == 0 or self.length_policy_mode == "calibrated"

    def stop(self, row: Row, plan: DraftPlan, depth: int, log_probs: Tensor) -> None:
        state = row.state.get(self)
        if state is None:
            state = row.state[self] = EntropyHistory()
        is_calibrated = self.length_policy_mode == "calibrated"
        if is_calibrated:
            nats = entropy(log_probs)
            share = calibrated_share(nats, self.reference_entropy or state.reference, self.num_tokens)
            shown = by_vocabulary(nats, log_probs)
            if math.isfinite(nats):
                state.add(nats)
        else:
            share = shown = normalised_entropy(log_probs.exp())
        length, state.ema = self.length(1.0 if math.isnan(share) else share, state.ema)
        if plan.entropy is None:
            plan.entropy = shown
        if not is_calibrated or length <= depth:
            plan.gamma = max(length, depth)

    def length(self, share: float, ema: float | None = None) -> tuple[int, float]:
        """Return the draft length, and the moving average to pass to the next call.

        Args:
          share: normalised entropy of the distribution of a draft token, 0..1.
          ema: moving average that the last call returned; None for the first call.

        With bounds 1 and 5, the entropies 0, 0.1, 0.5 and 1 give the lengths 5, 4, 2 and 1.
        """
        wanted = min(max(math.floor((1.0 - share) * self.num_tokens), self.gamma_min), self.num_tokens)
        beta = self.egag_ema_beta
        ema = float(wanted) if ema is None else beta * ema + (1.0 - beta) * wanted
        return round(ema), ema


@dataclass(eq=False)
class AdaEDL(LengthPolicy):
    """Draft continues while a lower bound on the acceptance probability, computed from the entropy, is above a
    threshold.

    Source: AdaEDL (Agrawal et al. 2024, arXiv:2410.18351): stop before a token when 1 - sqrt(entropy_scale * H) <
      threshold, with H the entropy of the drafter's distribution in nats. The threshold follows the acceptance rate by
      the two-branch rule. Choices that the paper leaves open: the first threshold is 0.7, and the rate starts at its
      target. The first token of a step is always drafted, so that the rate can be measured.

    Args:
      draft_threshold: first threshold.
      entropy_scale: factor of the entropy in the bound, above 0.
      target_acceptance_rate, threshold_step, acceptance_momentum, threshold_momentum: see `Threshold.follow`.
    """

    name = "adaedl"
    looks_at = DISTRIBUTION

    draft_threshold: float = 0.7
    entropy_scale: float = 0.2
    target_acceptance_rate: float = 0.9
    threshold_step: float = 0.01
    acceptance_momentum: float = 0.5
    threshold_momentum: float = 0.9

    def threshold(self, row: Row) -> Threshold:
        """Return the threshold of a row."""
        return Threshold.of(row, self, self.draft_threshold, self.target_acceptance_rate)

    def stop(self, row: Row, plan: DraftPlan, depth: int, log_probs: Tensor) -> None:
        nats = entropy(log_probs)
        if plan.entropy is None:
            plan.entropy = by_vocabulary(nats, log_probs)
        if depth and 1.0 - math.sqrt(self.entropy_scale * nats) < self.threshold(row).value:
            plan.gamma = depth

    def update(self, row: Row, num_drafted: int, num_accepted: int) -> None:
        self.threshold(row).follow(self, "paper", num_drafted, num_accepted)


@dataclass(eq=False)
class Acceptance(LengthPolicy):
    """End of the draft after an uncertain token, as in `Confidence`, with a threshold that follows the acceptance
    rate.

    Source: Draft & Verify (Zhang et al. 2023, arXiv:2309.08168). Deviations: the confidence is taken from the
    distribution that the token is drawn from, temperature and truncation included; threshold and rate are state of one
    row.

    Args:
      length_policy_mode, target_acceptance_rate, threshold_step, acceptance_momentum, threshold_momentum: see
        `Threshold.follow`; the mode "static" keeps the threshold.
      draft_threshold: first threshold; None for the published values, 0.8 for greedy and 0.5 for sampled rows.
      initial_acceptance_rate: first value of the moving average of the acceptance rate.
    """

    name = "acceptance"
    looks_at = CONFIDENCE
    modes = ("paper", "code", "static")

    length_policy_mode: str = "code"
    draft_threshold: float | None = None
    initial_acceptance_rate: float = 0.0
    target_acceptance_rate: float = 0.9
    threshold_step: float = 0.01
    acceptance_momentum: float = 0.5
    threshold_momentum: float = 0.9

    def threshold(self, row: Row) -> Threshold:
        """Return the threshold of a row."""
        published = 0.8 if row.sampler.is_greedy else 0.5
        first = published if self.draft_threshold is None else self.draft_threshold
        return Threshold.of(row, self, first, self.initial_acceptance_rate)

    def stop(self, row: Row, plan: DraftPlan, depth: int, log_probs: Tensor) -> None:
        if not confidence(log_probs) >= self.threshold(row).value:
            plan.gamma = depth + 1

    def update(self, row: Row, num_drafted: int, num_accepted: int) -> None:
        self.threshold(row).follow(self, self.length_policy_mode, num_drafted, num_accepted)


POLICIES: dict[str, type[LengthPolicy]] = {
    policy.name: policy for policy in (LengthPolicy, Heuristic, Bass, Confidence, Egag, AdaEDL, Acceptance)
}
"""Every policy by its name."""


# -- parts of policies -------------------------------------------------------------------------------------------------


@dataclass
class Threshold:
    """Confidence threshold of one row, and the moving average of its acceptance rate."""

    value: float
    acceptance_rate: float

    @classmethod
    def of(cls, row: Row, policy: LengthPolicy, first: float, rate: float) -> Threshold:
        """Return the threshold of a row under a policy; a new row starts with the first threshold and this acceptance
        rate.
        """
        if policy not in row.state:
            row.state[policy] = cls(first, rate)
        threshold: Threshold = row.state[policy]
        return threshold

    def follow(self, policy: AdaEDL | Acceptance, mode: str, num_drafted: int, num_accepted: int) -> None:
        """Record the outcome of a step; a step without a draft changes nothing.

        At threshold 0.8 and rate 0.9, 1 of 4 accepted tokens gives the rate 0.575 and the threshold 0.801.

        Source: Draft & Verify (Zhang et al. 2023, arXiv:2309.08168), section on adaptive draft-exiting.

        Args:
          policy: policy with the target acceptance rate, the step of the threshold before smoothing, and the weights
            of the past in both averages.
          mode: rule of the update. "paper" raises the threshold while the rate is at most the target rate and lowers it
            otherwise. "code", the published program, raises it while the rate is below the target, and does not lower
            it after a draft of the full length. "static" never changes the threshold.
          num_drafted: depth of the draft.
          num_accepted: number of accepted tokens.
        """
        if num_drafted == 0 or mode == "static":
            return
        kept, target, step = policy.acceptance_momentum, policy.target_acceptance_rate, policy.threshold_step
        self.acceptance_rate = kept * self.acceptance_rate + (1.0 - kept) * (num_accepted / num_drafted)
        wanted = self.value
        if self.acceptance_rate < target or (mode == "paper" and self.acceptance_rate == target):
            wanted += step
        elif mode == "paper" or num_drafted < policy.num_tokens:
            wanted -= step
        kept = policy.threshold_momentum
        self.value = kept * self.value + (1.0 - kept) * wanted


class EntropyHistory:
    """Last 128 entropies of a row, and the moving average of its draft lengths.

    Attributes:
      ema: moving average, see `Egag.length`; None before the first draft.
    """

    def __init__(self) -> None:
        self.ema: float | None = None
        self._last: deque[float] = deque()
        self._sorted: list[float] = []

    @property
    def reference(self) -> float:
        """The 95th percentile in nats, or `FIRST_REFERENCE` until 16 entropies have been added.

        For 17 values of 1, two of 3 and one of 4, in any order, the result is 4.
        """
        if len(self._sorted) < 16:
            return FIRST_REFERENCE
        return self._sorted[min(int(0.95 * len(self._sorted)), len(self._sorted) - 1)]

    def add(self, nats: float) -> None:
        """Add the next entropy."""
        if len(self._last) == 128:
            oldest = self._last.popleft()
            del self._sorted[bisect_left(self._sorted, oldest)]
        self._last.append(nats)
        insort(self._sorted, nats)


def confidence(log_probs: Tensor) -> float:
    """Return the largest probability of log-probabilities (V,), or NaN, which is below every threshold, if they
    contain NaN.
    """
    return math.exp(float(log_probs.max()))


def entropy(log_probs: Tensor) -> float:
    """Return -sum p log p in nats of log-probabilities (V,), or +inf, the largest uncertainty, if they contain NaN."""
    probs = log_probs.float().exp()
    nats = float((-probs).xlogy(probs).sum())
    return math.inf if math.isnan(nats) else nats


def by_vocabulary(nats: float, log_probs: Tensor) -> float:
    """Return an entropy relative to the largest entropy of a distribution (V,), or 0 for a vocabulary of one token."""
    return nats / math.log(len(log_probs)) if len(log_probs) > 1 else 0.0


def normalised_entropy(probs: Tensor) -> float:
    """Return -sum p log(p + 1e-8) / log V of a distribution (V,), 0..1, or 0 for a vocabulary of one token."""
    if len(probs) < 2:
        return 0.0
    probs = probs.double()
    entropy = -float((probs * (probs + 1e-8).log()).sum())
    return min(max(entropy / math.log(len(probs)), 0.0), 1.0)


def calibrated_share(nats: float, reference: float, gamma_max: int) -> float:
    """Return the share min(H / reference, 1) - 1/(2 gamma_max), with which the published floor formula rounds to the
    nearest.

    With gamma_max 5 and reference 2, 0.9 nats give 0.45 - 0.1 = 0.35, and floor((1 - 0.35) * 5) = 3 = round(0.55 * 5).
    """
    share = min(nats / reference, 1.0) if reference > 0.0 else float(nats > 0.0)
    return share - 0.5 / max(gamma_max, 1)


# -- options -----------------------------------------------------------------------------------------------------------

_KEYS_OF = {
    name: frozenset(each.name for each in fields(policy) if each.init) - {"num_tokens"}
    for name, policy in POLICIES.items()
}
_ALIASES = {"constant": "fixed", "heuristic_transient": "heuristic"}
_MODES = tuple(sorted({mode for policy in POLICIES.values() for mode in policy.modes}))


@dataclass(frozen=True, kw_only=True)
class LengthOptions(Options):
    """Keys that select the length policy of drafts; see docs/length_policies.md.

    Attributes:
      looks: information about the next draft token that the drafter provides to a policy.
      own_policy: default policy; under a governor the policy chooses within the governor's limits.
    """

    looks: ClassVar[frozenset[str]] = frozenset({NOTHING})
    own_policy: ClassVar[str] = "fixed"

    length_policy: str = policy_choice((GOVERNED, *POLICIES), _ALIASES)
    length_policy_mode: str | None = option(
        one_of(_MODES), help='"egag": calibrated, paper; "acceptance": code, paper, static'
    )
    draft_threshold: float | None = option(number(0.0, 1.0), help="confidence below which a draft ends")
    min_draft_tokens: int | None = option(whole(0), help="shortest draft under egag")
    egag_ema_beta: float | None = option(number(0.0, 1.0), help="weight of the past in the draft length of egag")
    reference_entropy: float | None = option(
        number(0.0, above=True), help="entropy in nats that counts as 1 in calibrated egag"
    )
    entropy_scale: float | None = option(number(0.0), help="factor of the entropy in the bound of adaedl")
    initial_acceptance_rate: float | None = option(
        number(0.0, 1.0), help="first value of the moving average of the acceptance rate"
    )
    target_acceptance_rate: float | None = option(
        number(0.0, 1.0), help="acceptance rate at which the threshold stays unchanged"
    )
    threshold_step: float | None = option(number(0.0, 1.0), help="change of the threshold per step, before smoothing")
    acceptance_momentum: float | None = option(number(0.0, 1.0), help="weight of the past in the acceptance rate")
    threshold_momentum: float | None = option(number(0.0, 1.0), help="weight of the past in the threshold")

    def check(self) -> None:
        super().check()
        policy, name = POLICIES[self.policy], self.policy
        if policy.looks_at not in self.looks:
            served = [other for other, its in POLICIES.items() if its.looks_at in self.looks]
            raise ConfigError(
                f"length_policy {name!r} needs the drafter's {policy.looks_at}, which method {self.method!r} does not "
                f"provide; choose one of {', '.join(served)}"
            )
        for given in sorted(frozenset[str]().union(*_KEYS_OF.values()) - _KEYS_OF[name]):
            if getattr(self, given) is not None:
                owners = [other for other, keys in _KEYS_OF.items() if given in keys]
                raise ConfigError(
                    f"key {given!r} has no meaning for length_policy {name!r}, only for {', '.join(owners)}; leave it "
                    "out, or set length_policy"
                )
        mode = self.length_policy_mode
        if mode is not None and mode not in policy.modes:
            raise ConfigError(f"length_policy {name!r} has no mode {mode!r}; choose one of {', '.join(policy.modes)}")

    @property
    def policy(self) -> str:
        """Name of the policy that limits each draft."""
        return self.own_policy if self.length_policy == GOVERNED else self.length_policy

    def new_policy(self, longest: int) -> LengthPolicy:
        """Make the selected policy for a longest draft."""
        given = {key: value for key in _KEYS_OF[self.policy] if (value := getattr(self, key)) is not None}
        return POLICIES[self.policy](longest, **given)

"""Length policies: how long a draft should be, and their options.

A policy stops a draft before a token is drawn, never after: a token that was drawn stays."""

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
"""How much a drafter can show a length policy of the token it is about to draft, and how much a policy looks at."""

ANY_LOOK = frozenset({NOTHING, CONFIDENCE, DISTRIBUTION})

MAX_LENGTH = 32
"""Longest draft that a schedule grows to: a row that loops accepts everything, and logits are (B, N, V)."""

FIRST_REFERENCE = 2.0
"""Nats; high entropy for a row of which fewer than 16 entropies are known."""


@dataclass(eq=False)
class LengthPolicy:
    """The same number of tokens in every step; subclasses decide per row and step how many.

    The fields of a policy are its options, by their names in the config.

    Args:
      num_tokens: longest draft of a step, or of the first one; 0 for none.

    Attributes:
      looks_at: the input of ``stop``: nothing (then it is not called), the confidence, or the whole distribution.
      modes: allowed values of ``length_policy_mode``.

    Exactness: a stopping time. What ``stop`` sees does not depend on the token that would be drawn next.
    Randomness: none.
    """

    name: ClassVar[str] = "fixed"
    looks_at: ClassVar[str] = NOTHING
    modes: ClassVar[tuple[str, ...]] = ()

    num_tokens: int

    def __post_init__(self) -> None:
        if self.num_tokens < 0:
            raise ConfigError(f"num_speculative_tokens is {self.num_tokens}; want 0 (no draft) or more")
        mode = getattr(self, "length_policy_mode", None)
        if mode is not None and mode not in self.modes:
            raise ConfigError(
                f"length_policy {self.name!r} has no mode {mode!r}; choose one of {', '.join(self.modes)}"
            )
        for name in ("egag_ema_beta", "acceptance_momentum", "threshold_momentum"):
            weight = getattr(self, name, 0.0)
            if not 0.0 <= weight < 1.0:
                raise ConfigError(f"{name} is {weight}; it must lie in 0..1, 1 excluded")

    def longest(self, row: Row) -> int:
        """The most tokens to draft in this step."""
        return self.num_tokens

    def looks(self, depth: int) -> bool:
        """Whether ``stop`` is called before the token after ``depth`` of them."""
        return self.looks_at != NOTHING

    def stop(self, row: Row, plan: DraftPlan, depth: int, log_probs: Tensor) -> None:
        """Lower ``plan.gamma`` to the length at which the draft is to end, as far as that is known.

        Args:
          depth: tokens drafted so far. With ``plan.gamma = depth`` none is added, with ``depth + 1`` one more.
          log_probs: (V,) log-probabilities of the token about to be drawn; of a tree, at the best node that is about to
            be expanded. Drafters that know only the share of their best token give that, (1,), to policies that look
            at the confidence.
        """

    def update(self, row: Row, num_drafted: int, num_accepted: int) -> None:
        """Take in the outcome: depth of the draft, and how many tokens of one path were accepted."""


class Heuristic(LengthPolicy):
    """Two tokens more after a step in which all were accepted, one fewer (but one) after any other.

    Source: the "heuristic" schedule of transformers' assisted generation. Deviations: the length belongs to
    one row and ends with it, nothing is written to anyone's generation_config; a draft that fell short of the
    length (end of budget, no match in the context) and was accepted as far as it went says nothing, and
    changes nothing. A length of 0 stays 0.
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
    """One length for all rows of a batch, which follows the row that accepts most.

    Source: BASS (Qian et al. 2024, arXiv:2404.15778), algorithm 1: after a round in which some row accepted the whole
    length, two tokens more, up to 32; otherwise shorter by a tenth, rounded up, and by one more after another such
    round, but never below what the best row accepted, nor below 1. Published: the first length is 7. Deviation: a round
    in which no row drafted so far as it was to (end of budget, no match) and all that was drafted was accepted changes
    nothing. A length of 0 stays 0.
    """

    name = "bass"

    _has_shrunk: bool = field(default=False, init=False)
    _outcomes: list[tuple[int, int]] = field(default_factory=list, init=False)  # of the round so far

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
    """Ends the draft after the first token before which the drafter's largest probability was below a threshold.

    Source: ``assistant_confidence_threshold`` of transformers' assisted generation, the training-free form of DISCO
    (Mamou et al. 2024, arXiv:2405.04304). Deviation: the largest probability of the distribution decides, not that of
    the token drawn. The unsure token itself is drafted, as in the source: its forward has been made, it costs one node
    more.

    Args:
      draft_threshold: 0 never stops, 1 nearly always.
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

    Source: TbK0ng/Speculative-Decoding: g = clip(floor((1 - H / log V) * gamma_max), gamma_min, gamma_max);
    ema = beta * ema + (1 - beta) * g; round(ema). "paper" takes the entropy of the step's first distribution, divides
    it by log V, and rounds down: with today's vocabularies that hardly moves. "calibrated" divides by a reference that
    real entropies reach, rounds to the nearest, and asks again before every token: it is drawn while the length that
    its own distribution asks for is longer than the draft.

    Args:
      num_tokens: gamma_max, the longest draft.
      length_policy_mode: "paper" or "calibrated".
      min_draft_tokens: gamma_min, at most ``num_tokens``; None for 1, or 0 where nothing is drafted.
      egag_ema_beta: weight of the past in the moving average of the length, 0 (off) to below 1.
      reference_entropy: nats that count as 1 in the mode "calibrated"; None for the 95th percentile of the row's last
        128 entropies (2 nats for the first 16).

    Raises: ConfigError when a number is out of range or the mode unknown.
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
            raise ConfigError(f"gamma_min is {self.gamma_min}; it must be 0 or more")
        if self.num_tokens < self.gamma_min:
            raise ConfigError(f"gamma_min is {self.gamma_min} and gamma_max {self.num_tokens}; swap them")

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
        """The length, and the moving average to hand in next time.

        Args:
          share: normalised entropy of the distribution of a drafted token, 0..1.
          ema: what the last call returned; None for the first.

        With bounds 1 and 5, entropies 0, 0.1, 0.5 and 1 give 5, 4, 2 and 1.
        """
        wanted = min(max(math.floor((1.0 - share) * self.num_tokens), self.gamma_min), self.num_tokens)
        beta = self.egag_ema_beta
        ema = float(wanted) if ema is None else beta * ema + (1.0 - beta) * wanted
        return round(ema), ema


@dataclass(eq=False)
class AdaEDL(LengthPolicy):
    """Drafts on while a lower bound on the chance of acceptance, read off the entropy, stays above a threshold.

    Source: AdaEDL (Agrawal et al. 2024, arXiv:2410.18351): stop before a token when
    1 - sqrt(entropy_scale * H) < threshold, H of the drafter's distribution in nats; the threshold follows the
    acceptance rate by the two-branched rule. What the paper leaves open: the first threshold is 0.7, the rate starts at
    its target, and the first token of a step is always drafted, so that there is something to learn from.

    Args:
      draft_threshold: the first one.
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
        """The threshold of a row."""
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
    """Ends the draft after an unsure token, as `Confidence`; what counts as unsure follows the acceptance rate.

    Source: Draft & Verify (Zhang et al. 2023, arXiv:2309.08168). Deviations: the confidence is that of the distribution
    the token is drawn from, temperature and truncation included; threshold and rate belong to one row and end with it.

    Args:
      length_policy_mode, target_acceptance_rate, threshold_step, acceptance_momentum, threshold_momentum: see
        `Threshold.follow`; "static" keeps the threshold.
      draft_threshold: the first one; None for the published 0.8 of greedy and 0.5 of sampled rows.
      initial_acceptance_rate: what the moving average of the acceptance rate starts from.
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
        """The threshold of a row."""
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


# -- what policies are made of -----------------------------------------------------------------------------------------


@dataclass
class Threshold:
    """The threshold of one row, and the moving average of its acceptance rate."""

    value: float
    acceptance_rate: float

    @classmethod
    def of(cls, row: Row, policy: LengthPolicy, first: float, rate: float) -> Threshold:
        """The threshold of a row under a policy; new rows begin with the first one and this acceptance rate."""
        if policy not in row.state:
            row.state[policy] = cls(first, rate)
        threshold: Threshold = row.state[policy]
        return threshold

    def follow(self, policy: AdaEDL | Acceptance, mode: str, num_drafted: int, num_accepted: int) -> None:
        """Take in the outcome of a step; one without a draft says nothing.

        At threshold 0.8, rate 0.9: 1 of 4 accepted gives the rate 0.575 and the threshold 0.801.

        Source: Draft & Verify (Zhang et al. 2023, arXiv:2309.08168), section on adaptive draft-exiting.

        Args:
          policy: has the wanted acceptance rate, the step of the threshold before smoothing, and the weights of the
            past in both averages.
          mode: "paper" raises the threshold while the rate is at most the wanted one and lowers it otherwise; "code",
            the published program, raises it while the rate is less, and leaves it alone when the draft was as long as
            drafts get; "static" never moves it.
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
    """The last 128 entropies of a row, and the moving average of its draft lengths.

    Attributes:
      ema: see `Egag.length`; None before the first draft.
    """

    def __init__(self) -> None:
        self.ema: float | None = None
        self._last: deque[float] = deque()
        self._sorted: list[float] = []

    @property
    def reference(self) -> float:
        """The 95th percentile, in nats; `FIRST_REFERENCE` until 16 were seen.

        Of 17 times 1, twice 3 and once 4, in any order, that is 4.
        """
        if len(self._sorted) < 16:
            return FIRST_REFERENCE
        return self._sorted[min(int(0.95 * len(self._sorted)), len(self._sorted) - 1)]

    def add(self, nats: float) -> None:
        """Take in the next entropy."""
        if len(self._last) == 128:
            oldest = self._last.popleft()
            del self._sorted[bisect_left(self._sorted, oldest)]
        self._last.append(nats)
        insort(self._sorted, nats)


def confidence(log_probs: Tensor) -> float:
    """The largest probability of log-probabilities (V,); NaN, which is below every threshold, if they are NaN."""
    return math.exp(float(log_probs.max()))


def entropy(log_probs: Tensor) -> float:
    """-sum p log p of log-probabilities (V,) in nats; +inf, as uncertain as can be, if they are NaN."""
    probs = log_probs.float().exp()
    nats = float((-probs).xlogy(probs).sum())
    return math.inf if math.isnan(nats) else nats


def by_vocabulary(nats: float, log_probs: Tensor) -> float:
    """An entropy relative to the largest that a distribution (V,) can have; 0 for a vocabulary of one token."""
    return nats / math.log(len(log_probs)) if len(log_probs) > 1 else 0.0


def normalised_entropy(probs: Tensor) -> float:
    """-sum p log(p + 1e-8) / log V of a distribution (V,), 0..1; 0 for a vocabulary of one token."""
    if len(probs) < 2:
        return 0.0
    probs = probs.double()
    entropy = -float((probs * (probs + 1e-8).log()).sum())
    return min(max(entropy / math.log(len(probs)), 0.0), 1.0)


def calibrated_share(nats: float, reference: float, gamma_max: int) -> float:
    """The input at which the floor of the published formula becomes a rounding: min(H / reference, 1) - 1/(2 g).

    With gamma_max 5 and reference 2: 0.9 nats are 0.45 - 0.1 = 0.35, and floor((1 - 0.35) * 5) = 3 = round(0.55 * 5).
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
    """Who decides how long a draft gets; see docs/drafting_length.md.

    Attributes:
      looks: what the drafter can show a policy of the token it is about to draft.
      own_policy: default policy; under a governor it decides within what the governor allows.
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
            served = [other for other, its in POLICIES.items() if its.looks_at in self.looks]
            raise ConfigError(
                f"length_policy {name!r} looks at the {policy.looks_at} of the drafter, and method {self.method!r} has "
                f"none; choose one of {', '.join(served)}"
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
        """The name of the policy that drafts are asked with."""
        return self.own_policy if self.length_policy == GOVERNED else self.length_policy

    def new_policy(self, longest: int) -> LengthPolicy:
        """The policy that is asked for, around a longest draft."""
        given = {key: value for key in _KEYS_OF[self.policy] if (value := getattr(self, key)) is not None}
        return POLICIES[self.policy](longest, **given)

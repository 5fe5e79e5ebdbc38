"""Length policies: how long a draft should be, and drafters that ask one.

A policy is asked before every drafted token, never after."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from foredraft.engine.drafter import Budget, ContextDrafter, StepResult
from foredraft.engine.sequence import Sequence
from foredraft.errors import ConfigError
from foredraft.lazy import Lazy
from foredraft.tree import DraftPlan, DraftTree

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = Lazy("torch")

NOTHING, CONFIDENCE, LAW = "nothing", "confidence", "law"
"""How much a drafter can show a length policy of the token it is about to draft, and how much a policy looks at."""

MAX_LENGTH = 32
"""Longest draft that a schedule grows to: a row that loops accepts everything, and logits are (B, N, V)."""

FIRST_REFERENCE = 2.0
"""Nats; what counts as high entropy until a row has shown what is high for it."""


class LengthPolicy(ABC):
    """Decides per row and step how many tokens to draft; usable by every drafter that can stop early.

    A drafter calls ``begin``; then for every token ``go_on`` before the forward that would tell its law (not for the
    first one, which is always looked at) and ``keep_drafting`` before it is drawn; and ``end`` with the outcome. State
    belongs to a row (by ``row.id``) and lives until ``forget``.

    A policy notes what it plans; the drafter puts the plan into its draft, and the engine makes the trace of it.

    Attributes:
      looks_at: the input that ``keep_drafting`` needs: nothing, the confidence (largest probability), or the whole law.
      keys: its options -> its arguments; see `foredraft.drafters.length_options`.
      modes: allowed values of ``length_policy_mode``.

    Exactness: a stopping time. ``go_on`` may look at everything before the forward, ``keep_drafting`` at the law of the
    token that would be drawn next too, neither at that token; a token that was drawn stays.
    """

    name: str
    looks_at: ClassVar[str] = NOTHING
    keys: ClassVar[Mapping[str, str]] = {}
    modes: ClassVar[tuple[str, ...]] = ()

    @cached_property
    def _tables(self) -> list[dict[int, Any]]:
        return []

    def _per_row(self) -> dict[int, Any]:
        """A new table by row, of which `forget` drops rows that have finished."""
        self._tables.append({})
        return self._tables[-1]

    @cached_property
    def _ends_early(self) -> bool:
        """Whether a draft may be shorter than ``begin`` has it."""
        verbs = type(self).go_on, type(self).keep_drafting
        return self.looks_at != NOTHING or verbs != (LengthPolicy.go_on, LengthPolicy.keep_drafting)

    @cached_property
    def _plans(self) -> dict[int, DraftPlan]:
        """Of the step that is being drafted."""
        return self._per_row()

    def plan(self, row: Sequence, gamma: int) -> int:
        """Note the longest draft of a step that begins, and return it."""
        self._plans[row.id] = DraftPlan(gamma)
        return gamma

    def note(self, row: Sequence, gamma: int, entropy: float | None = None) -> None:
        """Note what is planned so far; the first entropy of a step stays."""
        plan = self._plans.setdefault(row.id, DraftPlan(gamma))
        plan.gamma = gamma
        if plan.entropy is None:
            plan.entropy = entropy

    def take_plan(self, row: Sequence) -> DraftPlan | None:
        """The plan of the draft that has just been made; handed out once."""
        return self._plans.pop(row.id, None)

    @abstractmethod
    def begin(self, row: Sequence) -> int:
        """The most tokens to draft in this step, 0 or more."""

    def wants_log_probs(self, depth: int) -> bool:
        """Whether ``keep_drafting`` looks at its ``draft_log_probs`` at this depth."""
        return self.looks_at != NOTHING

    def go_on(self, row: Sequence, depth: int) -> bool:
        """Whether to look for a token after ``depth`` (1 or more) of them; a no saves the drafter a forward."""
        return True

    def keep_drafting(self, row: Sequence, depth: int, draft_log_probs: Tensor | None) -> bool:
        """Whether to draw one more token after ``depth`` of them; asked each time below the cap of ``begin``.

        Args:
          draft_log_probs: (V,) log-law of the token about to be drawn, where it is wanted; of a tree, at the best node
            that is about to be expanded. Drafters that know only the share of their best token give that, (1,),
            to policies that look at the confidence.
        """
        return True

    def end(self, row: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Take in the outcome: depth of the draft, and how many tokens of one path were accepted."""

    def forget(self, row: Sequence) -> None:
        """Drop the state of a row that has finished."""
        for table in self._tables:
            table.pop(row.id, None)

    def length(
        self, row: Sequence, budget: int, log_shares: Callable[[int], Tensor | None] = lambda depth: None
    ) -> int:
        """The draft length for a drafter that knows its draft beforehand: cap and stops within ``budget``.

        Args:
          log_shares: for policies that look at the confidence: logarithm of the share of the best token after so many
            of them, (1,); None where the draft ends.
        """
        cap = min(self.begin(row), budget)
        if not self._ends_early:
            return max(cap, 0)
        depth = 0
        while depth < cap and (depth == 0 or self.go_on(row, depth)):
            wants = self.wants_log_probs(depth)
            shares = log_shares(depth) if wants else None
            if (wants and shares is None) or not self.keep_drafting(row, depth, shares):
                break
            depth += 1
        return depth


class Fixed(LengthPolicy):
    """The same number of tokens in every step.

    Args:
      num_tokens: 0 or more.
    """

    name = "fixed"

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = checked_length(num_tokens)

    def begin(self, row: Sequence) -> int:
        return self.plan(row, self.num_tokens)


class Heuristic(LengthPolicy):
    """Two tokens more after a step in which all were accepted, one fewer (but one) after any other.

    Source: the "heuristic" schedule of transformers' assisted generation. Deviations: the length belongs to
    one row and ends with it, nothing is written to anyone's generation_config; a draft that fell short of the
    length (end of budget, no match in the context) and was accepted as far as it went says nothing, and
    changes nothing.

    Args:
      num_tokens: the length a row starts with, 0 (stays 0) or more.
    """

    name = "heuristic"

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = checked_length(num_tokens)
        self._length_of: dict[int, int] = self._per_row()

    def begin(self, row: Sequence) -> int:
        return self.plan(row, self._length_of.get(row.id, self.num_tokens))

    def end(self, row: Sequence, num_drafted: int, num_accepted: int) -> None:
        length = self._length_of.get(row.id, self.num_tokens)
        if num_accepted < num_drafted:
            self._length_of[row.id] = max(1, length - 1)
        elif num_drafted >= length > 0:
            self._length_of[row.id] = min(length + 2, max(self.num_tokens, MAX_LENGTH))


class Bass(LengthPolicy):
    """One length for all rows of a batch, which follows the row that accepts most.

    Source: BASS (Qian et al. 2024, arXiv:2404.15778), algorithm 1: after a round in which some row accepted the whole
    length, two tokens more, up to 32; otherwise shorter by a tenth, rounded up, and by one more after another such
    round, but never below what the best row accepted, nor below 1. Published: the first length is 7. Deviation: a round
    in which no row drafted so far as it was to (end of budget, no match) and all that was drafted was accepted changes
    nothing.

    Args:
      num_tokens: the length to begin with, 0 (stays 0) or more.

    Exactness: a stopping time: it looks at the outcomes of earlier rounds alone. Randomness: none.
    """

    name = "bass"

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = checked_length(num_tokens)
        self._length = num_tokens
        self._has_shrunk = False
        self._outcomes: list[tuple[int, int]] = []

    def begin(self, row: Sequence) -> int:
        if self._outcomes:
            self._update()
        return self.plan(row, self._length)

    def end(self, row: Sequence, num_drafted: int, num_accepted: int) -> None:
        if num_drafted:
            self._outcomes.append((num_drafted, num_accepted))

    def _update(self) -> None:
        """Take in the round that has ended."""
        outcomes, self._outcomes = self._outcomes, []
        most = max(accepted for _, accepted in outcomes)
        if most >= self._length:
            self._length, self._has_shrunk = min(self._length + 2, max(self.num_tokens, MAX_LENGTH)), False
        elif any(accepted < drafted for drafted, accepted in outcomes):
            shorter = self._length - -(-self._length // 10) - self._has_shrunk
            self._length, self._has_shrunk = max(1, most, shorter), True


class Confidence(LengthPolicy):
    """Ends the draft after the first token before which the drafter's largest probability was below a threshold.

    Source: ``assistant_confidence_threshold`` of transformers' assisted generation, the training-free form of DISCO
    (Mamou et al. 2024, arXiv:2405.04304). Deviation: the largest probability of the law decides, not that of the token
    drawn. The unsure token itself is drafted, as in the source: its forward has been made, it costs one node more.

    Args:
      num_tokens: longest draft.
      threshold: 0 never stops, 1 nearly always.

    Exactness: a stopping time; whether there is a next token depends on laws of earlier ones. Randomness: none.
    """

    name = "confidence"
    looks_at = CONFIDENCE
    keys: ClassVar[Mapping[str, str]] = {"draft_threshold": "threshold"}

    def __init__(self, num_tokens: int, threshold: float = 0.4) -> None:
        self.num_tokens = checked_length(num_tokens)
        self.threshold = within("draft_threshold", threshold, 0.0, 1.0)
        self._confidence_of: dict[int, float] = self._per_row()

    def begin(self, row: Sequence) -> int:
        return self.plan(row, self.num_tokens)

    def keep_drafting(self, row: Sequence, depth: int, draft_log_probs: Tensor | None) -> bool:
        self._confidence_of[row.id] = confidence(required(self, draft_log_probs))
        return True

    def go_on(self, row: Sequence, depth: int) -> bool:
        if self._confidence_of[row.id] >= self.threshold_of(row):
            return True
        self.note(row, depth)
        return False

    def threshold_of(self, row: Sequence) -> float:
        """The threshold that holds for this row now."""
        return self.threshold


@dataclass(frozen=True)
class EgagLength:
    """Length of the next draft: long where the drafter is certain, short where it is not.

    Source: entropy-guided adaptive gamma (TbK0ng/Speculative-Decoding):
    g = clip(floor((1 - H / log V) * gamma_max), gamma_min, gamma_max); ema = beta * ema + (1 - beta) * g; round(ema).

    Args:
      gamma_min, gamma_max: bounds of the length, 0 <= gamma_min <= gamma_max.
      beta: weight of the past, 0 (none, the default) to below 1.

    Raises: ConfigError when a number is out of range.
    Exactness: a stopping time, since the entropy is known before the first token is drawn. Randomness: none.
    """

    gamma_min: int
    gamma_max: int
    beta: float = 0.0

    def __post_init__(self) -> None:
        if self.gamma_min < 0:
            raise ConfigError(f"gamma_min is {self.gamma_min}; it must be 0 or more")
        if self.gamma_max < self.gamma_min:
            raise ConfigError(f"gamma_min is {self.gamma_min} and gamma_max {self.gamma_max}; swap them")
        if not 0.0 <= self.beta < 1.0:
            raise ConfigError(f"the EMA's beta is {self.beta}; it must lie in 0..1, 1 excluded")

    def length(self, normalised_entropy: float, ema: float | None = None) -> tuple[int, float]:
        """The length, and the moving average to hand in next time.

        Args:
          normalised_entropy: of the law of the first drafted token, 0..1.
          ema: what the last call returned; None for the first.

        With bounds 1 and 5, entropies 0, 0.1, 0.5 and 1 give 5, 4, 2 and 1.
        """
        wanted = math.floor((1.0 - normalised_entropy) * self.gamma_max)
        wanted = min(max(wanted, self.gamma_min), self.gamma_max)
        ema = float(wanted) if ema is None else self.beta * ema + (1.0 - self.beta) * wanted
        return round(ema), ema


class RunningReference:
    """The 95th percentile of the last 128 entropies of a row.

    Of 17 times 1, twice 3 and once 4, in any order, that is 4.
    """

    def __init__(self) -> None:
        self._last: deque[float] = deque()
        self._sorted: list[float] = []

    @property
    def value(self) -> float:
        """Nats; `FIRST_REFERENCE` until 16 were seen."""
        if len(self._sorted) < 16:
            return FIRST_REFERENCE
        return self._sorted[min(int(0.95 * len(self._sorted)), len(self._sorted) - 1)]

    def add(self, nats: float) -> None:
        if len(self._last) == 128:
            oldest = self._last.popleft()
            del self._sorted[bisect_left(self._sorted, oldest)]
        self._last.append(nats)
        insort(self._sorted, nats)


@dataclass
class _Entropies:
    gamma: int = 0
    ema: float | None = None
    reference: RunningReference = field(default_factory=RunningReference)


class Egag(LengthPolicy):
    """Entropy-guided adaptive gamma, as published or calibrated.

    Source: TbK0ng/Speculative-Decoding, see `EgagLength`, whose formula both modes use. "paper" takes the
    entropy of the step's first law, divides it by log V, and rounds down: with today's vocabularies that hardly moves.
    "calibrated" divides by a reference that real entropies reach, rounds to the nearest, and asks again before every
    token: it is drawn while the length that its own law asks for is longer than the draft.

    Args:
      num_tokens: gamma_max, the longest draft.
      mode: "paper" or "calibrated".
      min_tokens: gamma_min, at most ``num_tokens``; 1 by default.
      beta: weight of the past in the moving average of the length, 0 (off) to below 1.
      reference_entropy: nats that count as 1 in the mode "calibrated"; None for the 95th percentile of the row's last
        128 entropies (2 nats for the first 16).

    Raises: ConfigError when a number is out of range or the mode unknown.
    Exactness: a stopping time; no entropy depends on the token about to be drawn. Randomness: none.
    """

    name = "egag"
    looks_at = LAW
    keys: ClassVar[Mapping[str, str]] = {
        "length_policy_mode": "mode",
        "min_draft_tokens": "min_tokens",
        "egag_ema_beta": "beta",
        "reference_entropy": "reference_entropy",
    }
    modes = ("paper", "calibrated")

    def __init__(
        self,
        num_tokens: int,
        mode: str = "calibrated",
        *,
        min_tokens: int | None = None,
        beta: float = 0.0,
        reference_entropy: float | None = None,
    ) -> None:
        checked_mode("the mode of egag", mode, self.modes)
        self.num_tokens = checked_length(num_tokens)
        self.is_calibrated = mode == "calibrated"
        self.formula = EgagLength(min(1, num_tokens) if min_tokens is None else min_tokens, num_tokens, beta)
        if reference_entropy is not None:
            within("reference_entropy", reference_entropy, 1e-6, math.inf)
        self.reference_entropy = reference_entropy
        self._state_of: dict[int, _Entropies] = self._per_row()

    def begin(self, row: Sequence) -> int:
        return self.plan(row, self.num_tokens)

    def wants_log_probs(self, depth: int) -> bool:
        return self.is_calibrated or depth == 0

    def go_on(self, row: Sequence, depth: int) -> bool:
        return self.is_calibrated or depth < self._state_of[row.id].gamma

    def keep_drafting(self, row: Sequence, depth: int, draft_log_probs: Tensor | None) -> bool:
        if not self.wants_log_probs(depth):
            return True
        law = required(self, draft_log_probs)
        state = self._state_of.setdefault(row.id, _Entropies())
        if self.is_calibrated:
            share = self._calibrated(state, entropy(law))
            shown = entropy(law) / math.log(len(law)) if len(law) > 1 else 0.0
        else:
            share = shown = normalised_entropy(law.exp())
        if math.isnan(share):
            share = 1.0
        state.gamma, state.ema = self.formula.length(share, state.ema)
        self.note(row, max(state.gamma, depth), shown)  # what was drafted before stays
        return depth < state.gamma

    def _calibrated(self, state: _Entropies, nats: float) -> float:
        """Entropy by its reference, 0..1, moved by half a token, which makes the formula's floor a rounding."""
        reference = self.reference_entropy or state.reference.value
        if math.isfinite(nats):
            state.reference.add(nats)
        return calibrated_share(nats, reference, self.num_tokens)


THRESHOLD_MODES = ("paper", "code", "static")
"""See `ThresholdRule`."""

_RULE_KEYS = {
    "target_acceptance_rate": "target_rate",
    "threshold_step": "step",
    "acceptance_momentum": "acceptance_momentum",
    "threshold_momentum": "threshold_momentum",
}


@dataclass
class ThresholdState:
    """The threshold of one row, and the moving average of its acceptance rate."""

    threshold: float
    acceptance_rate: float


@dataclass(frozen=True)
class ThresholdRule:
    """How a threshold follows the acceptance rate.

    Source: Draft & Verify (Zhang et al. 2023, arXiv:2309.08168), section on adaptive draft-exiting.

    Args:
      mode: "paper" raises the threshold while the rate is at most the wanted one and lowers it otherwise; "code", the
        published program, raises it while the rate is less, and leaves it alone when the draft was as long as drafts
        get; "static" never moves it.
      target_rate: wanted acceptance rate.
      step: of the threshold, before smoothing.
      acceptance_momentum, threshold_momentum: weight of the past.

    Raises: ConfigError when a number is out of range or the mode unknown.
    """

    mode: str = "code"
    target_rate: float = 0.9
    step: float = 0.01
    acceptance_momentum: float = 0.5
    threshold_momentum: float = 0.9

    def __post_init__(self) -> None:
        checked_mode("the mode of the threshold", self.mode, THRESHOLD_MODES)
        within("target_acceptance_rate", self.target_rate, 0.0, 1.0)
        within("threshold_step", self.step, 0.0, 1.0)
        within("acceptance_momentum", self.acceptance_momentum, 0.0, 1.0, open_end=True)
        within("threshold_momentum", self.threshold_momentum, 0.0, 1.0, open_end=True)

    def update(self, state: ThresholdState, num_drafted: int, num_accepted: int, longest: int) -> None:
        """Take in the outcome of a step; one without a draft says nothing.

        At threshold 0.8, rate 0.9: 1 of 4 accepted gives the rate 0.575 and the threshold 0.801.
        """
        if num_drafted == 0 or self.mode == "static":
            return
        rate, kept = num_accepted / num_drafted, self.acceptance_momentum
        state.acceptance_rate = kept * state.acceptance_rate + (1.0 - kept) * rate
        wanted = state.threshold
        is_paper = self.mode == "paper"
        if state.acceptance_rate < self.target_rate or (is_paper and state.acceptance_rate == self.target_rate):
            wanted += self.step
        elif is_paper or num_drafted < longest:
            wanted -= self.step
        kept = self.threshold_momentum
        state.threshold = kept * state.threshold + (1.0 - kept) * wanted


class FollowingThreshold(LengthPolicy):
    """A policy whose threshold follows the acceptance rate, row by row.

    Args:
      rule: by which it follows.
    """

    num_tokens: int

    def __init__(self, rule: ThresholdRule) -> None:
        self.rule = rule
        self._thresholds: dict[int, ThresholdState] = self._per_row()

    @abstractmethod
    def first_state(self, row: Sequence) -> ThresholdState:
        """The threshold of a row that begins, and the acceptance rate that is assumed of it."""

    def threshold_of(self, row: Sequence) -> float:
        """The threshold that holds for this row now."""
        return self._state(row).threshold

    def end(self, row: Sequence, num_drafted: int, num_accepted: int) -> None:
        self.rule.update(self._state(row), num_drafted, num_accepted, self.num_tokens)

    def _state(self, row: Sequence) -> ThresholdState:
        if row.id not in self._thresholds:
            self._thresholds[row.id] = self.first_state(row)
        return self._thresholds[row.id]


class Acceptance(FollowingThreshold, Confidence):
    """Ends the draft after an unsure token; what counts as unsure follows the acceptance rate.

    Source: Draft & Verify (Zhang et al. 2023, arXiv:2309.08168). Deviations: the confidence is that of the law the
    token is drawn from, temperature and truncation included; threshold and rate belong to one row and end with it.

    Args:
      num_tokens: longest draft.
      threshold: the first one; None for the published 0.8 of greedy and 0.5 of sampled rows.
      mode, target_rate, step, acceptance_momentum, threshold_momentum: see `ThresholdRule`.
      initial_rate: what the moving average of the acceptance rate starts from.

    Exactness: a stopping time, as `Confidence`. Randomness: none.
    """

    name = "acceptance"
    keys: ClassVar[Mapping[str, str]] = {
        "length_policy_mode": "mode",
        "draft_threshold": "threshold",
        "initial_acceptance_rate": "initial_rate",
        **_RULE_KEYS,
    }
    modes = THRESHOLD_MODES

    def __init__(
        self,
        num_tokens: int,
        threshold: float | None = None,
        *,
        initial_rate: float = 0.0,
        **rule: float | str,
    ) -> None:
        Confidence.__init__(self, num_tokens, 0.5 if threshold is None else threshold)
        FollowingThreshold.__init__(self, ThresholdRule(**rule))  # type: ignore[arg-type]
        self._initial_rate = within("initial_acceptance_rate", initial_rate, 0.0, 1.0)
        self._has_own_threshold = threshold is not None

    def first_state(self, row: Sequence) -> ThresholdState:
        first = 0.8 if row.law.is_greedy and not self._has_own_threshold else self.threshold
        return ThresholdState(first, self._initial_rate)


class AdaEDL(FollowingThreshold):
    """Drafts on while a lower bound on the chance of acceptance, read off the entropy, stays above a threshold.

    Source: AdaEDL (Agrawal et al. 2024, arXiv:2410.18351): stop before a token when
    1 - sqrt(entropy_scale * H) < threshold, H of the drafter's law in nats; the threshold follows the acceptance rate
    by the two-branched rule. What the paper leaves open: the first threshold is 0.7, the rate starts at its target,
    and the first token of a step is always drafted, so that there is something to learn from.

    Args:
      num_tokens: longest draft.
      threshold: the first one.
      entropy_scale: of the bound, above 0.
      target_rate, step, acceptance_momentum, threshold_momentum: see `ThresholdRule`.

    Exactness: a stopping time; the entropy does not depend on the token. Randomness: none.
    """

    name = "adaedl"
    looks_at = LAW
    keys: ClassVar[Mapping[str, str]] = {
        "draft_threshold": "threshold",
        "entropy_scale": "entropy_scale",
        **_RULE_KEYS,
    }

    def __init__(
        self, num_tokens: int, threshold: float = 0.7, *, entropy_scale: float = 0.2, **rule: float | str
    ) -> None:
        super().__init__(ThresholdRule(**{"mode": "paper", **rule}))  # type: ignore[arg-type]
        self.num_tokens = checked_length(num_tokens)
        self.threshold = within("draft_threshold", threshold, 0.0, 1.0)
        self.entropy_scale = within("entropy_scale", entropy_scale, 0.0, math.inf)

    def first_state(self, row: Sequence) -> ThresholdState:
        return ThresholdState(self.threshold, self.rule.target_rate)

    def begin(self, row: Sequence) -> int:
        return self.plan(row, self.num_tokens)

    def keep_drafting(self, row: Sequence, depth: int, draft_log_probs: Tensor | None) -> bool:
        law = required(self, draft_log_probs)
        nats = entropy(law)
        self.note(row, self.num_tokens, nats / math.log(len(law)) if len(law) > 1 else 0.0)
        if depth == 0 or 1.0 - math.sqrt(self.entropy_scale * nats) >= self.threshold_of(row):
            return True
        self.note(row, depth)
        return False


POLICIES: dict[str, type[LengthPolicy]] = {
    policy.name: policy for policy in (Fixed, Heuristic, Bass, Confidence, Egag, AdaEDL, Acceptance)
}
"""Every policy by its name; the first argument is the longest draft."""


def make_policy(name: str, num_tokens: int, **settings: float | str) -> LengthPolicy:
    """The policy called ``name`` around ``num_tokens`` draft tokens.

    Args:
      settings: further arguments of the policy.

    Raises: ConfigError for an unknown name, a negative number, or a setting out of range.
    """
    if name not in POLICIES:
        raise ConfigError(f"unknown length policy {name!r}; known: {', '.join(sorted(POLICIES))}")
    make: Callable[..., LengthPolicy] = POLICIES[name]
    return make(num_tokens, **settings)


def required(policy: LengthPolicy, draft_log_probs: Tensor | None) -> Tensor:
    """The law that a policy looks at.

    Raises: ConfigError when the drafter has none.
    """
    if draft_log_probs is None:
        raise ConfigError(
            f"length_policy {policy.name!r} looks at the {policy.looks_at} of the drafter, and this drafter has none; "
            "use 'fixed' or 'heuristic'"
        )
    return draft_log_probs


def checked_length(num_tokens: int) -> int:
    """A draft length of 0 or more."""
    if num_tokens < 0:
        raise ConfigError(f"num_speculative_tokens is {num_tokens}; want 0 (no draft) or more")
    return num_tokens


def within(name: str, value: float, low: float, high: float, *, open_end: bool = False) -> float:
    """A number within limits, the upper one excluded on request."""
    if not low <= value <= high or (open_end and value == high):
        end = f"{high:g}, excluded" if open_end else f"{high:g}"
        raise ConfigError(f"{name} is {value}; it must lie between {low:g} and {end}")
    return value


def checked_mode(title: str, mode: str, modes: tuple[str, ...]) -> str:
    """A mode that a policy has."""
    if mode not in modes:
        raise ConfigError(f"{title} is {mode!r}; choose one of {', '.join(modes)}")
    return mode


def confidence(draft_log_probs: Tensor) -> float:
    """The largest probability of a log-law (V,); NaN, which is below every threshold, where there is no law."""
    return math.exp(float(draft_log_probs.max()))


def entropy(log_probs: Tensor) -> float:
    """-sum p log p of a log-law (V,) in nats; +inf, as uncertain as can be, where there is no law."""
    nats = float(torch.special.entr(log_probs.float().exp()).sum())
    return math.inf if math.isnan(nats) else nats


def normalised_entropy(probs: Tensor) -> float:
    """-sum p log(p + 1e-8) / log V of a law (V,), 0..1; 0 for a vocabulary of one token."""
    if len(probs) < 2:
        return 0.0
    law = probs.double()
    entropy = -float((law * (law + 1e-8).log()).sum())
    return min(max(entropy / math.log(len(probs)), 0.0), 1.0)


def calibrated_share(nats: float, reference: float, gamma_max: int) -> float:
    """The input at which the floor of the published formula becomes a rounding: min(H / reference, 1) - 1/(2 g).

    With gamma_max 5 and reference 2: 0.9 nats are 0.45 - 0.1 = 0.35, and floor((1 - 0.35) * 5) = 3 = round(0.55 * 5).
    """
    share = min(nats / reference, 1.0) if reference > 0.0 else float(nats > 0.0)
    return share - 0.5 / max(gamma_max, 1)


State = TypeVar("State")


class PlannedDrafter(ContextDrafter, Generic[State]):
    """A `ContextDrafter` with a length policy: its drafts carry what that has planned, and their outcome is told.

    Args:
      length_policy: decides how deep drafts are.
    """

    def __init__(self, length_policy: LengthPolicy) -> None:
        self.length_policy = length_policy
        self._state_of: dict[int, State] = {}

    @abstractmethod
    def new_state(self, row: Sequence) -> State:
        """The state of a row that begins, which is kept until it is forgotten."""

    def start(self, rows: Seq[Sequence]) -> None:
        for row in rows:
            self._state_of[row.id] = self.new_state(row)

    def propose(self, rows: Seq[Sequence], budgets: Seq[Budget]) -> list[DraftTree]:
        trees = super().propose(rows, budgets)
        return [tree.planned(self.length_policy.take_plan(row)) for tree, row in zip(trees, rows, strict=True)]

    def observe(self, rows: Seq[Sequence], results: Seq[StepResult]) -> None:
        for row, result in zip(rows, results, strict=True):
            self.length_policy.end(row, result.tree.depth, result.num_accepted)

    def forget(self, rows: Seq[Sequence]) -> None:
        for row in rows:
            self.length_policy.forget(row)
            self._state_of.pop(row.id, None)

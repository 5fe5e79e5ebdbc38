"""Thresholds that follow the acceptance rate: Draft & Verify's rule, and AdaEDL, which moves an entropy bound by it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from foretoken.drafters.lengths.base import LAW, LengthPolicy, checked_length, required, within
from foretoken.drafters.lengths.confidence import Confidence
from foretoken.drafters.lengths.entropy import entropy
from foretoken.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from foretoken.engine.sequence import Sequence

MODES = ("paper", "code", "static")


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
        if self.mode not in MODES:
            raise ConfigError(f"the mode of the threshold is {self.mode!r}; choose one of {', '.join(MODES)}")
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


class Acceptance(Confidence):
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

    def __init__(
        self,
        num_tokens: int,
        threshold: float | None = None,
        *,
        initial_rate: float = 0.0,
        **rule: float | str,
    ) -> None:
        super().__init__(num_tokens, 0.5 if threshold is None else threshold)
        self.rule = ThresholdRule(**rule)  # type: ignore[arg-type]
        self._initial_rate = within("initial_acceptance_rate", initial_rate, 0.0, 1.0)
        self._has_own_threshold = threshold is not None
        self._state_of: dict[int, ThresholdState] = {}

    def threshold_of(self, row: Sequence) -> float:
        return self._state(row).threshold

    def end(self, row: Sequence, num_drafted: int, num_accepted: int) -> None:
        self.rule.update(self._state(row), num_drafted, num_accepted, self.num_tokens)

    def forget(self, row: Sequence) -> None:
        super().forget(row)
        self._state_of.pop(row.id, None)

    def _state(self, row: Sequence) -> ThresholdState:
        state = self._state_of.get(row.id)
        if state is None:
            first = 0.8 if row.law.is_greedy and not self._has_own_threshold else self.threshold
            state = self._state_of[row.id] = ThresholdState(first, self._initial_rate)
        return state


class AdaEDL(LengthPolicy):
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

    def __init__(
        self, num_tokens: int, threshold: float = 0.7, *, entropy_scale: float = 0.2, **rule: float | str
    ) -> None:
        self.num_tokens = checked_length(num_tokens)
        self.threshold = within("draft_threshold", threshold, 0.0, 1.0)
        self.entropy_scale = within("entropy_scale", entropy_scale, 0.0, math.inf)
        self.rule = ThresholdRule(**{"mode": "paper", **rule})  # type: ignore[arg-type]
        self._state_of: dict[int, ThresholdState] = {}

    def begin(self, row: Sequence) -> int:
        return self.plan(row, self.num_tokens)

    def keep_drafting(self, row: Sequence, depth: int, draft_log_probs: Tensor | None) -> bool:
        law = required(self, draft_log_probs)
        nats = entropy(law)
        self.note(row, self.num_tokens, nats / math.log(len(law)) if len(law) > 1 else 0.0)
        if depth == 0 or 1.0 - math.sqrt(self.entropy_scale * nats) >= self._state(row).threshold:
            return True
        self.note(row, depth)
        return False

    def end(self, row: Sequence, num_drafted: int, num_accepted: int) -> None:
        self.rule.update(self._state(row), num_drafted, num_accepted, self.num_tokens)

    def forget(self, row: Sequence) -> None:
        super().forget(row)
        self._state_of.pop(row.id, None)

    def _state(self, row: Sequence) -> ThresholdState:
        state = self._state_of.get(row.id)
        if state is None:
            state = self._state_of[row.id] = ThresholdState(self.threshold, self.rule.target_rate)
        return state

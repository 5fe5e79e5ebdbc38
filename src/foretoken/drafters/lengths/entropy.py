"""EGAG: the draft is long where the drafter's entropy is low."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from foretoken.drafters.lengths.base import LAW, LengthPolicy, checked_length, required, within
from foretoken.drafters.lengths.egag import EgagLength, normalised_entropy
from foretoken.errors import ConfigError
from foretoken.lazy import Lazy

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from foretoken.engine.sequence import Sequence
else:
    torch = Lazy("torch")

MODES = ("paper", "calibrated")
FIRST_REFERENCE = 2.0
"""Nats; what counts as high entropy until a row has shown what is high for it."""

_WINDOW = 128  # entropies that the running reference looks back on
_FEW = 16  # of them, below which it is not trusted
_QUANTILE = 0.95


def entropy(log_probs: Tensor) -> float:
    """-sum p log p of a log-law (V,) in nats; +inf, as uncertain as can be, where there is no law."""
    nats = float(torch.special.entr(log_probs.float().exp()).sum())
    return math.inf if math.isnan(nats) else nats


class RunningReference:
    """The 95th percentile of the last entropies of a row.

    Of 17 times 1, twice 3 and once 4, in any order, that is 4.
    """

    def __init__(self) -> None:
        self._last: deque[float] = deque()
        self._sorted: list[float] = []

    @property
    def value(self) -> float:
        """Nats; `FIRST_REFERENCE` until enough was seen."""
        if len(self._sorted) < _FEW:
            return FIRST_REFERENCE
        return self._sorted[min(int(_QUANTILE * len(self._sorted)), len(self._sorted) - 1)]

    def add(self, nats: float) -> None:
        if len(self._last) == _WINDOW:
            oldest = self._last.popleft()
            del self._sorted[bisect_left(self._sorted, oldest)]
        self._last.append(nats)
        insort(self._sorted, nats)


@dataclass
class _State:
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

    def __init__(
        self,
        num_tokens: int,
        mode: str = "calibrated",
        *,
        min_tokens: int | None = None,
        beta: float = 0.0,
        reference_entropy: float | None = None,
    ) -> None:
        if mode not in MODES:
            raise ConfigError(f"the mode of egag is {mode!r}; choose one of {', '.join(MODES)}")
        self.num_tokens = checked_length(num_tokens)
        self.is_calibrated = mode == "calibrated"
        self.formula = EgagLength(min(1, num_tokens) if min_tokens is None else min_tokens, num_tokens, beta)
        if reference_entropy is not None:
            within("reference_entropy", reference_entropy, 1e-6, math.inf)
        self.reference_entropy = reference_entropy
        self._state_of: dict[int, _State] = {}

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
        state = self._state_of.setdefault(row.id, _State())
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

    def _calibrated(self, state: _State, nats: float) -> float:
        """Entropy by its reference, 0..1, moved by half a token, which makes the formula's floor a rounding."""
        reference = self.reference_entropy or state.reference.value
        if math.isfinite(nats):
            state.reference.add(nats)
        return calibrated_share(nats, reference, self.num_tokens)

    def forget(self, row: Sequence) -> None:
        super().forget(row)
        self._state_of.pop(row.id, None)


def calibrated_share(nats: float, reference: float, gamma_max: int) -> float:
    """The input at which the floor of the published formula becomes a rounding: min(H / reference, 1) - 1/(2 g).

    With gamma_max 5 and reference 2: 0.9 nats are 0.45 - 0.1 = 0.35, and floor((1 - 0.35) * 5) = 3 = round(0.55 * 5).
    """
    share = min(nats / reference, 1.0) if reference > 0.0 else float(nats > 0.0)
    return share - 0.5 / max(gamma_max, 1)

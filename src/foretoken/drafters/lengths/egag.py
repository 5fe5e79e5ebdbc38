"""The published formula of EGAG: a draft length from the entropy of the drafter's law. It is defined only here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from foretoken.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


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


def normalised_entropy(probs: Tensor) -> float:
    """-sum p log(p + 1e-8) / log V of a law (V,), 0..1; 0 for a vocabulary of one token."""
    if len(probs) < 2:
        return 0.0
    law = probs.double()
    entropy = -float((law * (law + 1e-8).log()).sum())
    return min(max(entropy / math.log(len(probs)), 0.0), 1.0)

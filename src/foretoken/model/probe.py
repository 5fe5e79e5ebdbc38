"""The findings of a model's probe, as data."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

Verdict = Literal["right", "wrong", "unclear"]
MARGIN = 4.0
"""An error below this multiple of the rounding is rounding; a fault below this multiple of it cannot be seen."""


@dataclass(frozen=True)
class Check:
    """One thing that was compared with plain forwards. All numbers are relative to the spread of the correct values.

    Args:
      error: what was measured.
      noise: the error that rounding alone causes.
      control: the error that the least visible of the deliberate faults causes.
      bound: the limit that the error was held against: between noise and control, as far from either, and at least
        `MARGIN` times the noise.
      verdict: "unclear" when the control cannot be told from the noise, so that a small error proves nothing.
    """

    name: str
    error: float
    noise: float
    control: float
    bound: float
    verdict: Verdict

    @classmethod
    def of(cls, name: str, error: float, noise: float, control: float) -> Check:
        """Hold an error against the bound that follows from noise and control."""
        bound = max(MARGIN * noise, math.sqrt(noise * control))
        verdict: Verdict = "wrong" if not error <= bound else "right" if control > bound else "unclear"
        return cls(name, error, noise, control, bound, verdict)

    def describe(self) -> str:
        """The numbers in one phrase."""
        return (
            f"relative error {self.error:.2g}; rounding alone gives {self.noise:.2g}, a fault made on purpose "
            f"{self.control:.2g}, allowed is {self.bound:.2g}"
        )


@dataclass(frozen=True)
class Probe:
    """The findings of a model's probe.

    Args:
      checks: by name: "chains", "trees" and "branches" of the reduced model, "linears" where layers are packed,
        "execution" of the whole model as it runs.
      layers: decoder layers of the reduced model.
      dtype: in which it ran.
      window: width of its sliding windows, narrow enough for a short text to fill them; None without any.
      invisible: faults that do not show in this model, such as wrong positions in one that has none.
      num_forwards: of all kinds; ``num_tokens`` is the sum of rows times width over them.
      seconds: that it took, packing not included.
      extra_bytes: the largest of these layers in that dtype, which is held besides the model for the length of a call.
    """

    checks: tuple[Check, ...]
    layers: tuple[int, ...]
    dtype: str
    window: int | None
    invisible: tuple[str, ...]
    num_forwards: int
    num_tokens: int
    seconds: float
    extra_bytes: int

    @property
    def supports_trees(self) -> bool:
        return all(check.verdict != "wrong" for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """As data for JSON, which has no infinity: an error without a number is None."""
        data = dataclasses.asdict(self)
        for check in data["checks"]:
            check["error"] = check["error"] if math.isfinite(check["error"]) else None
        return data

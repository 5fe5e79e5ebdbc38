"""Profile of a method on a machine: measured costs and acceptance, in a file written by ``foredraft tune``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from foredraft.config.keywords import integer, real
from foredraft.engine.cost_model import FEW, MEMORY, CostCurve, read_seconds
from foredraft.errors import ConfigError, error_text
from foredraft.folders import read_own_json

if TYPE_CHECKING:
    from foredraft.engine.acceptance_model import AcceptanceModel
    from foredraft.engine.cost_model import CostModel

FORMAT = "foredraft-profile"
REMEDY = "make one with foredraft tune"

SAME_MODEL = ("model", "layers", "shapes")
"""Facts that must agree. If other facts differ, the costs of a profile are not valid and are ignored."""


@dataclass(frozen=True)
class BestLength:
    """The best draft length for one batch size and context.

    Args:
      num_speculative_tokens: best draft length; 0 if plain decoding is best.
      speedup, low, high: expected speed relative to plain decoding, with its 95 % interval over prompts.
    """

    num_rows: int
    context: int
    num_speculative_tokens: int
    speedup: float
    low: float
    high: float

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> BestLength:
        """Read an entry from JSON data."""
        least = {"num_rows": 1, "context": 0, "num_speculative_tokens": 0}
        counts = (integer("a setting", name, data[name], low) for name, low in least.items())
        return cls(*counts, *(real("a setting", name, data[name], 0.0) for name in ("speedup", "low", "high")))


@dataclass(frozen=True)
class Profile:
    """Measured costs and acceptance of one method over one target.

    Args:
      method: name of the method whose drafts were measured.
      facts: facts of the target and the machine, see `foredraft.engine.costs`.
      curves: costs of verification.
      drafting: seconds of drafting by number of levels, for one row.
      acceptance: probability that a draft is right at depth 1, 2, ... if it was right at all depths before.
      settings: best draft lengths derived from these measurements.
      details: measurement conditions, for people.
    """

    method: str
    facts: Mapping[str, Any]
    curves: tuple[CostCurve, ...]
    drafting: Mapping[int, float]
    acceptance: tuple[float, ...]
    settings: tuple[BestLength, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Convert to plain data."""
        return {
            "format": FORMAT,
            "method": self.method,
            "facts": dict(self.facts),
            "costs": [asdict(curve) for curve in self.curves],
            "drafting_seconds": dict(self.drafting),
            "acceptance": list(self.acceptance),
            "settings": [asdict(setting) for setting in self.settings],
            **self.details,
        }

    @classmethod
    def load(cls, file: str | os.PathLike[str]) -> Self:
        """Read a file written from `as_dict`.

        Raises: ConfigError for a file that cannot be read or is not a profile.
        """
        path = Path(file).expanduser()
        data = read_own_json(path, FORMAT, "profile", "foredraft tune")
        try:
            return cls(
                str(data["method"]),
                dict(data["facts"]),
                tuple(map(CostCurve.read, data["costs"])),
                read_seconds(data["drafting_seconds"]),
                tuple(real("a profile", "acceptance", rate, 0.0, 1.0) for rate in data["acceptance"]),
                tuple(map(BestLength.read, data["settings"])),
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ConfigError(f"profile {path} is incomplete or invalid ({error_text(error)}); {REMEDY}") from None

    def difference(self, facts: Mapping[str, Any]) -> str | None:
        """Describe the conditions that differ from those of the measurement; None if there are none.

        Raises: ConfigError for another model.
        """
        differing = [name for name in facts if self.facts.get(name) != facts[name]]
        other = [name for name in differing if name in SAME_MODEL]
        if other:
            other += ["dtype"] if "dtype" in differing else []  # the shapes include dtypes
            theirs = ", ".join(f"{name} {self.facts.get(name)}" for name in other)
            ours = ", ".join(f"{name} {facts[name]}" for name in other)
            raise ConfigError(f"the profile is of another model ({theirs}; this model has {ours}); {REMEDY}")
        return ", ".join(f"{name} {self.facts.get(name)}, now {facts[name]}" for name in differing) or None

    def curve(self) -> CostCurve | None:
        """Return the curve of one row at the shortest context, with its cost per token; None if it was not measured."""
        single = sorted((curve for curve in self.curves if curve.num_rows == 1), key=lambda curve: curve.context)
        if not single:
            return None
        short, long = single[0], single[-1]
        fewest = min(short.seconds.keys() & long.seconds.keys(), default=None)
        if fewest is None or long.context == short.context:
            return short
        more = max(long.seconds[fewest] - short.seconds[fewest], 0.0)
        return replace(short, per_token=more / (long.context - short.context))

    def teach(self, acceptance: AcceptanceModel, title: str, costs: CostModel | None) -> None:
        """Pass the measurements to the models of a governor.

        Args:
          title: name of the drafting mode.
          costs: cost model of the governor; None if the measured costs are not valid on this machine.
        """
        for depth, rate in enumerate(self.acceptance, 1):
            acceptance.expect(title, depth, rate, MEMORY / 2)
        if costs is None:
            return
        for _ in range(FEW):
            for curve in self.curves:
                costs.set_context(curve.context)
                for nodes, seconds in curve.seconds.items():
                    costs.verified(curve.num_rows, curve.num_rows * nodes, seconds)
            for levels, seconds in self.drafting.items():
                costs.drafted(1, levels, seconds)

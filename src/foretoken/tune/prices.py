"""What steps cost here, measured once and kept: two runs price alike, whatever else the machine does."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

from foretoken.engine.cost_model import CostCurve
from foretoken.engine.costs import curve_of, facts_of, keep_measured, measure_curve, measured_file, read_measured
from foretoken.model.lm import CausalLM

ROUNDS = 3
"""Measurements of the curve, one after another: their spread is what is not known of it."""

MOST_ROUNDS = 9
"""Where the machine was busy, later runs add their own to what is known, until there are so many."""

FILE = "-prices"


class Step(NamedTuple):
    """What a step of one row has drafted and brought.

    Args:
      nodes: that were verified, the pending one included.
      levels: that were asked for.
      depth: of what was drafted.
      accepted: drafted tokens that were kept.
    """

    nodes: int
    levels: int
    depth: int
    accepted: int


@dataclass(frozen=True)
class Counts:
    """The steps that one text takes.

    Args:
      context: tokens before the steps, on average.
    """

    steps: Counter[Step]
    num_tokens: int
    context: float = 0.0

    @property
    def num_steps(self) -> int:
        return self.steps.total()


@dataclass
class Prices:
    """Seconds of what steps consist of.

    Args:
      curves: of verifying, measured one after another.
      host_seconds: of a step beside drafting and verifying; plain steps have them, too.
      drafting: by the title of what drafts, seconds of drafting by levels, one row.
      measured: when.
      is_steady: whether nothing else kept the machine busy then, as far as can be told.
    """

    curves: tuple[CostCurve, ...]
    host_seconds: float = 0.0
    drafting: dict[str, dict[int, float]] = field(default_factory=dict)
    measured: str = ""
    is_steady: bool = True

    def mean(self) -> CostCurve:
        """The curves as one."""
        first = self.curves[0]
        widths = [width for width in first.seconds if all(width in curve.seconds for curve in self.curves)]
        seconds = {width: fmean(curve.seconds[width] for curve in self.curves) for width in widths}
        return CostCurve(seconds, first.context, fmean(curve.per_token for curve in self.curves))

    def draft_seconds(self, title: str, levels: int) -> float:
        """Of drafting so many levels; see `drafting_seconds`."""
        return drafting_seconds(self.drafting.get(title, {}), levels)

    def plain(self, counts: Counts, curve: CostCurve, num_rows: int = 1) -> float:
        """Seconds in which plain decoding writes a text."""
        return counts.num_tokens * self._step(1, curve, counts.context, num_rows)

    def drafted(self, title: str, counts: Counts, curve: CostCurve, num_rows: int = 1) -> float:
        """Seconds in which these steps write it. The other rows of a batch are taken to verify as many nodes."""
        return sum(
            count * (self._step(step.nodes, curve, counts.context, num_rows) + self.draft_seconds(title, step.levels))
            for step, count in counts.steps.items()
        )

    def _step(self, nodes: int, curve: CostCurve, context: float, num_rows: int) -> float:
        """What verifying takes for one of so many rows."""
        of_context = curve.per_token * max(context - curve.context, 0.0)
        return curve.at(num_rows * nodes) / num_rows + of_context + self.host_seconds

    # -- on disk ---------------------------------------------------------------------------------------------------

    def keep(self, facts: Mapping[str, Any]) -> None:
        """For the next run on this machine, with this model."""
        keep_measured(measured_file(facts, FILE), {"facts": facts, **asdict(self)})

    @classmethod
    def kept(cls, facts: Mapping[str, Any]) -> Prices | None:
        """What an earlier run has measured."""
        read = read_measured(measured_file(facts, FILE))
        try:
            if read is None or not read["curves"]:
                return None
            drafting = {
                str(title): {int(levels): float(taken) for levels, taken in known.items()}
                for title, known in read["drafting"].items()
            }
            curves = tuple(map(curve_of, read["curves"]))
            return cls(curves, float(read["host_seconds"]), drafting, str(read["measured"]), bool(read["is_steady"]))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            return None


def prices_of(
    target: CausalLM, *, is_fresh: bool = False, say: Callable[[str, int, int], None] = lambda *_: None
) -> Prices:
    """The prices of a target on this machine: those that are kept, else measured now, in about six seconds.

    Args:
      is_fresh: measure anew.
    """
    facts = facts_of(target)
    known = None if is_fresh else Prices.kept(facts)
    if known is not None and (known.is_steady or len(known.curves) >= MOST_ROUNDS):
        return known
    found = known or Prices(())
    for number in range(ROUNDS):
        say("timing forwards", number, ROUNDS)
        curve, is_steady = measure_curve(target)
        found.curves += (_rising(curve),)
        found.is_steady &= is_steady
    found.measured = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    found.keep(facts)
    return found


def drafting_seconds(known: Mapping[int, float], levels: int) -> float:
    """Of drafting so many levels: on lines through those that were measured, and on beyond; 0 where nothing was."""
    return max(0.0, CostCurve(known).at(max(levels, min(known)))) if levels and known else 0.0


def _rising(curve: CostCurve) -> CostCurve:
    """No number of nodes counts for more than a larger one: what disturbs a machine only ever adds."""
    known = curve.seconds
    seconds = {width: min(known[other] for other in known if other >= width) for width in known}
    return CostCurve(seconds, curve.context, curve.per_token)


def rates(steps: Mapping[tuple[int, int], int]) -> tuple[float, ...]:
    """The chance of every depth, given that the one above was right; as deep as anything was tried.

    Args:
      steps: how many there were by depth of the draft and accepted tokens.
    """
    found = []
    for depth in range(1, max((drafted for drafted, _ in steps), default=0) + 1):
        tried = sum(count for (drafted, kept), count in steps.items() if drafted >= depth and kept >= depth - 1)
        right = sum(count for (drafted, kept), count in steps.items() if drafted >= depth and kept >= depth)
        if not tried:
            break
        found.append(right / tried)
    return tuple(found)

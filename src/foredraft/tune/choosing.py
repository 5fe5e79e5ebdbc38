"""The choice of the fastest setting from counted steps and measured costs, with its interval and its reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foredraft.bench.outcome import MIN_PROMPTS
from foredraft.config.speculative import SpeculativeConfig
from foredraft.engine.cost_model import CostCurve
from foredraft.engine.costs import StepCosts
from foredraft.tune.counting import PLAIN, Setting, SettingCounts
from foredraft.tune.walk import Counts

NUM_RESAMPLES = 2000
TAIL = 0.025

LITTLE = 0.03
"""Share of speed that a simpler setting may lose if measurements cannot separate it from the fastest."""

_NO_LOSS = 0.005
"""Loss of speed that would be shown as 0 %."""

Times = NDArray[np.float64]


@dataclass(frozen=True)
class Choice:
    """The recommended setting, and all settings that were compared.

    Args:
      ranked: all settings with their counts, the fastest first.
      chosen: the recommended one.
      ties: settings that measurements cannot separate from the fastest, the simplest first; empty if the fastest has no
        ties.
      prices: measured costs of steps.
      num_rows: number of rows decoded together.
    """

    ranked: tuple[SettingCounts, ...]
    chosen: SettingCounts
    ties: tuple[SettingCounts, ...]
    prices: StepCosts
    num_rows: int = 1

    @cached_property
    def best(self) -> SettingCounts:
        """The fastest setting, even if it is not certain to be the fastest."""
        return self.ranked[0]

    @property
    def plain_is_best(self) -> bool:
        return self.chosen.setting is PLAIN

    def of_method(self, title: str) -> Iterator[SettingCounts]:
        """Yield the settings of a method, the fastest first."""
        return (one for one in self.ranked if one.setting.title == title)

    def best_of_methods(self) -> list[SettingCounts]:
        """Return the fastest setting of every method, the fastest first, without plain decoding."""
        first: dict[str, SettingCounts] = {}
        for one in self.ranked:
            if one.setting is not PLAIN:
                first.setdefault(one.setting.title, one)
        return list(first.values())

    def speed_at(self, one: SettingCounts, num_rows: int) -> float:
        """Return the speed of a setting in a batch of this number of rows, relative to plain decoding, by the mean cost
        curve."""
        curve = self.prices.mean()
        plain, drafted = (
            sum(_seconds(arm, self.prices, curve, num_rows)) for arm in (SettingCounts(PLAIN, one.counts), one)
        )
        return plain / drafted

    def sentence(self) -> str:
        """Return the recommendation and its reason, in numbers."""
        if self.plain_is_best:
            others = [one for one in self.ranked if one.setting is not PLAIN]
            if not others:
                return "only plain decoding was tried"
            said = f"plain decoding is best: {others[0].setting.name} {self._gain(others[0])}"
        else:
            said = f"{self.chosen.setting.name} {self._gain(self.chosen)}"
            worst = min(self.of_method(self.chosen.setting.title), key=lambda one: one.speed)
            if worst.speed < 1.0 - _NO_LOSS:
                said += (
                    f"; {worst.setting.name} would lose {_percent(1 - worst.speed)} %, since {self._verifying(worst)}"
                )
        return f"{said}.{self._tie()}"

    def _gain(self, one: SettingCounts) -> str:
        """Return the gain of a setting in words: "gains 31 % (22 to 41): ..."."""
        change, low, high = one.speed - 1, one.low - 1, one.high - 1
        if change < 0:
            what, change, low, high = "would lose", -change, -high, -low
        else:
            what = "would gain" if self.plain_is_best else "gains"
        steps = f"{_tokens(one):.2f} tokens per step at {self._cost(one):.2f} times the cost of a plain step"
        return f"{what} {_percent(change)} % ({_percent(low)} to {_percent(high)}): {steps} ({self._verifying(one)})"

    def _verifying(self, one: SettingCounts) -> str:
        """Return in words the cost of verifying the mean number of nodes of steps with a draft, and the cost of
        drafting."""
        nodes = max(2, round(_drafted_nodes(one)))
        curve, rows = self.prices.mean(), self.num_rows
        said = f"verify({nodes}) / verify(1) = {curve.at(rows * nodes) / curve.at(rows):.2f}"
        steps = [(step.levels, count) for counts in one.counts for step, count in counts.steps.items()]
        seconds = sum(count * self.prices.draft_seconds(one.priced_as, levels) for levels, count in steps)
        share = seconds / _total(one.counts, "num_steps") * rows / curve.at(rows)
        return f"{said} and drafting {share:.2f} of a plain step" if share >= LITTLE else said

    def _cost(self, one: SettingCounts) -> float:
        """Return the cost of a step relative to a plain step."""
        return _tokens(one) / one.speed

    def _tie(self) -> str:
        others = [one.setting.name for one in self.ties if one is not self.chosen]
        num_prompts = len(self.chosen.counts)
        if num_prompts < MIN_PROMPTS:
            return f" {num_prompts} prompts are too few for a reliable result; use {MIN_PROMPTS} or more."
        if not others:
            return ""
        names = [repr(name) for name in others[:3]] + ([f"{len(others) - 3} more"] if len(others) > 3 else [])
        shown = " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))
        kind = "the simplest of them was chosen" if self.chosen is not self.best else "it is the fastest of them"
        return f" A tie: the measurements do not separate it from {shown}; {kind}."

    def as_dict(self) -> dict[str, Any]:
        """Return the choice as plain data."""
        curve = self.prices.mean()
        return {
            "speculative_config": dict(self.chosen.setting.config),
            "name": self.chosen.setting.name,
            "speedup": self.chosen.speed,
            "low": self.chosen.low,
            "high": self.chosen.high,
            "sentence": self.sentence(),
            "ties": [one.setting.name for one in self.ties if one is not self.chosen],
            "num_rows": self.num_rows,
            "step_cost": {str(nodes): taken / curve.at(1) for nodes, taken in curve.seconds.items()},
            "compared": [
                {
                    "name": one.setting.name,
                    "speculative_config": dict(one.setting.config),
                    "speedup": one.speed,
                    "low": one.low,
                    "high": one.high,
                    "tokens_per_step": _tokens(one),
                    "step_cost": self._cost(one),
                }
                for one in self.ranked
            ],
        }


def choose(arms: Sequence[SettingCounts], prices: StepCosts, *, num_rows: int = 1, seed: int = 0) -> Choice:
    """Choose the fastest setting. If measurements cannot separate several settings from it, choose the simplest of
    them.

    Args:
      arms: settings with their counts over the same prompts, ordered from the simplest method on. Plain decoding is
        added.
      prices: measured costs of steps.
      num_rows: number of rows decoded together.
      seed: seed of the resampling of prompts and measurements.

    Randomness: an own generator; the same arms and prices always give the same choice.
    """
    plain_counts = arms[0].counts if arms else ()
    arms = [SettingCounts(PLAIN, plain_counts), *arms]
    times = np.array([[_seconds(arm, prices, curve, num_rows) for curve in prices.rising()] for arm in arms])
    points = _speeds(times.mean(axis=1).sum(axis=1))
    generator = np.random.default_rng(seed)
    num_prompts = times.shape[2]
    drawn = np.empty((NUM_RESAMPLES, len(arms)))
    for place in range(NUM_RESAMPLES):
        prompts = generator.integers(0, num_prompts, num_prompts)
        drawn[place] = _speeds(times[:, generator.integers(0, times.shape[1]), prompts].sum(axis=1))
    low, high = np.quantile(drawn, (TAIL, 1 - TAIL), axis=0)
    best = int(points.argmax())
    is_tied = np.quantile(drawn[:, [best]] / drawn, TAIL, axis=0) <= 1.0
    found = [replace(arm, speed=float(points[i]), low=float(low[i]), high=float(high[i])) for i, arm in enumerate(arms)]
    simplest = sorted(range(len(arms)), key=lambda i: _complexity(i, arms[i].setting, arms))
    tied = [i for i in simplest if is_tied[i]]
    chosen = next(i for i in tied if points[i] >= (1 - LITTLE) * points[best])
    order = sorted(range(len(arms)), key=lambda i: -points[i])
    ties = tuple(found[i] for i in tied) if len(tied) > 1 else ()
    return Choice(tuple(found[i] for i in order), found[chosen], ties, prices, num_rows)


def _seconds(arm: SettingCounts, prices: StepCosts, curve: CostCurve, num_rows: int) -> list[float]:
    """Return the seconds of a setting for every prompt. The other rows of a batch are assumed to verify as many
    nodes."""

    def verifying(nodes: int, counts: Counts) -> float:
        """Return the seconds of a step per row, without drafting."""
        of_context = curve.per_token * max(counts.context - curve.context, 0.0)
        return curve.at(num_rows * nodes) / num_rows + of_context + prices.host_seconds

    if arm.setting is PLAIN:
        return [counts.num_tokens * verifying(1, counts) for counts in arm.counts]
    return [
        sum(
            number * (verifying(step.nodes, counts) + prices.draft_seconds(arm.priced_as, step.levels))
            for step, number in counts.steps.items()
        )
        for counts in arm.counts
    ]


def _speeds(seconds: Times) -> Times:
    """Return the speeds of all settings relative to the first, which is plain decoding."""
    speeds: Times = seconds[0] / seconds
    return speeds


def _complexity(place: int, setting: Setting, arms: Sequence[SettingCounts]) -> tuple[Any, ...]:
    """Return a sort key for simplicity.

    Plain decoding comes first, then methods without a second model, then the order of methods. A governed setting comes
    before fixed sizes, because it adapts to other prompts. Short drafts come before long ones.
    """
    if setting is PLAIN:
        return (0,)
    config = SpeculativeConfig.parse(setting.config)
    first = next(i for i, arm in enumerate(arms) if arm.setting.title == setting.title)
    has_model = config.model_part is not None or any(part.definition.drafts_with_heads for part in config.parts)
    size = (setting.nodes or 0, setting.length or 0)
    return 1, has_model, config.definition.combines, first, not setting.is_governed, size, place


def _tokens(arm: SettingCounts) -> float:
    """Return the mean number of tokens per step."""
    if arm.setting is PLAIN:
        return 1.0
    return _total(arm.counts, "num_tokens") / _total(arm.counts, "num_steps")


def _total(counts: Sequence[Counts], name: str) -> int:
    return sum(getattr(one, name) for one in counts)


def _drafted_nodes(arm: SettingCounts) -> float:
    """Return the mean number of nodes of steps that verified a draft."""
    steps = [(step.nodes, count) for one in arm.counts for step, count in one.steps.items() if step.nodes > 1]
    number = sum(count for _, count in steps)
    return sum(nodes * count for nodes, count in steps) / number if number else 1.0


def _percent(share: float) -> str:
    return f"{100 * share:.0f}"

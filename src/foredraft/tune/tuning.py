"""Search for the best method for a model, a machine and prompts: plain outputs, counts of every method, and a
choice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from foredraft.bench.outcome import MIN_PROMPTS
from foredraft.bench.workload import BenchPrompt
from foredraft.config.sampling import SamplingParams
from foredraft.drafters.none import EmptyDrafter
from foredraft.ending import finishing
from foredraft.engine.cost_model import FEW
from foredraft.engine.costs import StepCosts, facts_of, prices_of
from foredraft.engine.drafter import Drafter
from foredraft.engine.profiles import BestLength, Profile
from foredraft.errors import ConfigError, ForedraftError
from foredraft.llm import LLM
from foredraft.progress import Watch
from foredraft.tune.choosing import Choice, choose
from foredraft.tune.counting import ROWS_AT_ONCE, Setting, SettingCounts, alone, decoded, record, settings_of, walked
from foredraft.tune.walk import RecordedText, rates

SHARE_OF_TEXTS = 0.25
"""Share of the time budget for decoding the prompts plainly."""


@dataclass
class Tuning:
    """One running search.

    The work that fits into the budget is planned before it begins, from measured costs. The same costs give the same
    plan.

    Args:
      methods: titles and configs of the methods to try, the simplest first.
      budget_seconds: seconds that decoding may take, by the measured costs.
    """

    llm: LLM
    methods: Mapping[str, Mapping[str, Any]]
    budget_seconds: float
    say: Watch = lambda *_: None
    prices: StepCosts = field(init=False)
    refused: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    is_interrupted: bool = False
    _left: float = field(init=False)

    def measure(self, *, is_fresh: bool = False) -> None:
        """Measure the costs of forward passes, unless they are stored already."""
        self.prices = prices_of(self.llm.target, FEW, is_fresh=is_fresh, say=self.say)
        self._left = self.budget_seconds

    def num_prompts(self, most: int, max_new_tokens: int) -> int:
        """Return the number of prompts that can be decoded in their share of the budget.

        Raises: ConfigError if that is too few.
        """
        seconds = max_new_tokens * self._row_seconds(1)
        number = int(min(most, SHARE_OF_TEXTS * self.budget_seconds / seconds))
        fewest = min(most, MIN_PROMPTS)
        if number < fewest:
            needed = fewest * seconds / SHARE_OF_TEXTS
            raise ConfigError(
                f"--budget is {self.budget_seconds:g} seconds, but decoding {fewest} prompts with {max_new_tokens} new "
                f"tokens needs about {needed:.0f}; raise it, or lower --max-new-tokens"
            )
        return number

    def _row_seconds(self, nodes: int) -> float:
        """Return the seconds of a step per row of a batch."""
        return self.prices.mean().at(ROWS_AT_ONCE * nodes) / ROWS_AT_ONCE

    def run(
        self, prompts: Sequence[BenchPrompt], params: SamplingParams, *, num_rows: int = 1, seed: int = 0
    ) -> Choice:
        """Decode, count and choose. After Ctrl-C the choice is among the settings that have been counted.

        Raises: ConfigError if there is no prompt, or if no method can be used; KeyboardInterrupt if nothing was
        counted.
        """
        if not prompts:
            raise ConfigError("no prompt leaves room for new tokens in the context of this model; use shorter prompts")
        target, total = self.llm.target, len(prompts)
        self.say("decoding plainly", 0, total)
        given = [(prompt.category, tuple(prompt.token_ids)) for prompt in prompts]
        eos = () if params.ignore_eos else self.llm.eos_token_ids
        texts = record(target, given, params, eos, lambda done: self.say("decoding plainly", done, total))
        if not self.prices.host_seconds:
            self.prices.host_seconds = alone(target, EmptyDrafter(), texts, self.prices.mean())[1]
        self._left -= sum(len(text.output) for text in texts) * self._row_seconds(1)
        found: dict[str, list[SettingCounts]] = {title: [] for title in self.methods}
        try:
            self._count(texts, found)
        except KeyboardInterrupt:
            self.is_interrupted = True
            if not any(found.values()):
                raise
        finally:
            with finishing():
                self.prices.keep(facts_of(target))
        arms = [arm for several in found.values() for arm in several]
        if not arms:
            reasons = "; ".join([*(f"{name}: {reason}" for name, reason in self.refused.items()), *self.left_out])
            raise ConfigError(f"none of the methods can be tried: {reasons}")
        return choose(arms, self.prices, num_rows=num_rows, seed=seed)

    def _count(self, texts: Sequence[RecordedText], found: Mapping[str, list[SettingCounts]]) -> None:
        """Count every setting of every method. Settings without forward passes come first, because they take little
        time."""
        need_target = []
        for place, (title, given) in enumerate(self.methods.items()):
            self.say("along the texts", place, len(self.methods))
            make = self._maker(title, {**given, "length_policy": "fixed"})
            if make is None:
                continue
            is_walked = make().facts.drafts_from_text
            settings = settings_of(title, given, is_walked=is_walked)
            if is_walked:
                found[title].extend(walked(self.llm.target, make, settings, texts, self.prices))
            else:
                need_target += settings
        for setting in need_target:
            if arm := self._decoded(setting, texts):
                found[setting.title].append(arm)

    def _maker(self, title: str, config: Mapping[str, Any]) -> Callable[[], Drafter] | None:
        """Return a function that makes the drafters of a config; None if the config cannot be used with this model."""
        try:
            return self.llm.with_speculative_config(config).drafting.new_drafter
        except ForedraftError as error:
            self.refused[title] = str(error)
            return None

    def _decoded(self, setting: Setting, texts: Sequence[RecordedText]) -> SettingCounts | None:
        """Return a setting that needs the target, with its counts; None if it exceeds the budget."""
        total = sum(len(text.output) for text in texts)
        planned = total * self._row_seconds(setting.nodes or (setting.length or 0) + 1)
        if planned > self._left:
            self.left_out.append(f"{setting.name} (about {planned:.0f} s)")
            return None
        make = self._maker(setting.title, setting.config)
        if make is None:
            return None
        self._left -= planned
        self.say(setting.name, 0, len(texts))
        return decoded(
            self.llm.target, make, setting, texts, self.prices, lambda done: self.say(setting.name, done, len(texts))
        )

    # -- what is written -------------------------------------------------------------------------------------------

    def profile(self, choice: Choice, details: Mapping[str, Any]) -> Profile:
        """Return a profile for `generate` and other commands, with the costs and the acceptance of the chosen
        method."""
        curve, chosen = self.prices.mean(), choice.chosen
        acceptance = rates(() if choice.plain_is_best else chosen.counts)
        length = 0 if choice.plain_is_best else chosen.setting.length or len(acceptance)
        expected = BestLength(choice.num_rows, curve.context, length, chosen.speed, chosen.low, chosen.high)
        return Profile(
            str(chosen.setting.config["method"]),
            facts_of(self.llm.target),
            (curve,),
            self.prices.drafting.get(chosen.priced_as, {}),
            acceptance,
            (expected,),
            {**choice.as_dict(), **details},
        )

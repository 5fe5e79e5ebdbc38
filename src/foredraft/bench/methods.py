"""Comparison of methods on one model: plain decoding and all candidates, interleaved on the same prompts."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from foredraft.bench.arms import EngineArm, OwnArms
from foredraft.bench.candidates import PLAIN
from foredraft.bench.equality import Equality, check, gap_of
from foredraft.bench.outcome import NO_DRAFTING, MethodRow, MethodsOutcome, RefusedMethod
from foredraft.bench.trial import Sampling, Trial, compare, interleave, prompt_ratios
from foredraft.bench.workload import BenchPrompt, check_kinds, prompts_of_kinds, read_questions, repeated_share
from foredraft.config.engine import EngineConfig, Guarantee
from foredraft.config.speculative import SpeculativeConfig
from foredraft.drafters.none import EmptyDrafter
from foredraft.engine.drafter import Drafter
from foredraft.engine.stats import StepProfile
from foredraft.errors import ConfigError, ForedraftError
from foredraft.loading.models import load_model
from foredraft.model.dtypes import check_kv_cache_dtype
from foredraft.model.execution.execution import check_kind
from foredraft.progress import Watch
from foredraft.testing.divergence import NEAR_TIES
from foredraft.testing.inflation import inflated_from

_WARM_UP_TOKENS = 8
_NO_DRAFTING = SpeculativeConfig.parse(NO_DRAFTING)


@dataclass(frozen=True)
class MethodsSettings:
    """Settings of a comparison. The defaults equal those of ``foredraft bench``.

    Args:
      num_prompts: total number of prompts. The kinds take turns.
      kinds: kinds of prompts; None for all kinds of the file except "copy".
      repeats: number of rounds per prompt. In a round, all methods run forwards and then backwards.
      exactness: "default" or "relaxed".
      is_forced: True if the candidates run without the governor; see `read_candidates`.
    """

    num_prompts: int = 9
    max_new_tokens: int = 48
    repeats: int = 1
    kinds: tuple[str, ...] | None = None
    prompts_file: Path | None = None
    sampling: Sampling = field(default_factory=Sampling)
    execution: str = "auto"
    exactness: str = EngineConfig.exactness
    is_forced: bool = False


@dataclass
class Contender:
    """A method that can be used, with its arm warmed up.

    Args:
      given: speculative config as written by the user.
      memory_bytes: growth of the process's memory; None if the system does not report it.
    """

    given: Mapping[str, Any]
    config: SpeculativeConfig
    arm: EngineArm
    memory_bytes: int | None

    @property
    def name(self) -> str:
        return self.arm.name

    def row(self, trial: Trial, equality: Equality | None) -> MethodRow:
        """Return the results of the method in a trial."""
        name, profile = self.name, self.arm.engine.profile
        stats, speed = trial.stats(name), trial.tokens_per_second(name)
        return MethodRow(
            method=name,
            given=self.given,
            tokens_per_second=None if math.isnan(speed) else speed,
            comparison=None if name == PLAIN else compare(trial, name, PLAIN),
            prompt_ratios=tuple(prompt_ratios(trial, name, PLAIN)),
            tokens_per_step=stats.tokens_per_step,
            acceptance_rate=stats.draft_acceptance_rate if stats.num_draft_tokens else None,
            nodes_per_step=1 + stats.num_draft_tokens / max(1, stats.num_steps),
            draft_seconds=(profile.propose_seconds + profile.observe_seconds) / max(1, profile.num_steps),
            memory_bytes=self.memory_bytes,
            equality=equality,
            lossless=self.config.rule.is_lossless,
            drafted_share=stats.num_spec_steps / max(1, stats.num_steps),
            governed_share=stats.num_undrafted_steps["governor"] / max(1, stats.num_steps),
        )


class Methods:
    """A comparison of methods on one model.

    Args:
      model: see `LLM`.
      say: function that is called with the current activity.

    The settings are checked before the model is loaded.

    Raises: CheckpointError, UnsupportedModelError, ConfigError.
    """

    def __init__(
        self,
        model: str,
        dtype: str,
        settings: MethodsSettings,
        say: Watch = lambda *_: None,
        *,
        quantization: str | None = None,
        weights: str | None = None,
        kv_cache_dtype: str = "auto",
        activations: str | None = None,
    ) -> None:
        self.settings = settings
        self._say = say
        check_kind(settings.execution)
        check_kv_cache_dtype(kv_cache_dtype)
        EngineConfig(exactness=settings.exactness)  # checks the name
        self._questions = read_questions(settings.prompts_file)
        check_kinds(self._questions, settings.kinds)
        loaded = load_model(model, dtype=dtype, quantization=quantization, weights=weights)
        self.label = describe(loaded.model)
        rounding = kv_cache_dtype, activations
        self._arms = OwnArms(loaded, model, dtype, settings.execution, settings.exactness, *rounding)
        self.target = self._arms.target

    @cached_property
    def prompts(self) -> list[BenchPrompt]:
        """Prompts, of all kinds in turn. Prompts that leave no room for the output are skipped.

        Raises: ConfigError if no prompt remains, or if there is no prompt of a kind.
        """
        settings, context = self.settings, self.target.context_length
        room = None if context is None else context - settings.max_new_tokens
        ending, answering = (
            replace(settings.sampling, temperature=0.0, ignore_eos=False),
            self._arms.arm(PLAIN, _NO_DRAFTING),
        )

        def answer(ids: tuple[int, ...]) -> tuple[int, ...]:
            return answering.run(ids, settings.max_new_tokens, ending).token_ids

        found = prompts_of_kinds(self._arms.tokenizer, self._questions, settings.kinds, room, answer)
        prompts = list(islice(found, settings.num_prompts))
        if not prompts:
            raise ConfigError(
                f"no prompt leaves room for {settings.max_new_tokens} new tokens: at most {room} prompt tokens fit; "
                "use shorter prompts, or lower --max-new-tokens"
            )
        return prompts

    def run(
        self, candidates: Mapping[str, Mapping[str, Any]], on_prompt: Callable[[MethodsOutcome], None]
    ) -> MethodsOutcome:
        """Compare all methods that can be used with this model.

        Args:
          candidates: speculative configs by name; see `read_candidates`.
          on_prompt: function that is called after every prompt with the current results.

        Raises: ConfigError if no method can be used.
        """
        plain = self._started(PLAIN, NO_DRAFTING, EmptyDrafter)
        contenders, refused = self._contenders(candidates)
        if not contenders:
            reasons = "; ".join(f"{one.method}: {one.reason}" for one in refused)
            raise ConfigError(f"none of the methods can be used with this model: {reasons}")
        settings = self.settings

        def outcome(trial: Trial) -> MethodsOutcome:
            return self._outcome(trial, plain, contenders, refused)

        def note(trial: Trial) -> None:
            self._say("timing", len(trial.prompts), len(self.prompts))
            on_prompt(outcome(trial))

        self._say("timing", 0, len(self.prompts))
        arms = [plain.arm, *(one.arm for one in contenders)]
        trial = interleave(arms, self.prompts, settings.sampling, settings.max_new_tokens, settings.repeats, note)
        return outcome(trial)

    def _contenders(self, candidates: Mapping[str, Mapping[str, Any]]) -> tuple[list[Contender], list[RefusedMethod]]:
        """Return the candidates whose drafter can be made, each after a first run, and the other candidates with the
        reason."""
        contenders: list[Contender] = []
        refused = []
        for place, (name, given) in enumerate(candidates.items()):
            self._say("loading", place, len(candidates))
            before = resident_bytes()
            try:
                make = self._arms.drafters_of(SpeculativeConfig.parse(given))
            except ForedraftError as error:
                refused.append(RefusedMethod(name, str(error)))
                continue
            contenders.append(self._started(name, given, make, before))
        return contenders, refused

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee for every method's tokens, compared with those of plain decoding."""
        return self.target.guarantee(self.settings.exactness)

    @property
    def _near_tie(self) -> float:
        """Largest gap in logits that rounding explains; 0 if the guarantee is bitwise."""
        return 0.0 if self.guarantee.keeps_bits else NEAR_TIES[self.target.dtype]

    def _is_judged(self, contender: Contender) -> bool:
        """Return whether the tokens can be compared. Some rules keep only the distribution of plain decoding."""
        return contender.config.rule.keeps_tokens or self.settings.sampling.is_greedy

    def _started(
        self, name: str, given: Mapping[str, Any], make: Callable[[], Drafter], before: int | None = None
    ) -> Contender:
        """Return a method whose arm has run once.

        Args:
          before: memory of the process in bytes before the method was loaded; by default the memory now.
        """
        before = resident_bytes() if before is None else before
        config = SpeculativeConfig.parse(given)
        arm = self._arms.arm(name, config, make)
        arm.run(self.prompts[0].token_ids, _WARM_UP_TOKENS, self.settings.sampling)
        arm.engine.profile = StepProfile()
        after = resident_bytes()
        grown = None if before is None or after is None else max(0, after - before)
        return Contender(given, config, arm, grown)

    # -- figures -----------------------------------------------------------------------------------------------

    def _outcome(
        self, trial: Trial, plain: Contender, contenders: Sequence[Contender], refused: Sequence[RefusedMethod]
    ) -> MethodsOutcome:
        judged = [one.name for one in contenders if self._is_judged(one)]
        gap = gap_of(self.target, trial.sampling)
        found = {one.arm: one for one in check(trial, gap, PLAIN, judged)}
        different = [one for one in found.values() if not one.passes(self._near_tie)]
        names = {one.arm for one in different}
        rows = [one.row(trial, found.get(one.name)) for one in contenders if one.name not in names]
        return MethodsOutcome(
            sampling=self.settings.sampling.label,
            kinds=tuple(prompt.category for prompt in trial.prompts),
            num_prompts_planned=len(self.prompts),
            runs_per_prompt=2 * self.settings.repeats,
            other_cpu_share=trial.other_cpu_share,
            guarantee=self.guarantee.describe(),
            repeated_share=repeated_share(trial.outputs(PLAIN)),
            plain=plain.row(trial, None),
            rows=tuple(rows),
            different=tuple(different),
            refused=tuple(refused),
            is_forced=self.settings.is_forced,
        )


def resident_bytes() -> int | None:
    """Return the resident memory of the process in bytes; None if the system does not report it (Linux does)."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def describe(model: Any) -> str:
    """Return the parameters and shape of a model, and the original width of an inflated one."""
    config = model.config
    layers = f"{config.num_hidden_layers} layer{'' if config.num_hidden_layers == 1 else 's'}"
    shape = f"hidden {config.hidden_size}, ffn {config.intermediate_size}, {layers}"
    old = inflated_from(model)
    grown = f"; inflated in width from hidden {old['hidden_size']}" if old else ""
    return f"{model.num_parameters() / 1e6:.1f} M ({shape}{grown})"

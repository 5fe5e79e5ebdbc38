"""Comparison of methods for a model: plain decoding and all candidates, interleaved on the same prompts."""

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
from foredraft.bench.workload import BenchPrompt, prompts_of_kinds, read_questions, repeated_share
from foredraft.config.engine import EngineConfig, Promise
from foredraft.config.speculative import SpeculativeConfig
from foredraft.drafters.none import EmptyDrafter
from foredraft.engine.drafter import Drafter
from foredraft.engine.stats import StepProfile
from foredraft.errors import ConfigError, ForedraftError
from foredraft.loading.models import load_model
from foredraft.progress import Watch
from foredraft.testing.divergence import NEAR_TIES
from foredraft.testing.inflation import inflated_from

_WARM_UP_TOKENS = 8
_NO_DRAFTING = SpeculativeConfig.parse(NO_DRAFTING)


@dataclass(frozen=True)
class MethodsSettings:
    """Settings of a comparison. Defaults are those of ``foredraft bench``.

    Args:
      num_prompts: in all, of the kinds in turn.
      kinds: of prompts; None for all that the prompts have but passages to copy.
      repeats: rounds of forwards and backwards through all methods, per prompt.
      exactness: default or relaxed.
      ignore_eos: go on past the end of the answer.
    """

    num_prompts: int = 9
    max_new_tokens: int = 48
    repeats: int = 1
    kinds: tuple[str, ...] | None = None
    prompts_file: Path | None = None
    sampling: Sampling = field(default_factory=Sampling)
    execution: str = "auto"
    exactness: str = EngineConfig.exactness


@dataclass
class Contender:
    """A method whose arm has run.

    Args:
      given: the speculative config, as a user writes it.
      memory_bytes: by which the process grew, as far as the system says.
    """

    given: Mapping[str, Any]
    config: SpeculativeConfig
    arm: EngineArm
    memory_bytes: int | None

    @property
    def name(self) -> str:
        return self.arm.name

    def row(self, trial: Trial, equality: Equality | None) -> MethodRow:
        """Its results in a trial, with the comparison of its tokens with those of plain decoding."""
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
        )


class Methods:
    """Holds the model and runs the comparison.

    Args:
      model: as for `LLM`.
      say: told what is running.

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
    ) -> None:
        self.settings = settings
        self._say = say
        loaded = load_model(model, dtype=dtype, quantization=quantization, weights=weights)
        self.label = describe(loaded.model)
        self._arms = OwnArms(loaded, model, dtype, settings.execution, settings.exactness, kv_cache_dtype)
        self.target = self._arms.target

    @cached_property
    def prompts(self) -> list[BenchPrompt]:
        """Prompts, of the kinds in turn; those that leave no room for the output are skipped.

        Raises: ConfigError when no prompt remains, or a kind has none.
        """
        settings, context = self.settings, self.target.context_length
        room = None if context is None else context - settings.max_new_tokens
        questions = read_questions(settings.prompts_file)
        ending, answering = (
            replace(settings.sampling, temperature=0.0, ignore_eos=False),
            self._arms.arm(PLAIN, _NO_DRAFTING),
        )

        def answer(ids: tuple[int, ...]) -> tuple[int, ...]:
            return answering.run(ids, settings.max_new_tokens, ending).token_ids

        found = prompts_of_kinds(self._arms.tokenizer, questions, settings.kinds, room, answer)
        prompts = list(islice(found, settings.num_prompts))
        if not prompts:
            raise ConfigError(f"no prompt leaves room for {settings.max_new_tokens} tokens in {room} of context")
        return prompts

    def run(
        self, candidates: Mapping[str, Mapping[str, Any]], on_prompt: Callable[[MethodsOutcome], None]
    ) -> MethodsOutcome:
        """Compare all that apply.

        Args:
          candidates: speculative configs by name; see `read_candidates`.
          on_prompt: told of what is known so far, after every prompt.

        Raises: ConfigError when no method applies.
        """
        plain = self._started(PLAIN, NO_DRAFTING, EmptyDrafter)
        contenders, refused = self._contenders(candidates)
        if not contenders:
            reasons = "; ".join(f"{one.method}: {one.reason}" for one in refused)
            raise ConfigError(f"none of the methods applies to this model: {reasons}")
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
        """The candidates whose drafter can be made, each started once; and the others with their reason."""
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
    def promise(self) -> Promise:
        """The guarantee for every method's tokens, compared with those of plain decoding."""
        return self.target.promise(self.settings.exactness)

    @property
    def _near_tie(self) -> float:
        """Gap in logits up to which rounding explains other tokens; 0 where the same bits are promised."""
        return 0.0 if self.promise.keeps_bits else NEAR_TIES[self.target.dtype]

    def _is_judged(self, contender: Contender) -> bool:
        """Rules that draw by themselves follow the distribution of plain decoding, and not its tokens."""
        return contender.config.rule.keeps_tokens or self.settings.sampling.is_greedy

    def _started(
        self, name: str, given: Mapping[str, Any], make: Callable[[], Drafter], before: int | None = None
    ) -> Contender:
        """A method whose arm has run once.

        Args:
          before: memory of the process before anything of the method was loaded; its memory now if left out.
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
            promise=self.promise.describe(),
            repeated_share=repeated_share(trial.outputs(PLAIN)),
            plain=plain.row(trial, None),
            rows=tuple(rows),
            different=tuple(different),
            refused=tuple(refused),
        )


def resident_bytes() -> int | None:
    """Resident memory of the process now; None where the system does not report it (Linux does)."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def describe(model: Any) -> str:
    """Parameters and shape, and what an inflated model was before."""
    config = model.config
    layers = f"{config.num_hidden_layers} layer{'' if config.num_hidden_layers == 1 else 's'}"
    shape = f"hidden {config.hidden_size}, ffn {config.intermediate_size}, {layers}"
    old = inflated_from(model)
    grown = f"; inflated in width from hidden {old['hidden_size']}" if old else ""
    return f"{model.num_parameters() / 1e6:.1f} M ({shape}{grown})"

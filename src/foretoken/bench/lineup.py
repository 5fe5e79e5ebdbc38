"""The models of a benchmark, and the arms that decode with them: this library's, and transformers' at their best."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from functools import cached_property
from typing import Any

from foretoken.bench.arms import EngineArm, Sampling, TransformersArm
from foretoken.bench.measure import interleave
from foretoken.bench.models import Pair
from foretoken.bench.settings import Settings
from foretoken.bench.workload import Prompt
from foretoken.config.speculative import SpeculativeConfig
from foretoken.drafters.context import DrafterContext, drafter_factory
from foretoken.engine.engine import EngineConfig
from foretoken.loading.defaults import default_keys
from foretoken.model.lm import CausalLM

PLAIN = "plain"
TRANSFORMERS = "transformers"
_NUM_FINALISTS = 2


class Lineup:
    """Makes arms over one pair of models.

    Args:
      pair: as it is measured.
      say: told in a few words what is running.
    """

    def __init__(self, pair: Pair, settings: Settings, say: Callable[[str], None] = lambda _: None) -> None:
        self.pair = pair
        self.settings = settings
        self._say = say

    @cached_property
    def target(self) -> CausalLM:
        return CausalLM(self.pair.target, execution=self.settings.execution)

    @cached_property
    def drafter(self) -> CausalLM | None:
        model = self.pair.drafter
        return None if model is None else CausalLM(model, execution=self.settings.execution)

    def engine_arm(
        self, name: str, config: Mapping[str, Any], drafter: CausalLM | None = None, num_rows: int = 1
    ) -> EngineArm:
        """An arm of this library under a speculative config."""
        parsed = SpeculativeConfig.parse(config)
        drafter = drafter or self.drafter
        drafter_context = DrafterContext(self.target, drafter, self.pair.tokenizer, self.pair.zoo_name)
        make = drafter_factory(parsed, drafter_context)
        engine = EngineConfig(
            max_num_seqs=num_rows, acceptance=parsed.rejection_sample_method, typical=parsed.typical_limits
        )
        return EngineArm(name, self.target, make(), self.pair.eos_token_ids, engine, is_governed=parsed.is_governed)

    def plain_arm(self, num_rows: int = 1) -> EngineArm:
        return self.engine_arm(PLAIN, {"method": "none"}, num_rows=num_rows)

    @property
    def default_method(self) -> str:
        """How to draft where nothing else is said: with the pair's drafter, else as the command line does."""
        if self.drafter is not None:
            return "draft_model"
        return str(default_keys(self.pair.zoo_name)["method"])

    def draft_arms(self) -> list[EngineArm]:
        """The pair's drafter as chain and as tree; without one, the default method."""
        if self.drafter is None:
            return [self.engine_arm(self.default_method, self.config(self.default_method))]
        tree = {"num_draft_branches": self.settings.num_branches}
        return [
            self.engine_arm("draft_model", self.config("draft_model")),
            self.engine_arm("draft_model tree", self.config("draft_model") | tree),
        ]

    def config(self, method: str) -> dict[str, Any]:
        """A method with the length of draft that was asked for, if any."""
        length = self.settings.num_draft_tokens
        return {"method": method} if length is None else {"method": method, "num_speculative_tokens": length}

    def lookup_arms(self) -> list[EngineArm]:
        return [self.engine_arm(method, self.config(method)) for method in ("ngram", "nasd")]

    def transformers_arm(self, name: str = TRANSFORMERS, **options: Any) -> TransformersArm:
        """transformers on the same weights."""
        return TransformersArm(name, self.pair.target, self.pair.eos_token_ids, options)

    def plain_candidates(self) -> list[TransformersArm]:
        return [
            self.transformers_arm("dynamic cache"),
            self.transformers_arm("static cache", cache_implementation="static"),
        ]

    def assisted_candidates(self) -> list[TransformersArm]:
        """Every number of assistant tokens under both schedules."""
        return [
            TransformersArm(
                f"{schedule} {length}",
                self.pair.target,
                self.pair.eos_token_ids,
                assistant=self.pair.drafter,
                assistant_options={"num_assistant_tokens": length, "num_assistant_tokens_schedule": schedule},
            )
            for schedule in ("constant", "heuristic")
            for length in self.settings.assisted_lengths
        ]

    def lookup_candidates(self) -> list[TransformersArm]:
        return [
            self.transformers_arm(f"{length}", prompt_lookup_num_tokens=length)
            for length in self.settings.lookup_lengths
        ]

    def tuned(
        self, name: str, candidates: Seq[TransformersArm], prompts: Seq[Prompt], sampling: Sampling
    ) -> tuple[TransformersArm, dict[str, float]]:
        """The fastest of some settings of transformers on these prompts, and the tokens per second of all.

        One run of each on the first prompt, then the best two interleaved on one prompt or two.
        """
        self._say(f"tuning {name}")
        speeds = {}
        for candidate in candidates:
            candidate.run(prompts[0].token_ids, 4, sampling)
            run = candidate.run(prompts[0].token_ids, self.settings.max_new_tokens, sampling)
            speeds[candidate.name] = run.num_decoded / run.decode_seconds if run.num_decoded else 0.0
        finalists = sorted(candidates, key=lambda candidate: -speeds[candidate.name])[:_NUM_FINALISTS]
        if len(candidates) > 1:
            some = prompts[: max(1, min(2, len(prompts) // 2))]
            trial = interleave(finalists, some, sampling, self.settings.max_new_tokens)
            speeds |= {candidate.name: trial.tokens_per_second(candidate.name) for candidate in finalists}
        best = max(finalists, key=lambda candidate: speeds[candidate.name])
        best.name = f"{name} ({best.name})"
        return best, speeds

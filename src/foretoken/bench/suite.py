"""The parts of the benchmark: which arms meet on which prompts, and what is kept of it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from foretoken import zoo
from foretoken.bench import costs, equality
from foretoken.bench.arms import Arm, EngineArm, Sampling, TransformersArm
from foretoken.bench.drafting import DraftCost, draft_costs
from foretoken.bench.equality import Equality
from foretoken.bench.measure import Comparison, Trial, compare, interleave, no_garbage_collection
from foretoken.bench.models import Pair, describe, drafter_of_cost, relative_cost, scaled
from foretoken.bench.profile import Profile, profile
from foretoken.bench.workload import Prompt, asked_again, load_prompts, read_questions, repeated_share, select
from foretoken.config.speculative import SpeculativeConfig
from foretoken.drafters.materials import Materials, drafter_factory
from foretoken.engine.engine import EngineConfig
from foretoken.engine.stats import SequenceStats
from foretoken.errors import ForetokenError
from foretoken.model.lm import CausalLM
from foretoken.retrieval.build import Progress

PLAIN = "plain"
TRANSFORMERS = "transformers"
_NUM_FINALISTS = 2


class UnequalOutputsError(ForetokenError):
    """Two arms that must agree do not, so no speed is shown."""


@dataclass(frozen=True)
class Settings:
    """Settings of a benchmark. Defaults are those of ``foretoken bench``.

    Args:
      contexts: tokens to which prompts are padded, one table each.
      num_draft_tokens: of the own drafters; None for the defaults of their methods.
      num_branches: of the tree arm.
      assisted_lengths, lookup_lengths: numbers of draft tokens among which transformers' arms are tuned.
      draft_contexts, datastore_sizes, draft_steps: tokens of context and of datastores, and steps, at which the host
        time of drafting is measured.
      draft_costs: targets for the cost of a drafter's forward; 0 is the drafter as it is.
    """

    num_prompts: int = 4
    max_new_tokens: int = 48
    repeats: int = 1
    contexts: tuple[int, ...] = (256, 1500)
    draft_costs: tuple[float, ...] = (0.0, 0.05, 0.15)
    num_draft_tokens: int | None = None
    num_branches: int = 2
    batch_size: int = 8
    vocab_sizes: tuple[int, ...] = (4096, 32000, 150000)
    profile_contexts: tuple[int, ...] = (100, 500, 1500)
    draft_contexts: tuple[int, ...] = (1000, 16000, 128000)
    datastore_sizes: tuple[int, ...] = (100_000,)
    draft_steps: int = 200
    assisted_lengths: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 8)
    lookup_lengths: tuple[int, ...] = (2, 3, 5, 8, 10, 15)
    ignore_eos: bool = True
    seed: int = 0
    execution: str = "auto"
    prompts_file: Path | None = None


@dataclass(frozen=True)
class Row:
    """One arm of a table."""

    arm: str
    tokens_per_second: float
    comparisons: tuple[Comparison, ...]
    tokens_per_step: float | None
    acceptance_rate: float | None
    repeated_share: float
    equality: Equality | None


@dataclass(frozen=True)
class SpeedTable:
    """Arms over the same prompts in the same interleaved trial."""

    title: str
    sampling: str
    context: int | None
    num_prompts: int
    num_prompt_tokens: float
    runs_per_prompt: int
    other_cpu_share: float
    rows: tuple[Row, ...]
    tuned: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class EfficiencyTable:
    """Efficiencies with one drafter."""

    drafter: str
    measured_cost: float
    context: int
    rows: tuple[costs.Efficiency, ...]


@dataclass(frozen=True)
class BatchRow:
    """Throughput of many ragged rows at once, and of the same prompts one by one."""

    arm: str
    batch_size: int
    together_per_second: float
    alone_per_second: float

    @property
    def gain(self) -> float:
        return self.together_per_second / self.alone_per_second


@dataclass(frozen=True)
class ProfileCell:
    """A profile with its conditions."""

    vocab_size: int
    context: int
    sampling: str
    profile: Profile


class Suite:
    """Holds the models and runs the parts.

    Args:
      pair: as loaded; ``scale`` says how it is inflated.
      say: told in a few words what is running.
    """

    def __init__(self, pair: Pair, scale: str, settings: Settings, say: Callable[[str], None] = lambda _: None) -> None:
        self.original = pair
        self.scale = scale
        self.settings = settings
        self.pair = scaled(pair, scale)
        self._say = say
        self.questions = read_questions(settings.prompts_file)

    @cached_property
    def target(self) -> CausalLM:
        return CausalLM(self.pair.target, execution=self.settings.execution)

    @cached_property
    def drafter(self) -> CausalLM | None:
        model = self.pair.drafter
        return None if model is None else CausalLM(model, execution=self.settings.execution)

    @property
    def greedy(self) -> Sampling:
        return Sampling(seed=self.settings.seed, ignore_eos=self.settings.ignore_eos)

    def sampled(self, top_p: float = 1.0) -> Sampling:
        """Temperature 1."""
        return replace(self.greedy, temperature=1.0, top_p=top_p)

    # -- arms --------------------------------------------------------------------------------------------------

    def engine_arm(
        self, name: str, config: Mapping[str, Any], drafter: CausalLM | None = None, num_rows: int = 1
    ) -> EngineArm:
        """An arm of this library under a speculative config."""
        parsed = SpeculativeConfig.parse(config)
        drafter = drafter or self.drafter
        materials = Materials(self.target, drafter, self.pair.tokenizer, self.pair.zoo_name)
        make = drafter_factory(parsed, materials)
        engine = EngineConfig(max_num_seqs=num_rows, acceptance=parsed.rejection_sample_method)
        return EngineArm(name, self.target, make(), self.pair.eos_token_ids, engine)

    def plain_arm(self, num_rows: int = 1) -> EngineArm:
        return self.engine_arm(PLAIN, {"method": "none"}, num_rows=num_rows)

    @property
    def default_method(self) -> str:
        """How to draft where nothing else is said: with the pair's drafter, else as the zoo or the command line do."""
        if self.drafter is not None:
            return "draft_model"
        return "ngram" if self.pair.zoo_name is None else zoo.manifest(self.pair.zoo_name).default_method

    def draft_arms(self) -> list[EngineArm]:
        """The pair's drafter as chain and as tree; without one, the default method."""
        if self.drafter is None:
            return [self.engine_arm(self.default_method, self._config(self.default_method))]
        tree = {"num_draft_branches": self.settings.num_branches}
        return [
            self.engine_arm("draft_model", self._config("draft_model")),
            self.engine_arm("draft_model tree", self._config("draft_model") | tree),
        ]

    def _config(self, method: str) -> dict[str, Any]:
        length = self.settings.num_draft_tokens
        return {"method": method} if length is None else {"method": method, "num_speculative_tokens": length}

    def lookup_arms(self) -> list[EngineArm]:
        return [self.engine_arm(method, self._config(method)) for method in ("ngram", "nasd")]

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

    # -- parts -------------------------------------------------------------------------------------------------

    def prompts(self, context: int | None, *, copying: bool = False, count: int | None = None) -> list[Prompt]:
        """Prompts that leave room for the output."""
        questions = select(self.questions, count or self.settings.num_prompts, copying=copying)
        return load_prompts(self.pair.tokenizer, questions, context, self._room)

    @property
    def _room(self) -> int | None:
        """Longest prompt that leaves the output its tokens."""
        context = self.target.context_length
        return None if context is None else context - self.settings.max_new_tokens

    def speed(self, context: int | None, sampling: Sampling) -> SpeedTable:
        """Plain and drafted decoding beside transformers' plain and best assisted generation."""
        prompts = self.prompts(context)
        plain, speeds = self.tuned(TRANSFORMERS, self.plain_candidates(), prompts, sampling)
        tuning: dict[str, Any] = {plain.name: speeds}
        others = [plain]
        if self.pair.drafter is not None:
            assisted, speeds = self.tuned("assisted", self.assisted_candidates(), prompts, sampling)
            tuning[assisted.name] = speeds
            others.append(assisted)
        arms = [self.plain_arm(), *self.draft_arms()]
        return self._table("prompts of all kinds", context, prompts, sampling, arms, others, tuning)

    def passages(self, sampling: Sampling) -> SpeedTable:
        """Lookup beside transformers' best prompt lookup: a passage, and its beginning again."""
        return self._lookup_table("a passage and its beginning again", self.prompts(None, copying=True), sampling)

    def copying(self, sampling: Sampling) -> SpeedTable:
        """Lookup beside transformers' best prompt lookup: a question asked again after the model's own answer."""
        return self._lookup_table("a question asked again", self.copying_prompts(), sampling)

    def copying_prompts(self) -> list[Prompt]:
        """Conversations in which a question is asked again."""
        plain, sampling = self.plain_arm(), replace(self.greedy, ignore_eos=False)
        questions = select(self.questions, self.settings.num_prompts)
        length = self.settings.max_new_tokens

        def answer(ids: Seq[int]) -> tuple[int, ...]:
            return plain.run(ids, length, sampling).token_ids

        return asked_again(self.pair.tokenizer, questions, answer, self._room)

    def _lookup_table(self, title: str, prompts: Seq[Prompt], sampling: Sampling) -> SpeedTable:
        lookup, speeds = self.tuned("prompt lookup", self.lookup_candidates(), prompts, sampling)
        arms = [self.plain_arm(), *self.lookup_arms()]
        others = [self.transformers_arm(), lookup]
        return self._table(title, None, prompts, sampling, arms, others, {lookup.name: speeds})

    def _table(
        self,
        title: str,
        context: int | None,
        prompts: Seq[Prompt],
        sampling: Sampling,
        arms: Seq[EngineArm],
        others: Seq[TransformersArm],
        tuning: Mapping[str, Any],
    ) -> SpeedTable:
        self._say(f"{title}, {sampling.label}" + (f", context {context}" if context else ""))
        everyone: list[Arm] = [*arms, *others]
        trial = interleave(everyone, prompts, sampling, self.settings.max_new_tokens, self.settings.repeats)
        equal = self._gate(trial, arms, others)
        bases = [PLAIN, *(other.name for other in others)]
        rows = []
        for arm in everyone:
            ratios = tuple(compare(trial, arm.name, base) for base in bases if base != arm.name)
            rows.append(_row(trial, arm, ratios, equal.get(arm.name)))
        return SpeedTable(
            title=title,
            sampling=sampling.label,
            context=context,
            num_prompts=len(prompts),
            num_prompt_tokens=statistics.mean(len(prompt.token_ids) for prompt in prompts),
            runs_per_prompt=2 * self.settings.repeats,
            other_cpu_share=trial.other_cpu_share,
            rows=tuple(rows),
            tuned=tuning,
        )

    def _gate(self, trial: Trial, arms: Seq[EngineArm], others: Seq[TransformersArm]) -> dict[str, Equality]:
        """Own arms agree among themselves; greedy, with transformers too. No speed is shown otherwise.

        transformers' assisted arms are compared and reported, but they are transformers' own responsibility.

        Raises: UnequalOutputsError.
        """
        names = [arm.name for arm in arms]
        reference = PLAIN
        judged = [name for name in names if name != PLAIN]
        if trial.sampling.is_greedy:
            reference, judged = others[0].name, names
        found = {result.arm: result for result in equality.check(trial, self.pair.target, reference, judged)}
        unstable = [name for name in names if not equality.is_repeatable(trial, name)]
        failed = [found[name] for name in judged if not found[name].passes(self.target.dtype)]
        if unstable or failed:
            raise UnequalOutputsError(_complaint(unstable, failed))
        if trial.sampling.is_greedy:
            rest = [other.name for other in others[1:]]
            found |= {result.arm: result for result in equality.check(trial, self.pair.target, reference, rest)}
        return found

    def efficiency(self, cost: float, context: int, sampling: Sampling) -> EfficiencyTable:
        """Measure what remains of tau and the forward costs in the real loop, with a drafter of about this cost."""
        model = self.pair.drafter
        if cost > 0:
            self._say(f"looking for a drafter of cost {cost:g}")
            model, _ = drafter_of_cost(self.pair, self.target, cost)
        drafter = CausalLM(model, execution=self.settings.execution)
        measured = relative_cost(self.target, drafter, context)
        self._say(f"efficiency at draft cost {measured:.3f}")
        tree = {"num_draft_branches": self.settings.num_branches}
        arms = [
            self.engine_arm("draft_model", self._config("draft_model"), drafter),
            self.engine_arm("draft_model tree", self._config("draft_model") | tree, drafter),
        ]
        rows = self._efficiencies(arms, self.prompts(context), sampling)
        return EfficiencyTable(describe(model), measured, context, tuple(rows))

    def lookup_efficiency(self, sampling: Sampling) -> EfficiencyTable:
        """The same without a drafter model, on copying prompts."""
        prompts = self.copying_prompts()
        self._say("efficiency of lookup")
        rows = self._efficiencies(self.lookup_arms(), prompts, sampling)
        context = round(statistics.mean(len(prompt.token_ids) for prompt in prompts))
        return EfficiencyTable("none", 0.0, context, tuple(rows))

    def _efficiencies(self, arms: Seq[EngineArm], prompts: Seq[Prompt], sampling: Sampling) -> list[costs.Efficiency]:
        token_ids = [prompt.token_ids for prompt in prompts]
        plain = self.plain_arm()
        for arm in (plain, *arms):
            arm.run(token_ids[0], 16, sampling)
        return costs.efficiencies(
            plain, arms, token_ids, self.settings.max_new_tokens, sampling, max(2, self.settings.repeats)
        )

    def batch(self, sampling: Sampling) -> list[BatchRow]:
        """Ragged rows together against one by one, plain and drafted."""
        size = self.settings.batch_size
        prompts = [prompt.token_ids for prompt in self.prompts(None, count=size)]
        while len(prompts) < size:
            prompts.append(prompts[len(prompts) % len(prompts)])
        self._say(f"batch of {size}")
        configs: dict[str, dict[str, Any]] = {
            PLAIN: {"method": "none"},
            self.default_method: self._config(self.default_method),
        }
        return [self._batch_row(name, config, prompts, sampling) for name, config in configs.items()]

    def _batch_row(
        self, name: str, config: Mapping[str, Any], prompts: Seq[tuple[int, ...]], sampling: Sampling
    ) -> BatchRow:
        together = self.engine_arm(name, config, num_rows=len(prompts))
        alone = self.engine_arm(name, config)
        length = self.settings.max_new_tokens
        for arm in (together, alone):
            arm.run_batch(prompts[:1], 8, sampling)
        speeds: dict[int, list[float]] = {id(together): [], id(alone): []}
        for arm in [together, alone, alone, together] * self.settings.repeats:
            groups = [prompts] if arm is together else [[prompt] for prompt in prompts]
            with no_garbage_collection():
                results = [arm.run_batch(group, length, sampling) for group in groups]
            tokens, seconds = (sum(values) for values in zip(*results, strict=True))
            speeds[id(arm)].append(tokens / seconds)
        return BatchRow(
            name, len(prompts), statistics.median(speeds[id(together)]), statistics.median(speeds[id(alone)])
        )

    def profiles(self, samplings: Iterable[Sampling]) -> Iterator[ProfileCell]:
        """The step profile at every vocabulary and context, of the default method."""
        samplings = list(samplings)
        for vocab_size in self._vocab_sizes():
            with self._padded(vocab_size) as suite:
                arm = suite.engine_arm(suite.default_method, suite._config(suite.default_method))
                for context in self.settings.profile_contexts:
                    prompts = [prompt.token_ids for prompt in suite.prompts(context, count=2)]
                    for sampling in samplings:
                        self._say(f"profile at vocabulary {vocab_size}, context {context}, {sampling.label}")
                        found = profile(arm, prompts, self.settings.max_new_tokens, sampling)
                        yield ProfileCell(suite.target.vocab_size, context, sampling.label, found)

    def _vocab_sizes(self) -> list[int]:
        """The wanted sizes, none below the model's own; for a model that is measured as it is, its own alone."""
        own = self.pair.target.config.vocab_size
        wanted = [max(own, size) for size in self.settings.vocab_sizes]
        return [own] if self.scale == "none" else list(dict.fromkeys(wanted))

    def drafting(self, progress: Progress | None = None) -> Iterator[DraftCost]:
        """Host time of the drafters that need no forward, by context and size of the datastore."""
        settings = self.settings
        self._say(f"drafting at contexts {settings.draft_contexts}, datastores of {settings.datastore_sizes} tokens")
        materials = Materials(self.target, None, self.pair.tokenizer, self.pair.zoo_name)
        return draft_costs(materials, settings.draft_contexts, settings.datastore_sizes, settings.draft_steps, progress)

    @contextmanager
    def _padded(self, vocab_size: int) -> Iterator[Suite]:
        """The same suite over models with a larger vocabulary."""
        if vocab_size <= self.pair.target.config.vocab_size:
            yield self
            return
        suite = Suite(self.original, "none", self.settings, self._say)
        suite.pair = scaled(self.original, self.scale, vocab_size)
        yield suite


def _row(trial: Trial, arm: Arm, ratios: tuple[Comparison, ...], equal: Equality | None) -> Row:
    stats = SequenceStats()
    for runs in trial.runs[arm.name]:
        if runs[0].stats is not None:
            stats.add(runs[0].stats)
    has_stats = stats.num_steps > 0
    return Row(
        arm=arm.name,
        tokens_per_second=trial.tokens_per_second(arm.name),
        comparisons=ratios,
        tokens_per_step=stats.tokens_per_step if has_stats else None,
        acceptance_rate=stats.draft_acceptance_rate if stats.num_draft_tokens else None,
        repeated_share=repeated_share(trial.outputs(arm.name)),
        equality=equal,
    )


def _complaint(unstable: Seq[str], failed: Seq[Equality]) -> str:
    lines = [f"{name} gave different tokens in two runs of one prompt" for name in unstable]
    for result in failed:
        lines += [
            f"{found.arm} leaves {result.reference} on {found.prompt} at token {found.position}: {found.found} instead "
            f"of {found.expected}, preferred by {found.gap:.3g}"
            for found in result.divergences
        ]
    return "outputs differ, so no speed is shown: " + "; ".join(lines)

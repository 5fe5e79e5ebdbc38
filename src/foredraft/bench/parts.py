"""The parts of the benchmark: which arms meet on which prompts, and what is kept of it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from foredraft.bench.accepted import AcceptedLengths, accepted_lengths
from foredraft.bench.arms import EngineArm, TransformersArm
from foredraft.bench.drafting import DraftCost, draft_costs
from foredraft.bench.equality import Equality, check, gap_of
from foredraft.bench.forwards import Efficiency, efficiencies, profile
from foredraft.bench.models import Pair, describe, drafter_of_cost, relative_cost, scaled
from foredraft.bench.tables import BatchRow, EfficiencyTable, ProfileCell, Row, SpeedTable
from foredraft.bench.trial import Arm, Sampling, Trial, compare, in_groups, interleave
from foredraft.bench.workload import BenchPrompt, asked_again, load_prompts, read_questions, repeated_share, select
from foredraft.config.speculative import SpeculativeConfig
from foredraft.drafters import make_drafter
from foredraft.drafters.context import DrafterContext
from foredraft.engine.engine import EngineConfig
from foredraft.errors import ForedraftError
from foredraft.loading.defaults import default_keys
from foredraft.model.lm import CausalLM
from foredraft.retrieval.build import Progress

PLAIN = "plain"
TRANSFORMERS = "transformers"
_NUM_FINALISTS = 2


@dataclass(frozen=True)
class Settings:
    """Settings of a benchmark. Defaults are those of ``foredraft bench``.

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


class UnequalOutputsError(ForedraftError):
    """Two arms that must agree do not, so no speed is shown."""


class Suite:
    """Holds a pair of models and runs the parts.

    Args:
      pair: as loaded; ``scale`` and ``vocab_size`` say how it is inflated.
      say: told in a few words what is running.
    """

    def __init__(
        self,
        pair: Pair,
        scale: str,
        settings: Settings,
        say: Callable[[str], None] = lambda _: None,
        vocab_size: int | None = None,
    ) -> None:
        self._original, self._scale = pair, scale
        self.pair = scaled(pair, scale, vocab_size)
        self.settings = settings
        self._say = say
        self.questions = read_questions(settings.prompts_file)

    @cached_property
    def target(self) -> CausalLM:
        return self.pair.adapted(self.settings.execution)

    @cached_property
    def reference(self) -> Any:
        """What transformers runs: the same weights."""
        return self.pair.reference()

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

    def arm(
        self,
        name: str,
        config: Mapping[str, Any],
        drafter: CausalLM | None = None,
        *,
        num_rows: int = 1,
        is_governed: bool = True,
    ) -> EngineArm:
        """This library under a speculative config, that may run so many rows at once.

        Args:
          drafter: another one than the pair's.
          is_governed: as the config says; else every run of a prompt drafts the same.
        """
        parsed = SpeculativeConfig.parse(config)
        context = DrafterContext(self.target, drafter or self.drafter, self.pair.tokenizer, self.pair.zoo_name)
        made = make_drafter(parsed, context)
        engine = EngineConfig(
            max_num_seqs=num_rows, acceptance=parsed.rejection_sample_method, typical=parsed.typical_limits
        )
        is_governed = is_governed and parsed.is_governed
        return EngineArm(name, self.target, made, self.pair.eos_token_ids, engine, is_governed=is_governed)

    def plain_arm(self) -> EngineArm:
        return self.arm(PLAIN, {"method": "none"})

    @property
    def default_method(self) -> str:
        """How to draft where nothing else is said: with the pair's drafter, else as the command line does."""
        if self.drafter is not None:
            return "draft_model"
        return str(default_keys(self.pair.zoo_name)["method"])

    def draft_arms(self, drafter: CausalLM | None = None, *, is_governed: bool = True) -> list[EngineArm]:
        """The pair's drafter, or another one, as chain and as tree; without one, the default method."""
        if drafter is None and self.drafter is None:
            return [self.arm(self.default_method, self.config(self.default_method), is_governed=is_governed)]
        chain = self.config("draft_model")
        tree = {**chain, "num_draft_branches": self.settings.num_branches}
        return [
            self.arm(name, config, drafter, is_governed=is_governed)
            for name, config in (("draft_model", chain), ("draft_model tree", tree))
        ]

    def config(self, method: str) -> dict[str, Any]:
        """A method with the length of draft that was asked for, if any."""
        length = self.settings.num_draft_tokens
        return {"method": method} if length is None else {"method": method, "num_speculative_tokens": length}

    def lookup_arms(self, *, is_governed: bool = True) -> list[EngineArm]:
        return [self.arm(method, self.config(method), is_governed=is_governed) for method in ("ngram", "nasd")]

    def transformers_arm(self, name: str = TRANSFORMERS, **options: Any) -> TransformersArm:
        """transformers on the same weights."""
        return TransformersArm(name, self.reference, self.pair.eos_token_ids, options)

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
                self.reference,
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
        self, name: str, candidates: Seq[TransformersArm], prompts: Seq[BenchPrompt], sampling: Sampling
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

    def prompts(self, context: int | None, *, copying: bool = False, count: int | None = None) -> list[BenchPrompt]:
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

    def copying_prompts(self) -> list[BenchPrompt]:
        """Conversations in which a question is asked again."""
        plain, sampling = self.plain_arm(), replace(self.greedy, ignore_eos=False)
        questions = select(self.questions, self.settings.num_prompts)
        length = self.settings.max_new_tokens

        def answer(ids: Seq[int]) -> tuple[int, ...]:
            return plain.run(ids, length, sampling).token_ids

        return asked_again(self.pair.tokenizer, questions, answer, self._room)

    def _lookup_table(self, title: str, prompts: Seq[BenchPrompt], sampling: Sampling) -> SpeedTable:
        lookup, speeds = self.tuned("prompt lookup", self.lookup_candidates(), prompts, sampling)
        arms = [self.plain_arm(), *self.lookup_arms()]
        others = [self.transformers_arm(), lookup]
        return self._table(title, None, prompts, sampling, arms, others, {lookup.name: speeds})

    def _table(
        self,
        title: str,
        context: int | None,
        prompts: Seq[BenchPrompt],
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
            stats = trial.stats(arm.name)
            row = Row(
                arm=arm.name,
                tokens_per_second=trial.tokens_per_second(arm.name),
                comparisons=tuple(compare(trial, arm.name, base) for base in bases if base != arm.name),
                tokens_per_step=stats.tokens_per_step if stats.num_steps else None,
                acceptance_rate=stats.draft_acceptance_rate if stats.num_draft_tokens else None,
                repeated_share=repeated_share(trial.outputs(arm.name)),
                equality=equal.get(arm.name),
            )
            rows.append(row)
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
        gap = gap_of(self.target, trial.sampling)
        reference, judged = PLAIN, [name for name in names if name != PLAIN]
        if trial.sampling.is_greedy:
            reference, judged = others[0].name, names
        found = {result.arm: result for result in check(trial, gap, reference, judged)}
        unstable = [name for name in names if not trial.is_repeatable(name)]
        failed = [found[name] for name in judged if not found[name].passes(self.target.dtype)]
        if unstable or failed:
            raise UnequalOutputsError(_complaint(unstable, failed))
        if trial.sampling.is_greedy:
            rest = [other.name for other in others[1:]]
            found |= {result.arm: result for result in check(trial, gap, reference, rest)}
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
        rows = self._efficiencies(self.draft_arms(drafter, is_governed=False), self.prompts(context), sampling)
        return EfficiencyTable(describe(model), measured, context, tuple(rows))

    def lookup_efficiency(self, sampling: Sampling) -> EfficiencyTable:
        """The same without a drafter model, on copying prompts."""
        prompts = self.copying_prompts()
        self._say("efficiency of lookup")
        rows = self._efficiencies(self.lookup_arms(is_governed=False), prompts, sampling)
        context = round(statistics.mean(len(prompt.token_ids) for prompt in prompts))
        return EfficiencyTable("none", 0.0, context, tuple(rows))

    def _efficiencies(self, arms: Seq[EngineArm], prompts: Seq[BenchPrompt], sampling: Sampling) -> list[Efficiency]:
        token_ids = [prompt.token_ids for prompt in prompts]
        plain = self.plain_arm()
        for arm in (plain, *arms):
            arm.run(token_ids[0], 16, sampling)
        return efficiencies(
            plain, arms, token_ids, self.settings.max_new_tokens, sampling, max(2, self.settings.repeats)
        )

    def accepted(self, sampling: Sampling) -> list[AcceptedLengths]:
        """Accepted lengths of every method that drafts chains here, on prompts of all kinds."""
        prompts = [prompt.token_ids for prompt in self.prompts(None)]
        arms = list({arm.name: arm for arm in (self.draft_arms()[0], *self.lookup_arms())}.values())
        self._say(f"accepted lengths, {sampling.label}")
        return [accepted_lengths(arm, prompts, self.settings.max_new_tokens, sampling) for arm in arms]

    def batch(self, sampling: Sampling) -> list[BatchRow]:
        """Ragged rows together against one by one, plain and drafted."""
        size = self.settings.batch_size
        prompts = self.prompts(None, count=size)
        self._say(f"batch of {size}")
        (group,) = in_groups(prompts, size)
        rows = []
        for method in dict.fromkeys((PLAIN, self.default_method)):
            config = {"method": "none"} if method == PLAIN else self.config(method)
            sizes = dict.fromkeys((size, 1))
            arms = [self.arm(f"{method}, batches of {each}", config, num_rows=each) for each in sizes]
            trial = interleave(arms, [group], sampling, self.settings.max_new_tokens, self.settings.repeats)
            together, alone = (1 / trial.seconds_per_token(arms[place].name)[0] for place in (0, -1))
            rows.append(BatchRow(method, size, together, alone))
        return rows

    def profiles(self, samplings: Iterable[Sampling]) -> Iterator[ProfileCell]:
        """The step profile at every vocabulary and context, of the default method."""
        samplings = list(samplings)
        for vocab_size in self._vocab_sizes():
            suite: Suite = self
            if vocab_size > self.pair.target.config.vocab_size:
                suite = Suite(self._original, self._scale, self.settings, self._say, vocab_size)
            arm = suite.arm(suite.default_method, suite.config(suite.default_method))
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
        return [own] if self._scale == "none" else list(dict.fromkeys(wanted))

    def drafting(self, progress: Progress | None = None) -> Iterator[DraftCost]:
        """Host time of the drafters that need no forward, by context and size of the datastore."""
        settings = self.settings
        self._say(f"drafting at contexts {settings.draft_contexts}, datastores of {settings.datastore_sizes} tokens")
        context = DrafterContext(self.target, None, self.pair.tokenizer, self.pair.zoo_name)
        return draft_costs(context, settings.draft_contexts, settings.datastore_sizes, settings.draft_steps, progress)


def _complaint(unstable: Seq[str], failed: Seq[Equality]) -> str:
    lines = [f"{name} gave different tokens in two runs of one prompt" for name in unstable]
    for result in failed:
        lines += [
            f"{found.arm} leaves {result.reference} on {found.prompt} at token {found.position}: {found.found} instead "
            f"of {found.expected}, preferred by {found.gap:.3g}"
            for found in result.divergences
        ]
    return "outputs differ, so no speed is shown: " + "; ".join(lines)

"""The parts of the benchmark: which arms meet on which prompts, and what is kept of it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from foretoken.bench import costs, equality
from foretoken.bench.accepted import AcceptedLengths, accepted_lengths
from foretoken.bench.arms import Arm, EngineArm, Sampling, TransformersArm
from foretoken.bench.drafting import DraftCost, draft_costs
from foretoken.bench.equality import Equality
from foretoken.bench.lineup import PLAIN, TRANSFORMERS, Lineup
from foretoken.bench.measure import Trial, compare, interleave, no_garbage_collection
from foretoken.bench.models import Pair, describe, drafter_of_cost, relative_cost, scaled
from foretoken.bench.profile import profile
from foretoken.bench.settings import Settings
from foretoken.bench.tables import BatchRow, EfficiencyTable, ProfileCell, SpeedTable, row_of
from foretoken.bench.workload import Prompt, asked_again, load_prompts, read_questions, select
from foretoken.drafters.context import DrafterContext
from foretoken.errors import ForetokenError
from foretoken.model.lm import CausalLM
from foretoken.retrieval.build import Progress


class UnequalOutputsError(ForetokenError):
    """Two arms that must agree do not, so no speed is shown."""


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
        self.lineup = Lineup(scaled(pair, scale), settings, say)
        self._say = say
        self.questions = read_questions(settings.prompts_file)

    @property
    def pair(self) -> Pair:
        """The models as they are measured."""
        return self.lineup.pair

    @property
    def target(self) -> CausalLM:
        return self.lineup.target

    @property
    def greedy(self) -> Sampling:
        return Sampling(seed=self.settings.seed, ignore_eos=self.settings.ignore_eos)

    def sampled(self, top_p: float = 1.0) -> Sampling:
        """Temperature 1."""
        return replace(self.greedy, temperature=1.0, top_p=top_p)

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
        plain, speeds = self.lineup.tuned(TRANSFORMERS, self.lineup.plain_candidates(), prompts, sampling)
        tuning: dict[str, Any] = {plain.name: speeds}
        others = [plain]
        if self.pair.drafter is not None:
            assisted, speeds = self.lineup.tuned("assisted", self.lineup.assisted_candidates(), prompts, sampling)
            tuning[assisted.name] = speeds
            others.append(assisted)
        arms = [self.lineup.plain_arm(), *self.lineup.draft_arms()]
        return self._table("prompts of all kinds", context, prompts, sampling, arms, others, tuning)

    def passages(self, sampling: Sampling) -> SpeedTable:
        """Lookup beside transformers' best prompt lookup: a passage, and its beginning again."""
        return self._lookup_table("a passage and its beginning again", self.prompts(None, copying=True), sampling)

    def copying(self, sampling: Sampling) -> SpeedTable:
        """Lookup beside transformers' best prompt lookup: a question asked again after the model's own answer."""
        return self._lookup_table("a question asked again", self.copying_prompts(), sampling)

    def copying_prompts(self) -> list[Prompt]:
        """Conversations in which a question is asked again."""
        plain, sampling = self.lineup.plain_arm(), replace(self.greedy, ignore_eos=False)
        questions = select(self.questions, self.settings.num_prompts)
        length = self.settings.max_new_tokens

        def answer(ids: Seq[int]) -> tuple[int, ...]:
            return plain.run(ids, length, sampling).token_ids

        return asked_again(self.pair.tokenizer, questions, answer, self._room)

    def _lookup_table(self, title: str, prompts: Seq[Prompt], sampling: Sampling) -> SpeedTable:
        lookup, speeds = self.lineup.tuned("prompt lookup", self.lineup.lookup_candidates(), prompts, sampling)
        arms = [self.lineup.plain_arm(), *self.lineup.lookup_arms()]
        others = [self.lineup.transformers_arm(), lookup]
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
            rows.append(row_of(trial, arm, ratios, equal.get(arm.name)))
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
            self.lineup.engine_arm("draft_model", self.lineup.config("draft_model"), drafter),
            self.lineup.engine_arm("draft_model tree", self.lineup.config("draft_model") | tree, drafter),
        ]
        rows = self._efficiencies(arms, self.prompts(context), sampling)
        return EfficiencyTable(describe(model), measured, context, tuple(rows))

    def lookup_efficiency(self, sampling: Sampling) -> EfficiencyTable:
        """The same without a drafter model, on copying prompts."""
        prompts = self.copying_prompts()
        self._say("efficiency of lookup")
        rows = self._efficiencies(self.lineup.lookup_arms(), prompts, sampling)
        context = round(statistics.mean(len(prompt.token_ids) for prompt in prompts))
        return EfficiencyTable("none", 0.0, context, tuple(rows))

    def _efficiencies(self, arms: Seq[EngineArm], prompts: Seq[Prompt], sampling: Sampling) -> list[costs.Efficiency]:
        token_ids = [prompt.token_ids for prompt in prompts]
        plain = self.lineup.plain_arm()
        for arm in (plain, *arms):
            arm.run(token_ids[0], 16, sampling)
        return costs.efficiencies(
            plain, arms, token_ids, self.settings.max_new_tokens, sampling, max(2, self.settings.repeats)
        )

    def accepted(self, sampling: Sampling) -> list[AcceptedLengths]:
        """Accepted lengths of every method that drafts chains here, on prompts of all kinds."""
        prompts = [prompt.token_ids for prompt in self.prompts(None)]
        arms = list({arm.name: arm for arm in (self.lineup.draft_arms()[0], *self.lineup.lookup_arms())}.values())
        self._say(f"accepted lengths, {sampling.label}")
        return [accepted_lengths(arm, prompts, self.settings.max_new_tokens, sampling) for arm in arms]

    def batch(self, sampling: Sampling) -> list[BatchRow]:
        """Ragged rows together against one by one, plain and drafted."""
        size = self.settings.batch_size
        prompts = [prompt.token_ids for prompt in self.prompts(None, count=size)]
        while len(prompts) < size:
            prompts.append(prompts[len(prompts) % len(prompts)])
        self._say(f"batch of {size}")
        configs: dict[str, dict[str, Any]] = {
            PLAIN: {"method": "none"},
            self.lineup.default_method: self.lineup.config(self.lineup.default_method),
        }
        return [self._batch_row(name, config, prompts, sampling) for name, config in configs.items()]

    def _batch_row(
        self, name: str, config: Mapping[str, Any], prompts: Seq[tuple[int, ...]], sampling: Sampling
    ) -> BatchRow:
        together = self.lineup.engine_arm(name, config, num_rows=len(prompts))
        alone = self.lineup.engine_arm(name, config)
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
                arm = suite.lineup.engine_arm(
                    suite.lineup.default_method, suite.lineup.config(suite.lineup.default_method)
                )
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
        drafter_context = DrafterContext(self.target, None, self.pair.tokenizer, self.pair.zoo_name)
        return draft_costs(
            drafter_context, settings.draft_contexts, settings.datastore_sizes, settings.draft_steps, progress
        )

    @contextmanager
    def _padded(self, vocab_size: int) -> Iterator[Suite]:
        """The same suite over models with a larger vocabulary."""
        if vocab_size <= self.pair.target.config.vocab_size:
            yield self
            return
        suite = Suite(self.original, "none", self.settings, self._say)
        suite.lineup = Lineup(scaled(self.original, self.scale, vocab_size), self.settings, self._say)
        yield suite


def _complaint(unstable: Seq[str], failed: Seq[Equality]) -> str:
    lines = [f"{name} gave different tokens in two runs of one prompt" for name in unstable]
    for result in failed:
        lines += [
            f"{found.arm} leaves {result.reference} on {found.prompt} at token {found.position}: {found.found} instead "
            f"of {found.expected}, preferred by {found.gap:.3g}"
            for found in result.divergences
        ]
    return "outputs differ, so no speed is shown: " + "; ".join(lines)

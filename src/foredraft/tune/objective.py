"""The value of a layer set: time per token of drafted decoding, relative to plain decoding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from foredraft.bench.arms import EngineArm
from foredraft.bench.trial import Sampling, Trial, compare, interleave
from foredraft.bench.workload import BenchPrompt
from foredraft.drafters.none import EmptyDrafter
from foredraft.drafters.parts.layer_set import LayerSet, skipping
from foredraft.engine.budget import describe_cuts
from foredraft.engine.costs import CONTEXT, Forward, filled_cache, median_times
from foredraft.engine.drafter import Drafter
from foredraft.engine.stats import RowStats
from foredraft.errors import ConfigError
from foredraft.model.lm import CausalLM
from foredraft.tune.walk import decoded_rows

DrafterOf = Callable[[LayerSet], Drafter]


@dataclass(frozen=True)
class Score:
    """The score of one layer set.

    Args:
      value: time per token, of plain decoding; lower is better, below 1 is faster than plain.
      acceptance_rate: accepted of drafted tokens.
      acceptance_length: tokens per verification of a draft, bonus included.
      num_sublayers: how many are left out.
      low, high: 95 % interval of a measured value; of a computed one the value.
      num_drafted, num_accepted: tokens that were verified, and those of them that were kept.
      cuts: what kept others from being verified, for people; see `describe_cuts`.
    """

    value: float
    acceptance_rate: float
    acceptance_length: float
    num_sublayers: int
    low: float
    high: float
    num_drafted: int = 0
    num_accepted: int = 0
    cuts: str = ""

    @classmethod
    def of(cls, rows: Iterable[RowStats], layer_set: LayerSet, value: float, low: float, high: float) -> Score:
        """The score of a set with which the counters of these rows came about."""
        stats = RowStats.pooled(rows)
        return cls(
            value,
            stats.draft_acceptance_rate,
            stats.mean_acceptance_length,
            len(layer_set),
            low,
            high,
            stats.num_draft_tokens,
            stats.num_accepted_draft_tokens,
            describe_cuts(stats.num_cut_tokens, stats.num_undrafted_steps),
        )


class Objective(ABC):
    """Gives layer sets their scores."""

    @abstractmethod
    def score(self, layer_set: LayerSet) -> Score:
        """Decode the prompts greedily with this set."""


@dataclass(frozen=True)
class Task:
    """The workload of a search: what is decoded, and how.

    Args:
      target: the model.
      prompts: to continue.
      max_new_tokens: per prompt, ends of text passed over so that every set decodes the same text.
      drafter_of: makes the drafter of a set, with its draft length and length policy.
    """

    target: CausalLM
    prompts: tuple[BenchPrompt, ...]
    max_new_tokens: int
    drafter_of: DrafterOf

    def __post_init__(self) -> None:
        if not self.prompts:
            raise ConfigError("there are no prompts to search with; give a file with some, or 'built-in'")
        longest = max(len(prompt.token_ids) for prompt in self.prompts) + self.max_new_tokens
        context = self.target.context_length
        if context is not None and longest > context:
            raise ConfigError(
                f"a prompt and its {self.max_new_tokens} new tokens make {longest}, and {self.target.name} has a "
                f"context of {context}; shorten the prompts or lower max-new-tokens"
            )


def beside_plain(
    target: CausalLM, drafters: Mapping[str, Drafter], prompts: Sequence[BenchPrompt], max_new_tokens: int, repeats: int
) -> Trial:
    """The prompts with every drafter and plainly ("plain"), one row, greedily, interleaved."""
    arms = [EngineArm(name, target, drafter) for name, drafter in {"plain": EmptyDrafter(), **drafters}.items()]
    return interleave(arms, prompts, Sampling(ignore_eos=True), max_new_tokens, repeats)


class MeasuredTime(Objective):
    """Seconds per token with the set over seconds per token without, interleaved prompt by prompt (A B B A).

    Both are measured in every trial, so that what slows the machine down slows down both.

    Args:
      repeats: rounds of A B B A per prompt.
    """

    def __init__(self, task: Task, repeats: int = 1) -> None:
        self._task = task
        self._repeats = repeats

    def score(self, layer_set: LayerSet) -> Score:
        return self.scores({"candidate": layer_set})["candidate"]

    def scores(self, layer_sets: dict[str, LayerSet]) -> dict[str, Score]:
        """Several sets against plain decoding, all interleaved."""
        task = self._task
        drafters = {name: task.drafter_of(one) for name, one in layer_sets.items()}
        trial = beside_plain(task.target, drafters, task.prompts, task.max_new_tokens, self._repeats)
        scores = {}
        for name, layer_set in layer_sets.items():
            ratio = compare(trial, name, "plain")
            rows = (run.stats for runs in trial.runs[name] for run in runs[:1] if run.stats is not None)
            scores[name] = Score.of(rows, layer_set, 1 / ratio.ratio, 1 / ratio.high, 1 / ratio.low)
        return scores


@dataclass(frozen=True)
class Costs:
    """Costs of forwards, in units of the target's forward over one token.

    Args:
      attention, mlp: what leaving out one sublayer of a kind saves.
      verify: of the target over 1, 2, ... tokens.
      seconds: of the target's forward over one token.
    """

    attention: float
    mlp: float
    verify: tuple[float, ...] = field(default=(1.0,))
    seconds: float = float("nan")

    def draft(self, layer_set: LayerSet) -> float:
        """One forward of the target without these sublayers."""
        return 1.0 - self.attention * len(layer_set.attention) - self.mlp * len(layer_set.mlp)

    @classmethod
    @torch.inference_mode()
    def measured(cls, target: CausalLM, longest_draft: int, repeats: int = 15) -> Costs:
        """Median times after 256 tokens of context, all interleaved."""
        everything = tuple(range(target.num_layers))
        cache, _ = filled_cache(target, CONTEXT, longest_draft + 1)
        without = [skipping(target, LayerSet(everything, ())), skipping(target, LayerSet((), everything))]
        forwards = [Forward(variant, cache) for variant in without]
        forwards += [Forward(target, cache, width) for width in range(1, longest_draft + 2)]
        no_attention, no_mlp, one, *more = median_times(forwards, repeats)
        return cls(
            max(0.0, 1 - no_attention / one) / target.num_layers,
            max(0.0, 1 - no_mlp / one) / target.num_layers,
            tuple(seconds / one for seconds in (one, *more)),
            one,
        )


class ExpectedTime(Objective):
    """Time per token as it follows from what is accepted and from what forwards cost; no clock runs.

    Every prompt is decoded once, many at a time. A step costs its draft's forwards and one verification of its width.
    What the loop does besides is left out.

    Exactness: the same set has the same score on every machine, given the same costs.
    """

    def __init__(self, task: Task, costs: Costs) -> None:
        self._task = task
        self.costs = costs

    def score(self, layer_set: LayerSet) -> Score:
        task, params = self._task, Sampling(ignore_eos=True).params(self._task.max_new_tokens)
        ids = [prompt.token_ids for prompt in task.prompts]
        rows = decoded_rows(task.target, task.drafter_of(layer_set), ids, params, len(ids))
        steps = [step for row in rows for step in row.trace]
        draft, verify = self.costs.draft(layer_set), self.costs.verify
        cost = sum(step.drafted * draft + verify[min(step.drafted, len(verify) - 1)] for step in steps)
        num_tokens = sum(row.num_output_tokens for row in rows)
        value = cost / num_tokens
        return Score.of((row.stats for row in rows), layer_set, value, value, value)

"""The value of a layer set: time per token of drafted decoding, relative to plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from foredraft.bench.arms import EngineArm
from foredraft.bench.trial import Sampling, Trial, compare, interleave
from foredraft.bench.workload import BenchPrompt
from foredraft.drafters.none import EmptyDrafter
from foredraft.drafters.parts.layer_set import LayerSet, skipping
from foredraft.engine.costs import CONTEXT, Forward, filled_cache, median_times
from foredraft.engine.drafter import Drafter
from foredraft.engine.stats import RowStats, describe_cuts
from foredraft.errors import ConfigError
from foredraft.model.lm import CausalLM
from foredraft.tune.walk import decoded_rows

DrafterOf = Callable[[LayerSet], Drafter]


@dataclass(frozen=True)
class Score:
    """A layer set that was tried, and its score.

    Args:
      value: time per token relative to plain decoding; below 1 is faster.
      acceptance_rate: accepted tokens over drafted tokens.
      acceptance_length: tokens per verification of a draft, bonus included.
      num_sublayers: number of sublayers that the set leaves out.
      low, high: 95 % interval of a measured value; of a computed one the value.
      num_drafted, num_accepted: tokens that were verified, and those of them that were kept.
      cuts: what kept others from being verified, for people; see `describe_cuts`.
    """

    layer_set: LayerSet
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
            layer_set,
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

    @property
    def is_of_use(self) -> bool:
        """Whether any drafted token was accepted."""
        return self.acceptance_rate > 0

    def figures(self) -> dict[str, Any]:
        """All fields but the layer set, as plain data."""
        return {name: value for name, value in vars(self).items() if name != "layer_set"}


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

    def measured(self, layer_sets: Iterable[LayerSet], repeats: int = 1) -> list[Score]:
        """Time several sets and plain decoding in turns, prompt by prompt (A B B A).

        Plain decoding is measured in every trial, so that a slow moment of the machine slows down both.

        Args:
          repeats: rounds of A B B A per prompt.
        """
        named = {str(place): layer_set for place, layer_set in enumerate(layer_sets)}
        drafters = {name: self.drafter_of(layer_set) for name, layer_set in named.items()}
        trial = beside_plain(self.target, drafters, self.prompts, self.max_new_tokens, repeats)
        scores = []
        for name, layer_set in named.items():
            ratio = compare(trial, name, "plain")
            rows = (run.stats for runs in trial.runs[name] for run in runs[:1] if run.stats is not None)
            scores.append(Score.of(rows, layer_set, 1 / ratio.ratio, 1 / ratio.high, 1 / ratio.low))
        return scores

    def expected(self, layer_set: LayerSet, costs: Costs) -> Score:
        """Compute the time per token from what is accepted and from the costs of forwards. No clock runs.

        Every prompt is decoded once, many at a time. A step costs the forwards of its draft and one verification of its
        width. The rest of the loop is left out.

        Exactness: the same set has the same score on every machine, given the same costs.
        """
        params = Sampling(ignore_eos=True).params(self.max_new_tokens)
        ids = [prompt.token_ids for prompt in self.prompts]
        rows = decoded_rows(self.target, self.drafter_of(layer_set), ids, params, len(ids))
        steps = [step for row in rows for step in row.trace]
        draft, verify = costs.draft(layer_set), costs.verify
        cost = sum(step.drafted * draft + verify[min(step.drafted, len(verify) - 1)] for step in steps)
        value = cost / sum(row.num_output_tokens for row in rows)
        return Score.of((row.stats for row in rows), layer_set, value, value, value)


def beside_plain(
    target: CausalLM, drafters: Mapping[str, Drafter], prompts: Sequence[BenchPrompt], max_new_tokens: int, repeats: int
) -> Trial:
    """The prompts with every drafter and plainly ("plain"), one row, greedily, interleaved."""
    arms = [EngineArm(name, target, drafter) for name, drafter in {"plain": EmptyDrafter(), **drafters}.items()]
    return interleave(arms, prompts, Sampling(ignore_eos=True), max_new_tokens, repeats)


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

"""The score of a layer set: time per token with drafting, relative to plain decoding."""

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
      acceptance_rate: accepted tokens divided by drafted tokens.
      acceptance_length: tokens per verified draft, bonus included.
      num_sublayers: number of sublayers that the set skips.
      low, high: 95 % interval of a measured value; equal to ``value`` if it was computed.
      num_drafted, num_accepted: numbers of verified tokens and of accepted tokens.
      cuts: reasons why drafted tokens were not verified, in words; see `describe_cuts`.
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
        """Return the score of a layer set from the counters of the rows decoded with it."""
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
        """True if any drafted token was accepted."""
        return self.acceptance_rate > 0

    def figures(self) -> dict[str, Any]:
        """Return all fields but the layer set, as plain data."""
        return {name: value for name, value in vars(self).items() if name != "layer_set"}


@dataclass(frozen=True)
class Task:
    """The workload of a search.

    Args:
      target: the model.
      prompts: prompts to continue.
      max_new_tokens: number of tokens per prompt. EOS is ignored, so every set decodes the same text.
      drafter_of: function that makes the drafter of a layer set, with its draft length and length policy.
    """

    target: CausalLM
    prompts: tuple[BenchPrompt, ...]
    max_new_tokens: int
    drafter_of: DrafterOf

    def __post_init__(self) -> None:
        if not self.prompts:
            raise ConfigError("there are no prompts to search with; give a file with prompts, or 'built-in'")
        longest = max(len(prompt.token_ids) for prompt in self.prompts) + self.max_new_tokens
        context = self.target.context_length
        if context is not None and longest > context:
            raise ConfigError(
                f"the longest prompt with {self.max_new_tokens} new tokens has {longest} tokens, but the context of "
                f"{self.target.name} is {context}; shorten the prompts or lower max-new-tokens"
            )

    def measured(self, layer_sets: Iterable[LayerSet], repeats: int = 1) -> list[Score]:
        """Time several layer sets and plain decoding in turns, prompt by prompt (A B B A).

        Plain decoding is measured in every trial, so a slow moment of the machine affects both.

        Args:
          repeats: number of rounds of A B B A per prompt.
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
        """Compute the time per token from accepted tokens and the costs of forward passes, without a clock.

        Every prompt is decoded once, many at a time. A step costs the forward passes of its draft and one verification
        of its width. The rest of the step is not counted.

        Exactness: given the same costs, a layer set has the same score on every machine.
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
    """Decode the prompts greedily with every drafter and plainly ("plain"), one row at a time, interleaved."""
    arms = [EngineArm(name, target, drafter) for name, drafter in {"plain": EmptyDrafter(), **drafters}.items()]
    return interleave(arms, prompts, Sampling(ignore_eos=True), max_new_tokens, repeats)


@dataclass(frozen=True)
class Costs:
    """Costs of forward passes, in units of the target's forward pass over one token.

    Args:
      attention, mlp: cost saved by skipping one sublayer of the kind.
      verify: costs of the target's forward passes over 1, 2, ... tokens.
      seconds: duration of the target's forward pass over one token.
    """

    attention: float
    mlp: float
    verify: tuple[float, ...] = field(default=(1.0,))
    seconds: float = float("nan")

    def draft(self, layer_set: LayerSet) -> float:
        """Return the cost of one forward pass of the target without these sublayers."""
        return 1.0 - self.attention * len(layer_set.attention) - self.mlp * len(layer_set.mlp)

    @classmethod
    @torch.inference_mode()
    def measured(cls, target: CausalLM, longest_draft: int, repeats: int = 15) -> Costs:
        """Measure median times after 256 tokens of context, all interleaved."""
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

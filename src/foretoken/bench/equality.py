"""The same tokens first, speed afterwards: where two arms differ, and by how little."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch

from foretoken.bench.arms import Sampling
from foretoken.bench.measure import Trial
from foretoken.law.noise import as_int64, gumbel
from foretoken.law.sampling import SamplingLaw, log_probs
from foretoken.model.lm import CausalLM, Nodes

MAX_FLOAT32_GAP = 1e-4
"""Largest gap at which two float32 computations may choose differently (DESIGN 7.5)."""

_CHUNK = 512  # tokens per forward after a long text


@dataclass(frozen=True)
class Divergence:
    """The first place where an arm's output leaves the reference's.

    Args:
      position: index in the output.
      expected, found: tokens there; -1 where an output has ended.
      gap: how much the model prefers one to the other there, in logits (with the noise of the draw when sampled).
    """

    arm: str
    prompt: str
    position: int
    expected: int
    found: int
    gap: float


@dataclass(frozen=True)
class Equality:
    """The result of comparing one arm's outputs with the reference's."""

    arm: str
    reference: str
    num_prompts: int
    num_identical: int
    divergences: tuple[Divergence, ...]

    @property
    def largest_gap(self) -> float:
        return max((divergence.gap for divergence in self.divergences), default=0.0)

    def passes(self, dtype: torch.dtype) -> bool:
        """Full precision: identical, near-ties excepted. Half precision is reported, not judged."""
        return dtype in (torch.bfloat16, torch.float16) or self.largest_gap < MAX_FLOAT32_GAP


def check(trial: Trial, model: Any, reference: str, arms: Seq[str]) -> list[Equality]:
    """Compare the arms' outputs with the reference's, every prompt and every run.

    Args:
      model: the target, which measures the gaps by a plain forward: a transformers model, or its adapter.
    """
    expected = trial.outputs(reference)
    results = []
    for arm in arms:
        found = [
            _divergence(trial, model, arm, place, expected[place], run.token_ids)
            for place, runs in enumerate(trial.runs[arm])
            for run in runs[:1]
        ]
        divergences = tuple(divergence for divergence in found if divergence is not None)
        results.append(Equality(arm, reference, len(found), len(found) - len(divergences), divergences))
    return results


def is_repeatable(trial: Trial, arm: str) -> bool:
    """Whether every run of an arm gave the same tokens."""
    return all(len({run.token_ids for run in runs}) == 1 for runs in trial.runs[arm])


def _divergence(
    trial: Trial, model: Any, arm: str, place: int, expected: tuple[int, ...], found: tuple[int, ...]
) -> Divergence | None:
    position = first_difference(expected, found)
    if position is None:
        return None
    pair = [tokens[position] if position < len(tokens) else -1 for tokens in (expected, found)]
    prompt = trial.prompts[place]
    gap = float("inf")  # one has ended and the other goes on: no rounding does that
    if -1 not in pair:
        gap = preference_gap(model, prompt.token_ids, expected[:position], trial.sampling, pair[0], pair[1])
    return Divergence(arm, prompt.name, position, pair[0], pair[1], gap)


def first_difference(one: Seq[int], other: Seq[int]) -> int | None:
    """(1, 2, 3) and (1, 2) differ at 2; equal ones nowhere."""
    for position, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return position
    return None if len(one) == len(other) else min(len(one), len(other))


@torch.inference_mode()
def preference_gap(model: Any, prompt: Seq[int], output: Seq[int], sampling: Sampling, one: int, other: int) -> float:
    """How strongly one token is preferred to the other after prompt and output, noise of the draw included."""
    text = [*prompt, *output]
    logits = _next_logits(model, text)  # (1, V)
    values = logits[0].double()
    if not sampling.is_greedy:
        law = SamplingLaw(sampling.params(1), vocab_size=logits.shape[1], prompt_ids=prompt)
        law.extend(output)
        seeds, positions = torch.tensor(as_int64([law.seed])), torch.tensor([len(text)])
        pair = torch.tensor([one, other])
        values = log_probs(logits, [law], [()])[0].double()
        values[pair] += gumbel(seeds, positions, pair)[0]
    return abs(float(values[one] - values[other]))


def _next_logits(model: Any, text: Seq[int]) -> torch.Tensor:
    """(1, V), after the whole text."""
    if not isinstance(model, CausalLM):
        logits: torch.Tensor = model(input_ids=torch.tensor([text]), use_cache=False, logits_to_keep=1).logits[0]
        return logits
    cache = model.new_cache(1, capacity=len(text))
    *chunks, last = [text[start : start + _CHUNK] for start in range(0, len(text), _CHUNK)]
    for chunk in chunks:
        model.forward(Nodes.from_chains([chunk]), cache, keep=slice(0, 0))
        cache.commit([range(len(chunk))])
    return model.forward(Nodes.from_chains([last]), cache)[0, -1:].cpu()

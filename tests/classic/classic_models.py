"""Small models, and exact distributions by enumeration, for the tests of the classic interface."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from foredraft.classic.ngram_assisted import INgramStorage, NGramStorage
from foredraft.classic.reader import Reader
from foredraft.classic.rounds import Draft, ProcessorSampler, TorchNoise
from foredraft.classic.sampling.speculative_decoding import ModelProposer
from foredraft.testing import perturbed, toy_model

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4]


@cache
def target(seed: int = 0, vocab_size: int = 64) -> PreTrainedModel:
    return toy_model(vocab_size, seed=seed)


@cache
def drafter(seed: int = 0, vocab_size: int = 64, scale: float = 0.1) -> PreTrainedModel:
    return perturbed(target(seed, vocab_size), scale, seed=seed + 1)


@cache
def tiny(seed: int, vocab_size: int) -> PreTrainedModel:
    """One layer, for thousands of calls."""
    return toy_model(
        vocab_size,
        seed=seed,
        scale=0.4,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
    )


def plain_distribution(
    model: PreTrainedModel, processor: Any, prompt: Sequence[int], length: int, eos: Sequence[int] = ()
) -> dict[tuple[int, ...], float]:
    """Probability of every output, from plain forwards of the model and the processor's own distribution."""
    distribution: dict[tuple[int, ...], float] = {}
    for output in itertools.product(range(model.config.vocab_size), repeat=length):
        end = next((i + 1 for i, token in enumerate(output) if token in eos), length)
        if output[:end] in distribution:
            continue
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *output[:end]]]), use_cache=False).logits[0]
        probs = processor(logits[len(prompt) - 1 : -1].clone())
        distribution[output[:end]] = float(
            torch.stack([probs[i, token] for i, token in enumerate(output[:end])]).prod()
        )
    return distribution


# -- every outcome of every draw -------------------------------------------------------------------------------------


class Choices:
    """Takes a scripted way through all random choices of a run, and finds the ways that branch off."""

    def __init__(self, script: list[int]) -> None:
        self.script = script
        self.taken: list[int] = []
        self.branches: list[list[int]] = []
        self.weight = 1.0

    def take(self, weights: Sequence[float]) -> int:
        possible = [i for i, weight in enumerate(weights) if weight > 0.0]
        place = len(self.taken)
        if place < len(self.script):
            chosen = self.script[place]
        else:
            chosen = possible[0]
            self.branches += [[*self.taken, other] for other in possible[1:]]
        self.taken.append(chosen)
        self.weight *= weights[chosen]
        return chosen


def enumerated(
    run: Callable[[], Sequence[int]], monkeypatch: pytest.MonkeyPatch, max_runs: int = 100_000, *, reads: bool = False
) -> dict[tuple[int, ...], float]:
    """The exact distribution of ``run()``'s output: every draw of a classic function is taken every way.

    Draws of the processor, acceptance tests, and the random tokens of storages branch; logits are remembered by text,
    unless every run ``reads`` again.
    """
    distribution: dict[tuple[int, ...], float] = {}
    scripts: list[list[int]] = [[]]
    with every_choice(monkeypatch, reads) as begin:
        for num_runs in itertools.count(1):
            assert num_runs < max_runs
            choices = begin(scripts.pop())
            output = tuple(run())
            distribution[output] = distribution.get(output, 0.0) + choices.weight
            scripts += choices.branches
            if not scripts:
                return distribution
    raise AssertionError


@contextmanager
def every_choice(monkeypatch: pytest.MonkeyPatch, reads: bool = False) -> Iterator[Callable[[list[int]], Choices]]:
    current: list[Choices] = []
    last_draft: list[Draft] = []
    propose = ModelProposer.propose

    def watched_propose(self: ModelProposer, text: Sequence[int], budget: int) -> Draft:
        last_draft[:] = [propose(self, text, budget)]
        return last_draft[0]

    def sample(self: ProcessorSampler, probs: torch.Tensor) -> int:
        if not self.draws_from_probs:
            return int(probs.argmax())
        return current[-1].take((probs.double() / probs.double().sum()).tolist())

    def uniform(self: TorchNoise, depth: int, sibling: int) -> float:
        token = last_draft[0].tokens[depth]
        ratio = float(self.target_probs(depth)[token]) / float(last_draft[0].probs[depth][token])
        accepts = current[-1].take([min(1.0, ratio), 1.0 - min(1.0, ratio)]) == 0
        self.uniforms.append(0.0 if accepts else 1.0 - 2.0**-53)
        return self.uniforms[-1]

    def randint(high: int, size: Sequence[int], **_: Any) -> torch.Tensor:
        return torch.tensor([current[-1].take([1.0 / high] * high)])

    def begin(script: list[int]) -> Choices:
        current[:] = [Choices(script)]
        return current[-1]

    with monkeypatch.context() as patch:
        if not reads:
            remember_logits(patch)
        patch.setattr(ModelProposer, "propose", watched_propose)
        patch.setattr(ProcessorSampler, "sample", sample)
        patch.setattr(TorchNoise, "uniform", uniform)
        patch.setattr(torch, "randint", randint)
        yield begin


def remember_logits(patch: pytest.MonkeyPatch) -> None:
    """Let every text be read once: thousands of calls at the price of few forwards."""
    known: dict[tuple[int, ...], torch.Tensor] = {}
    read = Reader.read

    def remembering_read(self: Reader, text: Sequence[int], num_last: int = 1) -> torch.Tensor:
        key = (id(self.model), num_last, *text)
        if key not in known:
            known[key] = read(self, text, num_last)
        return known[key]

    patch.setattr(Reader, "read", remembering_read)


def difference(first: dict[tuple[int, ...], float], second: dict[tuple[int, ...], float]) -> float:
    """Largest difference of two distributions at one output."""
    return max(abs(first.get(output, 0.0) - second.get(output, 0.0)) for output in first.keys() | second.keys())


# -- storages --------------------------------------------------------------------------------------------------------


class RecordingStorage(NGramStorage):
    """Remembers what it was told."""

    def __init__(self, n: int, vocab_size: int) -> None:
        super().__init__(n, vocab_size)
        self.updates: list[tuple[list[int], list[int]]] = []
        self.fills: list[tuple[list[int], list[int]]] = []
        self.devices: set[str] = set()

    def update(self, input_ids: torch.Tensor, next_tokens: torch.Tensor) -> None:
        self.devices |= {input_ids.device.type, next_tokens.device.type}
        self.updates.append((input_ids[0].tolist(), next_tokens[0].tolist()))
        super().update(input_ids, next_tokens)

    def fill(self, input_ids: torch.Tensor, next_tokens: torch.Tensor, weight: float = 1.0) -> None:
        self.fills.append((input_ids[0].tolist(), next_tokens[0].tolist()))
        super().fill(input_ids, next_tokens, weight)

    def next_token(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.devices.add(input_ids.device.type)
        return super().next_token(input_ids)


class FixedStorage(INgramStorage):
    """Proposes the continuation of one text, or anything else; learns nothing. Shapes as in the listings, (batch,)."""

    def __init__(self, text: Sequence[int], vocab_size: int = 64) -> None:
        super().__init__(2, vocab_size)
        self.text = list(text)

    def next_token(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        place = input_ids.shape[1]
        token = self.text[place] if place < len(self.text) else 0
        return torch.tensor([token]), torch.tensor([place < len(self.text)])

    def has_gram(self, ngram: torch.Tensor) -> bool:
        return False

    def update(self, input_ids: torch.Tensor, next_tokens: torch.Tensor) -> None: ...

    def initialize(self, input_ids: torch.Tensor) -> None: ...

    def reset(self) -> None: ...

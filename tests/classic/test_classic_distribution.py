"""Outputs of the classic functions have exactly the distribution of plain decoding: by enumeration, and by chi-square.

Enumeration takes every draw every way, in float64; of each function once with every forward and the cache. Chi-square
runs the whole loop with torch's generator, with remembered logits. Its seeds are fixed and every cell passed at 1e-3
when it was written (20 cells: false alarms of a new seed 2 %).
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from classic_models import difference, enumerated, plain_distribution, remember_logits, tiny
from scipy.stats import chisquare

from foredraft import accept as verify
from foredraft.classic.ngram_assisted import NGramStorage, ngram_assisted_speculative_generate
from foredraft.classic.sampling import autoregressive_generate, speculative_generate
from foredraft.classic.utils.logits_processor import (
    LogitsProcessor,
    MultinomialProcessor,
    NucleusProcessor,
    TopKNucleusProcessor,
    TopKProcessor,
    draws_from_probs,
)

PROMPT = [0, 2, 1, 0, 2, 1, 0]
MAKERS: dict[str, Callable[[float], LogitsProcessor]] = {
    "multinomial": MultinomialProcessor,
    "top-k": lambda temperature: TopKProcessor(temperature, 2),
    "nucleus": lambda temperature: NucleusProcessor(temperature, 0.7),
    "both": lambda temperature: TopKNucleusProcessor(temperature, 3, 0.8),
}
TEMPERATURES = (0.5, 1.0, 1.5)


def speculative(processor: Any, vocab_size: int, length: int, **options: Any) -> list[int]:
    options = {"gamma": 2, "first_target": False, "eos_tokens_id": [], **options}
    drafter, target = tiny(8, vocab_size), tiny(7, vocab_size)
    return speculative_generate(PROMPT, drafter, target, logits_processor=processor, max_gen_len=length, **options)[0]


def ngram(processor: Any, vocab_size: int, length: int, **options: Any) -> list[int]:
    options = {"gamma": 2, "first_target": False, "eos_tokens_id": [], **options}
    storage = NGramStorage(3, vocab_size)
    target = tiny(7, vocab_size)
    return ngram_assisted_speculative_generate(
        PROMPT, storage, target, logits_processor=processor, max_gen_len=length, **options
    )[0]


def plain(processor: Any, vocab_size: int, length: int, **options: Any) -> list[int]:
    return autoregressive_generate(PROMPT, tiny(7, vocab_size), length, processor, **{"eos_tokens_id": [], **options})


def distribution_difference(
    run: Callable[..., Any], processor: Any, patch: pytest.MonkeyPatch, **options: Any
) -> float:
    vocab_size, length, reads = 3, options.pop("length", 3), options.pop("reads", False)
    wanted = plain_distribution(tiny(7, vocab_size), processor, PROMPT, length, options.get("eos_tokens_id", ()))
    found = enumerated(lambda: run(processor, vocab_size, length, **options), patch, reads=reads)
    assert abs(sum(found.values()) - 1.0) < 1e-12
    return difference(found, wanted)


def cells() -> list[Any]:
    """Every processor at every temperature; `make test` has each of both once."""
    fast = {("multinomial", 1.5), ("top-k", 1.0), ("nucleus", 0.5)}
    return [
        pytest.param(name, temperature, marks=() if (name, temperature) in fast else pytest.mark.full)
        for name in MAKERS
        for temperature in TEMPERATURES
    ]


@pytest.mark.sample(4)
@pytest.mark.parametrize(("name", "temperature"), cells())
@pytest.mark.parametrize("run", [speculative, ngram])
def test_every_output_has_its_probability(run: Any, name: str, temperature: float, monkeypatch: Any) -> None:
    assert distribution_difference(run, MAKERS[name](temperature), monkeypatch) < 1e-12


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("run", "options"),
    [
        (speculative, {"first_target": True}),
        (speculative, {"eos_tokens_id": [1]}),
        (speculative, {"gamma": 3, "use_egag": True, "gamma_max": 2}),
        (speculative, {"use_egag": True, "gamma_min": 0, "gamma_max": 3, "egag_ema_beta": 0.5}),
        (ngram, {"eos_tokens_id": [1, 0]}),
        (ngram, {"stop_if_unknown": True, "filler_top_k": 1}),
        (speculative, {"use_cache": True, "reads": True}),
        (ngram, {"use_cache": True, "reads": True}),
        (plain, {"use_cache": True, "reads": True}),
    ],
)
def test_options_keep_the_distribution(run: Any, options: dict[str, Any], monkeypatch: Any) -> None:
    assert distribution_difference(run, MultinomialProcessor(0.8), monkeypatch, **options) < 1e-12


class OwnProcessor(LogitsProcessor):
    """A distribution that is no softmax of the logits, and a ``sample`` that says nothing about itself."""

    def _process(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.clamp(-1.0, 1.0)

    def sample(self, probs: torch.Tensor) -> torch.Tensor:
        return torch.multinomial(probs, 1)


class DeclaredProcessor(OwnProcessor):
    @draws_from_probs
    def sample(self, probs: torch.Tensor) -> torch.Tensor:
        return torch.multinomial(probs, 1)


def test_a_declared_processor_keeps_the_distribution(monkeypatch: Any) -> None:
    assert distribution_difference(speculative, DeclaredProcessor(1.3), monkeypatch) < 1e-12


# -- what is broken shows ----------------------------------------------------------------------------------------------


def test_without_the_residual_the_distribution_is_another(monkeypatch: Any) -> None:
    monkeypatch.setattr(verify, "residual", lambda target_probs, *_: target_probs.double())
    assert distribution_difference(speculative, MultinomialProcessor(1.0), monkeypatch, length=2) > 1e-3


def test_skip_sample_adjustment_is_lossy(monkeypatch: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gap = distribution_difference(
            speculative, MultinomialProcessor(1.0), monkeypatch, length=2, skip_sample_adjustment=True
        )
    assert gap > 1e-3


# -- the whole loop ----------------------------------------------------------------------------------------------------

LENGTH, VOCAB_SIZE, NUM_SAMPLES = 3, 4, 1000


def p_value(run: Callable[[], list[int]], processor: Any, num_samples: int = NUM_SAMPLES) -> float:
    """Of the hypothesis that outputs have the exact distribution; rare outputs are pooled."""
    torch.manual_seed(1)
    counts = Counter(tuple(run()) for _ in range(num_samples))
    distribution = plain_distribution(tiny(7, VOCAB_SIZE), processor, PROMPT, LENGTH)
    assert all(distribution[output] > 0.0 for output in counts)
    frequent = [output for output in distribution if distribution[output] * num_samples >= 5]
    observed = [counts[output] for output in frequent]
    wanted = [distribution[output] * num_samples for output in frequent]
    if num_samples - sum(wanted) > 1.0:
        observed.append(num_samples - sum(observed))
        wanted.append(num_samples - sum(wanted))
    scale = sum(observed) / sum(wanted)
    return float(chisquare(observed, [w * scale for w in wanted]).pvalue)


OFTEN = [(speculative, "top-k", 1.0), (ngram, "multinomial", 0.5)]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("run", "name", "temperature"),
    [
        pytest.param(*cell, marks=pytest.mark.slow if cell in OFTEN else pytest.mark.full)
        for cell in product([speculative, ngram, plain], MAKERS, TEMPERATURES)
    ],
)
def test_samples_of_the_loop_have_the_distribution(run: Any, name: str, temperature: float, monkeypatch: Any) -> None:
    remember_logits(monkeypatch)
    processor = MAKERS[name](temperature)
    assert p_value(lambda: run(processor, VOCAB_SIZE, LENGTH, use_cache=True), processor) > 1e-3


@pytest.mark.full
@pytest.mark.slow
def test_samples_through_a_processor_of_ones_own_have_the_distribution(monkeypatch: Any) -> None:
    remember_logits(monkeypatch)
    processor = OwnProcessor(1.0)
    assert p_value(lambda: speculative(processor, VOCAB_SIZE, LENGTH, use_cache=True), processor) > 1e-3


@pytest.mark.full
@pytest.mark.slow
def test_a_processor_that_declares_what_it_does_not_do_is_found_out(monkeypatch: Any) -> None:
    """The chi-square test has teeth: 1e-9 for a ``sample`` that leans towards the likely."""
    remember_logits(monkeypatch)

    class Liar(OwnProcessor):
        @draws_from_probs
        def sample(self, probs: torch.Tensor) -> torch.Tensor:
            return torch.multinomial(probs.square(), 1)

    processor = Liar(1.0)
    assert p_value(lambda: speculative(processor, VOCAB_SIZE, LENGTH, use_cache=True), processor) < 1e-9

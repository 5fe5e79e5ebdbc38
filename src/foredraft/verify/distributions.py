"""Enumeration of a model's distribution over short continuations, and a test of samples against it.

The distribution is computed independently of the decoder's sampler: by transformers' processors over logits of the
model. Errors in the sampler are therefore found as well. The tests are exact Monte Carlo tests at any number of
samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from foredraft.config.engine import EngineConfig
from foredraft.config.sampling import SamplingParams
from foredraft.model.cache.ragged import KVCache
from foredraft.model.lm import CausalLM
from foredraft.model.nodes import Nodes
from foredraft.tree import DraftTree

OTHER = -1
"""Placeholder for every token that is not listed."""

BRANCHING = 6
"""Number of most likely tokens that are listed after a prefix. All other tokens form one cell."""

LEAST_MASS = 0.01
"""Probability of a prefix below which its continuations are pooled."""

LEAST_EXPECTED = 5.0
"""Smallest expected number of samples of a cell; rarer cells are pooled."""

SHIFT = 0.02
"""Shift, as total variation of one step, for which the power of a test is reported."""

SHIFTS = (SHIFT, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)
LIKELY = 0.9

IMPOSSIBLE = 1e-9
"""Largest mass that counts as zero; rounding leaves such remainders."""

NUM_SIMULATED = 20_000
"""Number of simulated draws per test. The error of p is a few parts in 1e4 where it matters."""

Text = tuple[int, ...]
ProbsAfter = Callable[[Text], NDArray[np.float64]]
"""Probabilities (V,) of the token after a continuation."""


def reference_distribution(
    target: CausalLM,
    prompt: Sequence[int],
    params: SamplingParams,
    chunk_size: int = EngineConfig.prefill_chunk_size,
) -> ProbsAfter:
    """Return a function for the distribution of the next token, computed by transformers' processors in their order.

    Args:
      params: sampling parameters; only temperature, top-k, top-p, min-p, typical-p, penalties and biases are used.
      chunk_size: chunk size of the prefill, equal to that of the engine that is verified.

    Returns: a function from the generated tokens to probabilities (V,) that sum to one.
    """
    processors = LogitsProcessorList()
    if params.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    if params.typical_p < 1.0:
        warpers.append(TypicalLogitsWarper(params.typical_p))
    cache = _prompt_cache(target, prompt[:-1], chunk_size)

    @torch.inference_mode()
    def probs_after(output: Text) -> NDArray[np.float64]:
        # Fed as a draft after the prompt, the output gives the same bits as the engine's steps. Fed as part of the
        # prompt, it is rounded differently, which can move a token across the edge of a nucleus. Drafts are never
        # committed.
        draft = Nodes.from_trees([DraftTree.chain(prompt[-1], output)])
        logits = target.forward(draft, cache, listed=True)[0][len(output)][None].float().cpu()
        ids = torch.tensor([[*prompt, *output]])
        scores = processors(ids, logits)
        for token, count in Counter(output).items():
            scores[0, token] -= params.presence_penalty + count * params.frequency_penalty
        for biased, bias in (params.logit_bias or {}).items():
            scores[0, int(biased)] += bias
        return torch.softmax(warpers(ids, scores)[0].double(), dim=-1).numpy()

    return probs_after


@torch.inference_mode()
def _prompt_cache(target: CausalLM, prompt: Sequence[int], chunk_size: int) -> KVCache:
    """Return a cache of the prompt, prefilled in chunks like the engine's."""
    cache = target.new_cache(1)
    for start in range(0, len(prompt), chunk_size):
        chunk = prompt[start : start + chunk_size]
        target.forward(Nodes.from_chains([chunk]), cache, keep=slice(0, 0))
        cache.commit([range(len(chunk))])
    return cache


@dataclass(frozen=True)
class Distribution:
    """Continuations of a prompt and their probabilities.

    Args:
      cells: probability of each cell. A cell that ends in `OTHER` pools all continuations with any unlisted token
        there.
      inner: prefixes whose continuations are enumerated.
      eos: tokens that end a continuation.
    """

    cells: Mapping[Text, float]
    inner: frozenset[Text]
    eos: frozenset[int] = frozenset()

    def cell_of(self, tokens: Sequence[int]) -> Text:
        """Return the cell of a continuation. A continuation that is too short has ended by EOS."""
        text: Text = ()
        while text in self.inner:
            following = tokens[len(text)] if len(text) < len(tokens) else next(iter(sorted(self.eos)), OTHER)
            longer = (*text, following)
            text = longer if longer in self.inner or longer in self.cells else (*text, OTHER)
        return text


def enumerate_distribution(probs_after: ProbsAfter, depth: int, eos: Iterable[int] = ()) -> Distribution:
    """Enumerate all continuations of ``depth`` tokens that are likely enough, and pool the others.

    Exactness: probabilities are products of float64 numbers and sum to one within 1e-9.
    """
    cells: dict[Text, float] = {}
    inner: set[Text] = set()
    ends = frozenset(eos)
    open_texts: list[tuple[Text, float]] = [((), 1.0)]
    while open_texts:
        text, mass = open_texts.pop()
        if len(text) == depth or (text and text[-1] in ends) or mass < LEAST_MASS:
            cells[text] = mass
            continue
        inner.add(text)
        probs = probs_after(text)
        listed = [int(token) for token in np.argsort(-probs, kind="stable")[:BRANCHING] if probs[token] > 0]
        open_texts += [((*text, token), mass * float(probs[token])) for token in listed]
        cells[*text, OTHER] = mass * max(0.0, 1.0 - float(probs[listed].sum()))
    return Distribution(cells, frozenset(inner), ends)


@dataclass(frozen=True)
class DistributionTest:
    """The result of a test of samples against a distribution.

    Args:
      p_value: probability, by simulation, of samples at least as unlikely as these under the distribution; never 0.
      num_cells: number of cells that the test distinguishes.
      power: probability that the test detects a shift of `SHIFT`. A shift moves that much mass from the most likely
        first token to the second.
      detectable: smallest of `SHIFTS` that is detected with a probability of 0.9; 1 if none is.
    """

    num_samples: int
    num_cells: int
    p_value: float
    power: float
    detectable: float


def judge_samples(
    distribution: Distribution, samples: Iterable[Sequence[int]], level: float, seed: int = 0
) -> DistributionTest:
    """Test whether samples could have been drawn from a distribution, by the likelihood ratio of pooled cells.

    Args:
      level: level of the test, for which its power is computed.

    Exactness: for samples of the distribution the chance of p <= a is at most a, at any number of samples.
    Randomness: simulated draws, keyed by ``seed``.
    """
    counts = Counter(distribution.cell_of(sample) for sample in samples)
    num_samples = sum(counts.values())
    places, num_places = _pooled(distribution, num_samples)

    def pooled(masses: Mapping[Text, float]) -> NDArray[np.float64]:
        sums: NDArray[np.float64] = np.zeros(num_places)
        for name, place in places.items():
            sums[place] += masses[name] if place else 0.0
        sums /= sums.sum()
        return sums

    observed = np.zeros(num_places, dtype=np.int64)
    for name, place in places.items():
        observed[place] += counts[name]
    probs = pooled(distribution.cells)
    rng = np.random.default_rng([seed, num_samples])
    null = _statistic(rng.multinomial(num_samples, probs, size=NUM_SIMULATED), probs)
    found = float(_statistic(observed[None], probs)[0])
    p_value = (1 + int((null >= found - 1e-9).sum())) / (NUM_SIMULATED + 1)
    limit = np.quantile(null, 1.0 - level)

    def power(shift: float) -> float:
        draws = rng.multinomial(num_samples, pooled(shifted(distribution, shift)), size=2_000)
        return float((_statistic(draws, probs) > limit).mean())

    powers = {shift: power(shift) for shift in SHIFTS}
    detectable = next((shift for shift, chance in powers.items() if chance >= LIKELY), 1.0)
    return DistributionTest(num_samples, int((probs > 0).sum()), p_value, powers[SHIFT], detectable)


def _pooled(distribution: Distribution, num_samples: int) -> tuple[dict[Text, int], int]:
    """Return an index for every cell, and the number of indices: 0 for impossible cells, 1 for those too rare."""
    places: dict[Text, int] = {}
    num_places = 2
    for name, mass in distribution.cells.items():
        is_common = mass * num_samples >= LEAST_EXPECTED
        places[name] = num_places if is_common else int(mass > IMPOSSIBLE)
        num_places += is_common
    return places, num_places


def shifted(distribution: Distribution, shift: float) -> dict[Text, float]:
    """Return the distribution with a part of the mass of its most likely first token moved to the second."""
    first: Counter[int] = Counter()
    for text, mass in distribution.cells.items():
        first[text[0] if text else OTHER] += mass  # type: ignore[assignment]
    likeliest = [(token, mass) for token, mass in first.most_common(2) if mass > 0]
    if len(likeliest) < 2:
        return dict(distribution.cells)
    (most, much), (second, less) = likeliest
    part = min(shift, much)
    factors = {most: 1.0 - part / much, second: 1.0 + part / less}
    return {text: mass * factors.get(text[0] if text else OTHER, 1.0) for text, mass in distribution.cells.items()}


def _statistic(counts: NDArray[np.int64], probs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return twice the log-likelihood ratio of every row of counts; infinite if an impossible cell was observed."""
    total = counts.sum(axis=1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = counts * (np.log(counts) - np.log(total * probs))
    result: NDArray[np.float64] = 2.0 * np.where(counts > 0, terms, 0.0).sum(axis=1)
    return result

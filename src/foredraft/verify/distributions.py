"""The distribution of a model over short continuations, enumerated; and whether samples could have been drawn from it.

The distribution is computed a second time here: by transformers' own processors over logits of the model, so that an
error of the decoder's sampler is found as well. Levels are those of exact Monte Carlo tests, at any number of samples.
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
"""Stands for every token that is not listed."""

BRANCHING = 6
"""Tokens that are listed after a text, the likeliest ones; the others are pooled."""

LEAST_MASS = 0.01
"""Probability of a text below which its continuations are pooled."""

LEAST_EXPECTED = 5.0
"""Samples that a cell is to hold on average; rarer cells are pooled."""

SHIFT = 0.02
"""Total variation of one step for which the power of a test is told."""

SHIFTS = (SHIFT, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)
LIKELY = 0.9

IMPOSSIBLE = 1e-9
"""Mass up to which a cell counts as none: what is left of one by rounding."""

NUM_SIMULATED = 20_000
"""Draws from the distribution that a test compares with: p is known to a few parts in 1e4 where it matters."""

Text = tuple[int, ...]
ProbsAfter = Callable[[Text], NDArray[np.float64]]
"""Probabilities (V,) of the token after a continuation."""


def reference_distribution(
    target: CausalLM,
    prompt: Sequence[int],
    params: SamplingParams,
    chunk_size: int = EngineConfig.prefill_chunk_size,
) -> ProbsAfter:
    """The distribution of the next token after a prompt and some output, by transformers' processors in their order.

    Args:
      params: how tokens are sampled: by temperature, top-k, top-p, min-p, typical-p, penalties and biases alone.
      chunk_size: chunks in which the prompt is read, as by the engine that is judged.

    Returns: a function of the output so far; its probabilities (V,) sum to one.
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
        # Read as a draft after the prompt, the output has the bits of an engine's steps. Read as a prompt, it had
        # other ones, and where a nucleus ends, rounding moved a token across. Drafts are never committed.
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
    """A cache of a prompt, read in chunks as an engine reads it."""
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
      cells: probability of each; one that ends in `OTHER` holds every continuation that goes on with another token.
      inner: texts that are gone on from.
      eos: tokens that end a text.
    """

    cells: Mapping[Text, float]
    inner: frozenset[Text]
    eos: frozenset[int] = frozenset()

    def cell_of(self, tokens: Sequence[int]) -> Text:
        """The cell that a continuation falls into. One that is shorter than it should be has ended by EOS."""
        text: Text = ()
        while text in self.inner:
            following = tokens[len(text)] if len(text) < len(tokens) else next(iter(sorted(self.eos)), OTHER)
            longer = (*text, following)
            text = longer if longer in self.inner or longer in self.cells else (*text, OTHER)
        return text


def enumerate_distribution(probs_after: ProbsAfter, depth: int, eos: Iterable[int] = ()) -> Distribution:
    """All continuations of so many tokens that are likely enough, the others pooled.

    Exactness: probabilities are products of float64 ones and sum to one within 1e-9.
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
      p_value: chance of samples as unlikely as these under the distribution, by simulation; never 0.
      num_cells: that were told apart.
      power: chance that a shift of `SHIFT`, of so much of the mass of the likeliest first token to the next one, would
        have been found at the level of the test.
      detectable: the smallest shift of `SHIFTS` that would have been found nine times in ten; 1 where none would.
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
      level: of one test, for which power is told.

    Exactness: the chance of p <= a is at most a for samples of the distribution, whatever their number.
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
        draws = rng.multinomial(num_samples, pooled(_shifted(distribution, shift)), size=2_000)
        return float((_statistic(draws, probs) > limit).mean())

    powers = {shift: power(shift) for shift in SHIFTS}
    detectable = next((shift for shift, chance in powers.items() if chance >= LIKELY), 1.0)
    return DistributionTest(num_samples, int((probs > 0).sum()), p_value, powers[SHIFT], detectable)


def _pooled(distribution: Distribution, num_samples: int) -> tuple[dict[Text, int], int]:
    """The place of every cell: the impossible ones share the first, those too rare for this number the second."""
    places: dict[Text, int] = {}
    num_places = 2
    for name, mass in distribution.cells.items():
        is_common = mass * num_samples >= LEAST_EXPECTED
        places[name] = num_places if is_common else int(mass > IMPOSSIBLE)
        num_places += is_common
    return places, num_places


def _shifted(distribution: Distribution, shift: float) -> dict[Text, float]:
    """The distribution, with a share of the mass of its likeliest first token given to the second."""
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
    """Twice the log-likelihood ratio of every row of counts; infinite where something impossible was seen."""
    total = counts.sum(axis=1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = counts * (np.log(counts) - np.log(total * probs))
    result: NDArray[np.float64] = 2.0 * np.where(counts > 0, terms, 0.0).sum(axis=1)
    return result

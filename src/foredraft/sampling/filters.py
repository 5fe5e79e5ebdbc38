"""Filters that leave tokens possible: temperature, top-k, top-p, min-p and typical-p.

The result equals that of transformers, token by token. The classes of transformers sort the whole vocabulary for every
row. On the CPU the kept set is found here from the few tokens that can be in it. Sometimes the result depends on the
rounding of transformers' cumulative sum, or on the order in which its unstable sort leaves equal values. The tokens in
question are then kept as *unsure*. If one of them matters, transformers' own classes decide. An *unsure* result rarely
matters, because a choice needs only the winner.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from foredraft.config.sampling import SamplingParams

SMALLEST_WEIGHT = float(np.finfo(np.float32).tiny)

MIN_P_BAND = 1e-5
"""Relative distance from the min-p threshold within which rounding could decide."""
COLUMN = 64
"""Number of scores per column when the k largest are searched by the maxima of columns."""
FLOORS = (1 / 200, 1 / 1600, 1 / 12_800)
"""Factors of 1 - top_p. Tokens down to each such weight are tried as a nucleus, relative to the largest weight; then
all are.
"""


@dataclass(frozen=True)
class Support:
    """The tokens of one row that keep some probability.

    Args:
      ids: int64 (S,), ascending. Without truncation these are all V tokens, including those of probability zero.
      scores: float32 (S,), logits after the temperature.
      weights: float32 (S,), exp(scores - peak).
      peak: the row's largest score.
      unsure_weight: largest weight of tokens that may still be removed; negative if all tokens are sure.
    """

    ids: np.ndarray
    scores: np.ndarray
    weights: np.ndarray
    peak: float
    unsure_weight: float = -1.0

    @property
    def is_sure(self) -> bool:
        return self.unsure_weight < 0.0 or not bool((self.weights <= self.unsure_weight).any())

    def among(self, kept: np.ndarray) -> Support:
        """Return the part of the support that bool (V,) ``kept`` selects; all of its tokens are sure."""
        keep = kept[self.ids]
        return Support(self.ids[keep], self.scores[keep], self.weights[keep], self.peak)


@dataclass(frozen=True)
class LogitsFilter:
    """Temperature and truncation of one set of parameters. Not for greedy rows, which have neither."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0

    @classmethod
    def of(cls, params: SamplingParams) -> LogitsFilter:
        return cls(params.temperature, params.top_k, params.top_p, params.min_p, params.typical_p)

    @property
    def truncation(self) -> tuple[float, ...]:
        return (self.top_k, self.top_p, self.min_p, self.typical_p)

    @cached_property
    def truncates(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0 or self.typical_p < 1.0

    @cached_property
    def has_shortcut(self) -> bool:
        """True if `support` can be used. Typical-p prevents this, because it reorders all tokens."""
        return self.typical_p == 1.0

    def scaled(self, scores: Tensor) -> Tensor:
        """Return scores divided by the temperature, as transformers does."""
        return scores if self.temperature == 1.0 else scores / self.temperature

    @cached_property
    def _classes(self) -> tuple[object, ...]:
        classes: list[object] = []
        if self.top_k > 0:
            classes.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1.0:
            classes.append(TopPLogitsWarper(self.top_p))
        if self.min_p > 0.0:
            classes.append(MinPLogitsWarper(self.min_p))
        if self.typical_p < 1.0:
            classes.append(TypicalLogitsWarper(self.typical_p))
        return tuple(classes)

    def truncated(self, scaled: Tensor) -> Tensor:
        """Apply transformers' own classes in its order: float32 (M, V) -> the same, with -inf for removed tokens."""
        for warper in self._classes:
            scaled = warper(None, scaled)  # type: ignore[operator]
        return scaled

    def kept(self, row: np.ndarray) -> np.ndarray:
        """Return bool (V,): the tokens that transformers' own classes keep in a row of scaled scores.

        If the boundary of top-p does not fall between equal values, sorting the values is enough, which is several
        times cheaper than sorting the tokens.
        """
        if self.top_k == 0 and self.min_p == 0.0 and self.typical_p == 1.0 and self.top_p < 1.0:
            lowest = smallest_in_nucleus(row, self.top_p)
            if lowest is not None:
                return row >= lowest
        result: np.ndarray = (self.truncated(torch.from_numpy(row)[None])[0] > -torch.inf).numpy()
        return result

    def support(self, row: np.ndarray, peak: float) -> Support:
        """Return the kept tokens of one row without sorting it, for parameters that truncate.

        Args:
          row: float32 (V,), scaled scores with a finite maximum.
          peak: maximum of ``row``.
        """
        lowest, unsure = SMALLEST_WEIGHT, -1.0
        if 0 < self.top_k < len(row):
            ids = top_ids(row, self.top_k)
        elif self.top_p < 1.0:
            return self._nucleus(row, peak)
        else:
            ids = (row >= self._lowest_score(peak)).nonzero()[0]
        scores = row[ids]
        weights = exp_weights(scores, peak)
        if self.top_p < 1.0:
            total = float(np.add.reduce(weights))
            goal, slack = self.top_p * total, slack_of(total, self.top_p, len(weights))
            lowest, unsure = nucleus_bounds(weights, goal, slack)
        return self._kept_of(Support(ids, scores, weights, peak, unsure), lowest)

    def _nucleus(self, row: np.ndarray, peak: float) -> Support:
        """Return the support under top-p and min-p, found among the heaviest tokens that have enough mass together."""
        all_weights = row - np.float32(peak)
        total = float(torch.from_numpy(all_weights).exp_().sum())
        goal, slack = self.top_p * total, slack_of(total, self.top_p, len(row))
        ids = heaviest(all_weights, self.top_p, (goal + slack) * (1.0 + 1e-6))
        scores = row[ids]
        weights = exp_weights(scores, peak)
        lowest, unsure = nucleus_bounds(weights, goal, slack)
        return self._kept_of(Support(ids, scores, weights, peak, unsure), lowest)

    def _lowest_score(self, peak: float) -> float:
        """Return a lower bound of the scores that min-p may keep, or that have any weight."""
        floor = max(self.min_p * (1.0 - MIN_P_BAND), SMALLEST_WEIGHT)
        return peak + math.log(floor) - 1e-3 - 1e-6 * abs(peak)

    def _kept_of(self, found: Support, lowest: float) -> Support:
        """Return the tokens that min-p keeps, down to the weight ``lowest``."""
        unsure = found.unsure_weight
        lowest = max(lowest, SMALLEST_WEIGHT)
        if self.min_p > 0.0:
            lowest, unsure = max(lowest, self.min_p * (1.0 - MIN_P_BAND)), max(unsure, self.min_p * (1.0 + MIN_P_BAND))
        keep = (found.weights >= lowest).nonzero()[0]
        return Support(found.ids[keep], found.scores[keep], found.weights[keep], found.peak, unsure)


def exp_weights(scores: np.ndarray, peak: float) -> np.ndarray:
    """Return exp(scores - peak), float32."""
    weights: np.ndarray = scores - np.float32(peak)
    np.exp(weights, out=weights)
    return weights


def threshold(values: np.ndarray, k: int) -> float:
    """Return, in one pass, a bound that the k largest of V >= k values reach, and usually few others.

    The values are arranged in columns. The k-th largest of the columns' maxima is at most the k-th largest value, and
    rarely much smaller if there are many more columns than k.
    """
    height = max(1, min(COLUMN, len(values) // (4 * k)))
    num_columns = len(values) // height
    maxima = np.maximum.reduce(values[: num_columns * height].reshape(height, num_columns), axis=0)
    maxima.partition(num_columns - k)
    return float(maxima[num_columns - k])


def candidates(values: np.ndarray, k: int) -> np.ndarray:
    """Return ids of the values that reach `threshold`: the k largest and some others; int64, ascending."""
    found: np.ndarray = (values >= threshold(values, k)).nonzero()[0]
    return found


def top_ids(row: np.ndarray, k: int) -> np.ndarray:
    """Return the k largest scores and all equal to the k-th, as in transformers' top-k filter: int64 ids, ascending."""
    ids = candidates(row, k)
    scores = row[ids]
    ordered = np.sort(scores)
    kept: np.ndarray = ids[scores >= ordered[len(ordered) - k]]
    return kept


def heaviest(weights: np.ndarray, top_p: float, mass: float) -> np.ndarray:
    """Return ids of the largest weights (V,), down to a bound. Their total is ``mass`` or more if possible."""
    for factor in FLOORS:
        ids: np.ndarray = (weights >= (1.0 - top_p) * factor).nonzero()[0]
        if float(np.add.reduce(weights[ids], dtype=np.float64)) >= mass:
            return ids
    return np.arange(len(weights))


def nucleus_bounds(weights: np.ndarray, goal: float, slack: float) -> tuple[float, float]:
    """Return bounds of the smallest set whose mass reaches a goal, as in transformers' TopPLogitsWarper.

    A token is removed if the mass of it and all lighter tokens is at most 1 - top_p. A token is therefore kept if the
    heavier tokens have less than top_p.

    Args:
      weights: float32 (S,), unnormalised probabilities of the heaviest tokens.
      goal: top_p times the sum of the weights of all tokens.
      slack: largest possible difference between transformers' sums and ours.

    Returns: the smallest weight that may be kept, and the largest weight that depends on rounding or on the order of
    equal weights; negative if there is none.
    """
    ascending = weights.copy()
    ascending.sort()
    ordered = ascending[::-1]
    mass_above = ordered.cumsum(dtype=np.float64)
    mass_above -= ordered
    surely, maybe = mass_above.searchsorted((goal - slack, goal + slack)).tolist()
    surely = max(1, surely)
    if maybe > surely:
        return float(ordered[maybe - 1]), float(ordered[surely])
    last = float(ordered[surely - 1])
    is_split = surely < len(ordered) and float(ordered[surely]) == last
    return last, last if is_split else -1.0


def smallest_in_nucleus(row: np.ndarray, top_p: float) -> float | None:
    """Return the smallest score that transformers' TopPLogitsWarper keeps; None if it also removes a token with that
    score.

    The steps on the sorted scores are the same: softmax, cumulative sum, comparison, all in float32.
    """
    ordered = torch.from_numpy(np.sort(row))
    removed = ordered.softmax(dim=-1).cumsum(dim=-1) <= (1 - top_p)
    num_removed = min(int(removed.sum()), len(row) - 1)
    lowest = float(ordered[num_removed])
    return None if num_removed and float(ordered[num_removed - 1]) == lowest else lowest


def slack_of(total: float, top_p: float, num_tokens: int) -> float:
    """Return a bound of the difference between transformers' float32 sums, taken in four lanes or more, and ours."""
    return total * ((1.0 - top_p) * (1e-5 + num_tokens / 4 * 2.0**-24) + 4e-6)

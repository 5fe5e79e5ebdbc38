"""Which tokens remain possible after temperature, top-k, top-p, min-p and typical-p.

The meaning is transformers', token by token. Its own classes sort the whole vocabulary for every row; on the CPU the
kept set is found here from the few tokens that can be in it. Where the outcome hangs on the rounding of transformers'
cumulative sum, or on the order in which its (unstable) sort leaves equal values, the tokens in question are kept as
*unsure* and transformers' own classes decide, but only when one of them matters: seldom for a choice, which needs the
winner alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

if TYPE_CHECKING:
    from foretoken.config.sampling import SamplingParams

FLOORS = (2.0**-6, 2.0**-10)
"""Weights down to these are tried as a nucleus first, the largest weight being 1: trained models are seldom flatter."""

HEAVY_SIZES = (256, 4096)
"""How many of the heaviest tokens are tried next, before all are sorted."""

FEW_TO_SORT = 4096

SMALLEST_WEIGHT = float(np.finfo(np.float32).tiny)

COLUMN = 64
"""Scores per column when the k largest are looked for by the columns' maxima."""

MIN_P_BAND = 1e-5
"""Relative distance from the min-p threshold within which rounding could decide."""


@dataclass(frozen=True)
class Support:
    """The tokens of one row that keep some probability.

    Args:
      ids: int64 (S,), ascending. Without truncation all V of them, those of probability zero included.
      scores: float32 (S,), logits after the temperature.
      weights: float32 (S,), exp(scores - peak).
      peak: the row's largest score.
      unsure_weight: tokens of at most this weight may turn out to be removed; negative when all are sure.
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
        """The part of it that bool (V,) ``kept`` names; all of that is sure."""
        keep = kept[self.ids]
        return Support(self.ids[keep], self.scores[keep], self.weights[keep], self.peak)


@dataclass(frozen=True)
class Warper:
    """Temperature and truncation of one set of parameters. Not for greedy rows, which have neither."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0

    @classmethod
    def of(cls, params: SamplingParams) -> Warper:
        return cls(params.temperature, params.top_k, params.top_p, params.min_p, params.typical_p)

    @property
    def truncation(self) -> tuple[float, ...]:
        return (self.top_k, self.top_p, self.min_p, self.typical_p)

    @cached_property
    def truncates(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0 or self.typical_p < 1.0

    @cached_property
    def has_shortcut(self) -> bool:
        """Whether `support` can be used: not with typical-p, which reorders all tokens."""
        return self.typical_p == 1.0

    def scaled(self, scores: Tensor) -> Tensor:
        """Scores over temperature, as transformers divides them."""
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
        """transformers' own classes in its order: float32 (M, V) -> the same, -inf where a token is removed."""
        for warper in self._classes:
            scaled = warper(None, scaled)  # type: ignore[operator]
        return scaled

    def kept(self, row: np.ndarray) -> np.ndarray:
        """bool (V,): what transformers' own classes leave of a row of scaled scores.

        Sorting the values is enough, and several times cheaper than sorting the tokens, unless the boundary of top-p
        falls between equal values.
        """
        if self.top_k == 0 and self.min_p == 0.0 and self.typical_p == 1.0 and self.top_p < 1.0:
            lowest = smallest_in_nucleus(row, self.top_p)
            if lowest is not None:
                return row >= lowest
        result: np.ndarray = (self.truncated(torch.from_numpy(row)[None])[0] > -torch.inf).numpy()
        return result

    def support(self, row: np.ndarray, peak: float) -> Support:
        """The kept tokens of one row without sorting it.

        Args:
          row: float32 (V,), scaled scores with a finite maximum.
          peak: that maximum.
        """
        if not self.truncates:
            return Support(np.arange(len(row)), row, exp_weights(row, peak), peak)
        ids = top_ids(row, self.top_k) if 0 < self.top_k < len(row) else None
        scores = row if ids is None else row[ids]
        weights = exp_weights(scores, peak)
        lowest, unsure = self._bounds(weights)
        keep = np.flatnonzero(weights >= lowest)
        return Support(keep if ids is None else ids[keep], scores[keep], weights[keep], peak, unsure)

    def _bounds(self, weights: np.ndarray) -> tuple[float, float]:
        """The smallest weight that may be kept, and the largest that may be removed (negative: none)."""
        lowest, unsure = SMALLEST_WEIGHT, -1.0
        if self.top_p < 1.0:
            in_nucleus, unsure = nucleus_bounds(weights, self.top_p)
            lowest = max(lowest, in_nucleus)
        if self.min_p > 0.0:
            floor = self.min_p * (1.0 - MIN_P_BAND)
            lowest, unsure = max(lowest, floor), max(unsure, self.min_p * (1.0 + MIN_P_BAND))
        return lowest, unsure


def exp_weights(scores: np.ndarray, peak: float) -> np.ndarray:
    """exp(scores - peak), float32."""
    weights: np.ndarray = scores - np.float32(peak)
    np.exp(weights, out=weights)
    return weights


def candidates(values: np.ndarray, k: int) -> np.ndarray:
    """Ids of the k largest values and of some others, in one pass: all that reach a threshold; int64, ascending.

    The values are cut into columns. The k-th largest of the columns' maxima is no larger than the k-th largest value,
    and seldom much smaller where there are many more columns than k.
    """
    height = max(1, min(COLUMN, len(values) // (4 * k)))
    num_columns = len(values) // height
    maxima = values[: num_columns * height].reshape(height, num_columns).max(axis=0)
    return np.flatnonzero(values >= np.partition(maxima, num_columns - k)[num_columns - k])


def top_ids(row: np.ndarray, k: int) -> np.ndarray:
    """The k largest scores and all that equal the k-th, as transformers' TopKLogitsWarper: int64 ids, ascending."""
    ids = candidates(row, k)
    scores = row[ids]
    kept: np.ndarray = ids[scores >= np.partition(scores, len(scores) - k)[len(scores) - k]]
    return kept


def heaviest(weights: np.ndarray, mass: float) -> np.ndarray:
    """The largest weights, largest first: all down to some threshold, and together at least ``mass`` if that exists."""
    for floor in FLOORS:
        heavy = weights[(weights >= floor).nonzero()[0]]
        if len(heavy) > FEW_TO_SORT:
            break
        if float(heavy.sum()) >= mass:
            return np.sort(heavy)[::-1]
    for size in HEAVY_SIZES:
        if len(weights) > FEW_TO_SORT and len(weights) >= 4 * size:
            heavy = weights[candidates(weights, size)]
            if float(heavy.sum()) >= mass:
                return np.sort(heavy)[::-1]
    return np.sort(weights)[::-1]


def nucleus_bounds(weights: np.ndarray, top_p: float) -> tuple[float, float]:
    """Bounds of the smallest set whose mass reaches top_p, in the manner of transformers' TopPLogitsWarper.

    A token is removed when the mass of itself and all lighter ones is at most 1 - top_p; so it is kept when the heavier
    ones hold less than top_p.

    Args:
      weights: float32 (V,), unnormalised probabilities, the largest 1.
      top_p: in (0, 1).

    Returns: the smallest weight that may be kept, and the largest whose fate hangs on rounding or on the order of equal
    weights; negative when there is none.
    """
    total = float(weights.sum())
    goal = top_p * total
    slack = total * ((1.0 - top_p) * rounding(len(weights)) + 4e-6)
    ordered = heaviest(weights, goal + slack)
    mass_above = np.cumsum(ordered, dtype=np.float64)
    mass_above -= ordered
    surely, maybe = np.searchsorted(mass_above, (goal - slack, goal + slack)).tolist()
    surely = max(1, surely)
    if maybe > surely:
        return float(ordered[maybe - 1]), float(ordered[surely])
    last = float(ordered[surely - 1])
    is_split = surely < len(ordered) and float(ordered[surely]) == last
    return last, last if is_split else -1.0


def smallest_in_nucleus(row: np.ndarray, top_p: float) -> float | None:
    """The smallest score that transformers' TopPLogitsWarper keeps; None when it removes an equal one.

    Its steps on the sorted scores: softmax, cumulative sum, comparison, all in float32.
    """
    ordered = torch.from_numpy(np.sort(row))
    removed = ordered.softmax(dim=-1).cumsum(dim=-1) <= (1 - top_p)
    num_removed = min(int(removed.sum()), len(row) - 1)
    lowest = float(ordered[num_removed])
    return None if num_removed and float(ordered[num_removed - 1]) == lowest else lowest


def rounding(num_tokens: int) -> float:
    """Bound of the relative error of a float32 sum over tokens, taken in four lanes or more."""
    return 1e-5 + num_tokens / 4 * 2.0**-24

"""The few largest values of a row, and how far down its nucleus reaches, without sorting the vocabulary."""

from __future__ import annotations

import numpy as np
import torch

COLUMN = 64
"""Scores per column when the k largest are looked for by the columns' maxima."""

FLOORS = (1 / 200, 1 / 1600, 1 / 12_800)
"""Times 1 - top_p: tokens down to such a weight are tried as a nucleus, the largest weight being 1; then all are."""


def threshold(values: np.ndarray, k: int) -> float:
    """A bound that the k largest of V >= k values reach, and usually few others, in one pass.

    The values are cut into columns. The k-th largest of the columns' maxima is no larger than the k-th largest value,
    and seldom much smaller where there are many more columns than k.
    """
    height = max(1, min(COLUMN, len(values) // (4 * k)))
    num_columns = len(values) // height
    maxima = np.maximum.reduce(values[: num_columns * height].reshape(height, num_columns), axis=0)
    maxima.partition(num_columns - k)
    return float(maxima[num_columns - k])


def candidates(values: np.ndarray, k: int) -> np.ndarray:
    """Ids of the k largest values and of some others: all that reach a threshold; int64, ascending."""
    found: np.ndarray = (values >= threshold(values, k)).nonzero()[0]
    return found


def top_ids(row: np.ndarray, k: int) -> np.ndarray:
    """The k largest scores and all that equal the k-th, as transformers' TopKLogitsWarper: int64 ids, ascending."""
    ids = candidates(row, k)
    scores = row[ids]
    ordered = np.sort(scores)
    kept: np.ndarray = ids[scores >= ordered[len(ordered) - k]]
    return kept


def heaviest(weights: np.ndarray, top_p: float, mass: float) -> np.ndarray:
    """Ids of the largest weights (V,): all down to some weight, and together at least ``mass`` if that exists."""
    for factor in FLOORS:
        ids: np.ndarray = (weights >= (1.0 - top_p) * factor).nonzero()[0]
        if float(np.add.reduce(weights[ids], dtype=np.float64)) >= mass:
            return ids
    return np.arange(len(weights))


def nucleus_bounds(weights: np.ndarray, goal: float, slack: float) -> tuple[float, float]:
    """Bounds of the smallest set whose mass reaches a goal, in the manner of transformers' TopPLogitsWarper.

    A token is removed when the mass of itself and all lighter ones is at most 1 - top_p; so it is kept when the heavier
    ones hold less than top_p.

    Args:
      weights: float32 (S,), unnormalised probabilities of the heaviest tokens.
      goal: top_p times the sum of the weights of all tokens.
      slack: by how much transformers' sums may differ from ours.

    Returns: the smallest weight that may be kept, and the largest whose fate hangs on rounding or on the order of equal
    weights; negative when there is none.
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
    """The smallest score that transformers' TopPLogitsWarper keeps; None when it removes an equal one.

    Its steps on the sorted scores: softmax, cumulative sum, comparison, all in float32.
    """
    ordered = torch.from_numpy(np.sort(row))
    removed = ordered.softmax(dim=-1).cumsum(dim=-1) <= (1 - top_p)
    num_removed = min(int(removed.sum()), len(row) - 1)
    lowest = float(ordered[num_removed])
    return None if num_removed and float(ordered[num_removed - 1]) == lowest else lowest


def slack_of(total: float, top_p: float, num_tokens: int) -> float:
    """Largest distance of transformers' float32 sums over tokens, taken in four lanes or more, from ours."""
    return total * ((1.0 - top_p) * (1e-5 + num_tokens / 4 * 2.0**-24) + 4e-6)

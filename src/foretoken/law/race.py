"""Who has the largest score plus keyed noise, in several rows at once on the CPU."""

from __future__ import annotations

import numpy as np

from foretoken.law import noise
from foretoken.law.segments import LOWEST, Segments, scaled, tops
from foretoken.law.support import Supports, Warper

FEW = 1024
"""Supports up to this size get their noise directly; larger ones are searched for the tokens that can win."""

HEAVY = 256
"""About how many of the largest scores get noise first in such a search."""


def race(
    warper: Warper, table: np.ndarray, peaks: np.ndarray, keys: np.ndarray, k: int
) -> tuple[np.ndarray, np.ndarray]:
    """The k best tokens of each row under keyed noise.

    Args:
      table: float32 (M, V), scores before the temperature.
      peaks: float32 (M,), the largest of each row after the temperature; finite.
      keys: uint64 (M,), of the match stream.

    Returns: tokens int64 (M, k), best first, and their scores with noise, float64 (M, k); -1 and -inf where there is
      none.
    """
    if not warper.truncates:
        at = _all_or_contenders(table, warper.temperature, keys, k)
        return _best(at, scaled(at.of(table), warper.temperature), keys, k)[1:]
    supports = warper.supports(table, peaks)
    few = _narrowed(supports, table, warper.temperature, keys, k)
    places, tokens, values = _best(few.at, few.scores, keys, k)
    unsure = few.is_unsure[places] & (places >= 0)
    if not unsure.any():
        return tokens, values
    supports = warper.settled(supports, table, np.flatnonzero(unsure.any(axis=1)).tolist())
    few = _narrowed(supports, table, warper.temperature, keys, k)
    return _best(few.at, few.scores, keys, k)[1:]


def _best(at: Segments, scores: np.ndarray, keys: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Places, tokens and values of the k best of some tokens, which have float32 (S,) scores over temperature."""
    places, values = at.best(scores + noise.token_gumbel(keys[at.rows], at.ids), k)
    return places, np.where(places >= 0, at.ids[places], -1), values


def _all_or_contenders(table: np.ndarray, temperature: float, keys: np.ndarray, k: int) -> Segments:
    everything = np.ones(table.shape, dtype=bool)
    if table.shape[1] > max(FEW, k):
        everything = _contenders(table, temperature, everything, keys, k)
    return Segments.in_mask(everything)


def _narrowed(supports: Supports, table: np.ndarray, temperature: float, keys: np.ndarray, k: int) -> Supports:
    """Large supports cut down to the tokens that can be among the k best."""
    large = np.flatnonzero(supports.at.counts > max(FEW, k))
    if not len(large):
        return supports
    line_of = np.full(len(table), -1)
    line_of[large] = np.arange(len(large))
    lines = line_of[supports.at.rows]
    inside = lines >= 0
    kept = np.zeros((len(large), table.shape[1]), dtype=bool)
    kept[lines[inside], supports.at.ids[inside]] = True
    contenders = _contenders(table[large], temperature, kept, keys[large], k)
    keep = ~inside
    keep[inside] = contenders[lines[inside], supports.at.ids[inside]]
    return supports.where(keep)


def _contenders(table: np.ndarray, temperature: float, kept: np.ndarray, keys: np.ndarray, k: int) -> np.ndarray:
    """The few tokens of each row among which the k best are certain to be: bool (M, V), a part of ``kept``.

    The heavy tokens get their noise first. The k-th best of them leads by so much over the largest score of the others
    that few of those have the noise to overtake it; and how much noise they have is seen from the hash alone.
    """
    bounds = np.maximum(tops(table, max(k, HEAVY)), LOWEST)
    mask: np.ndarray = table >= bounds[:, None]
    mask &= kept
    heavy = Segments.in_mask(mask)
    counts = heavy.counts
    if (many := counts > max(FEW, k)).any():  # equal scores: take some of them, and none of the others is larger
        heavy = heavy.where(np.arange(len(heavy.rows)) - heavy.starts[heavy.rows] < max(FEW, k))
        bounds[many] = table[many].max(axis=1)
        mask[:] = False
        mask[heavy.rows, heavy.ids] = True
    perturbed = scaled(heavy.of(table), temperature) + noise.token_gumbel(keys[heavy.rows], heavy.ids)
    worst = heavy.best(perturbed, k)[1][:, -1]
    least = worst - scaled(bounds, temperature)
    scratch = noise.Scratch.of(table.shape[1])
    for line, key in enumerate(keys.tolist()):
        mask[line] |= noise.noisiest(key, float(least[line]), scratch)
    mask &= kept
    return mask

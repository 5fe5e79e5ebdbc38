"""Top-p without sorting the vocabulary: how far down the nucleus reaches, for many rows at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from foretoken.law.segments import Segments

FLOORS = (1 / 200, 1 / 12_800, 0.0)
"""Times 1 - top_p: tokens down to such a weight are looked at, the largest being 1, until they have enough mass."""


@dataclass(frozen=True)
class Heaviest:
    """The heaviest tokens of M rows: of each row all down to some weight.

    Args:
      at: where they are.
      ordered: float32 (M, K), the weights, largest first, then zeros.
      mass_above: float64 (M, K), the sum of the weights before each.
      masses: float64 (M,), the sums.
    """

    at: Segments
    ordered: np.ndarray
    mass_above: np.ndarray
    masses: np.ndarray

    @classmethod
    def of(cls, at: Segments, weights: np.ndarray) -> Heaviest:
        ordered = at.padded(-weights, 0.0)
        ordered.sort(axis=1)
        np.negative(ordered, out=ordered)
        mass_above = np.cumsum(ordered, axis=1, dtype=np.float64)
        masses = mass_above[:, -1].copy()
        mass_above -= ordered
        return cls(at, ordered, mass_above, masses)

    def lack(self, totals: np.ndarray, top_p: float, num_tokens: int) -> np.ndarray:
        """Rows whose nucleus may reach beyond them, bool (M,); arguments as for `nucleus_bounds`."""
        goals, slacks = _goals(totals, top_p, num_tokens)
        lacking: np.ndarray = self.masses < goals + slacks
        return lacking


def nucleus_bounds(
    heaviest: Heaviest, totals: np.ndarray, top_p: float, num_tokens: int | np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Bounds of the smallest sets whose mass reaches top_p, in the manner of transformers' TopPLogitsWarper.

    A token is removed when the mass of itself and all lighter ones is at most 1 - top_p; so it is kept when the heavier
    ones hold less than top_p.

    Args:
      heaviest: of M rows, at least down to where the nucleus may end.
      totals: (M,), the sums of all weights.
      top_p: in (0, 1).
      num_tokens: how many weights that is, of all rows or of each (M,).

    Returns: the smallest weights that may be kept, and the largest whose fate hangs on rounding or on the order of
    equal weights, negative where there is none: float32 (M,) each.
    """
    ordered, counts, lines = heaviest.ordered, heaviest.at.counts, np.arange(len(totals))
    goals, slacks = _goals(totals, top_p, num_tokens)
    surely = (heaviest.mass_above < (goals - slacks)[:, None]).sum(axis=1)
    maybe = (heaviest.mass_above < (goals + slacks)[:, None]).sum(axis=1)
    surely, maybe = np.clip(surely, 1, counts), np.minimum(maybe, counts)
    lowest = ordered[lines, np.maximum(surely, maybe) - 1]
    following = ordered[lines, np.minimum(surely, ordered.shape[1] - 1)]
    is_split = (surely < counts) & (following == lowest)
    return lowest, np.where((maybe > surely) | is_split, following, np.float32(-1.0))


def _goals(totals: np.ndarray, top_p: float, num_tokens: int | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The mass that top-p asks for, and by how much transformers' sums may differ from ours: float64 (M,) each."""
    totals = totals.astype(np.float64)
    return top_p * totals, totals * ((1.0 - top_p) * rounding(num_tokens) + 4e-6)


def smallest_in_nucleus(row: np.ndarray, top_p: float) -> float | None:
    """The smallest score that transformers' TopPLogitsWarper keeps; None when it removes an equal one.

    Its steps on the sorted scores: softmax, cumulative sum, comparison, all in float32.
    """
    ordered = torch.from_numpy(np.sort(row))
    removed = ordered.softmax(dim=-1).cumsum(dim=-1) <= (1 - top_p)
    num_removed = min(int(removed.sum()), len(row) - 1)
    lowest = float(ordered[num_removed])
    return None if num_removed and float(ordered[num_removed - 1]) == lowest else lowest


def rounding(num_tokens: int | np.ndarray) -> float | np.ndarray:
    """Bound of the relative error of a float32 sum over tokens, taken in four lanes or more."""
    return 1e-5 + num_tokens / 4 * 2.0**-24

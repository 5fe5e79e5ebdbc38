"""Gumbel-top-k on the CPU: the tokens with the largest scores plus keyed noise, which all rows get at once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from foretoken.law import noise
from foretoken.law.support import Support, Warper, threshold

FEW = 1024
"""Supports up to this size get their noise directly; larger ones are searched for the tokens that can win."""

HEAVY = 256
"""About how many of the largest scores get noise first in such a search."""

LOWEST = float(np.finfo(np.float32).min)
"""Below every score of a token that is possible at all."""


def healthy_rows(scores: Tensor, temperature: float = 1.0) -> Iterator[tuple[int, np.ndarray, float]]:
    """The rows of (M, V) that have a finite maximum: number, float32 (V,) over temperature, maximum.

    The array is good until the next row comes: one that stays in the processor's cache is written again and again.
    """
    buffer = torch.empty(scores.shape[1], dtype=torch.float32)
    row = buffer.numpy()
    for index, values in enumerate(scores.detach()):
        buffer.copy_(values)
        if temperature != 1.0:
            buffer.div_(temperature)
        peak = float(np.maximum.reduce(row))
        if math.isfinite(peak):
            yield index, row, peak


class GumbelTopK:
    """The k best tokens of rows under keyed noise.

    Args:
      scores: (M, V) of any float dtype, before the temperature.
      keys: M keys of the match stream.
      columns: int64 (V,), the tokens that columns stand for; their own numbers by default.
    """

    def __init__(
        self, warper: Warper, scores: Tensor, keys: list[int], k: int, columns: np.ndarray | None = None
    ) -> None:
        self._columns = columns
        self._warper = warper
        self._scores = scores
        self._keys = keys
        self._k = k

    @cached_property
    def _scratch(self) -> noise.Scratch:
        return noise.Scratch.of(self._scores.shape[1], self._columns)

    def _noise(self, keys: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """Match noise of the tokens in these columns."""
        return noise.token_gumbel(keys, columns if self._columns is None else self._columns[columns])

    def run(self) -> tuple[np.ndarray, np.ndarray]:
        """Columns int64 (M, k), best first, and their scores with noise, float64; -1 and -inf where there is none."""
        tokens = np.full((len(self._keys), self._k), -1, dtype=np.int64)
        values = np.full((len(self._keys), self._k), -np.inf)
        supports = {}
        for index, row, peak in healthy_rows(self._scores, self._warper.temperature):
            supports[index] = self._support(index, row, peak)
        if not supports:
            return tokens, values
        starts, perturbed = self._perturbed(supports)
        for index, support, start in zip(supports, supports.values(), starts, strict=True):
            of_row = perturbed[start : start + len(support.ids)]
            best = ranked(of_row, self._k)
            if support.unsure_weight >= 0.0 and bool((support.weights[best] <= support.unsure_weight).any()):
                support, of_row = self._settled(index)
                best = ranked(of_row, self._k)
            tokens[index, : len(best)] = support.ids[best]
            values[index, : len(best)] = of_row[best]
        return tokens, values

    def _support(self, index: int, row: np.ndarray, peak: float) -> Support:
        """The tokens of a row that are to get noise: those that it may choose, or the part that can win."""
        if self._warper.truncates:
            return self._narrowed(self._warper.support(row, peak), index)
        everything = Support(self._all_ids, row, row, peak)
        few = self._narrowed(everything, index)
        return Support(few.ids, few.scores.copy(), few.weights, peak) if few is everything else few

    @cached_property
    def _all_ids(self) -> np.ndarray:
        return np.arange(self._scores.shape[1])

    def _settled(self, index: int) -> tuple[Support, np.ndarray]:
        """The support of a row, its unsure tokens decided by transformers' own classes, and the scores with noise."""
        ((_, row, peak),) = healthy_rows(self._scores[index : index + 1], self._warper.temperature)
        support = self._narrowed(self._warper.support(row, peak).among(self._warper.kept(row)), index)
        return support, self._perturbed({index: support})[1]

    def _perturbed(self, supports: dict[int, Support]) -> tuple[list[int], np.ndarray]:
        """Starts of the rows among the tokens of all, and the scores with noise of those, float64 (S,)."""
        keys = np.array([self._keys[index] for index in supports], dtype=np.uint64)
        parts = list(supports.values())
        if len(parts) == 1:
            return [0], parts[0].scores + self._noise(keys, parts[0].ids)
        sizes = [len(part.ids) for part in parts]
        drawn = self._noise(keys.repeat(sizes), np.concatenate([part.ids for part in parts]))
        drawn += np.concatenate([part.scores for part in parts])
        return [sum(sizes[:i]) for i in range(len(sizes))], drawn

    def _narrowed(self, support: Support, index: int) -> Support:
        """The part of a large support in which the k best are certain to be.

        Heavy tokens get their noise first. The k-th best of them leads by so much over the largest score of the others
        that few of those have the noise to overtake it; and how much noise they have is seen from the hash alone.
        """
        few = max(FEW, self._k)
        if len(support.ids) <= few:
            return support
        key = self._keys[index]
        bound = max(threshold(support.scores, max(self._k, HEAVY)), LOWEST)
        heavy = (support.scores >= bound).nonzero()[0]
        if len(heavy) > few:  # many equal scores: some of them will do, and none of the others is larger
            heavy, bound = heavy[:few], support.peak
        perturbed = support.scores[heavy] + self._noise(np.array(key, dtype=np.uint64), support.ids[heavy])
        best = perturbed[ranked(perturbed, self._k)]
        worst = float(best[-1]) if len(best) == self._k else -math.inf
        keep = noise.noisiest(key, worst - bound, self._scratch)
        if len(support.ids) < len(keep):
            keep = keep[support.ids]
        keep[heavy] = True
        places = keep.nonzero()[0]
        return Support(
            support.ids[places], support.scores[places], support.weights[places], support.peak, support.unsure_weight
        )


def ranked(values: np.ndarray, k: int) -> np.ndarray:
    """Indices of the k largest of float64 (S,), best first, of equal ones the first; -inf never counts."""
    best = np.array([values.argmax()]) if k == 1 else np.argsort(-values, kind="stable")[:k]
    ranked: np.ndarray = best[values[best] > -np.inf]
    return ranked

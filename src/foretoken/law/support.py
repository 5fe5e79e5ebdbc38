"""Which tokens remain possible after temperature, top-k, top-p, min-p and typical-p.

The meaning is transformers', token by token. Its own classes sort the whole vocabulary for every row; on the CPU the
kept sets of many rows are found here together, from the few tokens that can be in them. Where the outcome hangs on the
rounding of transformers' cumulative sum, or on the order in which its (unstable) sort leaves equal values, the tokens
in question are kept as *unsure* and transformers' own classes decide, but only when one of them matters: seldom for a
choice, which needs the winner alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
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

from foretoken.law.nucleus import FLOORS, Heaviest, nucleus_bounds, smallest_in_nucleus
from foretoken.law.segments import LOWEST, Segments, scaled, tops

if TYPE_CHECKING:
    from foretoken.config.sampling import SamplingParams

SMALLEST_WEIGHT = float(np.finfo(np.float32).tiny)

MIN_P_BAND = 1e-5
"""Relative distance from the min-p threshold within which rounding could decide."""


@dataclass(frozen=True)
class Supports:
    """The tokens that keep some probability, of M rows.

    Args:
      at: where they stand in the table of scores, and to which row they belong.
      scores: float32 (S,), logits after the temperature.
      weights: float32 (S,), exp(score - peak of the row).
      peaks: float32 (M,), the largest score of each row.
      unsure_weights: float32 (M,): tokens of at most this weight may turn out to be removed; negative: none.
    """

    at: Segments
    scores: np.ndarray
    weights: np.ndarray
    peaks: np.ndarray
    unsure_weights: np.ndarray

    def where(self, keep: np.ndarray, unsure_weights: np.ndarray | None = None) -> Supports:
        """The tokens that bool (S,) names; every row has one."""
        unsure = self.unsure_weights if unsure_weights is None else unsure_weights
        return Supports(self.at.where(keep), self.scores[keep], self.weights[keep], self.peaks, unsure)

    @property
    def is_unsure(self) -> np.ndarray:
        """Tokens that may turn out to be removed, bool (S,)."""
        unsure: np.ndarray = self.weights <= self.unsure_weights[self.at.rows]
        return unsure

    def settled(self, kept_of: dict[int, np.ndarray]) -> Supports:
        """With only those tokens of some rows that bool (V,) names; all of them are sure."""
        keep = np.ones(len(self.scores), dtype=bool)
        unsure = self.unsure_weights.copy()
        for row, kept in kept_of.items():
            of_row = slice(*np.searchsorted(self.at.rows, (row, row + 1)))
            keep[of_row] = kept[self.at.ids[of_row]]
            unsure[row] = -1.0
        return self.where(keep, unsure)


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
        """Whether `supports` can be used: not with typical-p, which reorders all tokens."""
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

    def supports(self, table: np.ndarray, peaks: np.ndarray) -> Supports:
        """The kept tokens of rows without sorting them.

        Args:
          table: float32 (M, V): scores before the temperature.
          peaks: float32 (M,), the largest of each row after the temperature; finite.
        """
        if self.top_p < 1.0 and not 0 < self.top_k < table.shape[1]:
            return self._nucleus(table, peaks)
        found = self._largest(table, peaks)
        if self.top_p < 1.0:
            heaviest = Heaviest.of(found.at, found.weights)
            return self._kept_of(found, *nucleus_bounds(heaviest, heaviest.masses, self.top_p, found.at.counts))
        return self._kept_of(found)

    def sure_supports(self, table: np.ndarray, peaks: np.ndarray) -> Supports:
        """`supports`, every unsure token decided by transformers' own classes."""
        found = self.supports(table, peaks)
        unsure_rows: list[int] = np.unique(found.at.rows[found.is_unsure]).tolist()
        return self.settled(found, table, unsure_rows) if unsure_rows else found

    def settled(self, found: Supports, table: np.ndarray, rows: Iterable[int]) -> Supports:
        """Supports with the tokens of some rows decided by transformers' own classes."""
        return found.settled({row: self.kept(scaled(table[row], self.temperature)) for row in rows})

    def _largest(self, table: np.ndarray, peaks: np.ndarray) -> Supports:
        """The k largest of each row and all that equal the k-th, as transformers' TopKLogitsWarper.

        Without top-k all that min-p may keep, or that have any weight. Scores that differ may be equal after the
        temperature, so tokens just below the k-th are looked at too.
        """
        if not 0 < self.top_k < table.shape[1]:
            at = Segments.at_least(table, self._lowest_scores(peaks))
            return self._scored(at, table, peaks)
        bounds = tops(table, self.top_k)
        at = Segments.at_least(table, bounds - np.abs(bounds) * np.float32(1e-6))
        found = self._scored(at, table, peaks)
        by_row = at.padded(found.scores, -np.inf)
        column = by_row.shape[1] - self.top_k
        kth = np.partition(by_row, column, axis=1)[:, column]
        return found.where(found.scores >= kth[at.rows])

    def _nucleus(self, table: np.ndarray, peaks: np.ndarray) -> Supports:
        """The support under top-p, and min-p, from the heaviest tokens that have enough mass together."""
        weights = table - peaks[:, None] if self.temperature == 1.0 else scaled(table, self.temperature)
        if self.temperature != 1.0:
            weights -= peaks[:, None]
        by_torch = torch.from_numpy(weights).exp_()
        totals = by_torch.sum(dim=-1).numpy()
        lacks = np.ones(len(table), dtype=bool)
        floors = np.empty(len(table), dtype=np.float32)
        for factor in FLOORS:
            floors[lacks] = (1.0 - self.top_p) * factor
            found = self._scored(Segments.at_least(weights, floors), table, peaks)
            heaviest = Heaviest.of(found.at, found.weights)
            lacks = heaviest.lack(totals, self.top_p, table.shape[1])
            if not lacks.any():
                break
        return self._kept_of(found, *nucleus_bounds(heaviest, totals, self.top_p, table.shape[1]))

    def _scored(self, at: Segments, table: np.ndarray, peaks: np.ndarray) -> Supports:
        """Tokens of a table with their scores and weights, all sure."""
        scores = scaled(at.of(table), self.temperature)
        weights = scores - peaks[at.rows]
        np.exp(weights, out=weights)
        return Supports(at, scores, weights, peaks, np.full(len(peaks), -1.0, dtype=np.float32))

    def _lowest_scores(self, peaks: np.ndarray) -> np.ndarray:
        """A bound (M,) of the scores before the temperature that min-p may keep, or that have any weight."""
        floor = max(self.min_p * (1.0 - MIN_P_BAND), SMALLEST_WEIGHT)
        margins = 1e-3 + 1e-6 * np.abs(peaks.astype(np.float64))
        bounds = (peaks + math.log(floor) - margins) * self.temperature
        return np.maximum(bounds, LOWEST).astype(np.float32)

    def _kept_of(self, found: Supports, lowest: np.ndarray | None = None, unsure: np.ndarray | None = None) -> Supports:
        """What top-p, by its bounds (M,), and min-p leave."""
        floor = max(SMALLEST_WEIGHT, self.min_p * (1.0 - MIN_P_BAND))
        bounds = np.full(len(found.peaks), floor) if lowest is None else np.maximum(lowest, floor)
        unsure = found.unsure_weights if unsure is None else unsure
        if self.min_p > 0.0:
            unsure = np.maximum(unsure, self.min_p * (1.0 + MIN_P_BAND))
        return found.where(found.weights >= bounds[found.at.rows], unsure)

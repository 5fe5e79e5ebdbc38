"""The best tokens of rows of scores: by score, or by score plus keyed noise. Rows share one set of parameters.

On the CPU a row gets noise only for the tokens that it may choose; elsewhere for the whole vocabulary at once. Both
take the same token. Bad rows (NaN, +inf, or nothing possible) get -1 and -inf, and never touch the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from foretoken.law import noise
from foretoken.law.support import Support, Warper, candidates

FEW = 1024
"""Supports up to this size get their noise directly; larger ones are searched for the tokens that can win."""

MAX_REACH = 80.0
"""Distance from the peak up to which weights and their multiples are ordinary numbers in float32."""


def argmax(logits: Tensor) -> Tensor:
    """Lowest index of the largest logit in float32, as greedy ``generate`` takes it; -1 in bad rows.

    (M, V) of any float dtype -> int64 (M,). It is the choice of every law with ``is_argmax``.
    """
    scores = logits.float()
    if scores.device.type == "cpu":
        table = scores.detach().numpy()
        columns = table.argmax(axis=-1)  # torch's takes 20 times longer
        columns[~np.isfinite(table[np.arange(len(table)), columns])] = -1
        return torch.from_numpy(columns)
    best = scores.argmax(dim=-1)
    return best.where(scores.gather(1, best[:, None])[:, 0].isfinite(), -1)


def largest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest entries, the argmax first: tokens and differences to the largest."""
    if k == 1:
        best = argmax(scores)
        return best[:, None], torch.where(best < 0, -torch.inf, 0.0).double()[:, None]
    if scores.device.type == "cpu":
        return _per_row(scores, k, lambda _, row: _largest_of_row(row, k))
    best = argmax(scores)
    peaks = scores.gather(1, best.clamp(min=0)[:, None])
    marked = scores.double().scatter(1, best.clamp(min=0)[:, None], torch.inf)
    values, tokens = marked.topk(min(k, scores.shape[1]), dim=-1)
    values = values - peaks.double()
    values[:, 0] = 0.0
    return _padded(tokens, values.where((best >= 0)[:, None], -torch.inf), k)


def _largest_of_row(row: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids of the k largest finite scores, equal ones by id, and the scores."""
    ids = candidates(row, min(k, len(row)))
    scores = row[ids].astype(np.float64)
    best = np.argsort(-scores, kind="stable")[:k]
    best = best[scores[best] > -np.inf]
    return ids[best], scores[best]


def _per_row(
    scores: Tensor, k: int, best_of: Callable[[int, np.ndarray], tuple[np.ndarray, np.ndarray]]
) -> tuple[Tensor, Tensor]:
    """Tokens and distances (M, k) from a function that finds up to k tokens, best first, and values for one row."""
    tokens = np.full((len(scores), k), -1, dtype=np.int64)
    distances = np.full((len(scores), k), -np.inf)
    for index, row in enumerate(scores.detach().numpy()):
        if math.isfinite(row.max()):
            ids, values = best_of(index, row)
            tokens[index, : len(ids)] = ids
            distances[index, : len(ids)] = values - values[0]
    return torch.from_numpy(tokens), torch.from_numpy(distances)


def _padded(tokens: Tensor, values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """k columns, -1 and -inf where there is no token."""
    missing = k - tokens.shape[1]
    tokens = torch.nn.functional.pad(tokens, (0, missing), value=-1)
    values = torch.nn.functional.pad(values, (0, missing), value=-torch.inf)
    return tokens.where(values > -torch.inf, -1), values


def perturbed_best(warper: Warper, scaled: Tensor, keys: Sequence[int], k: int) -> tuple[Tensor, Tensor]:
    """The k largest of log p + noise per row, and their distance to the largest: int64 and float64 (M, k)."""
    if scaled.device.type != "cpu" or not warper.has_shortcut:
        return perturbed_best_dense(warper, scaled, keys, k)
    search = _Search(scaled.shape[1])

    def best_of(index: int, row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        support = warper.support(row, float(row.max()))
        best, perturbed = search.best(support, keys[index], k)
        if bool((support.weights[best] <= support.unsure_weight).any()):
            support = support.among(warper.kept(row))
            best, perturbed = search.best(support, keys[index], k)
        return support.ids[best], perturbed

    return _per_row(scaled, k, best_of)


def perturbed_best_dense(warper: Warper, scaled: Tensor, keys: Sequence[int], k: int) -> tuple[Tensor, Tensor]:
    """The same on any device, with noise for the whole vocabulary."""
    healthy = scaled.amax(dim=-1).isfinite()
    tokens = torch.arange(scaled.shape[1], device=scaled.device)
    words = noise.bits(torch.tensor(noise.as_int64(keys), device=scaled.device)[:, None], tokens)
    perturbed = warper.truncated(scaled).double() + noise.gumbel_of_bits(words)
    perturbed = perturbed.where(healthy[:, None], -torch.inf)
    values, best = perturbed.topk(min(k, scaled.shape[1]), dim=-1)
    distance = torch.where(values > -torch.inf, values - values[:, :1], -torch.inf)
    return _padded(best, distance, k)


class _Search:
    """Finds the k largest of score + noise in the supports of rows of one width, on the CPU."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    @cached_property
    def _scratch(self) -> noise.Scratch:
        return noise.Scratch.of(self._vocab_size)

    def best(self, support: Support, key: int, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Indices into the support, best first, and their perturbed scores; fewer than k where it is smaller."""
        if len(support.ids) > max(FEW, k):
            candidates = self._candidates(support, key, k)
            best, perturbed = _ranked(support, candidates, key, k)
            return candidates[best], perturbed
        return _ranked(support, slice(None), key, k)

    def _candidates(self, support: Support, key: int, k: int) -> np.ndarray:
        """Indices of the few tokens among which the k best are certain to be.

        With e = -log u the perturbed score is log w - log e, so the largest score has the smallest e / w. Since
        e >= 1 - u =: c, a token with c > w R cannot beat a score of -log R.

        Where temperatures are low, weights fall to zero or close to it: quotients overflow, which is as good as any
        large number, and of 0 / 0 any bound follows, for every token's own score is one. Beyond the range of float32
        the same is decided by logarithms.
        """
        rest = noise.complements(key, self._scratch)
        if len(support.ids) < self._vocab_size:
            rest = rest[support.ids]
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            ratios = rest / support.weights
        if k == 1:
            first = int(ratios.argmin())
            worst = float(support.scores[first]) + noise.token_noise(key, int(support.ids[first]))
        else:
            perturbed = _ranked(support, np.argpartition(ratios, k - 1)[:k], key, k)[1]
            worst = float(perturbed[-1]) if len(perturbed) == k else -math.inf
        if not support.peak - worst < MAX_REACH:
            with np.errstate(divide="ignore", invalid="ignore"):
                logs = np.log(np.maximum(rest - 2.0**-31, 0.0, dtype=np.float64))
                can_win = logs <= support.scores.astype(np.float64) - worst + 1e-4
        else:
            reach = np.float32(np.exp(support.peak - worst) * (1 + 1e-4))
            can_win = rest <= support.weights * reach + np.float32(2.0**-31)
        found: np.ndarray = np.flatnonzero(can_win)
        return found


def _ranked(support: Support, among: np.ndarray | slice, key: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k best among some members of a support: indices into ``among``, and perturbed scores."""
    ids = support.ids[among]
    perturbed = support.scores[among] + noise.token_gumbel(np.array(key, dtype=np.uint64), ids)
    if k == 1:
        best = np.array([perturbed.argmax()])
    else:
        best = np.argsort(-perturbed, kind="stable")[:k]
        best = best[perturbed[best] > -np.inf]
    return best, perturbed[best]

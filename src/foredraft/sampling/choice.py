"""The best tokens of rows of scores: by score, or by score plus keyed noise. All rows share one set of parameters.

On the CPU, noise is computed only for tokens that may be chosen, for all rows at once. On other devices it is computed
for the whole vocabulary. Both ways choose the same token. Bad rows (NaN, +inf, or no possible token) get -1 and -inf,
and never affect other rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from foredraft.devices import upload
from foredraft.native import sample_kernels
from foredraft.sampling import noise
from foredraft.sampling.filters import LogitsFilter, Support, candidates, threshold
from foredraft.sampling.precision import for_double

FEW = 1024
"""Size up to which all tokens of a support get noise directly. Larger supports are first narrowed to tokens that can
win.
"""

HEAVY = 256
"""Approximate number of largest scores that get noise first when a support is narrowed."""

LOWEST = float(np.finfo(np.float32).min)
"""Lower bound of the scores of all possible tokens."""


def healthy_rows(scores: Tensor, temperature: float = 1.0) -> Iterator[tuple[int, np.ndarray, float]]:
    """Yield the rows of (M, V) that have a finite maximum: index, float32 (V,) divided by the temperature, maximum.

    The array is valid only until the next row. The array is reused so that it stays in the processor's cache.
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
      columns: int64 (V,), token ids of the columns; by default the column numbers.
    """

    def __init__(
        self, warper: LogitsFilter, scores: Tensor, keys: list[int], k: int, columns: np.ndarray | None = None
    ) -> None:
        self._columns = columns
        self._warper = warper
        self._scores = scores
        self._keys = keys
        self._k = k

    @cached_property
    def _steps(self) -> np.ndarray:
        return noise.weyl_steps(self._scores.shape[1] if self._columns is None else self._columns)

    @cached_property
    def _scratch(self) -> np.ndarray:
        return np.empty((2, len(self._steps)), dtype=np.uint64)

    def _noise(self, keys: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """Return the match noise of the tokens in these columns."""
        return noise.token_gumbel(keys, columns if self._columns is None else self._columns[columns])

    def run(self) -> tuple[np.ndarray, np.ndarray]:
        """Return columns int64 (M, k), best first, and their perturbed scores float64; -1 and -inf for missing ones."""
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
        """Return the tokens of a row that get noise: all that may be chosen, or the part that can win."""
        if self._warper.truncates:
            return self._narrowed(self._warper.support(row, peak), index)
        everything = Support(self._all_ids, row, row, peak)
        few = self._narrowed(everything, index)
        return Support(few.ids, few.scores.copy(), few.weights, peak) if few is everything else few

    @cached_property
    def _all_ids(self) -> np.ndarray:
        return np.arange(self._scores.shape[1])

    def _settled(self, index: int) -> tuple[Support, np.ndarray]:
        """Return the support of a row, with unsure tokens decided by transformers, and its perturbed scores."""
        ((_, row, peak),) = healthy_rows(self._scores[index : index + 1], self._warper.temperature)
        support = self._narrowed(self._warper.support(row, peak).among(self._warper.kept(row)), index)
        return support, self._perturbed({index: support})[1]

    def _perturbed(self, supports: dict[int, Support]) -> tuple[list[int], np.ndarray]:
        """Return the start of each row in the concatenated supports, and their perturbed scores, float64 (S,)."""
        keys = np.array([self._keys[index] for index in supports], dtype=np.uint64)
        parts = list(supports.values())
        if len(parts) == 1:
            return [0], parts[0].scores + self._noise(keys, parts[0].ids)
        sizes = [len(part.ids) for part in parts]
        drawn = self._noise(keys.repeat(sizes), np.concatenate([part.ids for part in parts]))
        drawn += np.concatenate([part.scores for part in parts])
        return [sum(sizes[:i]) for i in range(len(sizes))], drawn

    def _narrowed(self, support: Support, index: int) -> Support:
        """Return the part of a large support that certainly contains the k best tokens.

        Heavy tokens get their noise first. The k-th best of them leads the largest score of the others by a margin, and
        few tokens have enough noise to overcome it. A lower bound of their noise is visible in the hash alone.
        """
        few = max(FEW, self._k)
        if len(support.ids) <= few:
            return support
        key = self._keys[index]
        bound = max(threshold(support.scores, max(self._k, HEAVY)), LOWEST)
        heavy = (support.scores >= bound).nonzero()[0]
        if len(heavy) > few:  # many equal scores: any of them will do, and no other score is larger
            heavy, bound = heavy[:few], support.peak
        perturbed = support.scores[heavy] + self._noise(np.array(key, dtype=np.uint64), support.ids[heavy])
        best = perturbed[ranked(perturbed, self._k)]
        worst = float(best[-1]) if len(best) == self._k else -math.inf
        keep = noise.noisiest(key, worst - bound, self._steps, self._scratch)
        if len(support.ids) < len(keep):
            keep = keep[support.ids]
        keep[heavy] = True
        places = keep.nonzero()[0]
        return Support(
            support.ids[places], support.scores[places], support.weights[places], support.peak, support.unsure_weight
        )


def ranked(values: np.ndarray, k: int) -> np.ndarray:
    """Return the indices of the k largest of float64 (S,), best first, equal ones in order; -inf is excluded."""
    best = np.array([values.argmax()]) if k == 1 else np.argsort(-values, kind="stable")[:k]
    ranked: np.ndarray = best[values[best] > -np.inf]
    return ranked


NOISE_NUMBERS = 1 << 23
"""Number of noise values computed at once on an accelerator. Each of the few tensors involved then takes 64 MB."""


def argmax(logits: Tensor) -> Tensor:
    """Return the lowest index of the largest logit, as greedy ``generate`` does in float32; -1 in bad rows.

    (M, V) or (B, N, V) of any float dtype -> int64 (M,) or (B, N). The argmax is the choice of every sampler with
    ``is_argmax``.
    """
    if logits.device.type != "cpu":
        scores = logits.float()
        best = scores.argmax(dim=-1, keepdim=True)
        return best.where(scores.gather(-1, best).isfinite(), -1)[..., 0]
    if logits.ndim == 3:
        if not logits.is_contiguous():
            return torch.stack([argmax(row) for row in logits])  # numpy would copy a slice of a wider table
        return argmax(logits.view(-1, logits.shape[-1])).view(logits.shape[:2])
    if (found := sample_kernels.argmax(logits)) is not None:
        return found
    table = logits.detach().float().numpy()
    columns = table.argmax(axis=-1)  # torch's takes 20 times longer
    columns[~np.isfinite(table[np.arange(len(table)), columns])] = -1
    return torch.from_numpy(columns)


def largest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest entries, the argmax first, equal ones by id: tokens, and differences to the largest."""
    scores = for_double(scores)
    if k == 1:
        best = argmax(scores)
        return best[:, None], torch.where(best < 0, -torch.inf, 0.0).double()[:, None]
    if scores.device.type == "cpu":
        return _largest_of_rows(scores, k)
    scores = scores.float()
    best = argmax(scores)
    peaks = scores.gather(1, best.clamp(min=0)[:, None])
    marked = scores.double().scatter(1, best.clamp(min=0)[:, None], torch.inf)
    values, tokens = marked.topk(min(k, scores.shape[1]), dim=-1)
    values = values - peaks.double()
    values[:, 0] = 0.0
    return _padded(tokens, values.where((best >= 0)[:, None], -torch.inf), k)


def likeliest(scores: Tensor, k: int, power: float) -> tuple[Tensor, Tensor]:
    """Return the same tokens as `largest`, and their log-probabilities under the softmax raised to a power: (M, k).

    The distribution is normalised again after the power. On the CPU every row is read into the processor's cache only
    once.
    """
    scores = for_double(scores)
    if scores.device.type != "cpu":
        tokens, gaps = largest(scores, k)
        wide = scores.float() * power
        peaks = wide.gather(1, tokens[:, :1].clamp(min=0))
        return tokens, gaps * power + (peaks - wide.logsumexp(-1, keepdim=True)).double()
    found = np.full((len(scores), k), -1, dtype=np.int64)
    shares = np.full((len(scores), k), -np.inf)
    for index, row, peak in healthy_rows(scores):
        ids = candidates(row, min(k, len(row)))
        of_row = row[ids].astype(np.float64)
        best = ranked(of_row, k)
        found[index, : len(best)] = ids[best]
        np.subtract(row, np.float32(peak), out=row)
        np.multiply(row, np.float32(power), out=row)
        mass = float(np.add.reduce(np.exp(row, out=row)))
        shares[index, : len(best)] = (of_row[best] - peak) * power - math.log(mass)
    return torch.from_numpy(found), torch.from_numpy(shares)


def perturbed_best(
    warper: LogitsFilter, scores: Tensor, keys: Sequence[int], k: int, columns: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the k largest of log p + noise per row and their distances to the largest: int64, float64 (M, k).

    Args:
      scores: (M, V) of any float dtype, before the temperature.
      keys: M keys of the match stream.
      columns: int64 (V,), token ids of the columns. They select the noise of the columns. The default is the column
        numbers.
    """
    scores = for_double(scores)
    if scores.device.type != "cpu" or not warper.has_shortcut:
        return perturbed_best_dense(warper, scores, keys, k, columns)
    if not warper.truncates:
        best = sample_kernels.gumbel_best(scores, warper.temperature, keys, k, columns)
        if best is not None:
            return best[0], torch.from_numpy(_distances(best[1].numpy()))
    top = GumbelTopK(warper, scores, list(keys), k, None if columns is None else columns.cpu().numpy())
    found, values = top.run()
    return torch.from_numpy(found), torch.from_numpy(_distances(values))


def perturbed_best_dense(
    warper: LogitsFilter, scores: Tensor, keys: Sequence[int], k: int, columns: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Like `perturbed_best`, on any device, with noise for the whole vocabulary, at most `NOISE_NUMBERS` at once.

    Rows are independent, so the result does not depend on the block size.
    """
    size = max(1, NOISE_NUMBERS // scores.shape[1])
    if len(scores) > size:
        blocks = [slice(start, start + size) for start in range(0, len(scores), size)]
        parts = [perturbed_best_dense(warper, scores[block], keys[block], k, columns) for block in blocks]
        tokens, distances = zip(*parts, strict=True)
        return torch.cat(tokens), torch.cat(distances)
    logits = warper.scaled(scores.float())
    healthy = logits.amax(dim=-1).isfinite()
    device = logits.device
    names = torch.arange(logits.shape[1], device=device) if columns is None else columns.to(device)
    (of_rows,) = upload([torch.tensor(noise.as_int64(keys), device="cpu")], device)
    words = noise.bits(of_rows[:, None], names)
    perturbed = warper.truncated(logits).double() + noise.gumbel_of_bits(words)
    perturbed = perturbed.where(healthy[:, None], -torch.inf)
    values, best = perturbed.topk(min(k, logits.shape[1]), dim=-1)
    distance = torch.where(values > -torch.inf, values - values[:, :1], -torch.inf)
    return _padded(best, distance, k)


def _padded(tokens: Tensor, values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Pad to k columns, with -1 and -inf for missing tokens."""
    missing = k - tokens.shape[1]
    tokens = torch.nn.functional.pad(tokens, (0, missing), value=-1)
    values = torch.nn.functional.pad(values, (0, missing), value=-torch.inf)
    return tokens.where(values > -torch.inf, -1), values


def _largest_of_rows(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    tokens = np.full((len(scores), k), -1, dtype=np.int64)
    values = np.full((len(scores), k), -np.inf)
    for index, row, _ in healthy_rows(scores):
        ids = candidates(row, min(k, len(row)))
        of_row = row[ids].astype(np.float64)
        best = ranked(of_row, k)
        tokens[index, : len(best)] = ids[best]
        values[index, : len(best)] = of_row[best]
    return torch.from_numpy(tokens), torch.from_numpy(_distances(values))


def _distances(values: np.ndarray) -> np.ndarray:
    """Return the distances to the first value of each row, its largest; -inf for missing values."""
    peaks = values[:, :1]
    distances: np.ndarray = values - np.where(peaks > -np.inf, peaks, 0.0)
    return distances

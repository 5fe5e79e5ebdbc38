"""The best tokens of rows of scores: by score, or by score plus keyed noise. Rows share one set of parameters.

On the CPU rows get noise only for the tokens that they may choose, all rows in the same operations; elsewhere for the
whole vocabulary at once. Both take the same token. Bad rows (NaN, +inf, or nothing possible) get -1 and -inf, and never
touch the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from foretoken.law import noise
from foretoken.law.race import race
from foretoken.law.segments import LOWEST, Segments, tables, tops
from foretoken.law.support import Warper

INFINITY_BITS = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}


def argmax(logits: Tensor) -> Tensor:
    """Lowest index of the largest logit, as greedy ``generate`` takes it in float32; -1 in bad rows.

    (M, V) or (B, N, V) of any float dtype -> int64 (M,) or (B, N). It is the choice of every law with ``is_argmax``.
    """
    if logits.ndim == 3:
        if logits.is_contiguous() or logits.device.type != "cpu":
            return argmax(logits.flatten(0, 1)).view(logits.shape[:2])
        return torch.stack([argmax(row) for row in logits])  # numpy would copy a part of a wider table
    if logits.device.type == "cpu":
        if (infinity := INFINITY_BITS.get(logits.dtype)) is not None:
            return torch.from_numpy(_argmax_of_halves(logits.detach().view(torch.int16).numpy(), infinity))
        table = logits.detach().float().numpy()
        columns = table.argmax(axis=-1)  # torch's takes 20 times longer
        columns[~np.isfinite(table[np.arange(len(table)), columns])] = -1
        return torch.from_numpy(columns)
    scores = logits.float()
    best = scores.argmax(dim=-1)
    return best.where(scores.gather(1, best[:, None])[:, 0].isfinite(), -1)


def _argmax_of_halves(bits: np.ndarray, infinity: int) -> np.ndarray:
    """`argmax` of numbers of 16 bits, (M, V) as int16, without making them wider: int64 (M,).

    Above zero they are ordered as their bits are, and below it in reverse; so the bits tell the maximum where it is
    positive, as the largest logit of nearly every row is. NaN has more bits than infinity, of either sign.
    """
    columns: np.ndarray = bits.argmax(axis=-1)
    peaks = bits[np.arange(len(bits)), columns]
    has_nan = bits.view(np.uint16).max(axis=-1) > infinity + 0x8000
    for row in np.flatnonzero((peaks <= 0) & ~has_nan):
        # of negative numbers, and the two zeros: the order of the bits is turned round, -0 becomes 0
        turned = np.where(bits[row] < 0, -(bits[row] & np.int16(0x7FFF)), bits[row])
        columns[row] = turned.argmax()
        peaks[row] = turned[columns[row]]
    columns[has_nan | (peaks >= infinity) | (peaks <= -infinity)] = -1
    return columns


def largest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest entries, the argmax first, equal ones by id: tokens and differences to the largest."""
    if k == 1:
        best = argmax(scores)
        return best[:, None], torch.where(best < 0, -torch.inf, 0.0).double()[:, None]
    if scores.device.type == "cpu":
        return _collected(scores, k, lambda _, table, __: _largest_of(table, k))
    scores = scores.float()
    best = argmax(scores)
    peaks = scores.gather(1, best.clamp(min=0)[:, None])
    marked = scores.double().scatter(1, best.clamp(min=0)[:, None], torch.inf)
    values, tokens = marked.topk(min(k, scores.shape[1]), dim=-1)
    values = values - peaks.double()
    values[:, 0] = 0.0
    return _padded(tokens, values.where((best >= 0)[:, None], -torch.inf), k)


def perturbed_best(warper: Warper, scores: Tensor, keys: Sequence[int], k: int) -> tuple[Tensor, Tensor]:
    """The k largest of log p + noise per row, and their distance to the largest: int64 and float64 (M, k).

    Args:
      scores: (M, V) of any float dtype, before the temperature.
      keys: M keys of the match stream.
    """
    if scores.device.type != "cpu" or not warper.has_shortcut:
        return perturbed_best_dense(warper, scores, keys, k)
    words = np.array(keys, dtype=np.uint64)
    return _collected(
        scores, k, lambda rows, table, peaks: race(warper, table, peaks, words[rows], k), warper.temperature
    )


def perturbed_best_dense(warper: Warper, scores: Tensor, keys: Sequence[int], k: int) -> tuple[Tensor, Tensor]:
    """The same on any device, with noise for the whole vocabulary."""
    logits = warper.scaled(scores.float())
    healthy = logits.amax(dim=-1).isfinite()
    tokens = torch.arange(logits.shape[1], device=logits.device)
    words = noise.bits(torch.tensor(noise.as_int64(keys), device=logits.device)[:, None], tokens)
    perturbed = warper.truncated(logits).double() + noise.gumbel_of_bits(words)
    perturbed = perturbed.where(healthy[:, None], -torch.inf)
    values, best = perturbed.topk(min(k, logits.shape[1]), dim=-1)
    distance = torch.where(values > -torch.inf, values - values[:, :1], -torch.inf)
    return _padded(best, distance, k)


def _padded(tokens: Tensor, values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """k columns, -1 and -inf where there is no token."""
    missing = k - tokens.shape[1]
    tokens = torch.nn.functional.pad(tokens, (0, missing), value=-1)
    values = torch.nn.functional.pad(values, (0, missing), value=-torch.inf)
    return tokens.where(values > -torch.inf, -1), values


Found = tuple[np.ndarray, np.ndarray]
"""Up to k tokens and values per row, best first: int64 and float64 (M, k), -1 and -inf where there is none."""


def _collected(
    scores: Tensor, k: int, best_of: Callable[[np.ndarray, np.ndarray, np.ndarray], Found], temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Tokens and distances to the best, from a function of what `tables` yields."""
    tokens = np.full((len(scores), k), -1, dtype=np.int64)
    values = np.full((len(scores), k), -np.inf)
    for rows, table, peaks in tables(scores, temperature):
        tokens[rows], best = best_of(rows, table, peaks)
        values[rows] = best - best[:, :1]
    return torch.from_numpy(tokens), torch.from_numpy(values)


def _largest_of(table: np.ndarray, k: int) -> Found:
    at = Segments.at_least(table, np.maximum(tops(table, min(k, table.shape[1])), LOWEST))
    places, values = at.best(at.of(table).astype(np.float64), k)
    return np.where(places >= 0, at.ids[places], -1), values

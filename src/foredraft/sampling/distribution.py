"""Turns logits into the target's distribution and chooses tokens from it. Nothing else in foredraft does.

Order and meaning follow transformers 5.23 ``generate`` in float32. First come the processors of
`foredraft.sampling.processors`, then, unless greedy, temperature, top-k, top-p, min-p and typical-p
(`foredraft.sampling.filters`).

One bad row never affects another. If a row contains NaN or +inf, or no token is possible, its choice is -1 and its
log-probabilities are NaN. `failure` returns the error to report for such a row. No function here raises because of the
values of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from foredraft.config.keywords import shown
from foredraft.errors import NoTokenError, NumericsError, ShapeError
from foredraft.native import sample_kernels
from foredraft.sampling import noise
from foredraft.sampling.choice import argmax, healthy_rows, largest, perturbed_best
from foredraft.sampling.filters import LogitsFilter
from foredraft.sampling.precision import for_double
from foredraft.sampling.processors import Path, Sampler, check_shapes, process, processed

Key = TypeVar("Key", bound=Hashable)

__all__ = [
    "Sampler",
    "argmax",
    "choose",
    "choose_at",
    "choose_siblings",
    "failure",
    "log_probs",
    "probs",
    "process",
    "scores",
]


def log_probs(logits: Tensor, samplers: Sequence[Sampler], paths: Sequence[Path]) -> Tensor:
    """Return the processed distribution at each node, as log-probabilities.

    Args:
      logits: (M, V), any float dtype; never modified.
      samplers: M samplers, one per node; nodes of one row share a sampler.
      paths: M paths: the draft tokens between the row's committed tokens and the node, including the node's own.

    Returns: float32 (M, V); NaN in rows without a distribution. A greedy row has no temperature and no truncation. The
      entries of a greedy row are the log-softmax of the processed logits, as users expect; `probs` returns the point
      mass from which the row is decoded.
    Exactness: transformers' own values up to the rounding of the normaliser, and exactly its support.
    """
    return _warped(logits, samplers, paths, _log_probs)


def scores(logits: Tensor, samplers: Sequence[Sampler], paths: Sequence[Path]) -> Tensor:
    """Return the processed scores at each node before any softmax, as ``generate`` does; -inf for removed tokens.

    Arguments as for `log_probs`. Returns: float32 (M, V), never the logits themselves.
    Exactness: transformers' own values.
    """
    return _warped(logits, samplers, paths, lambda scores, warper: warper.truncated(warper.scaled(scores)))


def probs(logits: Tensor, samplers: Sequence[Sampler], paths: Sequence[Path]) -> Tensor:
    """Return the distribution from which each node's token is decoded, float64 (M, V), summing to one; NaN in bad rows.

    Arguments as for `log_probs`. A greedy row is a point mass on its argmax.
    """
    result = for_double(log_probs(logits, samplers, paths)).double().exp_()
    result /= result.sum(dim=-1, keepdim=True)
    greedy = [row for row, sampler in enumerate(samplers) if sampler.is_greedy]
    if greedy:
        best = choose(
            logits[greedy], [samplers[row] for row in greedy], [paths[row] for row in greedy], [0] * len(greedy)
        )
        best = best.to(result.device)
        point = torch.zeros(len(greedy), result.shape[1], dtype=torch.float64, device=result.device)
        point.scatter_(1, best.clamp(min=0)[:, None], 1.0)
        point[best < 0] = torch.nan
        result[greedy] = point
    return result


def choose(logits: Tensor, samplers: Sequence[Sampler], paths: Sequence[Path], positions: Sequence[int]) -> Tensor:
    """Return the target's own token at each node: argmax of log p + Gumbel noise keyed by (seed, position, token).

    Source: the Gumbel-max trick (Gumbel 1954); keyed as in `foredraft.sampling.noise`.

    Args:
      logits, samplers, paths: as for `log_probs`.
      positions: M absolute indices, in the sequence, of the token to choose.

    Returns: int64 (M,) on the device of the logits; -1 for a bad row, see `failure`.
    Exactness: for one node and seed, the same token in any batch, order and draft; over seeds, exactly the distribution
      p.
    Randomness: a pure function of (seed of the sampler, position, token id). None when greedy: the lowest index of the
      largest logit wins.
    """
    if all(sampler.is_argmax for sampler in samplers):
        check_shapes(logits, samplers, paths)
        return argmax(logits)
    return choose_siblings(logits, samplers, paths, positions, 1)[0][:, 0]


def choose_at(logits: Tensor, node: int, sampler: Sampler, path: Path, position: int) -> int:
    """Return the result of `choose` at one node of logits (N, V): its token, or -1."""
    if not sampler.is_processed:
        found = None
        if sampler.is_greedy:
            found = sample_kernels.argmax_at(logits, node)
        elif not sampler.warper.truncates:
            found = sample_kernels.gumbel_argmax_at(
                logits, node, sampler.warper.temperature, noise.row_key(sampler.seed, position)
            )
        if found is not None:
            return found
    return int(choose(logits[node : node + 1], [sampler], [path], [position]))


def choose_siblings(
    logits: Tensor,
    samplers: Sequence[Sampler],
    paths: Sequence[Path],
    positions: Sequence[int],
    k: int,
    columns: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the k best tokens at each node under the noise of `choose`: the natural children of a drafted node.

    Source: Gumbel-top-k sampling without replacement (Kool et al. 2019, arXiv:1903.06059).

    Args:
      logits, samplers, paths, positions: as for `choose`.
      k: number of tokens, 1 or more.
      columns: int64 (V,), ascending, token ids of the columns of the logits, for drafters with a reduced vocabulary. No
        sampler may have processors then, since these refer to token ids.

    Returns: tokens int64 (M, k), best first, the first column equal to `choose`; scores float64 (M, k), perturbed log-
      probability minus the row's best (log-probability when greedy). If fewer than k tokens are possible, and in bad
      rows, missing tokens are -1 and their scores -inf.
    Exactness: over seeds, k draws without replacement from the distribution.
    Randomness: as for `choose`.
    """
    scores = for_double(processed(logits, samplers, paths))
    groups = _grouped(samplers, lambda sampler: sampler.kind)  # by temperature and truncation; greedy ones apart
    if columns is not None:
        if any(sampler.is_processed for sampler in samplers):
            raise ShapeError("samplers with processors need logits of the whole vocabulary; expand these logits first")
        names = torch.cat([columns.to(scores.device), columns.new_full((1,), -1, device=scores.device)])
    if len(groups) == 1:
        found, values = _best(scores, samplers, positions, k, columns)
        return (found if columns is None else names[found]), values  # the last entry of names is for missing tokens, -1
    tokens = torch.empty(len(samplers), k, dtype=torch.int64, device=scores.device)
    values = torch.empty(len(samplers), k, dtype=torch.float64, device=scores.device)
    for rows in groups.values():
        group = _best(scores[rows], [samplers[row] for row in rows], [positions[row] for row in rows], k, columns)
        tokens[rows], values[rows] = group
    return (tokens if columns is None else names[tokens]), values


def failure(logits: Tensor, sampler: Sampler) -> Exception:
    """Return the error for a row (V,) of logits whose choice was -1. The fault is in the model or in a processor."""
    if bool(torch.isnan(logits).any()):
        return NumericsError("the model returned NaN logits; try a wider dtype, or check the weights")
    if not bool((logits > -torch.inf).any()):
        return NumericsError("the model returned -inf for every token; check its attention mask and weights")
    if bool((logits == torch.inf).any()):
        return NumericsError("the model returned infinite logits; try a wider dtype, or check the weights")
    if sampler.fault is not None:
        return sampler.fault
    limits = ", ".join(f"{name}={shown(value, 80)}" for name, value in sampler.params.limits.items())
    return NoTokenError(
        "a logits processor returned NaN, or the sampling parameters leave no token possible; relax "
        f"{limits or 'the sampling parameters'}"
    )


def _grouped(samplers: Sequence[Sampler], key: Callable[[Sampler], Key]) -> dict[Key, list[int]]:
    """Group the indices of samplers by key."""
    groups: dict[Key, list[int]] = {}
    for row, sampler in enumerate(samplers):
        groups.setdefault(key(sampler), []).append(row)
    return groups


def _warped(
    logits: Tensor, samplers: Sequence[Sampler], paths: Sequence[Path], warp: Callable[[Tensor, LogitsFilter], Tensor]
) -> Tensor:
    """Process logits, then apply a function to each group of rows with equal temperature and truncation."""
    scores = process(logits, samplers, paths)
    groups = _grouped(samplers, lambda sampler: sampler.warper)
    if len(groups) == 1:
        result = warp(scores, next(iter(groups)))
        return result.clone() if result is logits else result
    result = torch.empty_like(scores)
    for warper, rows in groups.items():
        result[rows] = warp(scores[rows], warper)
    return result


def _best(
    scores: Tensor, samplers: Sequence[Sampler], positions: Sequence[int], k: int, columns: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the k best columns of rows of one kind, and their distance to the best: (M, k) int64 and float64."""
    if samplers[0].is_greedy:
        return largest(scores, k)
    warper = samplers[0].warper
    keys = [noise.row_key(sampler.seed, position) for sampler, position in zip(samplers, positions, strict=True)]
    return perturbed_best(warper, scores, keys, k, columns)


def _log_probs(scores: Tensor, warper: LogitsFilter) -> Tensor:
    """Return log-probabilities of rows with equal parameters, NaN in bad ones: float32 (M, V) -> float32 (M, V)."""
    if not warper.truncates or scores.device.type != "cpu" or not warper.has_shortcut:
        scaled = warper.scaled(scores)
        result = torch.log_softmax(warper.truncated(scaled), dim=-1)
        return result.where(scaled.amax(dim=-1, keepdim=True).isfinite(), torch.nan)
    result = torch.full_like(scores, torch.nan)
    for index, row, peak in healthy_rows(scores, warper.temperature):
        support = warper.support(row, peak)
        if not support.is_sure:
            support = support.among(warper.kept(row))
        normaliser = peak + np.log(support.weights.sum(dtype=np.float64))
        kept = result[index].numpy()
        kept.fill(-np.inf)
        kept[support.ids] = support.scores - np.float32(normaliser)
    return result

"""Selection of the best tokens in rows of scores, by compiled code that reads every row once.

A decoding step displaces numpy's and torch's code from the processor's caches. Each of the dozen numpy or torch
operations of a selection then costs 10 to 25 microseconds, whatever its size. One call of compiled code costs as much
as one of them. Without a compiler, these operations make the same choices.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from foredraft.native.abi import array_of
from foredraft.native.library import KINDS, Library, library

LEAST_VOCABULARY = 4096
"""Smallest vocabulary for which the kernels are worth compiling."""
MOST_BEST = 64


@cache
def kernels() -> Library | None:
    """Return the kernels for this CPU, or None if there are none."""
    return library()


def argmax(scores: Tensor) -> Tensor | None:
    """Return the lowest index of the maximum of every row (M, V), -1 for bad rows: int64 (M,). None without kernels."""
    table = _table(scores)
    if table is None:
        return None
    found = torch.empty(len(scores), dtype=torch.int64)
    run, arguments = table
    run.argmax(*arguments, found.data_ptr(), torch.get_num_threads())
    return found


def argmax_at(scores: Tensor, row: int) -> int | None:
    """Return `argmax` of one row of (M, V); None without kernels."""
    table = _table(scores)
    if table is None:
        return None
    run, (address, kind, _, stride, length) = table
    return run.argmax_at(address, kind, row, stride, length)


def gumbel_argmax_at(scores: Tensor, row: int, temperature: float, key: int) -> int | None:
    """Return the first column of `gumbel_best` of one row of (M, V); None without kernels."""
    table = _table(scores)
    if table is None:
        return None
    run, (address, kind, _, stride, length) = table
    column, total = ctypes.c_int64(), ctypes.c_double()
    places = ctypes.addressof(column), ctypes.addressof(total)
    run.gumbel_best_at(address, kind, row, stride, length, temperature, key, None, 1, *places)
    return column.value


def best(scores: Tensor, k: int, rows: Sequence[int] | None = None) -> Tensor | None:
    """Return the ids of the k largest scores of some rows of (M, V), best first and ties by id: int64 (rows, k).

    None without kernels.
    """
    if not 0 < k <= min(MOST_BEST, scores.shape[-1]):
        return None
    table = _table(scores)
    if table is None:
        return None
    run, (address, kind, num_rows, stride, length) = table
    rows = range(num_rows) if rows is None else rows
    found = torch.empty(len(rows), k, dtype=torch.int64)
    numbers = array_of(rows)
    threads = torch.get_num_threads()
    run.best(address, kind, len(rows), stride, length, ctypes.addressof(numbers), k, found.data_ptr(), threads)
    return found


def gumbel_best(
    scores: Tensor, temperature: float, keys: Sequence[int], k: int, names: Tensor | None = None
) -> tuple[Tensor, Tensor] | None:
    """Return the k largest sums of score / temperature + match noise in every row, best first; None without kernels.

    Args:
      scores: (M, V); all columns are candidates.
      temperature: divisor of the scores.
      keys: M keys of the match stream.
      k: number of results per row.
      names: int64 (V,), token ids of the columns; None if columns are token ids.

    Returns: columns int64 and their sums float64, (M, k); -1 and -inf for missing results and in bad rows.
    Exactness: the largest sums over all tokens, in float64; see `foredraft.sampling.noise`.
    """
    table = _table(scores) if 0 < k <= MOST_BEST else None
    if table is None:
        return None
    columns = torch.empty(len(scores), k, dtype=torch.int64)
    sums = torch.empty(len(scores), k, dtype=torch.float64)
    of_rows = (ctypes.c_uint64 * len(scores))(*keys)
    named = None if names is None else names.contiguous()
    run, arguments = table
    run.gumbel_best(
        *arguments,
        temperature,
        ctypes.addressof(of_rows),
        None if named is None else named.data_ptr(),
        k,
        columns.data_ptr(),
        sums.data_ptr(),
        torch.get_num_threads(),
    )
    return columns, sums


def _table(scores: Tensor) -> tuple[Library, tuple[int, ...]] | None:
    """Return kernels and their arguments for scores (M, V); None if the kernels do not support these scores."""
    kind = KINDS.get(scores.dtype)
    if kind is None or not scores.is_cpu or scores.ndim != 2:
        return None
    num_rows, length = scores.shape
    if length < LEAST_VOCABULARY or (length > 1 and scores.stride(1) != 1):
        return None
    found = kernels()
    return None if found is None else (found, (scores.data_ptr(), kind, num_rows, scores.stride(0), length))

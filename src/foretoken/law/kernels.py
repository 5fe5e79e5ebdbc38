"""The best tokens of rows of scores by compiled code, which reads every row once.

A step of decoding leaves nothing of numpy's or torch's code in the processor's caches, so that each of the dozen
operations which a choice takes there costs 10 to 25 microseconds, whatever it has to do. One call costs as much as one
of them. Where there is no compiler these operations make the same choices.
"""

from __future__ import annotations

import ctypes
import logging
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from foretoken.compiling import compiled, first_line, instruction_set

logger = logging.getLogger("foretoken")

SOURCE = Path(__file__).with_name("sample_kernels.cpp")
KINDS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
LEAST_VOCABULARY = 4096
"""Shorter rows are not worth a compiler's time."""
MOST_BEST = 64


@dataclass(frozen=True)
class Kernels:
    """Functions of the address of scores, their kind, the number of rows, the distance between two, and their length.

    Args:
      argmax: and where the choices go.
      argmax_at: of the number of one row in the place of that of rows; returns its choice.
      best: of some rows: and where their numbers lie, how many of every row, and where they go.
      gumbel_argmax: and the temperature, where the keys of noise lie, and where the choices go.
      gumbel_argmax_at: of one row, and the temperature and its key; returns its choice.
    """

    argmax: Callable[..., None]
    argmax_at: Callable[..., int]
    best: Callable[..., None]
    gumbel_argmax: Callable[..., None]
    gumbel_argmax_at: Callable[..., int]

    @classmethod
    def load(cls, file: Path) -> Kernels:
        """Raises: OSError for a file that cannot be loaded, or a process that may not use the instructions."""
        shared = ctypes.CDLL(str(file.resolve()))
        if not shared.foretoken_is_allowed():
            raise OSError("the system does not let this process use them")
        size, address = ctypes.c_int64, ctypes.c_void_p
        table = (address, size, size, size, size)
        arguments = {
            "argmax": (*table, address),
            "argmax_at": table,
            "best": (*table, address, size, address),
            "gumbel_argmax": (*table, ctypes.c_float, address, address),
            "gumbel_argmax_at": (*table, ctypes.c_float, ctypes.c_uint64),
        }
        made = {}
        for name, types in arguments.items():
            function = shared[f"foretoken_{name}"]
            function.argtypes, function.restype = types, size if name.endswith("_at") else None
            made[name] = function
        return cls(**made)


@cache
def kernels() -> Kernels | None:
    """Kernels of this CPU, compiled at the first call on a machine; None where that is not possible."""
    chosen = instruction_set()
    if chosen is None:
        return None
    try:
        with compiled("sample_kernels", chosen, (SOURCE,)) as file:
            return Kernels.load(file)
    except (OSError, subprocess.SubprocessError) as error:
        logger.debug("tokens are chosen by numpy alone: %s", first_line(error))
        return None


def argmax(scores: Tensor) -> Tensor | None:
    """Lowest index of the largest of every row (M, V), -1 in bad rows: int64 (M,). None where that cannot be had."""
    table = _table(scores)
    if table is None:
        return None
    found = torch.empty(len(scores), dtype=torch.int64)
    table.kernels.argmax(*table.arguments, found.data_ptr())
    return found


def argmax_at(scores: Tensor, row: int) -> int | None:
    """`argmax` of one row of (M, V)."""
    table = _table(scores)
    if table is None:
        return None
    address, kind, _, stride, length = table.arguments
    return table.kernels.argmax_at(address, kind, row, stride, length)


def gumbel_argmax_at(scores: Tensor, row: int, temperature: float, key: int) -> int | None:
    """`gumbel_argmax` of one row of (M, V)."""
    table = _table(scores)
    if table is None:
        return None
    address, kind, _, stride, length = table.arguments
    return table.kernels.gumbel_argmax_at(address, kind, row, stride, length, temperature, key)


def best(scores: Tensor, k: int, rows: Sequence[int] | None = None) -> Tensor | None:
    """Ids of the k largest of some rows of (M, V), best first, equal ones by id: int64 (rows, k). None as above."""
    if not 0 < k <= min(MOST_BEST, scores.shape[-1]):
        return None
    table = _table(scores)
    if table is None:
        return None
    address, kind, num_rows, stride, length = table.arguments
    rows = range(num_rows) if rows is None else rows
    found = torch.empty(len(rows), k, dtype=torch.int64)
    numbers = (ctypes.c_int64 * len(rows))(*rows)
    table.kernels.best(address, kind, len(rows), stride, length, ctypes.addressof(numbers), k, found.data_ptr())
    return found


def gumbel_argmax(scores: Tensor, temperature: float, keys: Sequence[int]) -> Tensor | None:
    """Index of the largest of score / temperature + match noise of every row, -1 in bad rows: int64 (M,).

    Args:
      scores: (M, V), of which every one may be chosen.
      keys: M keys of the match stream.

    Exactness: the sum that is largest among those of all tokens, in float64; see `foretoken.law.noise`.
    """
    table = _table(scores)
    if table is None:
        return None
    found = torch.empty(len(scores), dtype=torch.int64)
    of_rows = (ctypes.c_uint64 * len(scores))(*keys)
    table.kernels.gumbel_argmax(*table.arguments, temperature, ctypes.addressof(of_rows), found.data_ptr())
    return found


@dataclass(frozen=True)
class _Table:
    kernels: Kernels
    arguments: tuple[int, ...]


def _table(scores: Tensor) -> _Table | None:
    """Arguments of kernels for scores (M, V); None where they are not for these."""
    kind = KINDS.get(scores.dtype)
    if kind is None or not scores.is_cpu or scores.ndim != 2:
        return None
    num_rows, length = scores.shape
    if length < LEAST_VOCABULARY or (length > 1 and scores.stride(1) != 1):
        return None
    found = kernels()
    return None if found is None else _Table(found, (scores.data_ptr(), kind, num_rows, scores.stride(0), length))

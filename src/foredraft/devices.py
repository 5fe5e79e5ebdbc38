"""Devices of tensors.

Small arrays of the host are copied to an accelerator in one transfer. Tensors without a named device are made on the
CPU, whatever default device the caller has set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

ALIGNMENT = 8
"""Alignment of every array in bytes, sufficient for 64-bit numbers."""


def upload(arrays: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copy CPU arrays to a device in one transfer. For the CPU, return the arrays themselves.

    On CUDA the transfer is from pinned memory, and the host does not wait for it. Torch reuses pinned memory only after
    the transfer that reads it has ended.

    Example: int64 (3,) and bool (2, 5) take 24 and 10 bytes, so that 34 bytes are transferred.
    """
    if device.type == "cpu":
        return list(arrays)
    starts, end = [], 0
    for array in arrays:
        starts.append(-(-end // ALIGNMENT) * ALIGNMENT)
        end = starts[-1] + array.nbytes
    packed = torch.empty(end, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
    for start, array in zip(starts, arrays, strict=True):
        packed[start : start + array.nbytes].view(array.dtype).view(array.shape).copy_(array)
    there = packed.to(device, non_blocking=True)
    return [
        there[start : start + array.nbytes].view(array.dtype).view(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    ]


def cpu_by_default() -> AbstractContextManager[object]:
    """Context manager inside which tensors without a named device are made on the CPU.

    Kernels receive addresses of such tensors. After ``torch.set_default_device("cuda")`` or "meta", the tensors would
    have no address that a kernel can read.
    """
    context: AbstractContextManager[object] = torch.device("cpu")
    return nullcontext() if torch.get_default_device().type == "cpu" else context


def makes_on_cpu(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that it runs inside `cpu_by_default`."""

    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with cpu_by_default():
            return function(*args, **kwargs)

    return wrapped

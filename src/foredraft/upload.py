"""Small arrays of the host, brought to an accelerator in one transfer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

ALIGNMENT = 8
"""Bytes: every array begins where one of 64-bit numbers may begin."""


def upload(arrays: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copies of arrays of the CPU on a device, made by one transfer; on the CPU the arrays themselves.

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

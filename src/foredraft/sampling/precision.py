"""The device for float64. Apple's MPS has no float64, so the CPU computes it there."""

from __future__ import annotations

import torch
from torch import Tensor

WITHOUT_DOUBLE = {"mps"}
"""Device types without float64."""


def double_device(device: torch.device) -> torch.device:
    """Return the device that computes float64 for tensors of a device: the device itself, or the CPU."""
    return torch.device("cpu") if device.type in WITHOUT_DOUBLE else device


def for_double(values: Tensor) -> Tensor:
    """Return the values on a device with float64: unchanged, or as a copy on the CPU.

    Noise and ranking scores are float64 everywhere, so that a seed gives the same output on every device.
    """
    return values.cpu() if values.device.type in WITHOUT_DOUBLE else values

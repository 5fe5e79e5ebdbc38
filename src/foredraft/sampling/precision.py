"""The device on which float64 is computed: Apple's MPS has no float64, so there the CPU computes it."""

from __future__ import annotations

import torch
from torch import Tensor

WITHOUT_DOUBLE = {"mps"}
"""Types of devices that have no float64."""


def double_device(device: torch.device) -> torch.device:
    """The device that computes float64 for tensors of a device: itself, or the CPU."""
    return torch.device("cpu") if device.type in WITHOUT_DOUBLE else device


def for_double(values: Tensor) -> Tensor:
    """The same values where they can be widened to float64: on their own device, or a copy on the CPU.

    Noise and ranking scores are float64 everywhere, so that a seed gives one text on every device.
    """
    return values.cpu() if values.device.type in WITHOUT_DOUBLE else values

"""Activations of modules, row by row.

Torch runs an elementwise operator over a whole tensor in vectors, what is left at its end number by number, and a large
tensor in parts that threads share. An exponential differs in the last bit between a vector and a number by itself, so
that a row's bits depend on where in the tensor it lies. Here rows are whole vectors, in parts too small to be shared.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2CLS

from foretoken.model.execution.forwards import StandIn

VECTOR = 64
"""Numbers. The widest step of torch's loops is two vectors of 512 bits in half precision."""
PART = 2**14
"""Numbers. Torch shares out a tensor with more among threads, by some operators."""

ACTIVATIONS = tuple({entry[0] if isinstance(entry, tuple) else entry for entry in ACT2CLS.values()})


class Rowwise(StandIn):
    """The forward of an elementwise module, by which a row has the same bits whatever rows are beside it.

    Args:
      inner: (..., W) -> (..., W), elementwise.
    """

    def __init__(self, inner: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.inner = inner

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(..., W) -> (..., W)."""
        width = x.shape[-1]
        missing = -width % VECTOR
        if x.is_contiguous() and not missing and x.numel() <= PART:
            return self.inner(x)
        rows = F.pad(x.reshape(-1, width), (0, missing))
        parts = [self.inner(part) for part in torch.split(rows, max(1, PART // rows.shape[1]))]
        return torch.cat(parts)[:, :width].view(x.shape)

    @staticmethod
    def fits(layer: nn.Module) -> bool:
        """Whether this is an activation without weights."""
        return isinstance(layer, ACTIVATIONS) and next(layer.parameters(), None) is None

"""Linear layers of a model: all of them, what replaces their forward, and how many rows they take in one call."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from foretoken.model.execution.packing import PackedLinear


class RowLimit:
    """How many rows linear layers take in one call, at least and at most; None for any number."""

    num_rows: tuple[int, int] | None = None


class LimitedLinear:
    """The forward of a linear layer, in several calls where its input has too many rows, padded where it has too few.

    Exactness: a row's bits are those that the layer gives it in a call of that size.
    """

    def __init__(self, layer: nn.Module, limit: RowLimit) -> None:
        self.inner: Callable[[torch.Tensor], torch.Tensor] = layer.forward
        self.replaced = vars(layer).get("forward")
        self._limit = limit

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out)."""
        limits = self._limit.num_rows
        if limits is None:
            return self.inner(x)
        if isinstance(self.inner, PackedLinear):
            product = self.inner.product
            return product.part(x, self.inner.index, lambda whole: in_calls(product, whole, limits))
        return in_calls(self.inner, x, limits)


def in_calls(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, limits: tuple[int, int]) -> torch.Tensor:
    """Run (..., in) in calls of at least and at most so many rows."""
    fewest, most = limits
    num_rows = x.shape[:-1].numel()
    if num_rows < fewest:
        padded = F.pad(x.flatten(0, -2), (0, 0, 0, fewest - num_rows))
        return run(padded)[:num_rows].view(*x.shape[:-1], -1)
    if num_rows <= most:
        return run(x)
    parts = x.flatten(0, -2).tensor_split(-(-num_rows // most))  # even: none is much smaller than the others
    return torch.cat([run(part) for part in parts]).view(*x.shape[:-1], -1)


def replacement(layer: nn.Module) -> object:
    """The function that replaces the forward of a linear layer's class, limits aside; None if there is none."""
    forward = vars(layer).get("forward")
    return forward.replaced if isinstance(forward, LimitedLinear) else forward


def linears(model: nn.Module) -> list[nn.Module]:
    """Every linear layer of a model, packed or not."""
    return [layer for layer in model.modules() if isinstance(layer, (nn.Linear, Conv1D))]

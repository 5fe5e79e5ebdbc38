"""Replacement of module forwards: the only place that reads, sets and removes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2CLS
from transformers.pytorch_utils import Conv1D


class StandIn:
    """Base of replacement forwards that compute the same result as their module."""


def linears(model: nn.Module) -> list[nn.Module]:
    """Return every linear layer of a model, packed or not."""
    return [layer for layer in model.modules() if isinstance(layer, (nn.Linear, Conv1D))]


def replacement(module: nn.Module) -> Any:
    """Return the function that replaces the forward of a module's class; None if there is none."""
    return vars(module).get("forward")


def changed_forward(module: nn.Module) -> object:
    """Return the replacement forward that computes something else than the module's class; None if there is none."""
    forward = replacement(module)
    return None if isinstance(forward, StandIn) else forward


def replace_forward(module: nn.Module, forward: Callable[..., Any] | None) -> None:
    """Replace the forward of a module by a function; None restores the forward of its class."""
    if forward is None:
        vars(module).pop("forward", None)
    else:
        vars(module)["forward"] = forward


@contextmanager
def replaced(forwards: Mapping[nn.Module, Callable[..., Any] | None]) -> Iterator[None]:
    """Replace module forwards inside the block; None selects the forward of the class."""
    before = {module: replacement(module) for module in forwards}
    for module, forward in forwards.items():
        replace_forward(module, forward)
    try:
        yield
    finally:
        for module, old in before.items():
            replace_forward(module, old)


# -- activations, row by row ---------------------------------------------------------------------------------------
#
# Torch runs an elementwise operator over a tensor in vectors, the rest at its end number by number, and splits a large
# tensor among threads. The exponential of a vector and of a single number differ in the last bit, so the bits of a row
# depend on its place in the tensor. Here every row is padded to whole vectors, and parts are too small to be split.

VECTOR = 64
"""Row width is padded to a multiple of this. The widest step in torch's loops is two 512-bit vectors of float16."""
PART = 2**14
"""Maximum number of elements per call. Some torch operators split larger tensors among threads."""

ACTIVATIONS = tuple({entry[0] if isinstance(entry, tuple) else entry for entry in ACT2CLS.values()})


class Rowwise(StandIn):
    """Forward of an elementwise module under which the bits of a row do not depend on the rows beside it.

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
        """Return whether a layer is an activation without weights."""
        return isinstance(layer, ACTIVATIONS) and next(layer.parameters(), None) is None

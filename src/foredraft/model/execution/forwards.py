"""What modules run instead of the forward of their class: the one place where it is looked up, set and taken away."""

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
    """A forward of this library that computes what its module does, another way."""


def linears(model: nn.Module) -> list[nn.Module]:
    """Every linear layer of a model, packed or not."""
    return [layer for layer in model.modules() if isinstance(layer, (nn.Linear, Conv1D))]


def replacement(module: nn.Module) -> Any:
    """The function that replaces the forward of a module's class; None if there is none."""
    return vars(module).get("forward")


def changed_forward(module: nn.Module) -> object:
    """The function by which a module computes something else than its class does; None if there is none."""
    forward = replacement(module)
    return None if isinstance(forward, StandIn) else forward


def replace_forward(module: nn.Module, forward: Callable[..., Any] | None) -> None:
    """Let a module run a function; None for its class's own forward."""
    if forward is None:
        vars(module).pop("forward", None)
    else:
        vars(module)["forward"] = forward


@contextmanager
def replaced(forwards: Mapping[nn.Module, Callable[..., Any] | None]) -> Iterator[None]:
    """Let modules run these functions inside; None for the forward of their class."""
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
# Torch runs an elementwise operator over a whole tensor in vectors, what is left at its end number by number, and a
# large tensor in parts that threads share. An exponential differs in the last bit between a vector and a number by
# itself, so that a row's bits depend on where in the tensor it lies. Here rows are whole vectors, in parts too small
# to be shared.

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

"""Linear layers of a model: all of them, and what replaces the forward of a module."""

from __future__ import annotations

from torch import nn
from transformers.pytorch_utils import Conv1D


class StandIn:
    """A forward of this library that computes what its module does, another way."""


def linears(model: nn.Module) -> list[nn.Module]:
    """Every linear layer of a model, packed or not."""
    return [layer for layer in model.modules() if isinstance(layer, (nn.Linear, Conv1D))]


def replacement(layer: nn.Module) -> object:
    """The function that replaces the forward of a linear layer's class; None if there is none."""
    return vars(layer).get("forward")


def changed_forward(module: nn.Module) -> object:
    """The function by which a module computes something else than its class does; None if there is none."""
    forward = vars(module).get("forward")
    return None if isinstance(forward, StandIn) else forward

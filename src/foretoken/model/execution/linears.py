"""Linear layers of a model: all of them, and what replaces their forward."""

from __future__ import annotations

from torch import nn
from transformers.pytorch_utils import Conv1D


def linears(model: nn.Module) -> list[nn.Module]:
    """Every linear layer of a model, packed or not."""
    return [layer for layer in model.modules() if isinstance(layer, (nn.Linear, Conv1D))]


def replacement(layer: nn.Module) -> object:
    """The function that replaces the forward of a linear layer's class; None if there is none."""
    return vars(layer).get("forward")

"""What modules run instead of the forward of their class: the one place where it is looked up, set and taken away."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
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

"""Private copies of a module tree over the same tensors: the user's module objects are never changed."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from torch import nn

from foretoken.errors import UnsupportedModelError
from foretoken.model.execution.forwards import StandIn, replacement
from foretoken.model.execution.packing import PackedLinear
from foretoken.model.wrappers import take_out_compilation

Model = TypeVar("Model", bound=nn.Module)

SHARED = (PackedLinear, StandIn)
"""Forwards that copies of a module share."""


def shadow(model: Model) -> Model:
    """A copy of the module tree, hooks and configs of ``model`` that shares every parameter, buffer and packed weight.

    Raises: UnsupportedModelError when the module tree cannot be copied.
    """
    forwards = [replacement(module) for module in model.modules()]
    shared = [
        *model.parameters(),
        *model.buffers(),
        *(forward for forward in forwards if isinstance(forward, SHARED)),
    ]
    memo: dict[int, Any] = {id(item): item for item in shared}
    try:
        copied = copy.deepcopy(model, memo)
    except (TypeError, RuntimeError, copy.Error) as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} holds something that cannot be copied ({error}), and foretoken only changes "
            "copies. Remove the attribute, hook or wrapper that holds it, or load the model from its path."
        ) from error
    take_out_compilation(copied)
    return copied

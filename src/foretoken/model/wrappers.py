"""Modules around a model: what is exact to take off, and what to say of the rest."""

from __future__ import annotations

import sys
from types import MethodType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from foretoken.errors import UnsupportedModelError
from foretoken.model.execution.forwards import replace_forward, replacement


def unwrapped(model: Any) -> Any:
    """The model that ``torch.compile`` was given, which computes the same; everything else as it is."""
    while _is_compiled(model):
        model = model._orig_mod
    return model


def check_unwrapped(model: nn.Module) -> PreTrainedModel:
    """The model, where it is one of `transformers` or a compiled one.

    Raises: UnsupportedModelError, which says where inside a wrapper the model is.
    """
    model = unwrapped(model)
    if isinstance(model, PreTrainedModel):
        return model
    kind = type(model).__name__
    for path, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            raise UnsupportedModelError(
                f"the model is a {kind} around a {type(module).__name__}; foretoken decodes the models of transformers "
                f"themselves, so give the one inside: model.{path}. Layers that were put into it, such as adapters, "
                "are part of it and are followed as they are switched; what the wrapper does to its inputs, such as "
                "the virtual tokens of prompt tuning, is not"
            )
    raise UnsupportedModelError(
        f"the model is a {kind}, which holds no model of transformers; load one by AutoModelForCausalLM"
    )


def take_out_compilation(model: nn.Module) -> None:
    """Let a shadow run what ``torch.compile`` was given: modules, and forwards that were replaced.

    A compiled forward is bound to the module of its owner, and its graphs are recompiled for every shape.
    """
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            parent._modules[name] = unwrapped(child)
    for module in model.modules():
        original = getattr(replacement(module), "_torchdynamo_orig_callable", None)
        if isinstance(original, MethodType) and original.__func__ is type(module).forward:
            replace_forward(module, None)


def _is_compiled(model: Any) -> bool:
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # there once anything was compiled; slow to import
    return dynamo is not None and isinstance(model, dynamo.OptimizedModule)

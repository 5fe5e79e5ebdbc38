"""The models that the classic functions are given: adapters, and modules that are read as they are."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from foretoken.classic.modules import Model, PlainModule, plain_module
from foretoken.errors import UnsupportedModelError, UnsupportedStateError
from foretoken.loading.adapters import ADAPTERS, Adapter
from foretoken.model.support import check_unwrapped, unwrapped

_IN_LAYERS = ("LoraModel", "AdaLoraModel", "IA3Model", "LoHaModel", "LoKrModel", "OFTModel")
"""Tuners of peft that change layers and nothing else."""


def adapter_of(model: nn.Module) -> Adapter:
    """The adapter of a loaded model of `transformers`, which follows what its owner has changed since the last call.

    Raises: UnsupportedModelError, UnsupportedStateError, ProbeError as `CausalLM` does.
    """
    return ADAPTERS.of(check_unwrapped(opened(model)))


def ready(model: Model) -> Adapter | PlainModule:
    """The adapter of a model, or the module itself where there is none: it reads every text from its beginning.

    Wrappers are taken off where that is exact, see `opened`.

    Raises: UnsupportedModelError, UnsupportedStateError, ProbeError.
    """
    if not isinstance(model, nn.Module):
        if callable(model) and not isinstance(model, type):
            return plain_module(model)
        raise UnsupportedModelError(
            f"the model is a {type(model).__name__}; give a loaded transformers model (AutoModelForCausalLM), or a "
            "torch.nn.Module that returns logits for token ids"
        )
    inner = opened(model)
    if not isinstance(inner, PreTrainedModel):
        return plain_module(model)
    try:
        return ADAPTERS.of(inner)
    except (UnsupportedModelError, UnsupportedStateError) as error:
        try:
            return plain_module(model)
        except UnsupportedModelError:
            raise error from None


def opened(model: nn.Module) -> nn.Module:
    """The model inside of wrappers that add nothing to a single text: compilation, data parallelism, peft's adapters.

    A wrapper with hooks, one of peft's that changes inputs (virtual tokens) or weighs adapters by the text, and any
    other module around a model stay on.
    """
    while True:
        inner = _opened_once(model)
        if inner is model:
            return model
        model = inner


def _opened_once(model: nn.Module) -> nn.Module:
    if model._forward_hooks or model._forward_pre_hooks:
        return model
    if isinstance(model, (nn.DataParallel, DistributedDataParallel)):
        inner: nn.Module = model.module
        return inner
    peft: Any = sys.modules.get("peft")
    if peft is not None and isinstance(model, peft.PeftModel):
        tuner = model.base_model
        kinds = [getattr(peft, name) for name in _IN_LAYERS if hasattr(peft, name)]
        has_hooks = bool(getattr(tuner, "_forward_hooks", None) or getattr(tuner, "_forward_pre_hooks", None))
        changed: nn.Module = tuner.model if type(tuner) in kinds and not has_hooks else model
        return changed
    without: nn.Module = unwrapped(model)
    return without

"""Adapters of the models that the classic functions are given."""

from __future__ import annotations

from torch import nn

from foretoken.errors import UnsupportedModelError
from foretoken.loading.adapters import ADAPTERS, Adapter
from foretoken.model.wrappers import check_unwrapped


def adapter_of(model: nn.Module) -> Adapter:
    """The adapter of a loaded model, which follows what its owner has changed since the last call.

    Raises: UnsupportedModelError, UnsupportedStateError, ProbeError as `CausalLM` does.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(
            f"the model is a {type(model).__name__}; give a loaded transformers model (AutoModelForCausalLM)"
        )
    return ADAPTERS.of(check_unwrapped(model))

"""Adapters of the models that the classic functions are given."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

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
    if isinstance(model, PreTrainedModel) or any(isinstance(part, PreTrainedModel) for part in model.modules()):
        return ADAPTERS.of(check_unwrapped(model))
    raise UnsupportedModelError(
        f"the model is a {type(model).__name__}, which holds no model of transformers; load one by "
        "AutoModelForCausalLM. Heads over a target's features (Medusa, Hydra, EAGLE) are not applicable to the classic "
        "functions: give them to LLM or foretoken.speculate"
    )

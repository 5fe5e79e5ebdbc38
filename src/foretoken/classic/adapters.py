"""One adapter per model object, made at the first call and kept as long as the model lives."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from transformers import PreTrainedModel

from foretoken.engine.errors import UnsupportedModelError
from foretoken.engine.model import CausalLM


@dataclass(frozen=True)
class _Entry:
    adapter: CausalLM
    state: tuple[Any, ...]


_ENTRIES: WeakKeyDictionary[nn.Module, _Entry] = WeakKeyDictionary()
_LOCK = threading.Lock()


def adapter_of(model: nn.Module) -> CausalLM:
    """The adapter of a loaded model; weights that were written since the last call are packed again.

    Building one probes the model (about 0.1 s for a small one), so it is kept, by a weak reference to the model. A
    model whose parameters, modules, hooks, dtype, device or attention were exchanged gets a new one.

    Raises: UnsupportedModelError, UnsupportedStateError, ProbeError as `CausalLM` does.
    """
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(
            f"the model is a {type(model).__name__}; give a loaded transformers model (AutoModelForCausalLM)"
        )
    state = _state(model)
    with _LOCK:
        entry = _ENTRIES.get(model)
        if entry is None or entry.state != state:
            entry = _ENTRIES[model] = _Entry(CausalLM(model), state)
        entry.adapter.execution.refresh_if_stale()
    return entry.adapter


def _state(model: PreTrainedModel) -> tuple[Any, ...]:
    """What an adapter was built on. The adapter keeps the tensors alive, so their ids stay theirs."""
    weight = model.get_input_embeddings().weight
    tensors = tuple(id(tensor) for tensor in (*model.parameters(), *model.buffers()))
    hooks = tuple(
        id(hook)
        for module in model.modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    )
    modules = tuple(id(module) for module in model.modules())
    attention = getattr(model.config, "_attn_implementation", None)
    return tensors, hooks, modules, weight.dtype, weight.device, attention

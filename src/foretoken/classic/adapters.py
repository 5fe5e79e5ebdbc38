"""One adapter per model object, made at the first call and kept as long as the model lives."""

from __future__ import annotations

import threading
from weakref import WeakKeyDictionary

from torch import nn

from foretoken.errors import UnsupportedModelError
from foretoken.model.lm import CausalLM
from foretoken.model.wrappers import check_unwrapped

_ENTRIES: WeakKeyDictionary[nn.Module, CausalLM] = WeakKeyDictionary()
_LOCK = threading.Lock()


def adapter_of(model: nn.Module) -> CausalLM:
    """The adapter of a loaded model, which follows what its owner has changed since the last call.

    Building one probes the model (about 0.1 s for a small one), so it is kept, by a weak reference to the model.

    Raises: UnsupportedModelError, UnsupportedStateError, ProbeError as `CausalLM` does.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(
            f"the model is a {type(model).__name__}; give a loaded transformers model (AutoModelForCausalLM)"
        )
    model = check_unwrapped(model)
    with _LOCK:
        adapter = _ENTRIES.get(model)
        if adapter is None:
            adapter = _ENTRIES[model] = CausalLM(model)
        else:
            adapter.refresh()
    return adapter

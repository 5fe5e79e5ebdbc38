"""Adapters of users' models. Each is made once, lives as long as its model, and follows changes of the model.

The interfaces that receive a model with every call share these adapters: the ``generate`` hook and the classic
functions. Two kinds of adapters are not shared. An `LLM` has an adapter of its own, because its streams may be open
while another interface is called, and must not continue with a model that the owner has changed in between. A draft
model has an adapter per target, because it runs under the lock of its target.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from foredraft import forking
from foredraft.config.speculative import SpeculativeConfig
from foredraft.devices import makes_on_cpu
from foredraft.loading.info import Loaded
from foredraft.loading.pairing import Drafting, Pairing
from foredraft.model.lm import CausalLM
from foredraft.model.support import model_name

MAX_DRAFTINGS = 4
"""Limit on drafting methods kept loaded per model. A draft model that was loaded by name stays in its entry."""


@dataclass(eq=False)
class Adapter:
    """A model that is ready to decode. It does not refer to the model object, which it must not keep alive.

    Args:
      target: adapter that shares the tensors of the model and follows its changes.
      execution: execution mode. Whether layers are rounded is in `CausalLM.quantization`.
      lock: lock that is held while the target, or a drafter of this adapter, runs.
    """

    target: CausalLM
    execution: str
    lock: threading.RLock = field(default_factory=forking.lock)
    _draftings: OrderedDict[Any, Drafting] = field(default_factory=OrderedDict)

    @makes_on_cpu
    def drafting(
        self, model: PreTrainedModel, config: SpeculativeConfig, tokenizer: PreTrainedTokenizerBase | None
    ) -> Drafting:
        """Return a drafting method for this model, which is loaded and checked on first use.

        Raises: the errors of `Pairing.drafting`.
        """
        key = (_key(config), None if tokenizer is None else weakref.ref(tokenizer), self.target.vocab_size)
        drafting = self._draftings.get(key)
        if drafting is None:
            loaded = Loaded.of(model, model_name(model), False)
            drafting = Pairing(loaded, self.target, tokenizer, execution=self.execution).drafting(config)
            self._draftings[key] = drafting
        else:
            drafting.refresh()
        self._draftings.move_to_end(key)
        while len(self._draftings) > MAX_DRAFTINGS:
            self._draftings.popitem(last=False)
        return drafting


_LOCK = forking.lock()
ADAPTERS: weakref.WeakKeyDictionary[PreTrainedModel, dict[tuple[str, str | None, str, str | None], Adapter]] = (
    weakref.WeakKeyDictionary()
)
"""Adapters of all models in the process, so that no call probes a model and packs its weights again."""


@makes_on_cpu
def shared_adapter(
    model: PreTrainedModel,
    execution: str = "auto",
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
    activations: str | None = None,
) -> Adapter:
    """Return the adapter of a model in its present state, rounded as requested; see `CausalLM`.

    Safe to call from several threads.

    Raises: UnsupportedModelError, UnsupportedStateError, ProbeError if the model cannot be decoded exactly.
    """
    with _LOCK:
        adapters = ADAPTERS.setdefault(model, {})
        key = execution, quantization, kv_cache_dtype, activations
        if key not in adapters:
            target = CausalLM(
                model,
                execution=execution,
                quantization=quantization,
                kv_cache_dtype=kv_cache_dtype,
                activations=activations,
            )
            adapters[key] = Adapter(target, execution)
        adapter = adapters[key]
    with adapter.lock:
        adapter.target.refresh()
    return adapter


def _key(config: SpeculativeConfig) -> Any:
    """Return the config as a key that keeps no model alive."""
    values = config.as_dict()
    if isinstance(config.model, nn.Module):
        values["model"] = weakref.ref(config.model)
    if config.definition.combines:
        values["drafters"] = tuple(_key(part) for part in config.parts)
    return tuple(values.items())

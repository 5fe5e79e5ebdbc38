"""Adapters of users' models: made once, kept as long as the model lives, and following its changes.

The faces that are handed a model with every call share this store: the hook and the classic functions. Two kinds of
adapters stay outside of it. An `LLM` has one of its own, since its streams may be open while another face is called:
what they have begun with the model as it was must not go on with a model that its owner has changed in between. And a
draft model is adapted for each target, since it runs under the lock of the target.
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
from foredraft.loading.info import Loaded, model_name
from foredraft.loading.pairing import Drafting, Pairing
from foredraft.model.lm import CausalLM

MAX_DRAFTINGS = 4
"""Ways of drafting that are kept per model; a draft model that was loaded by name lives in its entry."""


@dataclass(eq=False)
class Adapter:
    """A model ready to decode. Nothing in it refers to the model object, whose life it must not prolong.

    Args:
      target: shares the tensors of the model, and follows it when it is changed.
      execution: how it runs; `CausalLM.quantization` says whether its layers are rounded.
      lock: held while the target, or a drafter of this adapter, runs.
    """

    target: CausalLM
    execution: str
    lock: threading.RLock = field(default_factory=forking.lock)
    _draftings: OrderedDict[Any, Drafting] = field(default_factory=OrderedDict)

    @makes_on_cpu
    def drafting(
        self, model: PreTrainedModel, config: SpeculativeConfig, tokenizer: PreTrainedTokenizerBase | None
    ) -> Drafting:
        """A way of drafting for this model, loaded and checked when it is first asked for.

        Raises: as `Pairing.drafting`.
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
ADAPTERS: weakref.WeakKeyDictionary[PreTrainedModel, dict[tuple[str, str | None, str], Adapter]] = (
    weakref.WeakKeyDictionary()
)
"""Adapters of all models in use, in the whole process: no call must probe a model and pack its weights again."""


@makes_on_cpu
def shared_adapter(
    model: PreTrainedModel, execution: str = "auto", quantization: str | None = None, kv_cache_dtype: str = "auto"
) -> Adapter:
    """The adapter of a model as it is now, with its linear layers, or keys and values, rounded where that is asked.

    May be called from several threads.

    Raises: UnsupportedModelError, UnsupportedStateError, ProbeError: the model cannot be decoded exactly.
    """
    with _LOCK:
        adapters = ADAPTERS.setdefault(model, {})
        key = execution, quantization, kv_cache_dtype
        if key not in adapters:
            target = CausalLM(model, execution=execution, quantization=quantization, kv_cache_dtype=kv_cache_dtype)
            adapters[key] = Adapter(target, execution)
        adapter = adapters[key]
    with adapter.lock:
        adapter.target.refresh()
    return adapter


def _key(config: SpeculativeConfig) -> Any:
    """The config as a key that keeps no model alive."""
    values = config.as_dict()
    if isinstance(config.model, nn.Module):
        values["model"] = weakref.ref(config.model)
    if config.definition.combines:
        values["drafters"] = tuple(_key(part) for part in config.parts)
    return tuple(values.items())

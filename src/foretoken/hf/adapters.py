"""Adapters of users' models: made once, kept as long as the model lives, made anew when it has changed."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from foretoken.engine.model import CausalLM
from foretoken.modelinfo import Loaded, model_name
from foretoken.pairing import Drafting, Pairing
from foretoken.speculative import SpeculativeConfig

MAX_DRAFTINGS = 4
"""Ways of drafting that are kept per model; a draft model that was loaded by name lives in its entry."""


@dataclass(eq=False)
class Adapter:
    """A model ready to decode. Nothing in it refers to the model object, whose life it must not prolong.

    Args:
      target: shares the tensors of the model.
      execution: how it runs.
      signature: what the model consisted of when the adapter was made.
      lock: held while the target, or a drafter of this adapter, runs.
    """

    target: CausalLM
    execution: str
    signature: int
    lock: threading.RLock = field(default_factory=threading.RLock)
    _draftings: OrderedDict[Any, tuple[int, Drafting]] = field(default_factory=OrderedDict)

    def drafting(
        self, model: PreTrainedModel, config: SpeculativeConfig, tokenizer: PreTrainedTokenizerBase | None
    ) -> Drafting:
        """A way of drafting for this model, loaded and checked when it is first asked for.

        Raises: as `Pairing.drafting`.
        """
        key = (_key(config), None if tokenizer is None else weakref.ref(tokenizer))
        part = config.model_part
        drafter_signature = signature(part.model) if part and isinstance(part.model, PreTrainedModel) else 0
        made, drafting = self._draftings.get(key, (None, None))
        if drafting is None or made != drafter_signature:
            loaded = Loaded.of(model, model_name(model), False)
            drafting = Pairing(loaded, self.target, tokenizer, execution=self.execution).drafting(config)
            self._draftings[key] = (drafter_signature, drafting)
        self._draftings.move_to_end(key)
        while len(self._draftings) > MAX_DRAFTINGS:
            self._draftings.popitem(last=False)
        if drafting.model is not None:
            drafting.model.execution.refresh_if_stale()
        return drafting


class Adapters:
    """The adapters of all models in use. May be asked from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: weakref.WeakKeyDictionary[PreTrainedModel, dict[str, Adapter]] = weakref.WeakKeyDictionary()

    def of(self, model: PreTrainedModel, execution: str) -> Adapter:
        """The adapter of a model, with its present weights.

        Raises: UnsupportedModelError, ProbeError: the model cannot be decoded exactly.
        """
        with self._lock:
            adapters = self._of.setdefault(model, {})
            now = signature(model)
            adapter = adapters.get(execution)
            if adapter is None or adapter.signature != now:
                adapter = adapters[execution] = Adapter(CausalLM(model, execution=execution), execution, now)
        with adapter.lock:
            adapter.target.execution.refresh_if_stale()
        return adapter


def signature(model: PreTrainedModel) -> int:
    """Changes with the modules, tensors, hooks and attention of a model; not with values written into its tensors."""
    tensors = [(id(tensor), tensor.dtype, tensor.device, tensor.shape) for tensor in _tensors(model)]
    modules = [(id(module), *module._forward_hooks, *module._forward_pre_hooks) for module in model.modules()]
    return hash((tuple(tensors), tuple(modules), model.config._attn_implementation))


def _tensors(model: PreTrainedModel) -> list[Any]:
    return [*model.parameters(), *model.buffers()]


def _key(config: SpeculativeConfig) -> Any:
    """The config as a key that keeps no model alive."""
    values = {name: value for name, value in vars(config).items() if value is not None}
    if isinstance(config.model, PreTrainedModel):
        values["model"] = weakref.ref(config.model)
    if config.drafters is not None:
        values["drafters"] = tuple(_key(part) for part in config.drafters)
    return tuple(values.items())

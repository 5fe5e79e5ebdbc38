"""Adapters for the models given to the classic functions: transformers models, and any other modules."""

from __future__ import annotations

import inspect
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from foredraft import forking
from foredraft.errors import ShapeError, UnsupportedModelError, UnsupportedStateError, error_with_type
from foredraft.loading.adapters import Adapter, shared_adapter
from foredraft.model.support import check_unwrapped, unwrapped

_IN_LAYERS = ("LoraModel", "AdaLoraModel", "IA3Model", "LoHaModel", "LoKrModel", "OFTModel")
"""Tuners of peft that change only layers."""


def adapter_of(model: nn.Module) -> Adapter:
    """Return the adapter of a loaded `transformers` model, updated for changes to the model since the last call.

    Raises: UnsupportedModelError, UnsupportedStateError, ProbeError as `CausalLM` does.
    """
    return shared_adapter(check_unwrapped(opened(model)))


def ready(model: Model) -> Adapter | PlainModule:
    """Return the adapter of a model, or a `PlainModule`, which reads every text from its beginning.

    Wrappers are removed if that is exact; see `opened`.

    Raises: UnsupportedModelError, UnsupportedStateError, ProbeError.
    """
    if not isinstance(model, nn.Module):
        if callable(model) and not isinstance(model, type):
            return plain_module(model)
        raise UnsupportedModelError(
            f"the model is a {type(model).__name__}; use a loaded transformers model (AutoModelForCausalLM), or a "
            "torch.nn.Module that returns logits for token ids"
        )
    inner = opened(model)
    if not isinstance(inner, PreTrainedModel):
        return plain_module(model)
    try:
        return shared_adapter(inner)
    except (UnsupportedModelError, UnsupportedStateError) as error:
        try:
            return plain_module(model)
        except UnsupportedModelError:
            raise error from None


def opened(model: nn.Module) -> nn.Module:
    """Return the model inside wrappers that do not change its output: compilation, data parallelism, peft's adapters.

    Some wrappers are kept: wrappers with hooks, peft models that change inputs (virtual tokens) or weigh adapters by
    the text, and any other module around a model.
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


Model = Callable[..., Any]
"""A `torch.nn.Module`, or any other callable of token ids."""

_LIMITS = ("max_position_embeddings", "max_context_length")
_NAMED_ONLY = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
_TOLERANCE = 32  # largest difference of logits between forwards of two lengths, in roundings of the largest logit


class PlainModule:
    """A module that returns logits for token ids without a cache, and its properties as found by a test call.

    Args:
      module: called with int64 (B, T), by the name ``input_ids`` if that is not the first argument. The module returns
        logits (B, T, V), an object with ``.logits``, or a tuple that begins with the logits.

    Attributes:
      name: name of the module's class.
      vocab_size: V, the size of the module's logits.
      num_embeddings: number of token ids that the module can read: the rows of its input embedding, or V if that is
        unknown.
      context_length: context length from the module's config or from an attribute (``max_position_embeddings``,
        ``max_context_length``); None if unknown.
      device: device of the module's first parameter or buffer, else its attribute ``device``, else the CPU.

    Raises: UnsupportedModelError if the call fails, or if the logits are not one row per token, depend on later tokens,
      or change from call to call.
    """

    def __init__(self, module: Model) -> None:
        self._module = _reference(module)
        self._lock = forking.lock()
        self._was_said = False
        self._keyword, self._others = _arguments(module)
        self.name = type(module).__name__
        self.device = _device(module)
        self.context_length = _context_length(module)
        self.vocab_size = self._checked()
        self.num_embeddings = _num_embeddings(module, self.vocab_size)

    @property
    def model(self) -> PlainModule:
        """The model of the reader, as in `Reader`. A plain module is its own model."""
        return self

    def read(self, text: Sequence[int], num_last: int = 1) -> Tensor:
        """Return logits (num_last, V) after the last ``num_last`` tokens of the text, in the dtype of the module.

        Token ids that the module does not have are replaced by its largest id.

        Raises: ShapeError if the shape of the logits changes.
        """
        return self._read([text], num_last)[0]

    def read_beams(self, texts: Sequence[Sequence[int]], parents: Sequence[int]) -> Tensor:
        """Return logits (B, V) after texts of one length."""
        return self._read(texts, 1)[:, 0]

    def _read(self, texts: Sequence[Sequence[int]], num_last: int) -> Tensor:
        """Return logits (B, num_last, V) after the last tokens of texts of one length."""
        ids = torch.tensor(
            [[min(token, self.num_embeddings - 1) for token in text] for text in texts], device=self.device
        )
        logits = self._logits(ids)
        if logits.shape != (*ids.shape, self.vocab_size):
            raise ShapeError(
                f"{self.name} returned logits of shape {tuple(logits.shape)} for ids of shape {tuple(ids.shape)}; it "
                f"must return one row of {self.vocab_size} logits per token"
            )
        return logits[:, ids.shape[1] - num_last :]

    def say_once(self) -> None:
        """Warn, once, that the model has no cache, so that ``use_cache`` has no effect."""
        if not self._was_said:
            self._was_said = True
            warnings.warn(
                f"the model is a {self.name}, whose cache foredraft does not support: the whole text is read at every "
                "step. If it contains an equivalent transformers model, use that model",
                UserWarning,
                stacklevel=2,
            )

    def _logits(self, ids: Tensor) -> Tensor:
        module = self._module()
        assert module is not None, "the caller keeps the module alive"
        given = ([], {self._keyword: ids}) if self._keyword else ([ids], {})
        with self._lock, torch.no_grad(), _evaluating(module):
            output = module(*given[0], **given[1], **self._others)
        logits = output[0] if type(output) is tuple and output else getattr(output, "logits", output)
        if not isinstance(logits, Tensor) or not logits.is_floating_point():
            kind = logits.dtype if isinstance(logits, Tensor) else type(logits).__name__
            raise UnsupportedModelError(f"it returns {kind} instead of logits")
        return logits

    def _checked(self) -> int:
        """Return V, after checking that the logits of a token do not depend on later tokens.

        The texts are 0 1 0, 0 1 1 and 0 1. The first two tokens must have the same logits in all of them.
        """
        try:
            found = [self._logits(torch.tensor([text], device=self.device)) for text in ([0, 1, 0], [0, 1, 1], [0, 1])]
        except Exception as error:  # a module of the user may raise anything
            raise self._refusal(f"calling it with token ids fails ({error_with_type(error)})") from error
        vocab_size = found[0].shape[-1] if found[0].ndim else 0
        shapes = [tuple(logits.shape) for logits in found]
        if vocab_size < 2 or shapes != [(1, length, vocab_size) for length in (3, 3, 2)]:
            raise self._refusal(f"for 3, 3 and 2 token ids it returns shapes {shapes}, not one row of logits per token")
        first, second, beginning = (logits[0, :2].cpu().double() for logits in found)
        bound = _TOLERANCE * torch.finfo(found[0].dtype).eps * float(first.abs().max().clamp(min=1.0))
        apart = float(torch.maximum((first - second).abs(), (first - beginning).abs()).max())
        if not apart <= bound:
            raise self._refusal(
                f"its logits depend on later tokens, or change from call to call (by {apart:.2g}; rounding explains up "
                f"to {bound:.2g})"
            )
        return vocab_size

    def _refusal(self, reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"the model is a {self.name}, which contains no supported transformers model, and {reason}; use a model of "
            "AutoModelForCausalLM, or any module that returns logits for token ids. Heads over a target's features "
            "(Medusa, Hydra, EAGLE) do not work with the classic functions: use them with LLM or foredraft.speculate"
        )


_lock = forking.lock()
_known: weakref.WeakKeyDictionary[Model, PlainModule] = weakref.WeakKeyDictionary()


def plain_module(module: Model) -> PlainModule:
    """Return the `PlainModule` of a module. The module is tested once, and the result is kept while the module exists.
    Thread-safe.

    Raises: UnsupportedModelError.
    """
    with _lock:
        try:
            known = _known.get(module)
        except TypeError:  # an object without a hash, or without support for weak references
            return PlainModule(module)
        if known is None:
            known = _known[module] = PlainModule(module)
        return known


def _reference(module: Model) -> Callable[[], Model | None]:
    try:
        return weakref.ref(module)
    except TypeError:
        return lambda: module


def _arguments(module: Model) -> tuple[str, dict[str, Any]]:
    """Return the argument name for token ids ("" if positional), and values for cache arguments without a default."""
    try:
        found = inspect.signature(module.forward if isinstance(module, nn.Module) else module).parameters
    except (TypeError, ValueError):  # Python cannot determine the signature
        return "", {}
    by_place = [name for name, one in found.items() if one.kind not in _NAMED_ONLY]
    is_named = not by_place or ("input_ids" in found and by_place[0] != "input_ids")
    others = {
        name: value
        for name, value in (("past_key_values", None), ("use_cache", False))
        if name in found and found[name].default is inspect.Parameter.empty
    }
    return "input_ids" if is_named else "", others


def _device(module: Model) -> torch.device:
    if isinstance(module, nn.Module):
        tensor = next((tensor for tensor in (*module.parameters(), *module.buffers())), None)
        if tensor is not None:
            return tensor.device
    named = getattr(module, "device", None)
    return torch.device(named) if isinstance(named, (str, torch.device)) else torch.device("cpu")


def _num_embeddings(module: Model, vocab_size: int) -> int:
    try:
        return int(module.get_input_embeddings().weight.shape[0])  # type: ignore[attr-defined]
    except (AttributeError, NotImplementedError, TypeError):
        return vocab_size


def _context_length(module: Model) -> int | None:
    places: tuple[Any, ...] = (getattr(module, "config", None), module)
    found = (getattr(place, name, None) for place in places for name in _LIMITS)
    return next((limit for limit in found if isinstance(limit, int)), None)


@contextmanager
def _evaluating(module: Model) -> Iterator[None]:
    """Switch off dropout and other training behaviour inside the context."""
    training = [part for part in module.modules() if part.training] if isinstance(module, nn.Module) else []
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True

"""Models that are any `torch.nn.Module`: called with token ids, from the beginning of the text every time."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.errors import ShapeError, UnsupportedModelError

_LIMITS = ("max_position_embeddings", "max_context_length")
_TOLERANCE = 32  # roundings of the dtype by the largest logit, between forwards of two lengths


class PlainModule:
    """A module that gives logits for token ids, without a cache, and what a call learns of it.

    Args:
      module: called as ``module(ids)`` with int64 (B, T); returns logits (B, T, V), or an object with ``.logits``.

    Attributes:
      name: of its class.
      vocab_size: V of its logits.
      context_length: of its config, or an attribute of its own (``max_position_embeddings``, ``max_context_length``);
        None where neither is there.
      device: of its first parameter or buffer, else the CPU.

    Raises: UnsupportedModelError where the call fails, gives no logits for every token, or logits that depend on later
      tokens or change from call to call.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._lock = threading.RLock()
        self._was_said = False
        self.name = type(module).__name__
        self.device = next((tensor.device for tensor in (*module.parameters(), *module.buffers())), torch.device("cpu"))
        self.context_length = _context_length(module)
        self.vocab_size = self._checked()

    def read(self, texts: Sequence[Sequence[int]], num_last: int = 1) -> Tensor:
        """Logits (B, num_last, V) after the last tokens of texts of one length.

        Tokens that the module has no logit for are read as its last one.

        Raises: ShapeError for logits of another shape than the first.
        """
        ids = torch.tensor([[min(token, self.vocab_size - 1) for token in text] for text in texts], device=self.device)
        logits = self._logits(ids)
        if logits.shape != (*ids.shape, self.vocab_size):
            raise ShapeError(
                f"{self.name} returned logits of shape {tuple(logits.shape)} for ids of shape {tuple(ids.shape)}; want "
                f"one row of {self.vocab_size} for every token"
            )
        return logits[:, ids.shape[1] - num_last :]

    def say_once(self) -> None:
        """Warn that there is no cache to keep, the first time."""
        if not self._was_said:
            self._was_said = True
            warnings.warn(
                f"the model is a {self.name}, whose cache foretoken does not know: it reads the whole text at every "
                "step; give the transformers model inside it, if there is one and it computes the same",
                UserWarning,
                stacklevel=2,
            )

    def _logits(self, ids: Tensor) -> Tensor:
        module = self._module()
        assert module is not None, "the caller holds it"
        with self._lock, torch.no_grad(), _evaluating(module):
            output = module(ids)
        logits = getattr(output, "logits", output)
        if not isinstance(logits, Tensor) or not logits.is_floating_point():
            kind = logits.dtype if isinstance(logits, Tensor) else type(logits).__name__
            raise UnsupportedModelError(f"it returns {kind} and no logits")
        return logits

    def _checked(self) -> int:
        """V, when the logits of a text are those of its beginnings.

        The text is 0 1 0, then 0 1 1: the first two tokens have the same logits in both, and in 0 1 alone.
        """
        try:
            found = [self._logits(torch.tensor([text], device=self.device)) for text in ([0, 1, 0], [0, 1, 1], [0, 1])]
        except Exception as error:  # whatever a stranger's forward raises for ids
            raise self._refusal(f"calling it with token ids fails ({type(error).__name__}: {error})") from error
        vocab_size = found[0].shape[-1] if found[0].ndim else 0
        shapes = [tuple(logits.shape) for logits in found]
        if vocab_size < 2 or shapes != [(1, length, vocab_size) for length in (3, 3, 2)]:
            raise self._refusal(f"for 3, 3 and 2 token ids it returns shapes {shapes}, not one row of logits per token")
        first, second, beginning = (logits[0, :2].double() for logits in found)
        bound = _TOLERANCE * torch.finfo(found[0].dtype).eps * float(first.abs().max().clamp(min=1.0))
        apart = float(torch.maximum((first - second).abs(), (first - beginning).abs()).max())
        if not apart <= bound:
            raise self._refusal(
                f"its logits depend on tokens that come later, or change from call to call (by {apart:.2g}; rounding "
                f"explains {bound:.2g})"
            )
        return vocab_size

    def _refusal(self, reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"the model is a {self.name}, which holds no model of transformers that can be decoded, and {reason}; give "
            "a model of AutoModelForCausalLM, or any module that returns logits for token ids. Heads over a target's "
            "features (Medusa, Hydra, EAGLE) are not applicable to the classic functions: give them to LLM or "
            "foretoken.speculate"
        )


_lock = threading.Lock()
_known: weakref.WeakKeyDictionary[nn.Module, PlainModule] = weakref.WeakKeyDictionary()


def plain_module(module: nn.Module) -> PlainModule:
    """The one of a module, checked once, as long as it lives. May be asked from several threads.

    Raises: UnsupportedModelError.
    """
    with _lock:
        if module not in _known:
            _known[module] = PlainModule(module)
        return _known[module]


def _context_length(module: nn.Module) -> int | None:
    places: tuple[Any, ...] = (getattr(module, "config", None), module)
    found = (getattr(place, name, None) for place in places for name in _LIMITS)
    return next((limit for limit in found if isinstance(limit, int)), None)


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Dropout and the like switched off meanwhile."""
    training = [part for part in module.modules() if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True

"""The law that a user's processor makes of logits, and the randomness of torch's global generator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foretoken.errors import ConfigError, NumericsError, ShapeError

LAW_SUM_TOLERANCE = 1e-3  # of processors of one's own in half precision; ours are right to the rounding of the dtype


class ProcessedLaw:
    """A processor object, called as documented and checked: logits -> probabilities -> token.

    It gets (1, V) at a time, at least in float32, and a copy of its own.

    Args:
      processor: ``processor(logits) -> probs`` and ``processor.sample(probs) -> token``.
      vocab_size: V.
    """

    def __init__(self, processor: Any, vocab_size: int) -> None:
        if not callable(processor) or not callable(getattr(processor, "sample", None)):
            raise ConfigError(
                f"logits_processor is {processor!r}; give an object with __call__(logits) and sample(probs), such as "
                "GreedyProcessor()"
            )
        self._processor = processor
        self._name = type(processor).__name__
        self._vocab_size = vocab_size
        self.draws_from_probs = bool(getattr(processor.sample, "draws_from_probs", False))
        self.temperature = float(getattr(processor, "temperature", None) or 1.0)

    def probs(self, logits: Tensor) -> Tensor:
        """Logits (V,) of any float dtype -> probabilities (V,).

        Raises: NumericsError, ShapeError, naming the processor, or the model if that is to blame.
        """
        dtype = torch.promote_types(logits.dtype, torch.float32)
        probs = self._processor(logits.to(dtype, copy=True)[None])
        if not isinstance(probs, Tensor) or probs.shape != (1, self._vocab_size):
            shape = tuple(probs.shape) if isinstance(probs, Tensor) else type(probs).__name__
            raise ShapeError(
                f"{self._name} returned {shape} for logits of shape (1, {self._vocab_size}); it must return "
                "probabilities of the same shape"
            )
        law = probs.detach()[0]
        total = float(law.sum())
        if not abs(total - 1.0) <= LAW_SUM_TOLERANCE or bool((law < 0).any()):
            raise self._failure(logits, law, total)
        return law

    def _failure(self, logits: Tensor, law: Tensor, total: float) -> NumericsError:
        if bool(torch.isnan(logits).any()) or bool((logits == torch.inf).any()):
            return NumericsError("the model returned NaN or infinite logits; try a wider dtype, or check the weights")
        what = "NaN" if total != total else f"values from {float(law.min()):.4g} that sum to {total:.4g}"
        return NumericsError(f"{self._name} returned {what}; its probabilities must be 0 or more and sum to 1")

    def sample(self, probs: Tensor) -> int:
        """The processor's token for a law (V,).

        Raises: ShapeError for anything but one token; NumericsError for one outside the vocabulary.
        """
        token = self._processor.sample(probs[None])
        if not isinstance(token, Tensor) or token.numel() != 1:
            shape = tuple(token.shape) if isinstance(token, Tensor) else type(token).__name__
            raise ShapeError(f"{self._name}.sample returned {shape} for probabilities (1, V); want one token, (1, 1)")
        chosen = int(token)
        if not 0 <= chosen < self._vocab_size:
            raise NumericsError(f"{self._name}.sample returned token {chosen}, outside of 0..{self._vocab_size - 1}")
        return chosen


class TorchNoise:
    """Randomness of the acceptance rules from torch's global generator, in the order of use.

    Args:
      law: draws bonus and recovered tokens with the user's ``sample``.
      law_at: the target's law (V,) after a node of the draft.
      is_adjusted: False draws from the target's law where the residual was meant: lossy.

    Randomness: one ``torch.rand`` per tested token, then one call of the processor's ``sample``; `torch.manual_seed`
    repeats both.
    """

    def __init__(self, law: ProcessedLaw, law_at: Callable[[int], Tensor], *, is_adjusted: bool = True) -> None:
        self._law = law
        self._law_at = law_at
        self._is_adjusted = is_adjusted
        self.uniforms: list[float] = []

    def uniform(self, depth: int, sibling: int) -> float:
        self.uniforms.append(float(torch.rand((), dtype=torch.float64)))
        return self.uniforms[-1]

    def draw(self, depth: int, probs: Tensor) -> int:
        target = self._law_at(depth)  # drafts are chains: node and depth are the same number
        return self._law.sample(probs.to(target.dtype) if self._is_adjusted else target)

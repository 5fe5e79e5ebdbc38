"""What a step of the engine hands out."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from foretoken.engine.errors import ForetokenError
from foretoken.engine.sequence import Sequence


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of one emitted token under its processed distribution: its own, and the k most likely."""

    token: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]

    @classmethod
    def of(cls, token: int, log_probs: torch.Tensor, k: int) -> TokenLogprobs:
        """Read off a row (V,) of log-probabilities; rank 1 is the most likely token."""
        logprob = log_probs[token]
        top = log_probs.topk(min(k, len(log_probs)))
        rank = int((log_probs > logprob).sum()) + 1
        return cls(token, float(logprob), rank, tuple(top.indices.tolist()), tuple(top.values.tolist()))


@dataclass(frozen=True)
class RowOutput:
    """What one step added to one row.

    ``num_accepted`` of the ``token_ids``, counted from the front, were drafted; the rest came from the target.
    ``scores`` and ``logits``, where the engine keeps them, are float32 (tokens, V): what each token was chosen from.
    """

    row: Sequence
    token_ids: tuple[int, ...]
    num_accepted: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    error: ForetokenError | None = None
    scores: torch.Tensor | None = None
    logits: torch.Tensor | None = None

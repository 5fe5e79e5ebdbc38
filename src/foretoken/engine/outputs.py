"""The outputs of one step of the engine."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from foretoken.engine.sequence import Sequence
from foretoken.law import sampling


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
    """The tokens that one step added to one row.

    ``num_accepted`` of the ``token_ids``, counted from the front, were drafted; the rest came from the target.
    ``scores`` and ``logits``, where the engine keeps them, are float32 (tokens, V): what each token was chosen from.
    """

    row: Sequence
    token_ids: tuple[int, ...]
    num_accepted: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    error: Exception | None = None
    scores: torch.Tensor | None = None
    logits: torch.Tensor | None = None


def logprobs_of(
    row: Sequence, tokens: Seq[int], logits: torch.Tensor, paths: Seq[tuple[int, ...]]
) -> tuple[TokenLogprobs, ...]:
    """Log-probabilities of tokens, as many as the row's parameters ask for; empty when they ask for none."""
    k = row.params.logprobs
    if k is None:
        return ()
    table = sampling.log_probs(logits, [row.law] * len(tokens), paths)
    return tuple(TokenLogprobs.of(token, table[i], k) for i, token in enumerate(tokens))

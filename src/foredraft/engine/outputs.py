"""The outputs of one step of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from foredraft.engine.logprobs import TokenLogprobs
from foredraft.engine.row import Row
from foredraft.sampling import distribution
from foredraft.tree import DraftTree


@dataclass(frozen=True)
class RowOutput:
    """The tokens that one step added to one row.

    ``num_accepted`` of the ``token_ids``, counted from the front, were drafted, by what ``sources`` name; the rest came
    from the target. ``tree`` is the draft that was verified.
    ``scores`` and ``logits``, where the engine keeps them, are float32 (tokens, V): what each token was chosen from.
    """

    row: Row
    token_ids: tuple[int, ...]
    num_accepted: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    error: Exception | None = None
    tree: DraftTree | None = None
    scores: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    sources: tuple[str, ...] = ()


def logprobs_of(
    row: Row, tokens: Sequence[int], logits: torch.Tensor, paths: Sequence[tuple[int, ...]]
) -> tuple[TokenLogprobs, ...]:
    """Log-probabilities of tokens, as many as the row's parameters ask for; empty when they ask for none."""
    k = row.params.logprobs
    if k is None:
        return ()
    table = distribution.log_probs(logits, [row.sampler] * len(tokens), paths)
    return tuple(TokenLogprobs.of(tokens, table, k, row.params.logprob_token_ids))

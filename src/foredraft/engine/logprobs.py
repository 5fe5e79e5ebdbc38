"""Log-probabilities of tokens as results have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

FEW_NODES = 32
"""Rows of logits that are turned into log-probabilities at once."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of one token under one distribution: its own, and the k most likely, or those asked for."""

    token: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]
    top_ranks: tuple[int, ...]

    @classmethod
    def of(
        cls, tokens: Sequence[int], log_probs: torch.Tensor, k: int, wanted: Sequence[int] | None = None
    ) -> list[TokenLogprobs]:
        """Read off rows (len(tokens), V) of log-probabilities; rank 1 is the most likely token.

        Args:
          k: the most likely ones that are told.
          wanted: the tokens that are told in their place.
        """
        places = torch.tensor(tokens, dtype=torch.int64, device=log_probs.device)[:, None]
        is_impossible = places >= log_probs.shape[1]  # tokens of prompts that the model reads and never returns
        own = log_probs.gather(1, places.clamp(max=log_probs.shape[1] - 1)).masked_fill(is_impossible, -torch.inf)
        ranks = (log_probs > own).sum(dim=1) + 1
        if wanted is None:
            top = log_probs.topk(min(k, log_probs.shape[1]), dim=1)
            ids, values = top.indices.tolist(), top.values.tolist()
            top_ranks = [list(range(1, len(row) + 1)) for row in ids]
        else:
            ids, values = [list(wanted)] * len(tokens), log_probs[:, list(wanted)].tolist()
            columns_of = [((log_probs > log_probs[:, [one]]).sum(dim=1) + 1).tolist() for one in wanted]
            top_ranks = [list(row) for row in zip(*columns_of, strict=True)]
        columns = own[:, 0].tolist(), ranks.tolist(), ids, values, top_ranks
        return [
            cls(token, logprob, rank, tuple(top_ids), tuple(top_logprobs), tuple(ranks_of_top))
            for token, logprob, rank, top_ids, top_logprobs, ranks_of_top in zip(tokens, *columns, strict=True)
        ]


def raw_logprobs(tokens: Sequence[int], logits: torch.Tensor, k: int) -> list[TokenLogprobs]:
    """Log-probabilities of tokens by the model alone, of float32 sums.

    Args:
      logits: (N, V) that the tokens have come after, in order; N may be larger. They are turned few at a time, so that
        they are never copied whole.
    """
    found: list[TokenLogprobs] = []
    for first in range(0, len(tokens), FEW_NODES):
        some = tokens[first : first + FEW_NODES]
        found += TokenLogprobs.of(some, logits[first : first + len(some)].float().log_softmax(dim=-1), k)
    return found

"""Log-probabilities of tokens, in the form that results need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

FEW_NODES = 32
"""Number of rows of logits that are converted to log-probabilities at once."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one token: of the token itself, and of the k most likely tokens or the requested ones."""

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
        """Read tokens and their ranks from log-probabilities (len(tokens), V); rank 1 is the most likely token.

        Args:
          k: number of most likely tokens to include.
          wanted: tokens to include instead of the most likely ones.
        """
        places = torch.tensor(tokens, dtype=torch.int64, device=log_probs.device)[:, None]
        is_impossible = places >= log_probs.shape[1]  # prompt tokens that the model reads and never returns
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
    """Return log-probabilities of tokens under the model alone, without sampling parameters, summed in float32.

    Args:
      logits: (N, V); row i precedes token i, and N may exceed the number of tokens. Logits are converted a few rows at
        a time, so that they are never copied as a whole.
    """
    found: list[TokenLogprobs] = []
    for first in range(0, len(tokens), FEW_NODES):
        some = tokens[first : first + FEW_NODES]
        found += TokenLogprobs.of(some, logits[first : first + len(some)].float().log_softmax(dim=-1), k)
    return found

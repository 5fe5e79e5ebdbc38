"""Scores of rows that ended before the others: what ``generate`` computes for them over their padding."""

from __future__ import annotations

import torch

from foretoken.law.sampling import SamplingLaw, scores
from foretoken.model.lm import CausalLM, Nodes

CHUNK = 512
"""Tokens per forward."""


@torch.inference_mode()
def tail(target: CausalLM, text: list[int], padding: list[int]) -> torch.Tensor:
    """Logits after a text, and after each token of the padding but the last.

    Args:
      text: prompt and output of a row.
      padding: P tokens that follow.

    Returns: float32 (P, V).
    """
    cache = target.new_cache(1, capacity=len(text) + len(padding))
    chain = [*text, *padding[:-1]]
    parts = []
    for start in range(0, len(chain), CHUNK):
        chunk = chain[start : start + CHUNK]
        wanted = max(0, len(text) - 1 - start)
        logits = target.forward(Nodes.from_chains([chunk]), cache, keep=slice(min(wanted, len(chunk)), len(chunk)))
        cache.commit([range(len(chunk))])
        parts.append(logits[0].float())
    return torch.cat(parts)


@torch.inference_mode()
def tail_scores(logits: torch.Tensor, law: SamplingLaw, padding: list[int]) -> torch.Tensor:
    """Processed scores of a tail (P, V), given the law of its row after the text."""
    paths = [padding[:count] for count in range(len(padding))]
    return scores(logits, [law] * len(padding), paths)

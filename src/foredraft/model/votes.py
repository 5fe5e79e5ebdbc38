"""Attention weights that the last tokens of a row give to its earlier columns, by layer and key head."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from foredraft.errors import UnsupportedModelError
from foredraft.model.cache.ragged import KVCache
from foredraft.model.execution.attention import SPECIAL_ARGUMENTS, seen_by
from foredraft.model.lm import CausalLM
from foredraft.model.nodes import Nodes
from foredraft.model.reduced import group_attention

POOLING = 5
"""Number of neighbouring columns over which votes are averaged, as published."""


def attention_votes(query: torch.Tensor, key: torch.Tensor, scaling: float | None) -> torch.Tensor:
    """Return the votes of the last W tokens of a row for the columns before them.

    Args:
      query: (H_q, W, D), queries of the last tokens.
      key: (H_kv, T, D), keys of all columns, including the last tokens; H_kv divides H_q.
      scaling: factor of the scores; 1/sqrt(D) by default.
    Returns: (H_kv, T - W): attention weights of the W queries, summed over the query heads of a group, and averaged
      over `POOLING` neighbours.

    Source: SnapKV (Li et al. 2024, arXiv:2404.14469). The scores are scaled like those of the model.
    """
    num_heads, window, size = query.shape
    num_kv_heads, columns, _ = key.shape
    grouped = query.reshape(num_kv_heads, -1, size)  # (H_kv, g * W, D)
    scores = torch.matmul(grouped, key.transpose(1, 2)) * (size**-0.5 if scaling is None else scaling)
    scores = scores.view(num_heads, window, columns)
    scores = scores.float() if scores.dtype.itemsize < 4 else scores
    later = torch.ones(window, window, dtype=torch.bool, device=key.device).triu(1)
    scores[:, :, columns - window :].masked_fill_(later, float("-inf"))
    votes = scores.softmax(-1)[:, :, : columns - window].sum(1)  # (H_q, T - W)
    votes = votes.view(num_kv_heads, -1, columns - window).sum(1)
    return F.avg_pool1d(votes[:, None], POOLING, stride=1, padding=POOLING // 2)[:, 0]


class SnapKVScorer:
    """Computes votes of a model, by running the last tokens of a row once more.

    The votes are computed inside the attention function that the adapter registers. A model that does not run its
    attention through this function is refused.

    Args:
      target: model whose cache is scored. The target is not changed, and its forward passes are not counted.

    Raises: UnsupportedModelError for a model with its own attention code.
    """

    def __init__(self, target: CausalLM) -> None:
        self.model = target.variant("its votes", lambda *_: None)
        if not self.model.execution.uses_grouped_attention:
            group_attention(self.model)
        if not self.model.execution.uses_grouped_attention:
            raise self._refusal(target)
        self._refused = target
        self._votes: list[torch.Tensor] = []

    def votes(self, tokens: list[int], cache: KVCache, row: int) -> list[torch.Tensor]:
        """Return the votes of a row's last tokens for the columns before them, (heads, T - W) by layer.

        Args:
          tokens: tokens of the last W columns of the row. The columns are restored afterwards, bit for bit.
        Raises: UnsupportedModelError if attention has extra terms, or layers share keys and values.
        """
        length = cache.lengths[row]
        self._votes = []
        with cache.kept(row, length - len(tokens), length), seen_by(self._see):
            self.model.forward(Nodes.from_chains([tokens]), cache, first_row=row, keep=slice(0, 0))
        votes, self._votes = self._votes, []
        layers = [layer for layer in cache.layers if layer.is_initialized]
        if len(votes) != self.model.num_layers or len(layers) != self.model.num_layers:
            raise self._refusal(self._refused)
        # attention heads that share a key head vote together
        return [of.view(layer.keys.shape[1], -1, of.shape[1]).sum(1) for of, layer in zip(votes, layers, strict=True)]

    def _see(
        self, _: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **others: Any
    ) -> None:
        special = [others.get(name) for name in SPECIAL_ARGUMENTS]
        if any(value is not None and value is not False for value in special):
            raise self._refusal(self._refused)
        self._votes.append(attention_votes(query[0], key[0], others.get("scaling")))

    @staticmethod
    def _refusal(target: CausalLM) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{target.name} has its own attention code, whose attention weights are not available; use "
            "kv_selector='streaming', which needs no attention weights"
        )

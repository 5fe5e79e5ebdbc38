"""Adapters over some of a model's layers, for what is learned about a model by running it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from foretoken.model.execution.attention import use_grouped_sdpa
from foretoken.model.execution.execution import Execution
from foretoken.model.reduced import reduced

if TYPE_CHECKING:
    from foretoken.model.lm import CausalLM


def representative(lm: CausalLM, layers: Sequence[int], dtype: torch.dtype | None, window: int) -> CausalLM:
    """An adapter over a few of the layers, for the probe; see `foretoken.model.reduced`.

    Args:
      dtype: None for the whole model as it is.
      window: of every sliding layer, if the model has any and theirs is wider.
    """
    narrow = None if lm.window is None else min(lm.window, window)
    small = reduced(lm.shadow, lm.layers, layers, dtype, narrow)
    return lm.over(small, Execution(small, "eager"), dtype=dtype, window=narrow)


def group_attention(lm: CausalLM) -> None:
    """Run attention as packed execution does."""
    lm.execution.uses_grouped_attention = use_grouped_sdpa(lm.shadow)
    lm.run_by(lm.execution)

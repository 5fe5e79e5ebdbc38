"""Adapters over some of a model's layers, for what is learned about a model by running it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from foretoken.model.execution.attention import use_grouped_sdpa
from foretoken.model.execution.execution import Execution
from foretoken.model.execution.regions import detach
from foretoken.model.execution.shadows import shadow
from foretoken.model.reduced import reduced

if TYPE_CHECKING:
    from foretoken.model.lm import CausalLM


@torch.inference_mode()
def first_layers(lm: CausalLM, num_layers: int) -> CausalLM:
    """An adapter over the first layers only, more where a kind of attention comes later. Its text means nothing."""
    kinds = [lm.layer_types.index(kind) for kind in set(lm.layer_types)]
    count = max(num_layers, *(index + 1 for index in kinds))
    if count >= lm.num_layers:
        return lm
    copied = shadow(lm.shadow)
    other = lm.over(copied, lm.execution.over(copied), num_layers=count)
    detach(other.layers)
    other.compile_again()  # in a chain of their own
    return other


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

"""Forwards over made-up tokens, and adapters over some of the layers, for trying out how a model runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from foretoken.model.execution.attention import use_grouped_sdpa
from foretoken.model.execution.execution import Execution
from foretoken.model.execution.packing import packed_layers
from foretoken.model.execution.sharing import unmultiplied
from foretoken.model.nodes import Nodes
from foretoken.model.reduced import reduced

if TYPE_CHECKING:
    from foretoken.model.lm import CausalLM


@torch.inference_mode()
def trial(lm: CausalLM, num_nodes: int) -> torch.Tensor:
    """Logits (1, N, V) of a chain of so many nodes. The forward is not counted."""
    count, tokens = lm.num_forwards, [number % lm.vocab_size for number in range(num_nodes)]
    try:
        return lm.forward(Nodes.from_chains([tokens]), lm.new_cache(1, rounds=False))
    finally:
        lm.num_forwards = count


@torch.inference_mode()
def runs_own_attention(lm: CausalLM) -> str:
    """Why attention of some layer does not run by the library's own kernels; empty where all does.

    Structure decides, not values: which kernel takes a call follows from dtype, layout and kind of attention.
    """
    count, cache = lm.num_forwards, lm.new_cache(2, rounds=False)
    with unmultiplied(packed_layers([lm.shadow])):
        lm.forward(Nodes.from_chains([[0], [0, 0]]), cache)
    lm.num_forwards = count
    flat = lm.nodes_of_last_forward
    if flat is None:
        return "its code does not tell attention which node is whose"
    if flat.runs_stock_attention:
        return "its attention is more than masked sums (a soft cap, sinks, a bias of its own)"
    return ""


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

"""Hands drafters the features they asked for, one row of them per committed token."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from foretoken.drafters.base import Features, Requirements
from foretoken.engine.model import CausalLM


def recording(target: CausalLM, requires: Requirements) -> AbstractContextManager[Any]:
    """Record during a forward what the drafter needs from inside the model; nothing when it needs nothing."""
    if requires.last_hidden or requires.layer_inputs:
        return target.capture(last_hidden=requires.last_hidden, layer_inputs=requires.layer_inputs)
    return nullcontext()


def gather(
    requires: Requirements,
    record: Any,
    logits: torch.Tensor,
    row: int,
    nodes: Sequence[int],
    choices: tuple[int, ...] | None = None,
) -> Features:
    """Features of some nodes of one row, in this order; ``choices`` are passed on."""
    if not requires or not nodes:
        return Features()
    if not (requires.last_hidden or requires.layer_inputs or requires.top_k):
        return Features(choices=choices)
    index = torch.tensor(list(nodes), device=logits.device)
    hidden = record.last_hidden[row].index_select(0, index) if requires.last_hidden else None
    layers = {i: record.layer_inputs[i][row].index_select(0, index) for i in requires.layer_inputs}
    top_ids = None
    if requires.top_k and logits.shape[1]:
        k = min(requires.top_k, logits.shape[2])
        top_ids = logits[row].index_select(0, index).topk(k, dim=-1).indices
    return Features(hidden, layers, top_ids, choices)


def concatenate(parts: Sequence[Features]) -> Features:
    """Features of consecutive chunks as one."""
    if not parts:
        return Features()
    first = parts[0]
    return Features(
        None
        if first.last_hidden is None
        else torch.cat([part.last_hidden for part in parts if part.last_hidden is not None]),
        {i: torch.cat([part.layer_inputs[i] for part in parts]) for i in first.layer_inputs},
        None if first.top_ids is None else torch.cat([part.top_ids for part in parts if part.top_ids is not None]),
    )

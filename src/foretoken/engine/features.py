"""Give drafters the features they asked for, one row of them per committed token."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from foretoken.engine.drafter import Features, Requirements
from foretoken.model.lm import CausalLM


def recording(target: CausalLM, requires: Requirements) -> AbstractContextManager[Any]:
    """Record during a forward what the drafter needs from inside the model; nothing when it needs nothing."""
    if requires.last_hidden or requires.layer_inputs:
        return target.capture(last_hidden=requires.last_hidden, layer_inputs=requires.layer_inputs)
    return nullcontext()


_BLOCK = 128


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
        is_all = len(index) == logits.shape[1] and list(nodes) == list(range(len(index)))
        top_ids = largest_ids(logits[row] if is_all else logits[row].index_select(0, index), requires.top_k)
    return Features(hidden, layers, top_ids, choices)


def largest_ids(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Ids (M, k) of the k largest of every row (M, V), best first; fewer where V is smaller.

    torch's own search through long rows takes ten times as long as one pass for the largest of every block: the k
    largest lie in the k blocks with the largest maxima. With V = 8, blocks of 2 and k = 2: of (5 0 | 1 4 | 3 2 | 0 0)
    the maxima are 5 4 3 0, so blocks 0 and 1 hold 5 and 4.
    """
    num_rows, num_scores = scores.shape
    k = min(k, num_scores)
    num_blocks = num_scores // _BLOCK
    if num_blocks < 4 * k or scores.device.type != "cpu":
        return scores.topk(k, dim=-1).indices
    whole = num_blocks * _BLOCK
    blocks = scores[:, :whole].view(num_rows, num_blocks, _BLOCK).amax(-1).topk(k, dim=-1).indices
    places = (blocks[:, :, None] * _BLOCK + torch.arange(_BLOCK)).flatten(1)
    places = torch.cat([places, torch.arange(whole, num_scores).expand(num_rows, -1)], dim=1)
    return places.gather(1, scores.gather(1, places).topk(k, dim=-1).indices)


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

"""EAGLE's steps of drafting unrolled over a text whose features are known: what a draft would see, with gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from foretoken.heads.eagle import EagleHead
from foretoken.heads.layers import Placed
from foretoken.model.execution.attention import seen_by


class UnrolledStates:
    """Keys and values of the steps so far, one block of columns after the other, with their gradients."""

    def __init__(self) -> None:
        self._states: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, keys: Tensor, values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        if layer_idx in self._states:
            above = self._states[layer_idx]
            keys, values = torch.cat([above[0], keys], dim=2), torch.cat([above[1], values], dim=2)
        self._states[layer_idx] = keys, values
        return keys, values


def seen_by_step(num_entries: int, rows: range, counts: list[int], device: torch.device | None = None) -> Tensor:
    """What the rows of the last step look at: bool (1, 1, len(rows), columns).

    Args:
      num_entries: of the first step, made of features of the target; row t sees those up to t.
      rows: of the first step whose drafts this step goes on with.
      counts: rows of every later step, this one last; a row sees its own entry of each.

    Example: 3 entries, rows 1..2 in a second step: 110 10 / 111 01.
    """
    places = torch.arange(rows.start, rows.stop, device=device)
    blocks = [torch.arange(num_entries, device=device)[None] <= places[:, None]]
    columns = torch.arange(len(rows), device=device)[:, None]
    blocks += [torch.arange(count, device=device)[None] == columns for count in counts]
    return torch.cat(blocks, dim=1)[None, None]


def plain_attention(
    _module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> Tensor:
    """Attention as products and a softmax, (B, N, heads, D).

    The gradient of the fused kernel is slow on a CPU, in bfloat16 and with a mask: a seventh of a step of training.
    """
    assert mask is not None
    rows, heads, num_nodes, size = query.shape
    groups = heads // key.shape[1]
    folded = query.reshape(rows, key.shape[1], groups * num_nodes, size)
    scores = (folded @ key.transpose(-1, -2)).view(rows, key.shape[1], groups, num_nodes, -1) * size**-0.5
    scores = scores.masked_fill(~mask[:, :, None], -torch.inf)
    mixed: Tensor = scores.softmax(-1).flatten(2, 3).to(value.dtype) @ value
    return mixed.reshape(rows, heads, num_nodes, -1).transpose(1, 2)


def unrolled(
    head: EagleHead, features: Tensor, embedded: Tensor, first: int, num_steps: int
) -> Iterator[tuple[range, Tensor]]:
    """Run a head along a text as it would draft there, several tokens deep.

    Row t of the first step is made of the target's feature after token t and of token t + 1. Step j feeds it token
    t + 1 + j with what step j - 1 has put out, at position t + j; it sees the entries of the first step up to t and its
    own of the later steps, which is what a draft sees that begins after token t + 1.

    Source: EAGLE-3 (Li et al. 2025, arXiv:2503.01840), training-time test. Deviation: rows outside of the answer make
    entries, and no drafts.

    Args:
      features: (S, H), of `EagleHead.features`.
      embedded: (S, H), of the tokens 0 to S - 1.
      first: row from which on outputs are wanted.
      num_steps: 1 or more.

    Yields: by step j the rows, ``first`` to S - 3 - j, of which each has a token that its output should say (token
      t + 2 + j); and the outputs (rows, H). Ends early where no row is left.
    Exactness: equals what `foretoken.drafters.parts.eagle_rows` computes for a draft along the text, up to rounding.
    """
    size = len(embedded)
    states = UnrolledStates()
    counts: list[int] = []
    outputs = features[None, : size - 2]
    for step in range(num_steps):
        rows = range(first, size - 2 - step)
        if not rows:
            return
        entries = range(size - 2) if step == 0 else rows
        if step > 0:
            counts.append(len(rows))
        mask = seen_by_step(size - 2, entries, counts, features.device)
        positions = torch.arange(entries.start + step, entries.stop + step, device=features.device)[None]
        placed = Placed(*head.place(positions), mask, states)
        fed = embedded[None, entries.start + 1 + step : entries.stop + 1 + step]
        with seen_by(plain_attention):
            outputs = head(fed, outputs, placed)
        if step == 0:
            outputs = outputs[:, first:]
        yield rows, outputs[0]
        outputs = outputs[:, : len(rows) - 1]

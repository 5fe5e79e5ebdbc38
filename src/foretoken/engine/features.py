"""What a forward of the target has computed, as drafters see it: gathered and ranked when it is asked for."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import torch

from foretoken.engine.drafter import Features

if TYPE_CHECKING:
    from foretoken.engine.accepting import Choices
    from foretoken.model.capture import Output

_BLOCK = 128


class ForwardFeatures:
    """Features of all rows of one forward.

    Args:
      output: of the forward.
      choices: of all nodes, where the drafter wants them: made before anything is emitted, for they depend on the text.
    """

    def __init__(self, output: Output, choices: Choices | None = None) -> None:
        self.output = output
        self.choices = choices

    def of(self, row: int) -> Features:
        """Those of one row."""
        return RowFeatures(self, row)


class RowFeatures(Features):
    """Features of the nodes of one row."""

    def __init__(self, forward: ForwardFeatures, row: int) -> None:
        self._forward = forward
        self._row = row

    def last_hidden(self, nodes: Seq[int]) -> torch.Tensor:
        states = self._forward.output.last_hidden
        return super().last_hidden(nodes) if states is None else _selected(states[self._row], nodes)

    def layer_input(self, layer: int, nodes: Seq[int]) -> torch.Tensor:
        states = self._forward.output.layer_inputs.get(layer)
        return super().layer_input(layer, nodes) if states is None else _selected(states[self._row], nodes)

    def top_ids(self, k: int, nodes: Seq[int]) -> torch.Tensor:
        logits = self._forward.output.logits
        if not logits.shape[1]:  # a prompt of which no logits were wanted
            return super().top_ids(k, nodes)
        return largest_ids(_selected(logits[self._row], nodes), k)

    @property
    def choices(self) -> tuple[int, ...]:
        choices = self._forward.choices
        return super().choices if choices is None else choices[self._row]


def _selected(values: torch.Tensor, nodes: Seq[int]) -> torch.Tensor:
    """Rows of (N, ...), without a copy where these are the first ones."""
    if list(nodes) == list(range(len(nodes))):
        return values[: len(nodes)]
    return values.index_select(0, torch.tensor(list(nodes), device=values.device))


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

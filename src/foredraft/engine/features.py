"""Features of the target's forwards, as drafters see them: gathered and ranked when they are asked for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foredraft.accept import Choices
from foredraft.errors import ConfigError
from foredraft.model.nodes import NodeLogits, Output
from foredraft.native import sample_kernels

_BLOCK = 128


class Features:
    """Values that the target has computed at the nodes of one row: of a draft, or of a chunk of a prompt.

    This base has nothing. Features hold what a forward has left in memory: ask for them while the call they were
    handed to runs, and keep copies of what is to last.

    Raises: ConfigError for what `Drafter.needs` does not name.
    """

    def last_hidden(self, nodes: Sequence[int]) -> torch.Tensor:
        """The input of the output embedding at these nodes: (len(nodes), H)."""
        raise _not_required("last_hidden")

    def layer_input(self, layer: int, nodes: Sequence[int]) -> torch.Tensor:
        """The input of a decoder layer at these nodes: (len(nodes), H)."""
        raise _not_required("layer_inputs")

    def top_ids(self, k: int, nodes: Sequence[int]) -> torch.Tensor:
        """The likeliest next tokens after these nodes by the raw logits, best first: int64 (len(nodes), k or V)."""
        raise _not_required("prompt_logits")

    @property
    def choices(self) -> tuple[int, ...]:
        """The target's own token after every node, accepted or not; -1 where it has no usable distribution.

        It is what decoding would emit after that node's path, by the argmax or by the keyed noise of the row.
        """
        raise _not_required("choices")

    def at(self, nodes: Sequence[int]) -> Features:
        """Features whose node i is ``nodes[i]`` here."""
        return _FeaturesAt(self, nodes)

    def places(self, nodes: Sequence[int]) -> tuple[NodeLogits, list[int]] | None:
        """Where the logits of these nodes stand among those of all rows of a forward, if they do."""
        return None


NO_FEATURES = Features()


class _FeaturesAt(Features):
    """Features under other numbers."""

    def __init__(self, features: Features, nodes: Sequence[int]) -> None:
        self._features = features
        self._nodes = nodes

    def last_hidden(self, nodes: Sequence[int]) -> torch.Tensor:
        return self._features.last_hidden([self._nodes[node] for node in nodes])

    def layer_input(self, layer: int, nodes: Sequence[int]) -> torch.Tensor:
        return self._features.layer_input(layer, [self._nodes[node] for node in nodes])

    def top_ids(self, k: int, nodes: Sequence[int]) -> torch.Tensor:
        return self._features.top_ids(k, [self._nodes[node] for node in nodes])

    @property
    def choices(self) -> tuple[int, ...]:
        choices = self._features.choices
        return tuple(choices[node] for node in self._nodes)

    def places(self, nodes: Sequence[int]) -> tuple[NodeLogits, list[int]] | None:
        return self._features.places([self._nodes[node] for node in nodes])


def _not_required(name: str) -> ConfigError:
    return ConfigError(f"a drafter asked for features that were not computed; let its `needs` name {name}")


class RowFeatures(Features):
    """Features of the nodes of one row of a forward.

    Args:
      output: of the forward.
      row: number of the row.
      choices: of all nodes of all rows, where the drafter wants them: made before anything is emitted, for they depend
        on the text.
      nodes: numbers of the nodes in the forward; None where they are the same.
    """

    def __init__(
        self, output: Output, row: int, choices: Choices | None = None, nodes: Sequence[int] | None = None
    ) -> None:
        self._output = output
        self._row = row
        self._choices = choices
        self._nodes = nodes

    def _in_forward(self, nodes: Sequence[int]) -> Sequence[int]:
        """Numbers of nodes in the forward."""
        known = self._nodes
        return nodes if known is None else [known[node] for node in nodes]

    def last_hidden(self, nodes: Sequence[int]) -> torch.Tensor:
        states = self._output.last_hidden
        if states is None:
            return super().last_hidden(nodes)
        return _selected(states[self._row], nodes if self._nodes is None else self._in_forward(nodes))

    def layer_input(self, layer: int, nodes: Sequence[int]) -> torch.Tensor:
        states = self._output.layer_inputs.get(layer)
        if states is None:
            return super().layer_input(layer, nodes)
        return _selected(states[self._row], nodes if self._nodes is None else self._in_forward(nodes))

    def top_ids(self, k: int, nodes: Sequence[int]) -> torch.Tensor:
        logits = self._output.logits[self._row]
        if not len(logits):  # a prompt of which no logits were wanted
            return super().top_ids(k, nodes)
        return _best_at(logits, k, self._in_forward(nodes))

    @property
    def choices(self) -> tuple[int, ...]:
        if self._choices is None:
            return super().choices
        choices, nodes = self._choices[self._row], self._nodes
        return choices if nodes is None else tuple([choices[node] for node in nodes])

    def at(self, nodes: Sequence[int]) -> RowFeatures:
        if self._nodes is None and self._choices is None and list(nodes) == list(range(len(nodes))):
            return self
        return RowFeatures(self._output, self._row, self._choices, self._in_forward(nodes))

    def places(self, nodes: Sequence[int]) -> tuple[NodeLogits, list[int]] | None:
        logits = self._output.logits
        if not isinstance(logits, NodeLogits):
            return None
        start = logits.starts[self._row]
        return logits, [start + node for node in self._in_forward(nodes)]


def top_ids_of(features: Sequence[Features], k: int, nodes: Sequence[Sequence[int]]) -> torch.Tensor:
    """`Features.top_ids` of several rows, one row after the other: all at once where they are of one forward.

    Args:
      nodes: by row.
    """
    if len(features) == 1:
        return features[0].top_ids(k, nodes[0])
    found = [each.places(some) for each, some in zip(features, nodes, strict=True)]
    logits = {id(place[0]): place[0] for place in found if place is not None}
    if len(logits) != 1 or None in found:
        return torch.cat([each.top_ids(k, some) for each, some in zip(features, nodes, strict=True)])
    (of_all,) = logits.values()
    return _best_at(of_all.values, k, [node for place in found if place is not None for node in place[1]])


def _best_at(logits: torch.Tensor, k: int, nodes: Sequence[int]) -> torch.Tensor:
    """Ids of the k largest of some rows of (N, V), or of as many as there are, best first."""
    found = sample_kernels.best(logits, min(k, logits.shape[-1]), nodes)  # without a copy
    return largest_ids(_selected(logits, nodes), k) if found is None else found


def _selected(values: torch.Tensor, nodes: Sequence[int]) -> torch.Tensor:
    """Rows of (N, ...), without a copy where these are the first ones."""
    if list(nodes) == list(range(len(nodes))):
        return values[: len(nodes)]
    return values.index_select(0, torch.tensor(list(nodes), device=values.device))


def largest_ids(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Ids (M, k) of the k largest of every row (M, V), best first; fewer where V is smaller.

    One pass over every row where kernels are compiled. torch's own search through long rows takes ten times as long as
    one pass for the largest of every block: the k largest lie in the k blocks with the largest maxima. With V = 8,
    blocks of 2 and k = 2: of (5 0 | 1 4 | 3 2 | 0 0) the maxima are 5 4 3 0, so blocks 0 and 1 hold 5 and 4.
    """
    num_rows, num_scores = scores.shape
    k = min(k, num_scores)
    if (found := sample_kernels.best(scores, k)) is not None:
        return found
    num_blocks = num_scores // _BLOCK
    if num_blocks < 4 * k or scores.device.type != "cpu":
        return scores.topk(k, dim=-1).indices
    whole = num_blocks * _BLOCK
    blocks = scores[:, :whole].view(num_rows, num_blocks, _BLOCK).amax(-1).topk(k, dim=-1).indices
    places = (blocks[:, :, None] * _BLOCK + torch.arange(_BLOCK)).flatten(1)
    places = torch.cat([places, torch.arange(whole, num_scores).expand(num_rows, -1)], dim=1)
    return places.gather(1, scores.gather(1, places).topk(k, dim=-1).indices)

"""Features of the target's forward passes for drafters: gathered and ranked on request."""

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

    The base class has no values. Features refer to the memory of a forward pass: read them during the call that
    receives them, and copy values that must last longer.

    Raises: ConfigError for features that `Drafter.needs` does not name.
    """

    def last_hidden(self, nodes: Sequence[int]) -> torch.Tensor:
        """The input of the output embedding at these nodes: (len(nodes), H)."""
        raise _not_required("last_hidden")

    def layer_input(self, layer: int, nodes: Sequence[int]) -> torch.Tensor:
        """The input of a decoder layer at these nodes: (len(nodes), H)."""
        raise _not_required(f"layer {layer} in layer_inputs")

    def top_ids(self, k: int, nodes: Sequence[int]) -> torch.Tensor:
        """The likeliest next tokens after these nodes by the raw logits, best first: int64 (len(nodes), k or V).

        Decode steps always have top ids. Chunks of prompts have top ids if `Needs.prompt_logits` is set.
        """
        raise ConfigError(
            "a drafter used top_ids of a chunk or step without logits, such as the empty last chunk of a prompt; use "
            "chunks with num_tokens > 0 and results of decode steps"
        )

    @property
    def choices(self) -> tuple[int, ...]:
        """The target's own token after every node, accepted or not; -1 for a node without a usable distribution.

        The choice is the token that decoding would emit after the node's path, by argmax or by the keyed noise of the
        row.
        """
        raise _not_required("choices")

    def at(self, nodes: Sequence[int]) -> Features:
        """Return features in which node i is ``nodes[i]`` of these features."""
        return _FeaturesAt(self, nodes)

    def places(self, nodes: Sequence[int]) -> tuple[NodeLogits, list[int]] | None:
        """Return the logits of a forward pass and the indices of these nodes in them; None if there are none."""
        return None


NO_FEATURES = Features()


class _FeaturesAt(Features):
    """Features with renumbered nodes."""

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
    return ConfigError(f"a drafter used features that were not computed; its `needs` must name {name}")


class RowFeatures(Features):
    """Features of the nodes of one row of a forward pass.

    Args:
      output: output of the forward pass.
      row: index of the row.
      choices: choices at all nodes of all rows, if the drafter needs them. Choices depend on the text, so they are made
        before anything is emitted.
      nodes: indices of the nodes in the forward pass; None if they are the same.
    """

    def __init__(
        self, output: Output, row: int, choices: Choices | None = None, nodes: Sequence[int] | None = None
    ) -> None:
        self._output = output
        self._row = row
        self._choices = choices
        self._nodes = nodes

    def _in_forward(self, nodes: Sequence[int]) -> Sequence[int]:
        """Return the indices of nodes in the forward pass."""
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
        if not len(logits):  # a prompt chunk whose logits were not computed
            raise _not_required("prompt_logits")
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
    """`Features.top_ids` of several rows, concatenated; computed in one call if all rows are of one forward pass.

    Args:
      nodes: nodes of each row.
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
    """Ids of the k largest entries of the given rows of (N, V), or of all entries if V < k, best first."""
    found = sample_kernels.best(logits, min(k, logits.shape[-1]), nodes)  # without a copy
    return largest_ids(_selected(logits, nodes), k) if found is None else found


def _selected(values: torch.Tensor, nodes: Sequence[int]) -> torch.Tensor:
    """Select rows of (N, ...), without a copy if they are the first ones."""
    if list(nodes) == list(range(len(nodes))):
        return values[: len(nodes)]
    return values.index_select(0, torch.tensor(list(nodes), device=values.device))


def largest_ids(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Ids (M, k) of the k largest entries of every row (M, V), best first; fewer if V is smaller.

    Compiled kernels need one pass over every row. Without compiled kernels, torch's own search through long rows takes
    ten times as long as one pass for the maximum of every block. The k largest entries are in the k blocks with the
    largest maxima. Example with V = 8, blocks of 2 and k = 2: the maxima of (5 0 | 1 4 | 3 2 | 0 0) are 5 4 3 0, so
    blocks 0 and 1 contain the largest entries 5 and 4.
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

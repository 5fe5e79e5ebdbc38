"""A compiled part of one layer, and its calls over as many nodes as there are."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from foretoken.model.execution.inductor import Segment, Source


class BoundSegment:
    """A segment with the inputs that belong to one layer.

    Args:
      fixed: gives the inputs that are the same in every call, and None for others.
    """

    def __init__(self, segment: Segment, fixed: Callable[[Source], Any]) -> None:
        self._run = segment.run
        self._template = [fixed(source) for source in segment.sources]
        self._nodes_in, self._nodes_out = segment.nodes_in, segment.nodes_out
        places = list(enumerate(segment.sources))
        self._inputs = [(place, key) for place, (kind, key) in places if kind == "input"]
        self._values = [(place, key - 3) for place, (kind, key) in places if kind == "value"]
        self._attended = [place for place, (kind, _) in places if kind == "attended"]
        self._sizes = [place for place, (kind, _) in places if kind == "nodes"]

    def __call__(
        self,
        num_nodes: int,
        inputs: dict[int, torch.Tensor],
        attended: torch.Tensor | None,
        values: Sequence[torch.Tensor],
        limits: tuple[int, int] | None,
    ) -> Sequence[torch.Tensor]:
        """Run it.

        Args:
          inputs: of the layer, by their numbers.
          attended: what attention gives.
          values: of the segment before, that are needed here.
          limits: how many nodes a call takes at least and at most; None for any number.
        """
        filled = self._template.copy()
        for place, key in self._inputs:
            filled[place] = inputs[key]
        for place, key in self._values:
            filled[place] = values[key]
        for place in self._attended:
            filled[place] = attended
        if limits is None or limits[0] <= num_nodes <= limits[1]:
            for place in self._sizes:
                filled[place] = num_nodes
            return self._run(filled)
        return self._in_calls(filled, num_nodes, limits)

    def _in_calls(self, filled: list[Any], num_nodes: int, limits: tuple[int, int]) -> list[torch.Tensor]:
        """In several calls where there are too many rows, padded where there are too few."""
        fewest, most = limits
        num_calls = max(1, -(-num_nodes // most))
        bounds = [num_nodes * number // num_calls for number in range(num_calls + 1)]
        parts = []
        for first, last in itertools.pairwise(bounds):
            size = max(last - first, fewest)
            part = [
                value if dim is None else _rows(value, dim, first, last, size)
                for value, dim in zip(filled, self._nodes_in, strict=True)
            ]
            for place in self._sizes:
                part[place] = size
            parts.append(self._run(part))
        if num_calls == 1:
            return [
                value if dim is None else value.narrow(dim, 0, num_nodes)
                for value, dim in zip(parts[0], self._nodes_out, strict=True)
            ]
        return [
            each[0] if dim is None else torch.cat(each, dim) for dim, *each in zip(self._nodes_out, *parts, strict=True)
        ]


def _rows(tensor: torch.Tensor, dim: int, first: int, last: int, size: int) -> torch.Tensor:
    """Nodes ``first`` to ``last - 1``, and zeros up to ``size``; laid out as if they were all there is."""
    rows = tensor.narrow(dim, first, last - first)
    if size > last - first:
        shape = list(rows.shape)
        shape[dim] = size - (last - first)
        rows = torch.cat([rows, rows.new_zeros(shape)], dim)
    return rows.contiguous()

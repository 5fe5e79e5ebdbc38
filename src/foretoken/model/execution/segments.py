"""A compiled part of one layer, and its calls over as many nodes as there are."""

from __future__ import annotations

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
    ) -> Sequence[torch.Tensor]:
        """Run it.

        Args:
          inputs: of the layer, by their numbers.
          attended: what attention gives.
          values: of the segment before, that are needed here.
        """
        filled = self._template.copy()
        for place, key in self._inputs:
            filled[place] = inputs[key]
        for place, key in self._values:
            filled[place] = values[key]
        for place in self._attended:
            filled[place] = attended
        for place in self._sizes:
            filled[place] = num_nodes
        return self._run(filled)

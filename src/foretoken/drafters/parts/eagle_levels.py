"""Levels of drafts that a head of EAGLE is fed: every node with the output of its parent."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Protocol

from foretoken.drafters.parts.rows import Frontier, Place
from foretoken.lazy import Lazy

if TYPE_CHECKING:
    import torch

    from foretoken.drafters.parts.eagle_rows import EagleRows
    from foretoken.engine.sequence import Sequence
else:
    torch = Lazy("torch")


class Level(Frontier, Protocol):
    """A draft whose next level is to be fed."""

    @property
    def parents(self) -> Seq[int]: ...


class EagleLevels:
    """Feeds drafts level by level and remembers the outputs of the last level, which the next one is made of.

    Args:
      states: of the rows, committed.
    """

    def __init__(self, states: EagleRows) -> None:
        self._states = states
        self._places: list[Place] = []
        self._columns: list[dict[int, int]] = []  # by draft, where its nodes stand in the last level
        self._outputs: torch.Tensor  # (B, F, H)

    def open(self, rows: Seq[Sequence]) -> torch.Tensor:
        """Begin with the pending tokens: the outputs (B, 1, H) of the entries that hold them."""
        self._places, self._outputs = self._states.begin(rows)
        self._columns = [{0: 0} for _ in rows]
        return self._outputs

    def feed(self, drafts: Seq[Level], *, are_chains: bool = False) -> torch.Tensor:
        """Outputs (B, F, H) of the frontier of every draft, in its order; rows with a smaller one are padded."""
        width = max(1, *(len(draft.frontier) for draft in drafts))
        above = [
            [columns[draft.parents[node]] for node in draft.frontier]
            for draft, columns in zip(drafts, self._columns, strict=True)
        ]
        index = torch.tensor([row + [0] * (width - len(row)) for row in above], device=self._outputs.device)
        features = self._outputs.gather(1, index[..., None].expand(-1, -1, self._outputs.shape[-1]))
        self._outputs = self._states.feed(drafts, self._places, features, are_chains=are_chains)
        self._columns = [{node: column for column, node in enumerate(draft.frontier)} for draft in drafts]
        return self._outputs

    def close(self) -> None:
        """Forget what was fed."""
        self._states.end(self._places)
        self._places = []

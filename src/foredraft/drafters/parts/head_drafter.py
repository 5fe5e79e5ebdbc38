"""Drafters that use heads, and the states they draft from, computed from the target's features."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from foredraft.drafters.parts.growth import GrowingDraft, Growth, growing
from foredraft.engine.drafter import Drafter, DraftSize, Features, PromptChunk, StepResult
from foredraft.engine.row import Row, RowState
from foredraft.tree import DraftTree


@dataclass(eq=False)
class HeadRow(RowState):
    """Hidden states of a row that heads draft from.

    Args:
      drafter: drafter that makes the states.
      last: state (H,) of the last committed token; None if there is none yet.
      owed: inputs of committed tokens whose states are not computed yet.
      first: index in the row of the first of these tokens.
    """

    drafter: HeadDrafter
    last: torch.Tensor | None = None
    owed: list[torch.Tensor] = field(default_factory=list)
    first: int = 0

    def copied(self) -> HeadRow:
        return HeadRow(self.drafter, self.last)

    def taken(self) -> torch.Tensor:
        """Return the deferred inputs, and clear them."""
        inputs, self.owed = self.owed, []
        return inputs[0] if len(inputs) == 1 else torch.cat(inputs)

    def ended(self, row: Row, *, is_kept: bool) -> None:
        if is_kept:
            self.drafter.settle([row])


class HeadDrafter(Drafter):
    """Drafter that drafts from one state per row, the state of the last committed token.

    A row with a prompt of a single token has no such state at first, and no draft.

    Attributes:
      growth: rules by which drafts grow.
      reach: number of levels that the heads can draft.
    """

    growth: Growth
    reach = sys.maxsize

    # -- states ------------------------------------------------------------------------------------------------

    @abstractmethod
    def _inputs_of(self, features: Features, nodes: Sequence[int]) -> torch.Tensor:
        """Return the part of the target's features that the heads read, for some nodes: (n, ...)."""

    def _take_in(self, rows: Sequence[Row], inputs: Sequence[torch.Tensor], starts: Sequence[int]) -> None:
        """Compute the states of the next tokens of rows.

        Args:
          rows: rows of the tokens.
          inputs: per row (n, ...), see `_inputs_of`.
          starts: per row, index in the row of the first of these tokens.
        """
        for row, states in zip(rows, inputs, strict=True):
            self.state_of(row).last = states[-1].clone()

    def state_of(self, row: Row) -> HeadRow:
        """Return the state of a row, a new one if it has none."""
        if self not in row.state:
            row.state[self] = HeadRow(self)
        state: HeadRow = row.state[self]
        return state

    def has_state(self, row: Row) -> bool:
        """Return whether the row has a state to draft from."""
        return self in row.state and (row.state[self].last is not None or bool(row.state[self].owed))

    def last_of(self, rows: Sequence[Row]) -> torch.Tensor:
        """Return the states (B, H) of the last committed tokens of several rows."""
        return torch.stack([row.state[self].last for row in rows])

    def settle(self, rows: Iterable[Row]) -> None:
        """Compute all deferred states of rows."""
        owing = [row for row in rows if self in row.state and row.state[self].owed]
        if owing:
            states = [self.state_of(row) for row in owing]
            self._take_in(owing, [state.taken() for state in states], [state.first for state in states])

    # -- verbs -------------------------------------------------------------------------------------------------

    def start(self, rows: Sequence[Row], chunks: Sequence[PromptChunk]) -> None:
        read = [(row, chunk) for row, chunk in zip(rows, chunks, strict=True) if chunk.num_tokens]
        if read:
            inputs = [self._inputs_of(chunk.features, range(chunk.num_tokens)) for _, chunk in read]
            self._take_in([row for row, _ in read], inputs, [chunk.start for _, chunk in read])

    def propose(self, rows: Sequence[Row], budgets: Sequence[DraftSize]) -> list[DraftTree]:
        drafts = [
            self.growth.begin(row, budget if self.has_state(row) else DraftSize(0), self.reach)
            for row, budget in zip(rows, budgets, strict=True)
        ]
        if grown := growing(drafts):
            self._grow(grown)
        return [self.growth.finish(draft, self.name) for draft in drafts]

    @abstractmethod
    def _grow(self, drafts: Sequence[GrowingDraft]) -> None:
        """Grow the drafts of rows that have states, given in the order of their slots."""

    def observe(self, rows: Sequence[Row], results: Sequence[StepResult]) -> None:
        """Record the committed tokens: the token that was pending before the step, and all emitted tokens except the
        last."""
        inputs = [self._inputs_of(result.committed, range(len(result.emitted))) for result in results]
        starts = [len(row.token_ids) - 1 - len(result.emitted) for row, result in zip(rows, results, strict=True)]
        if rows:
            self._take_in(rows, inputs, starts)
        self._end(rows, results)

    def _end(self, rows: Sequence[Row], results: Sequence[StepResult]) -> None:
        for row, result in zip(rows, results, strict=True):
            self.growth.end(row, result)

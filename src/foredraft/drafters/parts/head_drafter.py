"""Drafters over heads, and the states that heads draft from: made of what the target computes of the text."""

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
    """Hidden states that heads draft from in a row.

    Args:
      drafter: makes the states.
      last: the state (H,) of the last committed token; None where there is none yet.
      owed: inputs of committed tokens whose states are made later.
      first: index in the text of the first of these tokens.
    """

    drafter: HeadDrafter
    last: torch.Tensor | None = None
    owed: list[torch.Tensor] = field(default_factory=list)
    first: int = 0

    def copied(self) -> HeadRow:
        return HeadRow(self.drafter, self.last)

    def taken(self) -> torch.Tensor:
        """The inputs that are owed, which are none any more."""
        inputs, self.owed = self.owed, []
        return inputs[0] if len(inputs) == 1 else torch.cat(inputs)

    def ended(self, row: Row, *, is_kept: bool) -> None:
        if is_kept:
            self.drafter.settle([row])


class HeadDrafter(Drafter):
    """Drafts from one state per row, that of the last committed token; no draft where the prompt is a single token.

    Attributes:
      growth: decides how drafts grow.
      reach: levels that the heads can draft.
    """

    growth: Growth
    reach = sys.maxsize

    # -- states ------------------------------------------------------------------------------------------------

    @abstractmethod
    def _inputs_of(self, features: Features, nodes: Sequence[int]) -> torch.Tensor:
        """The part of the target's features that heads read, of some nodes: (n, ...)."""

    def _take_in(self, rows: Sequence[Row], inputs: Sequence[torch.Tensor], starts: Sequence[int]) -> None:
        """Make states of the next tokens of rows.

        Args:
          inputs: by row (n, ...), see `_inputs_of`.
          starts: index in its text of the first token of every row.
        """
        for row, states in zip(rows, inputs, strict=True):
            self.state_of(row).last = states[-1].clone()

    def state_of(self, row: Row) -> HeadRow:
        """The state of a row, a new one where it has none."""
        if self not in row.state:
            row.state[self] = HeadRow(self)
        state: HeadRow = row.state[self]
        return state

    def has_state(self, row: Row) -> bool:
        """Whether there is anything to draft from."""
        return self in row.state and (row.state[self].last is not None or bool(row.state[self].owed))

    def last_of(self, rows: Sequence[Row]) -> torch.Tensor:
        """States of the last committed tokens of several rows, (B, H)."""
        return torch.stack([row.state[self].last for row in rows])

    def settle(self, rows: Iterable[Row]) -> None:
        """Make all states of rows that are still to be made."""
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
        """Grow drafts of rows that have states to their end, in the order of their slots."""

    def observe(self, rows: Sequence[Row], results: Sequence[StepResult]) -> None:
        """Take in what steps have committed: the token that was pending, and all that was emitted but the last."""
        inputs = [self._inputs_of(result.committed, range(len(result.emitted))) for result in results]
        starts = [len(row.token_ids) - 1 - len(result.emitted) for row, result in zip(rows, results, strict=True)]
        if rows:
            self._take_in(rows, inputs, starts)
        self._end(rows, results)

    def _end(self, rows: Sequence[Row], results: Sequence[StepResult]) -> None:
        for row, result in zip(rows, results, strict=True):
            self.growth.end(row, result)

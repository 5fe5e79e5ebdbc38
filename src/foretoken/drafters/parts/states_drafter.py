"""Drafters whose rows are kept by one object, which is told of everything that happens to them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Generic, Protocol, TypeVar

from foretoken.engine.drafter import Budget, Drafter, OwnCache, PromptChunk, StepResult
from foretoken.engine.sequence import Sequence


class RowStates(Protocol):
    """What a drafter knows of its rows; the verbs are those of `Drafter`."""

    def __contains__(self, row: Sequence) -> bool: ...

    def own_caches(self) -> Seq[OwnCache]: ...

    def recall(self, row: Sequence, memory: object, num_tokens: int) -> int: ...

    def read(self, rows: Seq[Sequence], chunks: Seq[PromptChunk]) -> None: ...

    def fork(self, row: Sequence, copies: Seq[Sequence]) -> None: ...

    def observe(self, rows: Seq[Sequence], results: Seq[StepResult]) -> None: ...

    def keep(self, row: Sequence) -> object: ...

    def forget(self, rows: Seq[Sequence]) -> None: ...


States = TypeVar("States", bound=RowStates)


class StatesDrafter(Drafter, Generic[States]):
    """A drafter that hands on to ``states`` what it is told of rows.

    Attributes:
      states: of its rows.
    """

    states: States

    def own_caches(self) -> Seq[OwnCache]:
        return self.states.own_caches()

    def recall(self, row: Sequence, memory: object, num_tokens: int) -> int:
        return self.states.recall(row, memory, num_tokens)

    def read(self, rows: Seq[Sequence], chunks: Seq[PromptChunk]) -> None:
        self.states.read(rows, chunks)

    def fork(self, row: Sequence, copies: Seq[Sequence]) -> None:
        self.states.fork(row, copies)

    def observe(self, rows: Seq[Sequence], results: Seq[StepResult]) -> None:
        self.states.observe(rows, results)

    def keep(self, row: Sequence) -> object:
        return self.states.keep(row)

    def forget(self, rows: Seq[Sequence]) -> None:
        self.states.forget(rows)

    def within(self, rows: Seq[Sequence], budgets: Seq[Budget]) -> list[tuple[Sequence, Budget]]:
        """Rows with what may be drafted for them: nothing where none of their states is known."""
        return [(row, budget if row in self.states else Budget(0)) for row, budget in zip(rows, budgets, strict=True)]

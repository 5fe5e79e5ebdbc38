"""What heads know of rows, and drafters over heads: they take in what the target computes of the text."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from foredraft.drafters.parts.draft import GrowingDraft
from foredraft.drafters.parts.growth import Growth
from foredraft.drafters.parts.rows import growing, spans
from foredraft.engine.drafter import DraftCache, Drafter, DraftSize, Features, PromptChunk, StepResult
from foredraft.engine.row import Row, RowState
from foredraft.heads.medusa_hydra import PrefixLayer
from foredraft.model.cache import ragged
from foredraft.tree import DraftTree

TakeStates = Callable[[Features, Sequence[int]], "torch.Tensor"]
"""The states (n, H) that heads read, of some nodes."""


def last_hidden(features: Features, nodes: Sequence[int]) -> torch.Tensor:
    """The input of the output embedding."""
    return features.last_hidden(nodes)


@dataclass(eq=False)
class HeadRow(RowState):
    """Hidden states that heads draft from in a row.

    Args:
      states: states of all rows.
      last: the state (H,) of the last committed token; None where there is none yet.
      owed: inputs of committed tokens whose states are made later.
      first: index in the text of the first of these tokens.
    """

    states: HeadStates
    last: torch.Tensor | None = None
    owed: list[torch.Tensor] = field(default_factory=list)
    first: int = 0

    def copied(self) -> HeadRow:
        return HeadRow(self.states, self.last)

    def taken(self) -> torch.Tensor:
        """The inputs that are owed, which are none any more."""
        inputs, self.owed = self.owed, []
        return inputs[0] if len(inputs) == 1 else torch.cat(inputs)

    def ended(self, row: Row, *, is_kept: bool) -> None:
        if is_kept:
            self.states.settle([row])


class HeadStates:
    """The state (H,) of the last committed token of every row; none yet where the prompt is a single token.

    Args:
      take: the states that heads read.
    """

    def __init__(self, take: TakeStates) -> None:
        self._take = take

    @property
    def caches(self) -> tuple[DraftCache, ...]:
        """Caches that grow with the text."""
        return ()

    def __contains__(self, row: Row) -> bool:
        """Whether there is anything to draft from."""
        return self in row.state and (row.state[self].last is not None or bool(row.state[self].owed))

    def state_of(self, row: Row) -> HeadRow:
        """The state of a row, a new one where it has none."""
        if self not in row.state:
            row.state[self] = HeadRow(self)
        state: HeadRow = row.state[self]
        return state

    def of(self, rows: Sequence[Row]) -> torch.Tensor:
        """Of several rows, (B, H)."""
        return torch.stack([row.state[self].last for row in rows])

    def read(self, rows: Sequence[Row], chunks: Sequence[PromptChunk]) -> None:
        """Take in chunks of prompts."""
        states = [self._take(chunk.features, range(chunk.num_tokens)) for chunk in chunks]
        self._take_in(rows, states, [chunk.start for chunk in chunks])

    def observe(self, rows: Sequence[Row], results: Sequence[StepResult]) -> None:
        """Take in what steps have committed: the token that was pending, and all that was emitted but the last."""
        states = [self._take(result.committed, range(len(result.emitted))) for result in results]
        starts = [len(row.token_ids) - 1 - len(result.emitted) for row, result in zip(rows, results, strict=True)]
        if rows:
            self._take_in(rows, states, starts)

    def settle(self, rows: Iterable[Row]) -> None:
        """Make all states of rows that are still to be made."""
        owing = [row for row in rows if self in row.state and row.state[self].owed]
        if owing:
            states = [self.state_of(row) for row in owing]
            self._take_in(owing, [state.taken() for state in states], [state.first for state in states])

    def _take_in(self, rows: Sequence[Row], states: Sequence[torch.Tensor], starts: Sequence[int]) -> None:
        """Take in the states (n, H) of the next tokens of rows.

        Args:
          starts: index in its text of the first token of every row.
        """
        for row, state in zip(rows, states, strict=True):
            self.state_of(row).last = state[-1].clone()


class CachedStates(HeadStates):
    """What layers of the heads' own make of the states of a whole text, over a cache: committed tokens only.

    Args:
      take: the states that they read.
      writer: the module that these layers are.
      num_layers: of it.
      device: of the target.

    Attributes:
      column_bytes: of keys and values of a token in all layers.
    """

    column_bytes: int
    lag = 0
    """How many tokens after its own the entry of a token needs."""

    def __init__(self, take: TakeStates, writer: torch.nn.Module, num_layers: int, device: torch.device) -> None:
        super().__init__(take)
        self._writer = writer
        self.cache = ragged.KVCache(num_layers, device=device)

    @property
    def caches(self) -> tuple[DraftCache, ...]:
        return (DraftCache(self.cache, lambda: self.column_bytes, writer=lambda: self._writer, lag=self.lag),)


class PrefixStates(CachedStates):
    """What Hydra++'s prefix layer makes of the states of a whole text. Column t of a row holds token t, at position t.

    Args:
      layer: see `PrefixLayer`.
      take: the states that it reads.
      device: of the target.
    """

    def __init__(self, layer: PrefixLayer, take: TakeStates, device: torch.device) -> None:
        super().__init__(take, layer, 1, device)
        self.layer = layer
        self.column_bytes = layer.shape.kv_numbers * next(layer.parameters()).element_size()

    def _take_in(self, rows: Sequence[Row], states: Sequence[torch.Tensor], starts: Sequence[int]) -> None:
        given = {}
        for row, state, start in zip(rows, states, starts, strict=True):
            self.cache.rollback([start], row.slot)
            given[row.slot] = row, state
        for slots in spans(given, max_gap=0):
            outputs = self._run([given[slot][1] for slot in slots], slots[0])
            for slot, output in zip(slots, outputs, strict=True):
                self.state_of(given[slot][0]).last = output

    def _run(self, states: Sequence[torch.Tensor], first_slot: int) -> list[torch.Tensor]:
        """Feed the next states of neighbouring rows; the last output (H,) of each."""
        counts = list(map(len, states))
        width = max(counts)
        device = self.cache.device
        hidden = torch.nn.utils.rnn.pad_sequence(list(states), batch_first=True)  # (B, width, H)
        # what is not finite would stay in the cache behind the columns that count, where 0 * NaN is NaN
        hidden = torch.nan_to_num(hidden)
        starts = torch.tensor(self.cache.row_lengths(first_slot, len(states)), device=device)[:, None]
        positions = starts + torch.arange(width, device=device)  # (B, width)
        num_columns = self.cache.open(first_slot, len(states), width)
        mask = torch.arange(num_columns, device=device) <= positions[:, :, None]
        placed = self.layer.placed(positions, hidden.dtype, mask[:, None], self.cache)
        outputs = self.layer(hidden, placed)
        self.cache.commit([range(count) for count in counts], first_slot)
        return [output[count - 1].clone() for output, count in zip(outputs, counts, strict=True)]


# -- drafters --------------------------------------------------------------------------------------------------------

States = TypeVar("States", bound=HeadStates)


class HeadDrafter(Drafter, Generic[States]):
    """A drafter over heads, which says how drafts grow; ``states`` are told of all that happens to its rows.

    Attributes:
      reach: levels that the heads can draft.
    """

    growth: Growth
    states: States
    reach = sys.maxsize

    def propose(self, rows: Sequence[Row], budgets: Sequence[DraftSize]) -> list[DraftTree]:
        drafts = [
            self.growth.begin(row, budget if row in self.states else DraftSize(0), self.reach)
            for row, budget in zip(rows, budgets, strict=True)
        ]
        if grown := growing(drafts):
            self._grow(grown)
        return [self.growth.finish(draft, self.name) for draft in drafts]

    @abstractmethod
    def _grow(self, drafts: Sequence[GrowingDraft]) -> None:
        """Grow drafts of rows whose states are known to their end, in the order of their slots."""

    def start(self, rows: Sequence[Row], chunks: Sequence[PromptChunk]) -> None:
        read = [place for place, chunk in enumerate(chunks) if chunk.num_tokens]
        if read:
            self.states.read([rows[place] for place in read], [chunks[place] for place in read])

    def observe(self, rows: Sequence[Row], results: Sequence[StepResult]) -> None:
        self.states.observe(rows, results)
        for row, result in zip(rows, results, strict=True):
            self.growth.end(row, result)

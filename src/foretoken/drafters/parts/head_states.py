"""What heads know of a row: the target's state after its last committed token, or what a prefix layer makes of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

from foretoken.drafters.parts.rows import CachedRows, neighbours
from foretoken.engine.drafter import Features, OwnCache, PromptChunk, StepResult
from foretoken.engine.sequence import Sequence
from foretoken.lazy import Lazy

if TYPE_CHECKING:
    import torch

    import foretoken.model.cache.ragged as ragged
    from foretoken.heads.hydra import PrefixLayer
else:
    torch = Lazy("torch")
    ragged = Lazy("foretoken.model.cache.ragged")

TakeStates = Callable[[Features, Seq[int]], "torch.Tensor"]
"""The states (n, H) that heads read, of some nodes."""


def last_hidden(features: Features, nodes: Seq[int]) -> torch.Tensor:
    """The input of the output embedding."""
    return features.last_hidden(nodes)


class RowContexts(ABC):
    """One vector (H,) per row, of the token before the pending one; none yet where the prompt is a single token."""

    def __init__(self, take: TakeStates) -> None:
        self._take = take
        self._of: dict[int, torch.Tensor] = {}

    def __contains__(self, row: Sequence) -> bool:
        return row.id in self._of

    def of(self, rows: Seq[Sequence]) -> torch.Tensor:
        """Of several rows, (B, H)."""
        return torch.stack([self._of[row.id] for row in rows])

    def own_caches(self) -> list[OwnCache]:
        """Caches that grow with the text."""
        return []

    def recall(self, row: Sequence, memory: object, num_tokens: int) -> int:
        """How much of a prompt need not be read again: never its last token, whose state is wanted."""
        return max(0, min(num_tokens, len(row.token_ids) - 2))

    @abstractmethod
    def _take_in(self, rows: Seq[Sequence], states: Seq[torch.Tensor], starts: Seq[int]) -> None:
        """Take in the states (n, H) of the next tokens of rows.

        Args:
          starts: index in its text of the first token of every row.
        """

    def read(self, rows: Seq[Sequence], chunks: Seq[PromptChunk]) -> None:
        """Take in chunks of prompts."""
        states = [self._take(chunk.features, range(chunk.num_tokens)) for chunk in chunks]
        self._take_in(rows, states, [chunk.start for chunk in chunks])

    def observe(self, rows: Seq[Sequence], results: Seq[StepResult]) -> None:
        """Take in what steps have committed: the token that was pending, and all that was emitted but the last."""
        states = [self._take(result.committed, range(len(result.emitted))) for result in results]
        starts = [len(row.token_ids) - 1 - len(result.emitted) for row, result in zip(rows, results, strict=True)]
        if rows:
            self._take_in(rows, states, starts)

    def fork(self, row: Sequence, copies: Seq[Sequence]) -> None:
        """Give other samples of a prompt what its row has."""
        if row.id in self._of:
            self._of.update((copy.id, self._of[row.id]) for copy in copies)

    def keep(self, row: Sequence) -> object:
        """For prompts that begin like this row."""
        return None

    def forget(self, rows: Seq[Sequence]) -> None:
        for row in rows:
            self._of.pop(row.id, None)


class LastStates(RowContexts):
    """The states themselves."""

    def _take_in(self, rows: Seq[Sequence], states: Seq[torch.Tensor], starts: Seq[int]) -> None:
        for row, state in zip(rows, states, strict=True):
            self._of[row.id] = state[-1].clone()


@dataclass(frozen=True)
class PrefixMemory:
    """The beginning of a text in the cache of a prefix layer, in copies of its own."""

    layer: PrefixLayer
    states: ragged.RowStates
    length: int


class PrefixStates(RowContexts):
    """What Hydra++'s prefix layer makes of the states of a whole text, over a cache of its own.

    Column t of a row holds token t, at position t: committed tokens only, never drafted ones.

    Args:
      layer: see `PrefixLayer`.
      take: the states that it reads.
      device: of the target.
    """

    def __init__(self, layer: PrefixLayer, take: TakeStates, device: torch.device) -> None:
        super().__init__(take)
        self.layer = layer
        self._column_bytes = layer.shape.kv_numbers * next(layer.parameters()).element_size()
        self.cache = ragged.KVCache(1, device=device)
        self.rows = CachedRows(self.cache)

    def own_caches(self) -> list[OwnCache]:
        return [OwnCache(self.cache, self._column_bytes)]

    def recall(self, row: Sequence, memory: object, num_tokens: int) -> int:
        if not (isinstance(memory, PrefixMemory) and memory.layer is self.layer):
            return 0
        num_known = super().recall(row, memory, min(num_tokens, memory.length))
        if num_known:
            place = self.rows.enter(row.id)
            self.cache.load(place.slot, memory.states, num_known)
        return num_known

    def _take_in(self, rows: Seq[Sequence], states: Seq[torch.Tensor], starts: Seq[int]) -> None:
        state_of = {}
        for row, state, start in zip(rows, states, starts, strict=True):
            slot = self.rows.enter(row.id).slot
            self.cache.rollback([start], slot)
            state_of[slot] = (row.id, state)
        for slots in neighbours(state_of):
            outputs = self._run([state_of[slot][1] for slot in slots], slots[0])
            for slot, output in zip(slots, outputs, strict=True):
                self._of[state_of[slot][0]] = output

    def _run(self, states: Seq[torch.Tensor], first_slot: int) -> list[torch.Tensor]:
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

    def fork(self, row: Sequence, copies: Seq[Sequence]) -> None:
        super().fork(row, copies)
        for copy in copies if row.id in self.rows else ():
            self.rows.fork(row.id, copy.id)

    def keep(self, row: Sequence) -> PrefixMemory | None:
        if row.id not in self.rows:
            return None
        slot = self.rows[row.id].slot
        length = self.cache.lengths[slot]
        return PrefixMemory(self.layer, self.cache.export(slot, length), length)

    def forget(self, rows: Seq[Sequence]) -> None:
        super().forget(rows)
        self.rows.remove(row.id for row in rows)

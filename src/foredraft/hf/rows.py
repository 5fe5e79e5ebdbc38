"""The rows of a ``generate`` call: visible tokens of ``input_ids``, and replay of plain generation column by column.

Plain ``generate`` emits one token of every row and then evaluates the stopping criteria. The engine advances every row
by whole accepted drafts instead. The output is replayed in the order of plain generation. Once all rows have a token
for the next column, the column is complete. The criteria then see exactly the batch that they would see in plain
generation, and rows end where they would end there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

from foredraft.engine.row import RowOutput
from foredraft.errors import ConfigError, PromptError
from foredraft.model.lm import CausalLM, layer_types
from foredraft.model.support import has_planes


@dataclass(frozen=True)
class InputRow:
    """One row of the ``input_ids`` of a call.

    Args:
      token_ids: tokens that the model sees.
      shown_ids: tokens that processors and stopping criteria receive: the row of ``input_ids``, padding included.
      num_padding: number of masked tokens at the beginning.
    """

    token_ids: tuple[int, ...]
    shown_ids: tuple[int, ...]
    num_padding: int

    @property
    def has_holes(self) -> bool:
        """Whether tokens after the padding at the beginning are masked."""
        return len(self.token_ids) + self.num_padding < len(self.shown_ids)


def read_rows(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> list[InputRow]:
    """Remove the padding.

    Args:
      input_ids: (B, T).
      attention_mask: (B, T), 0 for tokens that the model must not see; None if it sees all tokens.

    Raises: PromptError for a row without tokens, or with padding at its end; ConfigError for a mask of another shape.
    """
    if attention_mask is None:
        return [InputRow(tuple(ids), tuple(ids), 0) for ids in input_ids.tolist()]
    if attention_mask.shape != input_ids.shape:
        raise ConfigError(
            f"attention_mask has the shape {tuple(attention_mask.shape)} and input_ids {tuple(input_ids.shape)}; a "
            "mask longer than the prompt belongs to a cache of earlier tokens, so give the whole text as input_ids"
        )
    rows = zip(input_ids.tolist(), (attention_mask != 0).tolist(), strict=True)
    return [_read_row(place, ids, seen) for place, (ids, seen) in enumerate(rows)]


def _read_row(place: int, ids: list[int], seen: list[bool]) -> InputRow:
    if not any(seen):
        raise PromptError(f"row {place} contains no tokens: its attention_mask is 0 everywhere; leave the row out")
    if not seen[-1]:
        raise PromptError(
            f"row {place} is padded at its end, so new tokens would follow padding; pad at the beginning "
            "(tokenizer.padding_side = 'left')"
        )
    visible = tuple(token for token, is_seen in zip(ids, seen, strict=True) if is_seen)
    return InputRow(visible, tuple(ids), seen.index(True))


def check_positions(
    rows: list[InputRow], attention_mask: torch.Tensor | None, position_ids: Any, target: CausalLM
) -> None:
    """Refuse positions that do not count the unmasked tokens of each row from 0.

    Raises: ConfigError for such positions, and for masked tokens inside a row if the model has attention windows.
    """
    is_windowed = set(layer_types(target.config)) != {"full_attention"}
    for place, row in enumerate(rows):
        if row.has_holes and is_windowed:
            raise ConfigError(
                f"row {place} masks tokens inside its text, and the attention windows of {target.name} would count "
                "them; remove these tokens from input_ids"
            )
    if position_ids is None:
        return
    width = len(rows[0].shown_ids)
    planes = 1 if has_planes(target.config) else 0  # planes of time, height and width, which are equal for text
    if position_ids.ndim not in (2, 2 + planes) or tuple(position_ids.shape[-2:]) not in (
        (1, width),
        (len(rows), width),
    ):
        raise ConfigError(f"position_ids of shape {tuple(position_ids.shape)} are not supported; leave them out")
    seen = torch.ones(len(rows), width, dtype=torch.bool) if attention_mask is None else attention_mask.cpu() != 0
    expected = seen.long().cumsum(-1) - 1
    if bool(((position_ids.cpu() != expected) & seen).any()):
        pictures = ", or remove the image tokens from input_ids" if planes else ""
        raise ConfigError(
            "position_ids do not count the unmasked tokens of each row from 0, so drafts would get wrong positions; "
            f"leave position_ids out{pictures}"
        )


@dataclass(eq=False)
class LookaheadBuffer:
    """Tokens of a row beyond the last complete column, with scores and logits of shape (V,) per token."""

    tokens: deque[int] = field(default_factory=deque)
    scores: deque[torch.Tensor] = field(default_factory=deque)
    logits: deque[torch.Tensor] = field(default_factory=deque)

    def take(self, output: RowOutput) -> None:
        self.tokens.extend(output.token_ids)
        if output.scores is not None:
            self.scores.extend(output.scores)
        if output.logits is not None:
            self.logits.extend(output.logits)


class Endings:
    """The stopping criteria of a call. Criteria that are plain rules are evaluated without tensors.

    Args:
      criteria: stopping criteria that ``generate`` prepared.
    """

    def __init__(self, criteria: StoppingCriteriaList) -> None:
        self.criteria = criteria
        lengths = [criterion.max_length for criterion in criteria if type(criterion) is MaxLengthCriteria]
        self.max_length: int | None = min(lengths, default=None)
        eos = [token for each in criteria if type(each) is EosTokenCriteria for token in each.eos_token_id.tolist()]
        self.eos_token_ids = frozenset(token for token in eos if token >= 0)
        self.pads = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        self.are_fixed = all(type(criterion) in (MaxLengthCriteria, EosTokenCriteria) for criterion in criteria)

    def of(self, column: Sequence[int], length: int) -> list[bool]:
        """Return whether each row ends with this column, by plain rules alone. ``length`` includes the column."""
        if self.max_length is not None and length >= self.max_length:
            return [True] * len(column)
        return [token in self.eos_token_ids for token in column]


class Columns:
    """Replay of plain generation, one column (one token of every row) at a time.

    Args:
      input_ids: (B, T), as shown to criteria and returned in the result.
      endings: stopping criteria.
      pad_token_id: token that fills a row after its end, if there is an end-of-sequence criterion.
      streamer: streamer that receives every column.
      keeps_scores, keeps_logits: whether the result contains scores and logits.

    Attributes:
      columns: complete columns of B tokens each.
      scores, logits: float32 (B, V) per complete column; zeros for rows that have ended.
      lengths: length in columns of each row that has ended; None for the others.
      is_cut: whether each row ended because its context was full.
      is_done: whether plain generation would have ended.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        endings: Endings,
        pad_token_id: int | None,
        streamer: Any = None,
        *,
        keeps_scores: bool = False,
        keeps_logits: bool = False,
    ) -> None:
        self._shown = input_ids
        self._prompt = input_ids
        self.endings = endings
        self._pad = pad_token_id
        self._streamer = streamer
        self._keeps_scores, self._keeps_logits = keeps_scores, keeps_logits
        self._ahead = [LookaheadBuffer() for _ in input_ids]
        self.columns: list[list[int]] = []
        self.scores: list[torch.Tensor] = []
        self.logits: list[torch.Tensor] = []
        self.lengths: list[int | None] = [None] * len(input_ids)
        self.is_cut = [False] * len(input_ids)
        self.is_done = False

    @property
    def device(self) -> torch.device:
        """Device of ``input_ids``."""
        return self._prompt.device

    @property
    def silent(self) -> list[bool]:
        """Whether each row adds nothing but padding from now on."""
        ended = [length is not None for length in self.lengths]
        return [
            has_ended and (is_cut or self.endings.pads) for has_ended, is_cut in zip(ended, self.is_cut, strict=True)
        ]

    def is_waiting_for(self, row: int) -> bool:
        """Whether the next column still needs the token of this row."""
        return not (self.is_done or self.silent[row] or self._ahead[row].tokens)

    def cut(self, row: int) -> None:
        """End a row whose context is full. Without a padding token, all rows end with it."""
        self.is_cut[row] = True
        if self.lengths[row] is None:
            self.lengths[row] = len(self.columns)
        self.is_done = self._pad is None or all(length is not None for length in self.lengths)

    def take(self, row: int, output: RowOutput) -> None:
        """Add the output of a step to a row."""
        self._ahead[row].take(output)

    def advance(self) -> list[int]:
        """Complete as many columns as possible and return the rows that need no further tokens."""
        before = self.silent
        while not self.is_done and all(
            is_silent or ahead.tokens for is_silent, ahead in zip(self.silent, self._ahead, strict=True)
        ):
            self._complete_column()
        if self.is_done:
            return [row for row, was_silent in enumerate(before) if not was_silent]
        return [row for row, (was, now) in enumerate(zip(before, self.silent, strict=True)) if now and not was]

    def _complete_column(self) -> None:
        silent = self.silent
        if self._keeps_scores:
            self.scores.append(self._stacked([ahead.scores for ahead in self._ahead], silent))
        if self._keeps_logits:
            self.logits.append(self._stacked([ahead.logits for ahead in self._ahead], silent))
        column = [self._next_token(row, is_silent) for row, is_silent in enumerate(silent)]
        self.columns.append(column)
        ended = self._ended(column)
        for row, has_ended in enumerate(ended):
            if has_ended and self.lengths[row] is None:
                self.lengths[row] = len(self.columns)
        if self._streamer is not None:
            self._streamer.put(torch.tensor(column))
        self.is_done = all(length is not None for length in self.lengths)

    def _next_token(self, row: int, is_silent: bool) -> int:
        if not is_silent:
            return self._ahead[row].tokens.popleft()
        if self._pad is None:
            raise ConfigError("a row ended before the others, and no pad_token_id is set to fill it; give pad_token_id")
        return self._pad

    def _ended(self, column: list[int]) -> list[bool]:
        if self.endings.are_fixed:
            return self.endings.of(column, self._prompt.shape[1] + len(self.columns))
        added = torch.tensor(column, device=self._shown.device)[:, None]
        self._shown = torch.cat([self._shown, added], dim=-1)
        scores = tuple(self.scores) if self._keeps_scores else None
        ended: list[bool] = self.endings.criteria(self._shown, scores).tolist()
        return ended

    def _stacked(self, queues: list[deque[torch.Tensor]], silent: list[bool]) -> torch.Tensor:
        known = [None if is_silent else queue.popleft() for queue, is_silent in zip(queues, silent, strict=True)]
        like = next(values for values in known if values is not None)
        rows = [torch.zeros_like(like) if values is None else values for values in known]
        return torch.stack(rows).to(self._prompt.device)

    @property
    def sequences(self) -> torch.Tensor:
        """Prompt and all complete columns, int64 (B, T + columns)."""
        added = torch.tensor(self.columns, dtype=torch.long, device=self._prompt.device)
        return torch.cat([self._prompt, added.T], dim=-1) if self.columns else self._prompt

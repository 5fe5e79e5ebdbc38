"""The rows of a call: which tokens of ``input_ids`` the model sees, and what processors are shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from foretoken.errors import ConfigError, PromptError
from foretoken.model.lm import CausalLM, layer_types


@dataclass(frozen=True)
class InputRow:
    """One row of the ``input_ids`` of a call.

    Args:
      token_ids: what the model sees.
      shown_ids: what processors and stopping criteria see: the row of ``input_ids``, padding included.
      num_padding: masked tokens at its beginning.
    """

    token_ids: tuple[int, ...]
    shown_ids: tuple[int, ...]
    num_padding: int

    @property
    def has_holes(self) -> bool:
        """Whether tokens are masked elsewhere than at the beginning."""
        return len(self.token_ids) + self.num_padding < len(self.shown_ids)


def read_rows(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> list[InputRow]:
    """Take the padding off.

    Args:
      input_ids: (B, T).
      attention_mask: (B, T), 0 where a token is not to be seen; None where all are.

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
        raise PromptError(f"row {place} holds no tokens: its attention_mask is 0 everywhere; leave the row out")
    if not seen[-1]:
        raise PromptError(
            f"row {place} is padded at its end, so no token would follow its text; pad at the beginning "
            "(tokenizer.padding_side = 'left')"
        )
    visible = tuple(token for token, is_seen in zip(ids, seen, strict=True) if is_seen)
    return InputRow(visible, tuple(ids), seen.index(True))


def check_positions(
    rows: list[InputRow], attention_mask: torch.Tensor | None, position_ids: Any, target: CausalLM
) -> None:
    """Refuse positions that are not those of the text without its padding.

    Raises: ConfigError.
    """
    is_windowed = set(layer_types(target.config)) != {"full_attention"}
    for place, row in enumerate(rows):
        if row.has_holes and is_windowed:
            raise ConfigError(
                f"row {place} masks tokens inside its text, and {target.name} attends over windows, which count them; "
                "take these tokens out of input_ids"
            )
    if position_ids is None:
        return
    width = len(rows[0].shown_ids)
    if position_ids.ndim != 2 or position_ids.shape[0] not in (1, len(rows)) or position_ids.shape[1] != width:
        raise ConfigError(f"position_ids of shape {tuple(position_ids.shape)} are not supported; leave them out")
    seen = torch.ones(len(rows), width, dtype=torch.bool) if attention_mask is None else attention_mask.cpu() != 0
    expected = seen.long().cumsum(-1) - 1
    if bool(((position_ids.cpu() != expected) & seen).any()):
        raise ConfigError(
            "position_ids do not count the tokens of each row from 0, padding left out; drafts would get wrong "
            "positions. Leave position_ids out"
        )

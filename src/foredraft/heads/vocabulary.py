"""The reduced vocabulary of a drafter: output rows for the tokens that occur often, and a map to the target's ids."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.errors import CheckpointError, ConfigError
from foredraft.folders import parsed_json


@dataclass(frozen=True, eq=False)
class DraftVocabulary:
    """Which tokens of a target a drafter can propose: row i of its output layer stands for token ``target_ids[i]``.

    Tokens that have no row are never drafted. They come from the target, as the bonus, so the output stays what it is.

    Source: EAGLE-3 (Li et al. 2025, arXiv:2503.01840) for the map as published; FR-Spec (Zhao et al. 2025,
    arXiv:2502.14856) for the most frequent tokens as an output layer of any drafter.

    Args:
      target_ids: int64 (V_d,), ascending.
      target_size: V.

    Raises: CheckpointError for ids that are out of order or outside of the target's vocabulary.
    Exactness: lossless for any vocabulary.
    """

    target_ids: Tensor
    target_size: int

    def __post_init__(self) -> None:
        ids = self.target_ids
        if ids.ndim != 1 or ids.dtype != torch.int64 or not len(ids):
            raise CheckpointError(f"a draft vocabulary is int64 (V_d,); got {ids.dtype} {tuple(ids.shape)}")
        if bool((ids[1:] <= ids[:-1]).any()):
            raise CheckpointError("the ids of a draft vocabulary are not ascending; two rows may stand for one token")
        if int(ids[0]) < 0 or int(ids[-1]) >= self.target_size:
            raise CheckpointError(
                f"a draft vocabulary reaches from token {int(ids[0])} to {int(ids[-1])}, and the target has "
                f"{self.target_size} tokens; it is of another target"
            )

    @classmethod
    def full(cls, target_size: int) -> DraftVocabulary:
        """Every token of the target."""
        return cls(torch.arange(target_size), target_size)

    @classmethod
    def of(cls, target_ids: Iterable[int], target_size: int) -> DraftVocabulary:
        """These tokens, in any order."""
        ids = sorted(set(target_ids))
        if ids and max(abs(ids[0]), abs(ids[-1])) >= 2**63:  # more than a tensor holds
            raise CheckpointError(
                f"a draft vocabulary reaches from token {ids[0]} to {ids[-1]}; it holds other numbers"
            )
        return cls(torch.tensor(ids, dtype=torch.int64), target_size)

    @classmethod
    def most_frequent(
        cls, counts: Mapping[int, int], size: int, target_size: int, always: Iterable[int] = ()
    ) -> DraftVocabulary:
        """The ``size`` most frequent tokens, of equal ones those with the lower ids.

        Args:
          counts: by token, how often it occurred.
          always: tokens that are kept whatever their counts, EOS among them.

        Raises: ConfigError where ``always`` does not fit in.
        """
        kept = set(always)
        if len(kept) > size:
            raise ConfigError(f"a draft vocabulary of {size} tokens cannot keep {len(kept)} special ones; enlarge it")
        ranked = sorted(range(target_size), key=lambda token: (-counts.get(token, 0), token))
        for token in ranked:
            if len(kept) >= min(size, target_size):
                break
            kept.add(token)
        return cls.of(kept, target_size)

    @classmethod
    def load(cls, file: str | os.PathLike[str], target_size: int) -> DraftVocabulary:
        """From a file of `save`: a JSON list of token ids.

        Raises: CheckpointError for a file that is none, or is of another target.
        """
        try:
            ids = parsed_json(Path(file).expanduser().read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"the draft vocabulary {os.fspath(file)} cannot be read ({error})") from None
        if not isinstance(ids, list) or not ids or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
            raise CheckpointError(f"the draft vocabulary {os.fspath(file)} is not a JSON list of token ids")
        return cls.of(ids, target_size)

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write the ids of its tokens."""
        Path(file).write_text(json.dumps(self.target_ids.tolist()) + "\n", encoding="utf-8")

    @classmethod
    def published(cls, d2t: Tensor, t2d: Tensor | None, num_rows: int, target_size: int) -> DraftVocabulary:
        """From the tensors of EAGLE-3's checkpoints.

        Args:
          d2t: int64 (V_d,), the *offsets* of ids: row i stands for token ``i + d2t[i]``.
          t2d: bool (V,), the tokens that have a row; None where it is not stored.
          num_rows: V_d of the output layer.
          target_size: V.

        Raises: CheckpointError where these contradict one another, saying which.
        """
        if d2t.ndim != 1 or len(d2t) != num_rows:
            raise CheckpointError(f"d2t has shape {tuple(d2t.shape)}, and the output layer has {num_rows} rows")
        if d2t.is_floating_point() or d2t.dtype == torch.bool:
            raise CheckpointError(f"d2t is {d2t.dtype}; it must hold whole numbers")
        vocabulary = cls(torch.arange(num_rows) + d2t.to(torch.int64), target_size)
        if t2d is not None:
            if tuple(t2d.shape) != (target_size,):
                raise CheckpointError(
                    f"t2d has shape {tuple(t2d.shape)}, and the target has {target_size} tokens; it is of another one"
                )
            if not torch.equal(t2d.bool().nonzero()[:, 0], vocabulary.target_ids):
                raise CheckpointError("d2t and t2d name different tokens; the checkpoint contradicts itself")
        return vocabulary

    def __len__(self) -> int:
        """V_d."""
        return len(self.target_ids)

    @property
    def is_full(self) -> bool:
        return len(self) == self.target_size

    @property
    def d2t(self) -> Tensor:
        """The offsets as published, int64 (V_d,)."""
        return self.target_ids - torch.arange(len(self))

    @property
    def t2d(self) -> Tensor:
        """Bool (V,), whether a token has a row."""
        kept = torch.zeros(self.target_size, dtype=torch.bool)
        kept[self.target_ids] = True
        return kept

    def check_eos(self, eos_token_ids: Iterable[int], name: str) -> None:
        """Refuse a vocabulary in which no text can end.

        Raises: CheckpointError where none of the target's EOS tokens has a row.
        """
        eos = [token for token in eos_token_ids if 0 <= token < self.target_size]
        if eos and not bool(torch.isin(self.target_ids, torch.tensor(eos)).any()):
            raise CheckpointError(
                f"the draft vocabulary of {name} has none of the target's EOS tokens {eos}: no end of a text could be "
                "drafted; it is of another target, or was made without special tokens"
            )

    def rows_of(self, target_ids: Tensor) -> Tensor:
        """Rows of tokens, of any shape; -1 where a token has none."""
        own = self.target_ids.to(target_ids.device)
        rows = torch.searchsorted(own, target_ids).clamp_(max=len(self) - 1)
        return rows.where(own[rows] == target_ids, -1)

    def rows_of_layer(self, weight: Tensor) -> Tensor:
        """The rows of a full output layer (V, H) that are kept: (V_d, H), the layer itself where all are."""
        return weight if self.is_full else weight.index_select(0, self.target_ids.to(weight.device))

    def spread(self, scores: Tensor, blank: Any = -torch.inf) -> Tensor:
        """(..., V_d) -> (..., V), ``blank`` for tokens without a row; where only the full width will do."""
        if self.is_full:
            return scores
        wide = scores.new_full((*scores.shape[:-1], self.target_size), blank)
        wide[..., self.target_ids.to(scores.device)] = scores
        return wide

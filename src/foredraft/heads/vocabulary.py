"""Reduced vocabulary of a drafter: output rows for frequent tokens, and a map to the target's ids."""

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
    """Tokens of a target that a drafter can propose; row i of its output layer is the logit of token
    ``target_ids[i]``.

    Tokens without a row are never drafted. The target still emits tokens without a row, as the bonus, so the output
    does not change.

    Source: EAGLE-3 (Li et al. 2025, arXiv:2503.01840) for the map as published; FR-Spec (Zhao et al. 2025,
    arXiv:2502.14856) for the most frequent tokens as an output layer of any drafter.

    Args:
      target_ids: int64 (V_d,), ascending token ids of the target.
      target_size: V.

    Raises: CheckpointError for ids that are out of order or outside of the target's vocabulary.
    Exactness: lossless for any vocabulary.
    """

    target_ids: Tensor
    target_size: int

    def __post_init__(self) -> None:
        ids = self.target_ids
        if ids.ndim != 1 or ids.dtype != torch.int64 or not len(ids):
            raise CheckpointError(
                f"the ids of a draft vocabulary are {ids.dtype} {tuple(ids.shape)}; they must be int64 (V_d,), V_d > 0"
            )
        if bool((ids[1:] <= ids[:-1]).any()):
            raise CheckpointError(
                "the ids of a draft vocabulary are not ascending, so two rows could be the same token; sort them"
            )
        if int(ids[0]) < 0 or int(ids[-1]) >= self.target_size:
            raise CheckpointError(
                f"a draft vocabulary has the tokens {int(ids[0])} to {int(ids[-1])}, and the target has "
                f"{self.target_size} tokens; the vocabulary is for another target"
            )

    @classmethod
    def full(cls, target_size: int) -> DraftVocabulary:
        """Return the vocabulary of all tokens of the target."""
        return cls(torch.arange(target_size), target_size)

    @classmethod
    def of(cls, target_ids: Iterable[int], target_size: int) -> DraftVocabulary:
        """Make a vocabulary of these tokens, given in any order."""
        ids = sorted(set(target_ids))
        if ids and max(abs(ids[0]), abs(ids[-1])) >= 2**63:  # outside of int64
            raise CheckpointError(
                f"a draft vocabulary has values from {ids[0]} to {ids[-1]}, which are not token ids; check the file"
            )
        return cls(torch.tensor(ids, dtype=torch.int64), target_size)

    @classmethod
    def most_frequent(
        cls, counts: Mapping[int, int], size: int, target_size: int, always: Iterable[int] = ()
    ) -> DraftVocabulary:
        """Make a vocabulary of the ``size`` most frequent tokens; ties go to lower ids.

        Args:
          counts: number of occurrences by token.
          size: number of tokens, V_d.
          target_size: V.
          always: tokens that are kept whatever their counts, EOS among them.

        Raises: ConfigError if ``always`` has more than ``size`` tokens.
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
        """Read a file that `save` wrote, a JSON list of token ids.

        Raises: CheckpointError for a file that is not such a list, or is for another target.
        """
        try:
            ids = parsed_json(Path(file).expanduser().read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"the draft vocabulary {os.fspath(file)} cannot be read ({error}); check the path"
            ) from None
        if not isinstance(ids, list) or not ids or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
            raise CheckpointError(f"the draft vocabulary {os.fspath(file)} is not a JSON list of token ids")
        return cls.of(ids, target_size)

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write the token ids to a JSON file."""
        Path(file).write_text(json.dumps(self.target_ids.tolist()) + "\n", encoding="utf-8")

    @classmethod
    def published(cls, d2t: Tensor, t2d: Tensor | None, num_rows: int, target_size: int) -> DraftVocabulary:
        """Make a vocabulary from the tensors in EAGLE-3 checkpoints.

        Args:
          d2t: int64 (V_d,), the *offsets* of ids: row i is token ``i + d2t[i]``.
          t2d: bool (V,), True for tokens that have a row; None if it is not stored.
          num_rows: V_d of the output layer.
          target_size: V.

        Raises: CheckpointError if these contradict one another. The message names the arguments.
        """
        if d2t.ndim != 1 or len(d2t) != num_rows:
            raise CheckpointError(
                f"d2t has shape {tuple(d2t.shape)}, and the output layer has {num_rows} rows; download it again"
            )
        if d2t.is_floating_point() or d2t.dtype == torch.bool:
            raise CheckpointError(f"d2t is {d2t.dtype}; it must contain whole numbers")
        vocabulary = cls(torch.arange(num_rows) + d2t.to(torch.int64), target_size)
        if t2d is not None:
            if tuple(t2d.shape) != (target_size,):
                raise CheckpointError(
                    f"t2d has shape {tuple(t2d.shape)}, and the target has {target_size} tokens; the head is for "
                    "another target"
                )
            if not torch.equal(t2d.bool().nonzero()[:, 0], vocabulary.target_ids):
                raise CheckpointError(
                    "d2t and t2d name different tokens; the checkpoint is inconsistent; download it again"
                )
        return vocabulary

    def __len__(self) -> int:
        """Return the number of tokens, V_d."""
        return len(self.target_ids)

    @property
    def is_full(self) -> bool:
        return len(self) == self.target_size

    @property
    def d2t(self) -> Tensor:
        """Offsets as published, int64 (V_d,)."""
        return self.target_ids - torch.arange(len(self))

    @property
    def t2d(self) -> Tensor:
        """Mask (V,) of bool, True for tokens with a row."""
        kept = torch.zeros(self.target_size, dtype=torch.bool)
        kept[self.target_ids] = True
        return kept

    def check_eos(self, eos_token_ids: Iterable[int], name: str) -> None:
        """Check that drafts can contain the end of a row.

        Raises: CheckpointError if none of the target's EOS tokens has a row.
        """
        eos = [token for token in eos_token_ids if 0 <= token < self.target_size]
        if eos and not bool(torch.isin(self.target_ids, torch.tensor(eos)).any()):
            raise CheckpointError(
                f"the draft vocabulary of {name} has none of the target's EOS tokens {eos}, so the end of a text could "
                "not be drafted; it is for another target, or was made without special tokens"
            )

    def rows_of(self, target_ids: Tensor) -> Tensor:
        """Return the rows of tokens of any shape; -1 for a token without a row."""
        own = self.target_ids.to(target_ids.device)
        rows = torch.searchsorted(own, target_ids).clamp_(max=len(self) - 1)
        return rows.where(own[rows] == target_ids, -1)

    def rows_of_layer(self, weight: Tensor) -> Tensor:
        """Return the kept rows (V_d, H) of a full output layer (V, H), or the layer itself if all rows are kept."""
        return weight if self.is_full else weight.index_select(0, self.target_ids.to(weight.device))

    def spread(self, scores: Tensor, blank: Any = -torch.inf) -> Tensor:
        """Return scores (..., V) from (..., V_d), with ``blank`` for tokens without a row."""
        if self.is_full:
            return scores
        wide = scores.new_full((*scores.shape[:-1], self.target_size), blank)
        wide[..., self.target_ids.to(scores.device)] = scores
        return wide

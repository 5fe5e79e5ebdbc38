"""What a recipe of training is: a module, the features that it reads, and its losses along an example."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.heads.checkpoint import write_checkpoint
from foretoken.heads.layers import LayerShape
from foretoken.heads.vocabulary import DraftVocabulary
from foretoken.train.examples import Example
from foretoken.train.features import Streams
from foretoken.train.losses import Part

NUM_LAYERS = {"medusa": 1, "hydra": 1, "hydra++": 4, "draft_model": 4}
"""Layers of a drafter by method, where nothing is said: of the MLP of every head, as published, or of a draft model."""


@dataclass(frozen=True)
class TargetParts:
    """What recipes take of a target, frozen.

    Args:
      name: of the target.
      embedding, output: (V, H), its input embedding and output layer.
      norm: (H,), weight of its final norm; None where it has no such norm.
      num_layers: L.
      layer: sizes of its decoder layers.
      eos_token_ids: that end a text.
      layers: tensors of its decoder layers, by name; none where they are not built as Llama's, so that drafters begin
        with random numbers.
      context: tokens that its positions reach.
    """

    name: str
    embedding: Tensor
    output: Tensor
    norm: Tensor | None
    num_layers: int
    layer: LayerShape
    eos_token_ids: tuple[int, ...]
    layers: Seq[dict[str, Tensor]] = ()
    context: int = 2048

    @property
    def hidden_size(self) -> int:
        return int(self.embedding.shape[1])

    @property
    def is_tied(self) -> bool:
        """Whether its output layer is its embedding."""
        return self.output.data_ptr() == self.embedding.data_ptr() or torch.equal(self.output, self.embedding)

    @property
    def vocab_size(self) -> int:
        return len(self.output)

    def embedded(self, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
        """(T,) -> (T, H)."""
        return nn.functional.embedding(token_ids, self.embedding).to(dtype)


@dataclass(frozen=True)
class Place:
    """Where drafts of an example begin, and what the target says there.

    Entry t knows what the target has computed after token t; a draft from it follows token t + 1, and its token at
    depth k, counted from 0, is token t + 2 + k of the text.

    Args:
      token_ids: int64 (T,).
      first: entry from which drafts are wanted: that of the last token but one of the prompt.
    """

    token_ids: Tensor
    first: int

    @classmethod
    def of(cls, example: Example, device: torch.device) -> Place | None:
        """None where there is no token to draft."""
        first = max(0, example.prompt_length - 2)
        if len(example.token_ids) - 2 <= first:
            return None
        return cls(torch.tensor(example.token_ids, device=device), first)

    def counts(self, depths: int) -> list[int]:
        """How many entries have a text to draft at each depth; 0 at none of them: 5 entries give 5, 4, 3."""
        longest = len(self.token_ids) - 2 - self.first
        return [longest - depth for depth in range(depths) if depth < longest]

    def rows(self, counts: Seq[int]) -> Tensor:
        """For every depth the laws of its entries, one after the other: 3 and 2 entries give 0 1 2 1 2."""
        rows = [torch.arange(depth, depth + count) for depth, count in enumerate(counts)]
        return torch.cat(rows).to(self.token_ids.device)


class Laws:
    """What the target says after tokens, over a draft vocabulary.

    Args:
      output: (V, H), of the target.
      vocabulary: tokens that can be drafted.
    """

    def __init__(self, output: Tensor, vocabulary: DraftVocabulary) -> None:
        self.vocabulary = vocabulary
        self.kept = vocabulary.rows_of_layer(output)
        self._t2d = vocabulary.t2d.to(output.device)

    @torch.no_grad()
    def along(self, place: Place, last_hidden: Tensor) -> Tensor:
        """Logits (N, V_d) after token ``first`` + 1 and all that follow but the last.

        Args:
          last_hidden: (T, H), after the final norm.
        """
        return last_hidden[place.first + 1 : -1].to(self.kept.dtype) @ self.kept.T

    def weights(self, place: Place, rows: Tensor) -> Tensor:
        """1 where the token that is to be drafted can be, 0 elsewhere: (M,)."""
        return self._t2d[place.token_ids[place.first + 2 + rows]].float()

    def labels(self, place: Place, rows: Tensor) -> Tensor:
        """Rows of the tokens that are to be drafted, -1 for those that cannot: (M,)."""
        return self.vocabulary.rows_of(place.token_ids[place.first + 2 + rows])


class Recipe(ABC):
    """How one kind of drafter is trained over a target.

    Args:
      module: what is trained.
      target: whose features and laws are learned.
      vocabulary: tokens that can be drafted, over which laws are compared.
      weights: of its parts, by step or head.
      streams: layers of the target whose inputs it reads, beside the last hidden state.

    Attributes:
      layers: of the target, whose inputs it reads; the number of layers for the last hidden state.
    """

    def __init__(
        self,
        module: nn.Module,
        target: TargetParts,
        vocabulary: DraftVocabulary,
        weights: tuple[float, ...],
        streams: Seq[int] = (),
    ) -> None:
        self.module, self.weights = module, weights
        self.layers: tuple[int, ...] = tuple(sorted({*streams, target.num_layers}))
        self._target = target
        self._laws = Laws(target.output, vocabulary)

    def parts(self, example: Example, streams: Streams) -> list[Part]:
        """Losses along one example, by step or head; none where the answer is too short."""
        place = Place.of(example, self._target.output.device)
        return [] if place is None else self._parts(place, streams)

    @abstractmethod
    def _parts(self, place: Place, streams: Streams) -> list[Part]:
        """Losses along an example with something to draft."""

    @abstractmethod
    def _checkpoint(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Config and tensors of the drafter, in the layout that its method reads."""

    def save(self, folder: Path, facts: dict[str, Any]) -> None:
        """Write a checkpoint, with floating-point numbers in bfloat16.

        Args:
          facts: further entries of its config.
        """
        config, tensors = self._checkpoint()
        halved = {
            name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
            for name, tensor in tensors.items()
        }
        write_checkpoint(folder, {**config, **facts}, halved)

"""Recipes of training: a module, the features that it reads, and its losses along an example."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from foredraft.heads.checkpoint import write_checkpoint
from foredraft.heads.layers import LayerShape
from foredraft.heads.vocabulary import DraftVocabulary
from foredraft.train.examples import Example
from foredraft.train.features import Streams
from foredraft.train.losses import Part


@dataclass(frozen=True)
class Texts:
    """Texts side by side, where drafts of them begin, and what they go on with.

    Entry t of a text knows what the target has computed after token t; a draft from it follows token t + 1, and its
    token at depth k, counted from 0, is token t + 2 + k of the text. The A drafts of a text begin at one entry after
    the other, the first at that of the last token but one of the prompt; fewer are filled up with more of the last.

    Args:
      token_ids: int64 (B, T), filled up with 0.
      lengths: int64 (B,), tokens of the texts.
      entries: int64 (B, A), from which drafts begin.
      places: by depth int64 (M_k,): which of the B x A drafts have a token of the text at that depth; maybe none.
      target_rows: by depth int64 (M_k,): the draft of `places[0]` after whose pending token the target has the
        distribution of that depth; 3 drafts and 2 of them deeper give 0 1 2, and 1 2.
      tokens: by depth int64 (M_k,), of the texts.
    """

    token_ids: Tensor
    lengths: Tensor
    entries: Tensor
    places: tuple[Tensor, ...]
    target_rows: tuple[Tensor, ...]
    tokens: tuple[Tensor, ...]

    @classmethod
    def of(cls, examples: Sequence[Example], depths: int, device: torch.device) -> Texts | None:
        """None where no text has a token to draft."""
        first = torch.tensor([max(0, example.prompt_length - 2) for example in examples])
        lengths = torch.tensor([len(example.token_ids) for example in examples])
        counts = (lengths - 2 - first).clamp(min=0)
        longest = int(counts.max())
        if longest == 0:
            return None
        token_ids = pad_sequence([torch.tensor(example.token_ids) for example in examples], batch_first=True)
        drafts = torch.arange(longest)
        entries = (first[:, None] + drafts).minimum(lengths[:, None] - 3).clamp(min=0)
        before = counts.cumsum(0) - counts
        places, target_rows, tokens = [], [], []
        for depth in range(depths):
            rows, columns = (drafts < counts[:, None] - depth).nonzero(as_tuple=True)
            places.append((rows * longest + columns).to(device))
            target_rows.append((before[rows] + columns + depth).to(device))
            tokens.append(token_ids[rows, first[rows] + columns + 2 + depth].to(device))
        return cls(
            token_ids.to(device),
            lengths.to(device),
            entries.to(device),
            tuple(places),
            tuple(target_rows),
            tuple(tokens),
        )

    @property
    def counts(self) -> list[int]:
        """Drafts that have a token at each depth."""
        return [len(places) for places in self.places]

    def noise(self, like: Tensor, widest: Tensor) -> Tensor:
        """Uniform noise in the shape of states (B, T, H), between plus and minus a number of each text, (B,)."""
        return (2 * torch.rand_like(like) - 1) * widest[:, None, None].to(like.dtype)

    def after(self, states: Tensor, distance: int = 0) -> Tensor:
        """(B, T, H) -> (B x A, H): of every draft the state so many tokens behind its entry; where a text has none
        there, any."""
        rows = torch.arange(len(self.entries), device=states.device)[:, None]
        return states[rows, (self.entries + distance).clamp(max=states.shape[1] - 1)].flatten(0, 1)


METHODS = ("medusa", "hydra", "hydra++", "eagle", "eagle2", "eagle3", "draft_model")
"""Methods whose drafters can be trained; "eagle2" makes the heads of "eagle"."""

WITH_LAYER = ("hydra++", "eagle", "eagle2", "eagle3")
"""Methods whose heads have a decoder layer of their own."""

NUM_LAYERS = {"medusa": 1, "hydra": 1, "hydra++": 4, "draft_model": 4}
"""Layers of a drafter by method, where nothing is said: of the MLP of every head, as published, or of a draft model."""


@dataclass(frozen=True)
class TargetParts:
    """Parts of a target that recipes read, frozen.

    Args:
      name: of the target.
      embedding, output: (V, H), its input embedding and output layer.
      norm: (H,), weight of its final norm; None where it has no such norm.
      num_layers: L.
      layer: sizes of its decoder layers.
      eos_token_ids: that end a text.
      layer_tensors: returns the tensors of a decoder layer by name; None where layers are not built as Llama's, so that
        drafters begin with random numbers.
      context: tokens that its positions reach.
    """

    name: str
    embedding: Tensor
    output: Tensor
    norm: Tensor | None
    num_layers: int
    layer: LayerShape
    eos_token_ids: tuple[int, ...]
    layer_tensors: Callable[[int], dict[str, Tensor]] | None = None
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
        """(...) -> (..., H)."""
        return nn.functional.embedding(token_ids, self.embedding).to(dtype)


class Recipe(ABC):
    """Training of one kind of drafter over a target.

    Args:
      module: what is trained.
      target: whose features and distributions are learned.
      vocabulary: tokens that can be drafted, over which distributions are compared.
      weights: of its parts, by step or head.
      streams: layers of the target whose inputs it reads, beside the last hidden state.
      depths: of the drafts that it learns; one for every part where nothing is said.

    Attributes:
      layers: of the target, whose inputs it reads; the number of layers for the last hidden state.
    """

    def __init__(
        self,
        module: nn.Module,
        target: TargetParts,
        vocabulary: DraftVocabulary,
        weights: tuple[float, ...],
        streams: Sequence[int] = (),
        depths: int = 0,
    ) -> None:
        self.module, self.weights = module, weights
        self.layers: tuple[int, ...] = tuple(sorted({*streams, target.num_layers}))
        self._target = target
        self._vocabulary = vocabulary
        self._kept = vocabulary.rows_of_layer(target.output)  # (V_d, H), of the target's output layer
        self._t2d = vocabulary.t2d.to(target.output.device)
        self._depths = depths or len(weights)

    def parts(self, examples: Sequence[Example], streams: Sequence[Streams]) -> list[Part]:
        """Losses along texts side by side, by step or head; none where every answer is too short.

        Args:
          streams: of each example.
        """
        device = self._target.output.device
        texts = Texts.of(examples, self._depths, device)
        if texts is None:
            return []
        padded = {layer: pad_sequence([one[layer] for one in streams], True).to(device) for layer in self.layers}
        return self._parts(texts, padded)

    @torch.no_grad()
    def _target_logits(self, texts: Texts, streams: Streams) -> Tensor:
        """Logits (M_0, V_d) of the target after the pending tokens of drafts, which `Texts.target_rows` counts."""
        last_hidden = streams[self._target.num_layers]
        return texts.after(last_hidden, 1)[texts.places[0]].to(self._kept.dtype) @ self._kept.T

    def _weights(self, texts: Texts) -> Tensor:
        """1 where the token that is to be drafted can be, 0 elsewhere, one depth after the other: (M,)."""
        return self._t2d[torch.cat(texts.tokens)].float()

    @abstractmethod
    def _parts(self, texts: Texts, streams: Streams) -> list[Part]:
        """Losses along texts with something to draft, whose streams are (B, T, H)."""

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

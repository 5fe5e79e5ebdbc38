"""Recipes of training: a module to train, the features that it reads, and its losses along an example."""

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
    """A batch of texts, the entries where drafts begin, and the tokens that the drafts should predict.

    Entry t of a text has the target's features after token t. A draft from entry t follows token t + 1, and its token
    at depth k, counted from 0, is token t + 2 + k of the text. The A drafts of a text begin at consecutive entries, the
    first at the last but one token of the prompt. Texts with fewer drafts repeat their last entry.

    Args:
      token_ids: int64 (B, T), padded with 0.
      lengths: int64 (B,), number of tokens of every text.
      entries: int64 (B, A), entries where drafts begin.
      places: int64 (M_k,) per depth k, indices of the B x A drafts for which the text has a token at that depth.
      target_rows: int64 (M_k,) per depth k, row of the target's logits for every draft of ``places[k]``. The rows of
        these logits are the drafts of ``places[0]``. For 3 drafts, of which 2 are deeper, they are 0 1 2, and 1 2.
      tokens: int64 (M_k,) per depth k, tokens of the texts.
    """

    token_ids: Tensor
    lengths: Tensor
    entries: Tensor
    places: tuple[Tensor, ...]
    target_rows: tuple[Tensor, ...]
    tokens: tuple[Tensor, ...]

    @classmethod
    def of(cls, examples: Sequence[Example], depths: int, device: torch.device) -> Texts | None:
        """Return the batch of some examples; None if no text has a token to draft."""
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
        """Number of drafts that have a token at each depth."""
        return [len(places) for places in self.places]

    def noise(self, like: Tensor, widest: Tensor) -> Tensor:
        """Return uniform noise in the shape of states (B, T, H), with an absolute value of at most ``widest`` (B,) per
        text."""
        return (2 * torch.rand_like(like) - 1) * widest[:, None, None].to(like.dtype)

    def after(self, states: Tensor, distance: int = 0) -> Tensor:
        """Return the state ``distance`` tokens after the entry of every draft, (B, T, H) -> (B x A, H).

        The state is arbitrary if the text ends before.
        """
        rows = torch.arange(len(self.entries), device=states.device)[:, None]
        return states[rows, (self.entries + distance).clamp(max=states.shape[1] - 1)].flatten(0, 1)


@dataclass(frozen=True)
class TargetParts:
    """Parts of a target that recipes read. These parts are not trained.

    Args:
      name: name of the target.
      embedding, output: (V, H), input embedding and output layer.
      norm: (H,), weight of the final norm; None if the target has no such norm.
      num_layers: L.
      layer: sizes of the decoder layers.
      eos_token_ids: tokens that end an output.
      layer_tensors: function that returns the tensors of a decoder layer by name. None if layers differ from Llama's;
        drafters then start with random weights.
      context: length of the context in tokens.
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
        """True if the output layer is the embedding."""
        return self.output.data_ptr() == self.embedding.data_ptr() or torch.equal(self.output, self.embedding)

    @property
    def vocab_size(self) -> int:
        return len(self.output)

    def embedded(self, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Embed tokens, (...) -> (..., H)."""
        return nn.functional.embedding(token_ids, self.embedding).to(dtype)


class Recipe(ABC):
    """Training of one kind of drafter over a target.

    Args:
      module: the module to train.
      target: parts of the target whose features and distributions are learned.
      vocabulary: tokens that can be drafted, and over which distributions are compared.
      weights: weights of the losses, by step or head.
      streams: layers of the target whose inputs are read, besides the last hidden state.
      depths: depth of the drafts that it learns; 0 for the number of weights.

    Attributes:
      vocabulary: tokens that can be drafted.
      layers: indices of the layers of the target whose inputs are read; ``num_layers`` for the last hidden state.
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
        self.vocabulary = vocabulary
        self._kept = vocabulary.rows_of_layer(target.output)  # (V_d, H), draftable rows of the target's output layer
        self._t2d = vocabulary.t2d.to(target.output.device)
        self._depths = depths or len(weights)

    def parts(self, examples: Sequence[Example], streams: Sequence[Streams]) -> list[Part]:
        """Return the losses of a batch of texts, by step or head; an empty list if every answer is too short.

        Args:
          streams: features of each example.
        """
        device = self._target.output.device
        texts = Texts.of(examples, self._depths, device)
        if texts is None:
            return []
        padded = {layer: pad_sequence([one[layer] for one in streams], True).to(device) for layer in self.layers}
        return self._parts(texts, padded)

    @torch.no_grad()
    def _target_logits(self, texts: Texts, streams: Streams) -> Tensor:
        """Return the target's logits (M_0, V_d) after the pending tokens of all drafts; `Texts.target_rows` are their
        rows."""
        last_hidden = streams[self._target.num_layers]
        return texts.after(last_hidden, 1)[texts.places[0]].to(self._kept.dtype) @ self._kept.T

    def _weights(self, texts: Texts) -> Tensor:
        """Return 1 for tokens in the draft vocabulary and 0 for others, one depth after the other: (M,)."""
        return self._t2d[torch.cat(texts.tokens)].float()

    @abstractmethod
    def _parts(self, texts: Texts, streams: Streams) -> list[Part]:
        """Return the losses along texts with something to draft. Features are (B, T, H)."""

    @abstractmethod
    def _checkpoint(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return config and tensors of the drafter, in the layout that its method loads."""

    def save(self, folder: Path, facts: dict[str, Any]) -> None:
        """Write a checkpoint, with floating-point numbers in bfloat16.

        Args:
          facts: further entries of the config.
        """
        config, tensors = self._checkpoint()
        halved = {
            name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
            for name, tensor in tensors.items()
        }
        write_checkpoint(folder, {**config, **facts}, halved)

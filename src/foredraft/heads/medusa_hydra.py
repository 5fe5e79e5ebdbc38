"""Heads of Medusa, Hydra and Hydra++, each of which guesses one of the next tokens from the target's features.

Medusa heads read a hidden state alone, independently of one another. Hydra heads also read the tokens drafted before
them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foredraft.errors import CheckpointError
from foredraft.heads.layers import AttentionContext, DecoderLayer, LayerShape, Rotary
from foredraft.heads.vocabulary import DraftVocabulary

OutputLayer = Callable[[Tensor], Tensor]
"""Output layer of the target, from (..., H) to (..., V)."""


@dataclass(frozen=True)
class HeadsShape:
    """Structure of Medusa or Hydra heads, as the tensors of a checkpoint show it.

    Args:
      hidden_size: H of the target.
      vocab_size: number of rows of every output layer; 0 if the target's own layer is used.
      num_heads: K.
      num_layers: number of residual blocks of a Medusa head; for Hydra, number of MLP layers of a head, the first
        included.
      is_shared: True if all blocks of a head (for Hydra, the later layers) are the same module repeated, as in the
        published checkpoints.
      has_bias: True if Medusa's blocks have a bias.
      prefix: sizes of the layer that attends to earlier tokens (Hydra++); None without one.
      offset: hidden state that Hydra heads read, counted in layers before the last; 0 for the last hidden state, after
        the final norm.
    """

    hidden_size: int
    vocab_size: int
    num_heads: int
    num_layers: int = 1
    is_shared: bool = True
    has_bias: bool = True
    prefix: LayerShape | None = None
    offset: int = 0


class ResidualBlock(nn.Module):
    """Block x + SiLU(W x + b), with W = 0 at first; for several input vectors, R x + r replaces the first x.

    Args:
      size: H.
      num_inputs: n, number of input vectors side by side.
      has_bias: True for a bias b.
    """

    def __init__(self, size: int, num_inputs: int = 1, *, has_bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(num_inputs * size, size, bias=has_bias)
        self.res_connection = nn.Linear(num_inputs * size, size) if num_inputs > 1 else nn.Identity()
        nn.init.zeros_(self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., H) from (..., n H)."""
        mixed: Tensor = self.res_connection(x) + F.silu(self.linear(x))
        return mixed


def repeated(make: Callable[[], nn.Module], times: int, is_shared: bool) -> nn.ModuleList:
    """Return one module several times (as in the published classes, with shared weights), or several modules."""
    first = make()
    return nn.ModuleList([first, *(first if is_shared else make() for _ in range(times - 1))])


class PrefixLayer(nn.Module):
    """Decoder layer of Hydra++ with a final norm, run causally over the target's hidden states."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.shape = shape
        self.rotary = Rotary(shape)
        self.layer = DecoderLayer(shape)
        self.norm = nn.RMSNorm(shape.hidden_size, shape.eps)

    def placed(self, positions: Tensor, dtype: torch.dtype, mask: Tensor | None, cache: Any = None) -> AttentionContext:
        """Return the attention context for hidden states at positions (B, N)."""
        cos, sin = self.rotary(positions, dtype)
        return AttentionContext(cos, sin, mask, cache)

    def forward(self, hidden: Tensor, placed: AttentionContext) -> Tensor:
        """Return (B, N, H) from (B, N, H)."""
        normed: Tensor = self.norm(self.layer(hidden, placed))
        return normed


class MultiHeads(nn.Module):
    """K heads; from the state after token t, head k guesses token t + 2 + k. Token t + 1 is the target's own choice.

    Args:
      shape: structure of the heads.
      vocabulary: tokens of the output layers' rows; None for all of the target's, or if there are no output layers.

    Attributes:
      sees_path: True if a head reads the tokens before its guess.
      prefix: layer that attends to earlier tokens; None without one.
    """

    sees_path = False
    shape: HeadsShape
    prefix: PrefixLayer | None
    lm_heads: nn.ModuleList

    def __init__(self, shape: HeadsShape, vocabulary: DraftVocabulary | None) -> None:
        super().__init__()
        self.shape, self.vocabulary, self.prefix = shape, vocabulary, None

    def _outputs(self, *, bias: bool) -> nn.ModuleList:
        size, num_rows = self.shape.hidden_size, self.shape.vocab_size
        return nn.ModuleList(nn.Linear(size, num_rows, bias=bias) for _ in range(self.num_heads if num_rows else 0))

    def reduced(self, vocabulary: DraftVocabulary, rows_of: Callable[[nn.Module], nn.Module]) -> Self:
        """Return the same heads with some rows of their output layers; everything else is shared.

        Args:
          vocabulary: tokens to keep.
          rows_of: function from an output layer to one with these tokens only.
        """
        other = type(self).__new__(type(self))
        nn.Module.__init__(other)
        other.shape, other.vocabulary, other.prefix = self.shape, vocabulary, self.prefix
        for name, module in self.named_children():
            setattr(other, name, module)
        other.lm_heads = nn.ModuleList(map(rows_of, self.lm_heads))
        return other

    @property
    def kind(self) -> str:
        """Name of the method for such heads."""
        return "medusa"

    @property
    def num_heads(self) -> int:
        return self.shape.num_heads

    @property
    def offset(self) -> int:
        """Number of layers before the last whose hidden state is read."""
        return self.shape.offset

    @property
    def needs_output_layer(self) -> bool:
        """True if the target's output layer computes the logits."""
        return not self.shape.vocab_size

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @abstractmethod
    def state(self, head: int, inputs: Tensor) -> Tensor:
        """Return the output layer's input (M, H) for head ``head`` from inputs (M, n H); see `logits`."""

    def logits(self, head: int, inputs: Tensor, output: OutputLayer | None = None) -> Tensor:
        """Return the logits of head ``head``.

        Args:
          head: index of the head.
          inputs: (M, H), context vectors. For heads that read the path, inputs are (M, (head + 2) H): each context
            vector, followed by the embeddings of the pending token and of the ``head`` drafted tokens after it.
          output: target's output layer, for heads without their own.

        Returns: (M, V), or (M, V_d) if the output layers cover a part of the vocabulary.
        """
        state = self.state(head, inputs)
        if self.lm_heads:
            own: Tensor = self.lm_heads[head](state)
            return own
        return _needed(output)(state)

    def contexts(self, hidden: Tensor) -> Tensor:
        """Return the context vectors (..., T, H) of whole rows at once: the hidden states (..., T, H), or the prefix
        layer's outputs.
        """
        if self.prefix is None:
            return hidden
        length = hidden.shape[-2]
        mask = torch.ones(length, length, dtype=torch.bool, device=hidden.device).tril()[None, None]
        positions = torch.arange(length, device=hidden.device)[None]
        mixed: Tensor = self.prefix(
            hidden.view(-1, *hidden.shape[-2:]), self.prefix.placed(positions, hidden.dtype, mask)
        )
        return mixed.view(hidden.shape)

    def along(self, head: int, contexts: Tensor, embedded: Tensor, output: OutputLayer | None = None) -> Tensor:
        """Return the logits of a head along a known token sequence.

        Args:
          head: index of the head.
          contexts: (T, H), context vectors of tokens 0 to T - 1.
          embedded: (T, H), embeddings of the same tokens.
          output: see `logits`.

        Returns: (T - 1 - head, V); row t guesses token t + 2 + head.
        """
        count = len(contexts) - 1 - head
        path = [embedded[1 + i : 1 + i + count] for i in range(head + 1)] if self.sees_path else []
        return self.logits(head, torch.cat([contexts[:count], *path], dim=-1), output)


def _needed(output: OutputLayer | None) -> OutputLayer:
    if output is None:
        raise CheckpointError("these heads have no output layers; pass the target's output layer")
    return output


class MedusaHeads(MultiHeads):
    """Heads that guess independently of one another.

    Source: Medusa (Cai et al. 2024, arXiv:2401.10774).
    """

    def __init__(self, shape: HeadsShape, vocabulary: DraftVocabulary | None = None) -> None:
        super().__init__(shape, vocabulary)
        self.blocks = nn.ModuleList(
            repeated(
                lambda: ResidualBlock(shape.hidden_size, has_bias=shape.has_bias), shape.num_layers, shape.is_shared
            )
            for _ in range(shape.num_heads)
        )
        self.lm_heads = self._outputs(bias=False)

    def state(self, head: int, inputs: Tensor) -> Tensor:
        for block in self.blocks[head]:  # type: ignore[attr-defined]
            inputs = block(inputs)
        return inputs

    def forward(self, hidden: Tensor, num_heads: int | None = None, output: OutputLayer | None = None) -> Tensor:
        """Return the logits of the first heads.

        Args:
          hidden: (B, H), input of the target's output layer.
          num_heads: D, the number of heads to run; all by default.
          output: see `logits`.

        Returns: (B, D, V) or (B, D, V_d).
        """
        heads = range(self.num_heads if num_heads is None else num_heads)
        states = [self.state(head, hidden) for head in heads]
        if self.lm_heads:
            return torch.stack([self.lm_heads[i](state) for i, state in zip(heads, states, strict=True)], dim=1)
        return _needed(output)(torch.stack(states, dim=1))


class HydraHeads(MultiHeads):
    """Heads that also read the tokens t + 1 ... t + 1 + k.

    Source: Hydra (Ankner et al. 2024, arXiv:2402.05109); Hydra++ with a prefix layer and deeper MLPs.
    """

    sees_path = True

    def __init__(self, shape: HeadsShape, vocabulary: DraftVocabulary | None = None) -> None:
        super().__init__(shape, vocabulary)
        size = shape.hidden_size
        self.first = nn.ModuleList(ResidualBlock(size, head + 2) for head in range(shape.num_heads))
        self.later = nn.ModuleList(
            repeated(lambda: ResidualBlock(size), shape.num_layers - 1, shape.is_shared)
            for _ in range(shape.num_heads if shape.num_layers > 1 else 0)
        )
        self.lm_heads = self._outputs(bias=True)
        self.prefix = None if shape.prefix is None else PrefixLayer(shape.prefix)

    @property
    def kind(self) -> str:
        return "hydra" if self.prefix is None else "hydra++"

    def state(self, head: int, inputs: Tensor) -> Tensor:
        state: Tensor = self.first[head](inputs)
        for block in self.later[head] if self.later else ():  # type: ignore[union-attr]
            state = block(state)
        return state

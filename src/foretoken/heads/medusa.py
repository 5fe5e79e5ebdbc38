"""Medusa's heads: each guesses one of the next tokens from a hidden state of the target, without seeing the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.errors import CheckpointError
from foretoken.heads.vocabulary import DraftVocabulary

OutputLayer = Callable[[Tensor], Tensor]
"""(..., H) -> (..., V): the target's own."""


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b), with W = 0 at first."""

    def __init__(self, size: int, has_bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size, bias=has_bias)
        nn.init.zeros_(self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(..., H) -> (..., H)."""
        return x + F.silu(self.linear(x))


def repeated(make: Callable[[], nn.Module], times: int, is_shared: bool) -> nn.ModuleList:
    """One module several times, or several modules: the published classes repeat one, whose weights are then shared."""
    first = make()
    return nn.ModuleList([first, *(first if is_shared else make() for _ in range(times - 1))])


@dataclass(frozen=True)
class MedusaShape:
    """The structure of Medusa's heads, as the tensors of a checkpoint show it.

    Args:
      hidden_size: H of the target.
      vocab_size: rows of every output layer; 0 where the target's own layer is used.
      num_heads: K.
      num_layers: residual blocks per head.
      has_bias: of these blocks.
      is_shared: the blocks of a head are one block, repeated.
    """

    hidden_size: int
    vocab_size: int
    num_heads: int
    num_layers: int = 1
    has_bias: bool = True
    is_shared: bool = True


class MedusaHeads(nn.Module):
    """K heads; from the hidden state after token t, head k guesses token t + 2 + k. The target itself says token t + 1.

    Source: Medusa (Cai et al. 2024, arXiv:2401.10774).

    Args:
      shape: their structure.
      vocabulary: which tokens the output layers have rows for; None for all of the target's, or where it has none.
    """

    def __init__(self, shape: MedusaShape, vocabulary: DraftVocabulary | None = None) -> None:
        super().__init__()
        self.shape, self.vocabulary = shape, vocabulary
        self.blocks = nn.ModuleList(
            repeated(lambda: ResidualBlock(shape.hidden_size, shape.has_bias), shape.num_layers, shape.is_shared)
            for _ in range(shape.num_heads)
        )
        outputs = [
            nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
            for _ in range(shape.num_heads if shape.vocab_size else 0)
        ]
        self.lm_heads = nn.ModuleList(outputs)

    def reduced(self, vocabulary: DraftVocabulary, rows_of: Callable[[nn.Module], nn.Module]) -> MedusaHeads:
        """The same heads with some rows of their output layers; the blocks are shared.

        Args:
          rows_of: the layer of these tokens, of an output layer of all.
        """
        other = MedusaHeads.__new__(MedusaHeads)
        nn.Module.__init__(other)
        other.shape, other.vocabulary, other.blocks = self.shape, vocabulary, self.blocks
        other.lm_heads = nn.ModuleList(map(rows_of, self.lm_heads))
        return other

    @property
    def num_heads(self) -> int:
        return self.shape.num_heads

    @property
    def needs_output_layer(self) -> bool:
        """Whether the target's output layer turns their states into logits."""
        return not self.shape.vocab_size

    @property
    def dtype(self) -> torch.dtype:
        weight: Tensor = self.blocks[0][0].linear.weight  # type: ignore[index]
        return weight.dtype

    def state(self, head: int, hidden: Tensor) -> Tensor:
        """What head ``head`` makes of hidden states, (..., H) -> (..., H)."""
        for block in self.blocks[head]:  # type: ignore[attr-defined]
            hidden = block(hidden)
        return hidden

    def logits(self, head: int, hidden: Tensor, output: OutputLayer | None = None) -> Tensor:
        """What one head says: (M, H) -> (M, V); see `forward`."""
        state = self.state(head, hidden)
        if self.lm_heads:
            own: Tensor = self.lm_heads[head](state)
            return own
        if output is None:
            raise CheckpointError("these heads have no output layers; give the target's")
        return output(state)

    def forward(self, hidden: Tensor, num_heads: int | None = None, output: OutputLayer | None = None) -> Tensor:
        """Logits of the first heads.

        Args:
          hidden: (B, H), the input of the target's output layer.
          num_heads: D, how many; all by default.
          output: the target's output layer, for heads without their own.

        Returns: (B, D, V), or V_d where the output layers have rows for a part of the vocabulary.
        """
        heads = range(self.num_heads if num_heads is None else num_heads)
        states = [self.state(head, hidden) for head in heads]
        if self.lm_heads:
            return torch.stack([self.lm_heads[i](state) for i, state in zip(heads, states, strict=True)], dim=1)
        if output is None:
            raise CheckpointError("these heads have no output layers; give the target's")
        return output(torch.stack(states, dim=1))

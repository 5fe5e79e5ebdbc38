"""Hydra's heads: like Medusa's, but each also sees the tokens that were drafted before the one it guesses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.errors import CheckpointError
from foretoken.heads.layers import DecoderLayer, LayerShape, Placed, RMSNorm, Rotary
from foretoken.heads.medusa import OutputLayer, ResidualBlock, repeated
from foretoken.heads.vocabulary import DraftVocabulary


@dataclass(frozen=True)
class HydraShape:
    """The structure of Hydra's heads, as the tensors of a checkpoint show it.

    Args:
      hidden_size: H of the target.
      vocab_size: rows of every output layer; 0 where the target's own layer is used.
      num_heads: K.
      num_layers: of the MLP of a head, the first included.
      is_shared: the later layers of a head are one, repeated, as in the published checkpoints.
      prefix: the layer that attends to what comes before (Hydra++); None without one.
      offset: which hidden state of the target is read: m layers before the last; 0 for the last, after the final norm.
    """

    hidden_size: int
    vocab_size: int
    num_heads: int
    num_layers: int = 1
    is_shared: bool = True
    prefix: LayerShape | None = None
    offset: int = 0


class FirstLayer(nn.Module):
    """R x + r + SiLU(W x + w) from several vectors side by side to one, with W = 0 at first."""

    def __init__(self, num_inputs: int, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(num_inputs * size, size)
        self.res_connection = nn.Linear(num_inputs * size, size)
        nn.init.zeros_(self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(..., n H) -> (..., H)."""
        mixed: Tensor = self.res_connection(x) + F.silu(self.linear(x))
        return mixed


class PrefixLayer(nn.Module):
    """Hydra++: a decoder layer with its final norm, run causally over the target's hidden states."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.shape = shape
        self.rotary = Rotary(shape)
        self.layer = DecoderLayer(shape)
        self.norm = RMSNorm(shape.hidden_size, shape.eps)

    def placed(self, positions: Tensor, dtype: torch.dtype, mask: Tensor | None, cache: Any = None) -> Placed:
        """Where hidden states stand: positions (B, N), and what they may look at; see `Placed`."""
        cos, sin = self.rotary(positions, dtype)
        return Placed(cos, sin, mask, cache)

    def forward(self, hidden: Tensor, placed: Placed) -> Tensor:
        """(B, N, H) -> (B, N, H)."""
        normed: Tensor = self.norm(self.layer(hidden, placed))
        return normed


class HydraHeads(nn.Module):
    """K heads; head k guesses token t + 2 + k from the target's state after token t and the tokens t + 1 ... t + 1 + k.

    Source: Hydra (Ankner et al. 2024, arXiv:2402.05109); Hydra++ with a prefix layer and deeper MLPs.

    Args:
      shape: their structure.
      vocabulary: which tokens they can draft; None for all of the target's.
    """

    def __init__(self, shape: HydraShape, vocabulary: DraftVocabulary | None = None) -> None:
        super().__init__()
        self.shape, self.vocabulary = shape, vocabulary
        size = shape.hidden_size
        self.first = nn.ModuleList(FirstLayer(head + 2, size) for head in range(shape.num_heads))
        self.later = nn.ModuleList(
            repeated(lambda: ResidualBlock(size), shape.num_layers - 1, shape.is_shared)
            for _ in range(shape.num_heads if shape.num_layers > 1 else 0)
        )
        outputs = [nn.Linear(size, shape.vocab_size) for _ in range(shape.num_heads if shape.vocab_size else 0)]
        self.lm_heads = nn.ModuleList(outputs)
        self.prefix = None if shape.prefix is None else PrefixLayer(shape.prefix)

    def reduced(self, vocabulary: DraftVocabulary, rows_of: Callable[[nn.Module], nn.Module]) -> HydraHeads:
        """The same heads with some rows of their output layers; everything else is shared.

        Args:
          rows_of: the layer of these tokens, of an output layer of all.
        """
        other = HydraHeads.__new__(HydraHeads)
        nn.Module.__init__(other)
        other.shape, other.vocabulary, other.prefix = self.shape, vocabulary, self.prefix
        other.first, other.later = self.first, self.later
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
    def _weight(self) -> Tensor:
        weight: Tensor = self.first[0].linear.weight  # type: ignore[union-attr, assignment]
        return weight

    @property
    def dtype(self) -> torch.dtype:
        return self._weight.dtype

    @property
    def device(self) -> torch.device:
        return self._weight.device

    def state(self, head: int, inputs: Tensor) -> Tensor:
        """What an output layer reads of head ``head``: (M, (head + 2) H) -> (M, H); see `logits`."""
        state: Tensor = self.first[head](inputs)
        for block in self.later[head] if self.later else ():  # type: ignore[union-attr]
            state = block(state)
        return state

    def logits(self, head: int, inputs: Tensor, output: OutputLayer | None = None) -> Tensor:
        """What head ``head`` says.

        Args:
          inputs: (M, (head + 2) H): the context vector, then the embeddings of the pending token and of the ``head``
            drafted ones after it.
          output: the target's output layer, for heads without their own.

        Returns: (M, V), or V_d.
        """
        state = self.state(head, inputs)
        if self.lm_heads:
            own: Tensor = self.lm_heads[head](state)
            return own
        if output is None:
            raise CheckpointError("these heads have no output layers; give the target's")
        return output(state)

    def contexts(self, hidden: Tensor) -> Tensor:
        """Context vectors of a whole text at once, (T, H) -> (T, H): the states themselves, or what the prefix layer
        makes of them."""
        if self.prefix is None:
            return hidden
        length = len(hidden)
        mask = torch.ones(length, length, dtype=torch.bool, device=hidden.device).tril()[None, None]
        positions = torch.arange(length, device=hidden.device)[None]
        mixed: Tensor = self.prefix(hidden[None], self.prefix.placed(positions, hidden.dtype, mask))
        return mixed[0]

    def inputs_along(self, head: int, contexts: Tensor, embedded: Tensor) -> Tensor:
        """What a head reads along a text that is known, (T - 1 - head, (head + 2) H); see `along`."""
        count = len(contexts) - 1 - head
        return torch.cat([contexts[:count], *(embedded[1 + i : 1 + i + count] for i in range(head + 1))], dim=-1)

    def along(self, head: int, contexts: Tensor, embedded: Tensor, output: OutputLayer | None = None) -> Tensor:
        """What a head says along a text that is known.

        Args:
          contexts: (T, H), of tokens 0 to T - 1.
          embedded: (T, H), of the same tokens.
          output: as for `logits`.

        Returns: (T - 1 - head, V): row t guesses token t + 2 + head.
        """
        return self.logits(head, self.inputs_along(head, contexts, embedded), output)

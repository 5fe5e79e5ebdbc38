"""Heads of Medusa, Hydra and Hydra++: each guesses one of the next tokens from what the target has computed.

Medusa's look at a hidden state alone, without seeing one another; Hydra's see the tokens drafted before theirs, too.
"""

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
"""(..., H) -> (..., V): the target's own."""


@dataclass(frozen=True)
class HeadsShape:
    """The structure of heads, as the tensors of a checkpoint show it.

    Args:
      hidden_size: H of the target.
      vocab_size: rows of every output layer; 0 where the target's own layer is used.
      num_heads: K.
      num_layers: residual blocks of a head of Medusa; of Hydra, layers of the MLP of a head, the first included.
      is_shared: the blocks of a head, of Hydra the later layers, are one, repeated, as in the published checkpoints.
      has_bias: of Medusa's blocks.
      prefix: the layer that attends to what comes before (Hydra++); None without one.
      offset: of Hydra, which hidden state of the target is read: m layers before the last; 0 for the last, after the
        final norm.
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
    """x + SiLU(W x + b), with W = 0 at first; R x + r in the place of x where several vectors side by side become one.

    Args:
      size: H.
      num_inputs: n, vectors side by side.
      has_bias: whether there is a b.
    """

    def __init__(self, size: int, num_inputs: int = 1, *, has_bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(num_inputs * size, size, bias=has_bias)
        self.res_connection = nn.Linear(num_inputs * size, size) if num_inputs > 1 else nn.Identity()
        nn.init.zeros_(self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(..., n H) -> (..., H)."""
        mixed: Tensor = self.res_connection(x) + F.silu(self.linear(x))
        return mixed


def repeated(make: Callable[[], nn.Module], times: int, is_shared: bool) -> nn.ModuleList:
    """One module several times, or several modules: the published classes repeat one, whose weights are then shared."""
    first = make()
    return nn.ModuleList([first, *(first if is_shared else make() for _ in range(times - 1))])


class PrefixLayer(nn.Module):
    """Hydra++: a decoder layer with its final norm, run causally over the target's hidden states."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.shape = shape
        self.rotary = Rotary(shape)
        self.layer = DecoderLayer(shape)
        self.norm = nn.RMSNorm(shape.hidden_size, shape.eps)

    def placed(self, positions: Tensor, dtype: torch.dtype, mask: Tensor | None, cache: Any = None) -> AttentionContext:
        """The context of attention for hidden states at positions (B, N)."""
        cos, sin = self.rotary(positions, dtype)
        return AttentionContext(cos, sin, mask, cache)

    def forward(self, hidden: Tensor, placed: AttentionContext) -> Tensor:
        """(B, N, H) -> (B, N, H)."""
        normed: Tensor = self.norm(self.layer(hidden, placed))
        return normed


class MultiHeads(nn.Module):
    """K heads; from the state after token t, head k guesses token t + 2 + k. The target itself says token t + 1.

    Args:
      shape: their structure.
      vocabulary: which tokens the output layers have rows for; None for all of the target's, or where it has none.

    Attributes:
      sees_path: whether a head is given the tokens that stand before its guess.
      prefix: a layer that attends to what comes before; None without one.
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
        """The same heads with some rows of their output layers; everything else is shared.

        Args:
          rows_of: the layer of these tokens, of an output layer of all.
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
        """The method of such heads."""
        return "medusa"

    @property
    def num_heads(self) -> int:
        return self.shape.num_heads

    @property
    def offset(self) -> int:
        """Which hidden state of the target is read: so many layers before the last."""
        return self.shape.offset

    @property
    def needs_output_layer(self) -> bool:
        """Whether the target's output layer turns their states into logits."""
        return not self.shape.vocab_size

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @abstractmethod
    def state(self, head: int, inputs: Tensor) -> Tensor:
        """What an output layer reads of head ``head``, (M, n H) -> (M, H); see `logits`."""

    def logits(self, head: int, inputs: Tensor, output: OutputLayer | None = None) -> Tensor:
        """What head ``head`` says.

        Args:
          inputs: (M, H), context vectors; of heads that see the path (M, (head + 2) H): behind each the embeddings of
            the pending token and of the ``head`` drafted ones after it.
          output: the target's output layer, for heads without their own.

        Returns: (M, V), or V_d where the output layers have rows for a part of the vocabulary.
        """
        state = self.state(head, inputs)
        if self.lm_heads:
            own: Tensor = self.lm_heads[head](state)
            return own
        return _needed(output)(state)

    def contexts(self, hidden: Tensor) -> Tensor:
        """Context vectors of whole texts at once, (..., T, H) -> (..., T, H): the states themselves, or what the prefix
        layer makes of them."""
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
        """What a head says along a text that is known.

        Args:
          contexts: (T, H), of tokens 0 to T - 1.
          embedded: (T, H), of the same tokens.
          output: as for `logits`.

        Returns: (T - 1 - head, V): row t guesses token t + 2 + head.
        """
        count = len(contexts) - 1 - head
        path = [embedded[1 + i : 1 + i + count] for i in range(head + 1)] if self.sees_path else []
        return self.logits(head, torch.cat([contexts[:count], *path], dim=-1), output)


def _needed(output: OutputLayer | None) -> OutputLayer:
    if output is None:
        raise CheckpointError("these heads have no output layers; give the target's")
    return output


class MedusaHeads(MultiHeads):
    """Heads that do not see one another.

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
        """Logits of the first heads.

        Args:
          hidden: (B, H), the input of the target's output layer.
          num_heads: D, how many; all by default.
          output: as for `logits`.

        Returns: (B, D, V), or V_d.
        """
        heads = range(self.num_heads if num_heads is None else num_heads)
        states = [self.state(head, hidden) for head in heads]
        if self.lm_heads:
            return torch.stack([self.lm_heads[i](state) for i, state in zip(heads, states, strict=True)], dim=1)
        return _needed(output)(torch.stack(states, dim=1))


class HydraHeads(MultiHeads):
    """Heads that see the tokens t + 1 ... t + 1 + k, too.

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

"""The parts that heads are made of: a decoder layer in the manner of Llama, whose keys and values lie in any cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, LlamaConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from foredraft.errors import CheckpointError
from foredraft.model.execution.attention import grouped_sdpa
from foredraft.model.nodes import FlatNodes

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary positions whose angles do not depend on the length of the text."""


@dataclass(frozen=True)
class LayerShape:
    """Sizes and settings of a decoder layer.

    Args:
      hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim: as in transformers' configs.
      eps: of the norms.
      activation: transformers' name of it.
      rope: transformers' ``rope_parameters``: ``rope_type``, ``rope_theta`` and what the type takes.
      has_bias: of the projections of queries, keys and values.
      has_head_norms: norms of queries and keys by head (Qwen3).
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float = 1e-6
    activation: str = "silu"
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    has_bias: bool = False
    has_head_norms: bool = False

    @property
    def kv_numbers(self) -> int:
        """How many numbers keys and values of one token are."""
        return 2 * self.num_kv_heads * self.head_dim

    @classmethod
    def of(cls, config: Any) -> LayerShape:
        """That of the decoder layers of a target, by its config."""
        num_heads = config.num_attention_heads
        rope = dict(getattr(config, "rope_parameters", None) or {"rope_theta": 10000.0})
        return cls(
            hidden_size=config.hidden_size,
            intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
            num_heads=num_heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
            eps=getattr(config, "rms_norm_eps", None) or 1e-6,
            rope=rope if "rope_theta" in rope else {"rope_theta": 10000.0},
        )


class Rotary(nn.Module):
    """Cosines and sines of positions, computed as they are asked for: no table ends where a context was trained to.

    Raises: CheckpointError for kinds of rotary positions that depend on the length of the text.
    """

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        kind = shape.rope.get("rope_type", "default")
        if kind not in ROPE_TYPES:
            raise CheckpointError(f"rope_type is {kind!r}; heads take {', '.join(ROPE_TYPES)}")
        theta = float(shape.rope.get("rope_theta", 10000.0))
        self.factor = 1.0
        self._cast: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        powers = torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
        self._frequencies = theta**-powers
        if kind != "default":
            config = LlamaConfig(
                hidden_size=shape.hidden_size,
                num_attention_heads=shape.num_heads,
                head_dim=shape.head_dim,
                rope_parameters=dict(shape.rope),
            )
            frequencies, self.factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
            self._frequencies = frequencies.double()

    @property
    def frequencies(self) -> Tensor:
        """Of every pair of a head's numbers, float64 (head_dim / 2,): the angle of position 1."""
        return self._frequencies

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Positions (B, N) -> cosines and sines (B, 1, N, head_dim) of this dtype."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        frequencies = self._cast.get((positions.device, wide))
        if frequencies is None:
            frequencies = torch.cat([self._frequencies, self._frequencies]).to(positions.device, wide)
            self._cast[positions.device, wide] = frequencies
        angles = positions[:, None, :, None].to(wide) * frequencies
        cos, sin = angles.cos(), angles.sin()
        if self.factor != 1.0:
            cos, sin = cos * self.factor, sin * self.factor
        return cos.to(dtype), sin.to(dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(B, heads, N, head_dim), its halves turned against one another."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


@dataclass(frozen=True)
class AttentionContext:
    """Where the nodes of a forward stand, and what they may look at.

    Args:
      cos, sin: of their positions.
      mask: bool or additive (B, 1, N, T); None where all see everything.
      cache: of keys and values; None where there is nothing before these nodes.
      flat: where the nodes come as one list (1, S) of the real nodes of all rows.
    """

    cos: Tensor
    sin: Tensor
    mask: Tensor | None = None
    cache: Cache | None = None
    flat: FlatNodes | None = None


class Attention(nn.Module):
    """Grouped self-attention with rotary positions.

    Args:
      in_size: of what queries, keys and values are made of.
      index: of the layer in the cache.
    """

    def __init__(self, shape: LayerShape, in_size: int, index: int) -> None:
        super().__init__()
        self.index, self.head_dim = index, shape.head_dim
        width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(in_size, width, bias=shape.has_bias)
        self.k_proj = nn.Linear(in_size, kv_width, bias=shape.has_bias)
        self.v_proj = nn.Linear(in_size, kv_width, bias=shape.has_bias)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(shape.head_dim, shape.eps) if shape.has_head_norms else None
        self.k_norm = nn.RMSNorm(shape.head_dim, shape.eps) if shape.has_head_norms else None

    def forward(self, x: Tensor, placed: AttentionContext) -> Tensor:
        """(B, N, in) -> (B, N, H)."""
        queries, keys, values = (self._by_head(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        both = rotated(torch.cat([queries, keys], dim=1), placed.cos, placed.sin)
        queries, keys = both[:, : queries.shape[1]], both[:, queries.shape[1] :]
        if placed.cache is not None:
            keys, values = placed.cache.update(keys, values, self.index)
        flat = placed.flat
        if flat is not None:  # attention runs over rows, everything else over the list
            queries = flat.spread(queries[0].transpose(0, 1)).transpose(1, 2)
        seen, _ = grouped_sdpa(self, queries, keys, values, placed.mask, is_causal=False)
        if flat is not None:
            seen = flat.listed(seen)[None]
        mixed: Tensor = self.o_proj(seen.flatten(2))
        return mixed

    @property
    def sharing_input(self) -> tuple[nn.Linear, ...]:
        """Layers that are given the same tensor."""
        return self.q_proj, self.k_proj, self.v_proj

    def _by_head(self, x: Tensor) -> Tensor:
        """(B, N, heads * head_dim) -> (B, heads, N, head_dim)."""
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)


class MLP(nn.Module):
    """The gated feed-forward network of Llama."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)
        self._act = ACT2FN[shape.activation]

    @property
    def sharing_input(self) -> tuple[nn.Linear, ...]:
        """Layers that are given the same tensor."""
        return self.gate_proj, self.up_proj

    def forward(self, x: Tensor) -> Tensor:
        """(..., H) -> (..., H)."""
        mixed: Tensor = self.down_proj(self._act(self.gate_proj(x)) * self.up_proj(x))
        return mixed


class DecoderLayer(nn.Module):
    """Attention and MLP around a residual stream.

    Args:
      has_input_norm: without one, attention reads the stream as it is (EAGLE-1).
    """

    def __init__(self, shape: LayerShape, index: int = 0, *, has_input_norm: bool = True) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, shape.eps) if has_input_norm else None
        self.self_attn = Attention(shape, shape.hidden_size, index)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, shape.eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, placed: AttentionContext) -> Tensor:
        """(B, N, H) -> (B, N, H)."""
        x = x + self.self_attn(x if self.input_layernorm is None else self.input_layernorm(x), placed)
        mixed: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return mixed

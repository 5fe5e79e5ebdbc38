"""Parts of heads: a Llama-style decoder layer whose keys and values are stored in any cache."""

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
"""Rotary types whose angles do not depend on the context length."""


@dataclass(frozen=True)
class LayerShape:
    """Sizes and settings of a decoder layer.

    Args:
      hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim: sizes, as in the configs of transformers.
      eps: epsilon of the norms.
      activation: name of the activation in transformers.
      rope: ``rope_parameters`` of transformers: ``rope_type``, ``rope_theta`` and the parameters of the type.
      has_bias: True if the projections of queries, keys and values have a bias.
      has_head_norms: True if queries and keys are normed per head (Qwen3).
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
        """Number of values in the keys and values of one token."""
        return 2 * self.num_kv_heads * self.head_dim

    @classmethod
    def of(cls, config: Any) -> LayerShape:
        """Return the shape of a target's decoder layers, from its config."""
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
    """Cosines and sines of positions, computed on demand, so that no table limits the context.

    Raises: CheckpointError for rotary types that depend on the context length.
    """

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        kind = shape.rope.get("rope_type", "default")
        if kind not in ROPE_TYPES:
            raise CheckpointError(f"rope_type is {kind!r}; heads support {', '.join(ROPE_TYPES)}")
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
        """Angle of position 1 for every pair of values of an attention head, float64 (head_dim / 2,)."""
        return self._frequencies

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and sines (B, 1, N, head_dim) of positions (B, N) in this dtype."""
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
    """Apply rotary positions to x (B, heads, N, head_dim), pairing its first half with its second half."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


@dataclass(frozen=True)
class AttentionContext:
    """Positions, mask and cache of the nodes of a forward pass.

    Args:
      cos, sin: cosines and sines of the positions.
      mask: bool or additive (B, 1, N, T); None if every node attends to everything.
      cache: cache of keys and values; None if there is nothing before these nodes.
      flat: layout of the nodes if they are given as one list (1, S) of the real nodes of all rows; else None.
    """

    cos: Tensor
    sin: Tensor
    mask: Tensor | None = None
    cache: Cache | None = None
    flat: FlatNodes | None = None


class Attention(nn.Module):
    """Grouped self-attention with rotary positions.

    Args:
      shape: sizes of the layer.
      in_size: size of the input of queries, keys and values.
      index: index of the layer in the cache.
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
        """Return (B, N, H) from (B, N, in)."""
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
        """Layers with the same input."""
        return self.q_proj, self.k_proj, self.v_proj

    def _by_head(self, x: Tensor) -> Tensor:
        """Reshape (B, N, heads * head_dim) to (B, heads, N, head_dim)."""
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)


class MLP(nn.Module):
    """Gated feed-forward network of Llama."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)
        self._act = ACT2FN[shape.activation]

    @property
    def sharing_input(self) -> tuple[nn.Linear, ...]:
        """Layers with the same input."""
        return self.gate_proj, self.up_proj

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., H) from (..., H)."""
        mixed: Tensor = self.down_proj(self._act(self.gate_proj(x)) * self.up_proj(x))
        return mixed


class DecoderLayer(nn.Module):
    """Decoder layer with attention and MLP around a residual stream.

    Args:
      shape: sizes of the layer.
      index: index of the layer in the cache.
      has_input_norm: False if attention reads the residual stream without a norm (EAGLE-1).
    """

    def __init__(self, shape: LayerShape, index: int = 0, *, has_input_norm: bool = True) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, shape.eps) if has_input_norm else None
        self.self_attn = Attention(shape, shape.hidden_size, index)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, shape.eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, placed: AttentionContext) -> Tensor:
        """Return (B, N, H) from (B, N, H)."""
        x = x + self.self_attn(x if self.input_layernorm is None else self.input_layernorm(x), placed)
        mixed: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return mixed

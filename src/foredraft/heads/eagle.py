"""EAGLE heads: one decoder layer that predicts the target's next feature from its last features and the next token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from foredraft.errors import ConfigError
from foredraft.heads.layers import MLP, Attention, AttentionContext, DecoderLayer, LayerShape, Rotary
from foredraft.heads.vocabulary import DraftVocabulary


@dataclass(frozen=True)
class EagleShape:
    """Structure of an EAGLE head.

    Args:
      generation: 1 for EAGLE-1 and 2, which extrapolate the last hidden state; 3 for EAGLE-3, which fuses several
        streams.
      layer: sizes of the decoder layers.
      target_size: H of the target.
      streams: features that the head reads, as indices of the target's layers; the feature is the input of the layer.
        The number of the target's layers means the last hidden state after the final norm, the only stream of EAGLE-1
        and 2.
      num_layers_of_target: L of the target.
      num_layers: number of decoder layers; layers after the first read only the residual stream.
      has_fc_bias: True if the fusing layer has a bias.
      embed_norm, input_norm, output_norm: True for norms after the embedding, before attention and before the output
        layer, as in later variants of EAGLE-1.
      norm_before_residual: True if the residual is the normed feature (speculators).
      norm_before_fc: True for one norm over all streams side by side (gpt-oss, EAGLE-3.1).
      fc_norm: True for one norm per stream (EAGLE-3.1).
      norm_output: True if the normed output is fed back (EAGLE-3.1).
      own_embedding: number of rows of an input embedding that differs from the target's; 0 for none.
      shares_output: True if the head has no output layer, and uses the rows of the target's that its vocabulary names.
    """

    generation: int
    layer: LayerShape
    target_size: int
    streams: tuple[int, ...]
    num_layers_of_target: int
    num_layers: int = 1
    has_fc_bias: bool = False
    embed_norm: bool = False
    input_norm: bool = False
    output_norm: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    own_embedding: int = 0
    shares_output: bool = False

    @property
    def reads_last_hidden(self) -> bool:
        return self.num_layers_of_target in self.streams

    @property
    def layer_inputs(self) -> tuple[int, ...]:
        """Layers of the target whose inputs are read, in order."""
        return tuple(sorted(set(self.streams) - {self.num_layers_of_target}))


def default_streams(num_layers: int) -> tuple[int, ...]:
    """Return the layers whose inputs EAGLE-3 reads: 2, L//2 and L-3. If two of these are the same layer, a neighbour
    replaces one.

    30 layers give (2, 15, 27), and 5 layers give (2, 3, 4). For 2 to 4 layers the last stream is the last hidden
    state: (0, 1, 2), (0, 2, 3), (2, 3, 4).

    Raises: ConfigError for a target of one layer, which does not have three streams.
    """
    if num_layers < 2:
        raise ConfigError(
            f"the target has {num_layers} layer, and EAGLE-3 needs features from three layers; use 'eagle' or 'eagle2'"
        )
    if num_layers < 4:
        return (0, num_layers - 1, num_layers)
    middle = max(3, num_layers // 2)
    return (2, middle, max(middle + 1, num_layers - 3))


class EagleHead(nn.Module):
    """Head of EAGLE-1, 2 or 3.

    Entry t of the head's cache is computed from the target's feature after token t and from token t + 1, at position t.
    The output of the head predicts the token after token t + 1.

    Source: EAGLE (Li et al. 2024, arXiv:2401.15077); EAGLE-3 (Li et al. 2025, arXiv:2503.01840).

    Args:
      shape: structure of the head.
      vocabulary: tokens that the head drafts, for its own output layer or for rows of the target's; None for all
        tokens of the target.

    Attributes:
      first_token_acceptance: share of drafts whose first token the target accepted in validation, if the checkpoint
        contains it.
    """

    def __init__(self, shape: EagleShape, vocabulary: DraftVocabulary | None = None) -> None:
        super().__init__()
        self.shape, self.vocabulary = shape, vocabulary
        self.first_token_acceptance: float | None = None
        size, eps = shape.layer.hidden_size, shape.layer.eps
        self.rotary = Rotary(shape.layer)
        self.embed_tokens = nn.Embedding(shape.own_embedding, size) if shape.own_embedding else None
        self.embed_norm = nn.RMSNorm(size, eps) if shape.embed_norm else None
        if shape.generation == 1:
            self.fc = nn.Linear(2 * size, size, bias=shape.has_fc_bias)
            layers: list[nn.Module] = [
                DecoderLayer(shape.layer, i, has_input_norm=shape.input_norm or i > 0) for i in range(shape.num_layers)
            ]
        else:
            self.fc = nn.Linear(len(shape.streams) * shape.target_size, size, bias=shape.has_fc_bias)
            layers = [FusedLayer(shape), *(DecoderLayer(shape.layer, i) for i in range(1, shape.num_layers))]
        self.layers = nn.ModuleList(layers)
        width = len(shape.streams) * shape.target_size
        self.input_norm = nn.RMSNorm(width, eps) if shape.norm_before_fc else None
        each = [nn.RMSNorm(shape.target_size, eps) for _ in shape.streams] if shape.fc_norm else None
        self.fc_norm = None if each is None else nn.ModuleList(each)
        self.norm = nn.RMSNorm(size, eps) if shape.generation == 3 or shape.output_norm else None
        has_output = vocabulary is not None and not shape.shares_output
        self.lm_head = nn.Linear(size, len(vocabulary), bias=False) if vocabulary is not None and has_output else None

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def features(self, streams: Tensor) -> Tensor:
        """Return the features (..., H) that the head reads, from the target's streams (..., streams * H of the
        target).
        """
        if self.shape.generation == 1:
            return streams
        if self.input_norm is not None:
            streams = self.input_norm(streams)
        if self.fc_norm is not None:
            parts = streams.chunk(len(self.shape.streams), dim=-1)
            streams = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        fused: Tensor = self.fc(streams)
        return fused

    def forward(self, embedded: Tensor, features: Tensor, placed: AttentionContext) -> Tensor:
        """Run one step.

        Args:
          embedded: (B, N, H), embeddings of the next tokens.
          features: (B, N, H), from `features` for committed tokens, else the outputs of this method for the parents.
          placed: positions, mask and cache.

        Returns: (B, N, H), the features for the children of these nodes, which are also the input of `before_output`.
        """
        if self.embed_norm is not None:
            embedded = self.embed_norm(embedded)
        if self.shape.generation == 1:
            x = self.fc(torch.cat([embedded, features], dim=-1))
            for layer in self.layers:
                x = layer(x, placed)
        else:
            x = self.layers[0](embedded, features, placed)
            for layer in list(self.layers)[1:]:
                x = layer(x, placed)
        if self.norm is not None and self.shape.norm_output:
            x = self.norm(x)
        result: Tensor = x
        return result

    def place(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of positions (B, N)."""
        cos, sin = self.rotary(positions, self.dtype)
        return cos, sin

    def before_output(self, outputs: Tensor) -> Tensor:
        """Return the input (..., H) of the output layer, the head's own or the target's."""
        if self.norm is None or self.shape.norm_output:
            return outputs
        normed: Tensor = self.norm(outputs)
        return normed


class FusedLayer(nn.Module):
    """First layer of EAGLE-3. The queries, keys and values of this layer are computed from the embedding and the
    feature, concatenated."""

    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        size, eps = shape.layer.hidden_size, shape.layer.eps
        self.input_layernorm = nn.RMSNorm(size, eps)
        self.hidden_norm = nn.RMSNorm(size, eps)
        self.self_attn = Attention(shape.layer, 2 * size, 0)
        self.post_attention_layernorm = nn.RMSNorm(size, eps)
        self.mlp = MLP(shape.layer)
        self._normed_residual = shape.norm_before_residual

    def forward(self, embedded: Tensor, features: Tensor, placed: AttentionContext) -> Tensor:
        """Return (B, N, H) from embeddings and features (B, N, H)."""
        normed = self.hidden_norm(features)
        residual = normed if self._normed_residual else features
        x = residual + self.self_attn(torch.cat([self.input_layernorm(embedded), normed], dim=-1), placed)
        mixed: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return mixed

"""Enlargement of a trained small model to a bigger one that computes the same function.

An inflated model gives the output, and so the acceptance rate, of the small model at the forward cost of the bigger
size. Results measured with an inflated model must be labelled as such; `inflated_from` returns the original shape.

How the function stays the same (h and H: old and new hidden size; eps and w of an RMSNorm; x the residual stream):

- Every weight is the old one, followed by zeros in each dimension. New channels of the residual stream therefore stay
  zero.
- The mean of x^2 over H entries is h/H times the old mean. So ``eps' = eps h/H`` and ``w' = w sqrt(h/H)`` give the old
  result: x / sqrt(h/H (mean + eps)) * w sqrt(h/H).
- Heads keep their size, because the rotary embedding depends on it, and the number of query heads per key head. New
  heads have zero queries, keys, values and output columns, and come after the old ones.
- Added layers, on demand, copy old ones with zero output projections, so they add nothing to the residual stream.
- Added vocabulary gets logits far below the others, through one spare channel; see `_spare_channel`.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, MistralForCausalLM, PreTrainedModel, Qwen2ForCausalLM, Qwen3ForCausalLM

from foredraft.errors import ConfigError, UnsupportedModelError

__all__ = ["inflate", "inflated_from"]

_SUPPORTED = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
_HIDDEN_NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight")
_OUTPUTS = ("o_proj.weight", "o_proj.bias", "down_proj.weight", "down_proj.bias")
_PADDING_LOGIT_WEIGHT = -(2.0**20)


def inflate(
    model: PreTrainedModel,
    *,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int | None = None,
    vocab_size: int | None = None,
) -> Any:
    """Return a wider model of the same class, dtype and device that computes the same function.

    The number of heads grows with ``hidden_size``, so the share of attention in the cost stays the same. By default
    only widths grow: added layers do nothing, so a layer-skipping drafter would gain from leaving them out.

    A dense matrix product takes as long for zeros as for other numbers. The zeros are written to memory: untouched zero
    pages would all be one page, and reads of that page would come from the CPU cache.

    Args:
        model: a Llama, Mistral, Qwen2 or Qwen3 causal LM. The given model is not changed.
        hidden_size: new width H, at least the old one, and a multiple of the width of one key head with its query
          heads.
        intermediate_size: new MLP width >= the old one.
        num_layers: new depth >= the old one; the added layers do nothing.
        vocab_size: new vocabulary >= the old one. The added tokens have a logit below about -500 and so probability
          zero. Widening requires ``hidden_size`` above the old one, for a spare channel. Embeddings are untied.

    Returns:
        The new model in evaluation mode; `inflated_from` returns its original shape.

    Raises:
        UnsupportedModelError: another class of model.
        ConfigError: a size below the old one, or a width that gives no whole number of key heads.

    Exactness: equal up to the rounding of the dtype. Ratios H/h of 4 and 16 scale every intermediate value by an exact
      power of two. Other ratios round the norm weights once. Qwen3's head norms keep their epsilon in memory, but not
    through ``save_pretrained``, where one config entry serves all norms (a change near 1e-6).
    """
    if type(model) not in _SUPPORTED:
        known = ", ".join(kind.__name__ for kind in _SUPPORTED)
        raise UnsupportedModelError(
            f"a model of type {model.config.model_type} cannot be inflated: foredraft does not know how its output "
            f"depends on its width. Use {known}."
        )
    config = _bigger_config(model.config, hidden_size, intermediate_size, num_layers, vocab_size)
    spare = _spare_channel(model.config, config)
    if spare is not None:
        config.rms_norm_eps -= spare**2 / config.hidden_size
    bigger = type(model)(config).to(device=model.device, dtype=model.dtype)
    _fill(bigger, model)
    _keep_head_norms(bigger, model)
    if spare is not None:
        _push_padding_down(bigger, model.config.vocab_size, spare)
    bigger.generation_config = copy.deepcopy(model.generation_config)
    return bigger.eval().requires_grad_(False)


def inflated_from(model: PreTrainedModel) -> dict[str, int] | None:
    """Return the shape that a model had before `inflate`, for benchmark reports; None if it was not inflated."""
    shape: dict[str, int] | None = getattr(model.config, "inflated_from", None)
    return shape


def _bigger_config(old: Any, hidden: int, ffn: int, layers: int | None, vocab: int | None) -> Any:
    head_dim = _head_dim(old)
    layers = old.num_hidden_layers if layers is None else layers
    vocab = old.vocab_size if vocab is None else vocab
    for name, size, least in (
        ("hidden_size", hidden, old.hidden_size),
        ("intermediate_size", ffn, old.intermediate_size),
        ("num_layers", layers, old.num_hidden_layers),
        ("vocab_size", vocab, old.vocab_size),
    ):
        if size < least:
            raise ConfigError(
                f"{name}={size} is below the model's {least}; a model can only be enlarged. Use {least} or more."
            )
    num_heads, num_kv_heads = _heads(old, hidden)
    config = copy.deepcopy(old)
    config.hidden_size, config.intermediate_size = hidden, ffn
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = num_heads, num_kv_heads, head_dim
    config.rms_norm_eps = old.rms_norm_eps * old.hidden_size / hidden
    if layers > old.num_hidden_layers and getattr(old, "layer_types", None):
        config.layer_types = [*old.layer_types, *[old.layer_types[-1]] * (layers - old.num_hidden_layers)]
    config.num_hidden_layers, config.vocab_size = layers, vocab
    if vocab > old.vocab_size:
        config.tie_word_embeddings = False
    config.inflated_from = {
        "hidden_size": old.hidden_size,
        "intermediate_size": old.intermediate_size,
        "num_hidden_layers": old.num_hidden_layers,
        "vocab_size": old.vocab_size,
    }
    return config


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _heads(old: Any, hidden: int) -> tuple[int, int]:
    """Return the numbers of query and key heads at the new width: 4 and 2 at 256 become 16 and 8 at 1,024."""
    num_kv_heads, remainder = divmod(old.num_key_value_heads * hidden, old.hidden_size)
    if remainder:
        step = old.hidden_size // math.gcd(old.hidden_size, old.num_key_value_heads)
        raise ConfigError(
            f"hidden_size={hidden} gives no whole number of key heads (the model has {old.num_key_value_heads} at "
            f"{old.hidden_size}); use a multiple of {step}, such as {-(-hidden // step) * step}."
        )
    return num_kv_heads * (old.num_attention_heads // old.num_key_value_heads), num_kv_heads


@torch.no_grad()
def _fill(bigger: Any, model: Any) -> None:
    """Fill every parameter with the old weights, followed by zeros in every dimension."""
    old = dict(model.named_parameters())
    if bigger.get_output_embeddings().weight is not bigger.get_input_embeddings().weight:
        old.setdefault("lm_head.weight", model.get_output_embeddings().weight)
    depth = model.config.num_hidden_layers
    scale = math.sqrt(model.config.hidden_size / bigger.config.hidden_size)
    for name, parameter in bigger.named_parameters():
        source, added = _source_layer(name, depth)
        parameter.zero_()
        if added and name.endswith(_OUTPUTS):
            continue
        value = old[source].double() * (scale if name.endswith(_HIDDEN_NORMS) else 1.0)
        parameter[tuple(slice(size) for size in value.shape)] = value.to(parameter.dtype)


def _source_layer(name: str, depth: int) -> tuple[str, bool]:
    """Return the name of a parameter's source, and True for an added layer: layer 7 copies layer 1 at depth 6."""
    parts = name.split(".")
    if parts[1] != "layers" or int(parts[2]) < depth:
        return name, False
    parts[2] = str(int(parts[2]) % depth)
    return ".".join(parts), True


def _keep_head_norms(bigger: Any, model: Any) -> None:
    """Restore the epsilon of norms over a head (Qwen3), whose width did not change."""
    modules = dict(model.named_modules())
    for name, module in bigger.named_modules():
        if name.endswith(("q_norm", "k_norm")):
            module.variance_epsilon = modules[_source_layer(name, model.config.num_hidden_layers)[0]].variance_epsilon


def _spare_channel(old: Any, config: Any) -> float | None:
    """Return the constant in the last channel of the residual stream if the vocabulary is padded; None otherwise.

    An added token must have a very low logit. A zero output row gives the logit 0, which often beats real tokens, and
    no direction of the stream has a reliable sign. Every embedding therefore contains a constant c in one spare channel
    that no layer reads or writes. The constant adds c^2/H to the mean in every norm. ``eps'`` is lowered by as much, so
    the norms do not change. After the last norm the added rows multiply the channel by a large negative number, and the
    real rows by zero. c is a power of two (exact in bfloat16) with c^2 <= eps h / 2, such as 2^-5 for eps 1e-5 at width
    256.
    """
    if config.vocab_size == old.vocab_size:
        return None
    if config.hidden_size == old.hidden_size:
        raise ConfigError(
            f"vocab_size={config.vocab_size} needs a spare channel; use a hidden_size above {old.hidden_size}."
        )
    return float(2.0 ** math.floor(math.log2(old.rms_norm_eps * old.hidden_size / 2) / 2))


@torch.no_grad()
def _push_padding_down(bigger: Any, old_vocab_size: int, constant: float) -> None:
    embedding: Tensor = bigger.get_input_embeddings().weight
    output: Tensor = bigger.get_output_embeddings().weight
    embedding[:, -1] = constant
    bigger.model.norm.weight[-1] = 1.0
    output[old_vocab_size:, -1] = _PADDING_LOGIT_WEIGHT

"""Which models draft in one call, see `decoder`: small ones of a few kinds, as they come, and as numbers confirm."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM
from transformers.activations import ACT2FN

from foretoken.model.execution.chain import ChainedLayer
from foretoken.model.execution.decoder import Decoder
from foretoken.model.execution.linears import linears
from foretoken.model.execution.native import KINDS, Library, library
from foretoken.model.execution.node_lists import NodeList
from foretoken.model.execution.norms import RMSNorm
from foretoken.model.execution.packing import PackedLinear
from foretoken.model.execution.regions import MIN_WEIGHTS
from foretoken.model.execution.rowwise import Rowwise
from foretoken.model.nodes import Nodes

if TYPE_CHECKING:
    from foretoken.model.lm import CausalLM

logger = logging.getLogger("foretoken")

MODELS = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM)
ROPES = ("default", "linear", "llama3", "yarn")
"""Ways to turn heads by their positions in which no position changes what others are turned by."""
PLAIN = nn.Embedding, nn.Linear
"""Embeddings of inputs and outputs."""
TOLERANCE = 8.0
"""How far logits may be from those of the modules, in roundings of the dtype, relative to their size."""


def decoder_of(lm: CausalLM) -> Decoder | None:
    """The model in one call, made at the first request and kept until the model changes; None where it runs as modules.

    What it computes is compared with the modules once.
    """
    known = lm.decoder
    if known is None or known[0] != lm.num_changes:
        kernels = None if lm.execution.kind == "eager" else library()
        reason = why_not(lm, kernels)
        decoder = None if reason or kernels is None else Decoder(lm, kernels)
        if decoder is not None and not _agrees(lm, decoder):
            reason, decoder = "it computes something else than its modules", None
        if reason:
            logger.debug("%s drafts by its modules: %s", lm.name, reason)
        known = lm.decoder = lm.num_changes, decoder
    return known[1]


def why_not(lm: CausalLM, kernels: Library | None) -> str | None:
    """Why a model runs as modules; None where `Decoder` takes it."""
    model: Any = lm.shadow
    if kernels is None or lm.device.type != "cpu" or lm.dtype not in KINDS:
        return "it runs eagerly, not on a CPU, or no C++ compiler is found"
    if type(model) not in MODELS:
        return f"{lm.name} is none of {', '.join(known.__name__ for known in MODELS)}"
    config, layers = lm.config, model.base_model.layers
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    head_dim, lanes = layers[0].self_attn.head_dim, kernels.lanes
    norms = [norm for layer in layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
    inputs = config.hidden_size, config.num_attention_heads * head_dim, config.intermediate_size
    reasons = {
        "it is large": sum(layer.weight.numel() for layer in linears(model)) >= MIN_WEIGHTS,  # type: ignore[operator, misc]
        "its attention slides": lm.window is not None,
        "its heads are turned by where a text ends": rope.get("rope_type", "default") not in ROPES,
        "it has another activation than silu": {type(layer.mlp.act_fn) for layer in layers} != {type(ACT2FN["silu"])},
        "its sizes are no multiples of vectors": any(size % lanes for size in (*inputs, head_dim)) or head_dim % 2 != 0,
        "its norms differ": {norm.variance_epsilon for norm in norms} != {model.base_model.norm.variance_epsilon},
        "its layers scale scores differently": len({layer.self_attn.scaling for layer in layers}) > 1,
        "its modules were changed": any(map(_is_changed, model.modules())),
        "its linear layers are others, or have a bias in part": any(map(_is_mixed, layers)),
        "its embeddings are others": (type(model.base_model.embed_tokens), type(model.get_output_embeddings()))
        != PLAIN,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _is_changed(module: nn.Module) -> bool:
    """Whether a module may run something else than the code of its class."""
    forward = vars(module).get("forward")
    if module._forward_hooks or module._forward_pre_hooks:
        return True
    is_other = type(module).__module__.partition(".")[0] not in ("torch", "transformers")
    has_others = any(type(tensor) not in (nn.Parameter, torch.Tensor) for tensor in module.parameters(recurse=False))
    return (
        is_other
        or has_others
        or (forward is not None and not isinstance(forward, (PackedLinear, RMSNorm, Rowwise, ChainedLayer)))
    )


def _is_mixed(layer: Any) -> bool:
    """Whether linear layers with one input have a bias in part."""
    inner, mlp = layer.self_attn, layer.mlp
    together = (inner.q_proj, inner.k_proj, inner.v_proj), (mlp.gate_proj, mlp.up_proj)
    plain = all(type(one) is nn.Linear for each in (*together, (inner.o_proj, mlp.down_proj)) for one in each)
    return not plain or any(len({one.bias is None for one in each}) > 1 for each in together)


@torch.inference_mode()
def _agrees(lm: CausalLM, decoder: Decoder) -> bool:
    """Whether logits are those of the modules: of four tokens at once, and of three one after another."""
    count, tokens = lm.num_forwards, [(17 + 31 * number) % lm.vocab_size for number in range(7)]
    want = lm.forward(Nodes.from_chains([tokens]), lm.new_cache(1, capacity=8))[0]
    lm.num_forwards = count
    cache, found = lm.new_cache(1, capacity=8), []
    for piece in (tokens[:4], *([token] for token in tokens[4:])):
        fed = NodeList.chains([piece], cache.lengths)
        found.append(decoder.logits(fed, cache, range(len(piece))))
        cache.commit([range(len(piece))])
    error, size = (float(each.double().norm()) for each in (torch.cat(found).double() - want.double(), want))
    return error <= max(TOLERANCE * torch.finfo(lm.dtype).eps, 1e-4) * size

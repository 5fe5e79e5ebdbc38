"""Tiny random models of every supported architecture, and of those that must be refused.

Weights are strong (see `foretoken.testing.strengthen`): at the default initialisation a wrong mask or position
hardly moves the logits, and a test over such a model cannot fail. Sliding windows are 8 wide, so that they fill.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from foretoken.testing import perturbed, strengthen

VOCAB_SIZE = 96
CONTEXT = 256
WINDOW = 8
SLIDING_FULL = ["sliding_attention", "full_attention"]

_COMMON: dict[str, Any] = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=CONTEXT,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)


@dataclass(frozen=True)
class Architecture:
    """How to build one tiny model.

    Args:
      family: prefix of the transformers classes, as in ``LlamaConfig`` and ``LlamaForCausalLM``.
      options: changes to the common config; None drops a key.
      model_class: name of the model class when it is not ``{family}ForCausalLM``.
      attention: implementations the modelling code supports.
    """

    family: str
    options: dict[str, Any] = field(default_factory=dict)
    model_class: str = ""
    attention: tuple[str, ...] = ("sdpa", "eager")

    def config(self) -> PreTrainedConfig:
        options = {**_COMMON, **self.options}
        options = {key: value for key, value in options.items() if value is not ...}
        return getattr(transformers, f"{self.family}Config")(**options)

    def build(self, attention: str = "sdpa", dtype: torch.dtype = torch.float64, seed: int = 0) -> PreTrainedModel:
        model_class = getattr(transformers, self.model_class or f"{self.family}ForCausalLM")
        torch.manual_seed(seed)
        config = self.config()
        config._attn_implementation = attention
        model = model_class(config)
        model.generation_config.eos_token_id = None
        return strengthen(model, seed).to(dtype).eval()


def _only(**options: Any) -> dict[str, Any]:
    """Options of a config that does not know the common names."""
    return {key: ... for key in _COMMON} | options


_MOE = dict(num_experts_per_tok=2)
_IDS = dict(vocab_size=VOCAB_SIZE, bos_token_id=None, eos_token_id=None, pad_token_id=None, tie_word_embeddings=False)

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("Llama"),
    "qwen2": Architecture("Qwen2", dict(tie_word_embeddings=True)),
    "qwen2-sliding": Architecture(
        "Qwen2", dict(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=0, layer_types=SLIDING_FULL)
    ),
    "qwen3": Architecture("Qwen3", dict(head_dim=16)),
    "qwen3-moe": Architecture(
        "Qwen3Moe", dict(head_dim=16, num_experts=4, moe_intermediate_size=48, decoder_sparse_step=1, **_MOE)
    ),
    "mistral": Architecture("Mistral", dict(sliding_window=None)),
    "mistral-window": Architecture("Mistral", dict(sliding_window=128)),
    "mistral-filled": Architecture("Mistral", dict(sliding_window=WINDOW)),
    "mixtral": Architecture("Mixtral", dict(num_local_experts=4, sliding_window=None, **_MOE)),
    "gemma": Architecture("Gemma", dict(head_dim=16, tie_word_embeddings=True)),
    "gemma2": Architecture(
        "Gemma2",
        dict(head_dim=16, sliding_window=WINDOW, layer_types=SLIDING_FULL, query_pre_attn_scalar=16, final_logit_softcapping=10.0),
    ),
    "gemma3": Architecture(
        "Gemma3",
        dict(head_dim=16, sliding_window=WINDOW, layer_types=SLIDING_FULL, query_pre_attn_scalar=16),
        model_class="Gemma3ForCausalLM",
    ),
    "phi": Architecture("Phi", dict(partial_rotary_factor=0.5)),
    "phi3": Architecture("Phi3", dict(sliding_window=None)),
    "gpt2": Architecture(
        "GPT2", _only(n_embd=64, n_layer=2, n_head=4, n_positions=CONTEXT, n_inner=96, **_IDS)
    ),
    "gpt-neox": Architecture("GPTNeoX", dict(num_key_value_heads=..., rotary_pct=0.25)),
    "opt": Architecture(
        "OPT",
        dict(num_key_value_heads=..., intermediate_size=..., ffn_dim=96, word_embed_proj_dim=64, pad_token_id=1),
    ),
    "falcon": Architecture(
        "Falcon",
        dict(new_decoder_architecture=True, num_kv_heads=2, alibi=False, num_key_value_heads=..., intermediate_size=..., ffn_hidden_size=96),
    ),
    "falcon-multi-query": Architecture(
        "Falcon",
        dict(
            new_decoder_architecture=False, multi_query=True, parallel_attn=True, alibi=False,
            num_key_value_heads=..., intermediate_size=..., ffn_hidden_size=96, bias=True,
        ),
    ),
    "stablelm": Architecture("StableLm", dict(partial_rotary_factor=0.5, use_qkv_bias=True)),
    "olmo2": Architecture("Olmo2"),
    "granite": Architecture(
        "Granite",
        dict(embedding_multiplier=2.0, attention_multiplier=0.2, residual_multiplier=0.7, logits_scaling=0.8),
    ),
    "cohere": Architecture("Cohere", dict(logit_scale=0.8, use_qk_norm=True, tie_word_embeddings=True)),
    "smollm3": Architecture("SmolLM3", dict(no_rope_layers=[1, 0])),
    "smollm3-sliding": Architecture(
        "SmolLM3", dict(no_rope_layers=[1, 0], use_sliding_window=True, sliding_window=WINDOW, layer_types=SLIDING_FULL)
    ),
    "starcoder2": Architecture("Starcoder2", dict(sliding_window=None, use_bias=True)),
    "starcoder2-filled": Architecture("Starcoder2", dict(sliding_window=WINDOW, use_bias=True)),
    "gpt-oss": Architecture(
        "GptOss",
        dict(head_dim=16, num_local_experts=4, sliding_window=WINDOW, layer_types=SLIDING_FULL, **_MOE),
        attention=("eager",),
    ),
    "deepseek-v3": Architecture(
        "DeepseekV3",
        dict(
            num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8,
            v_head_dim=16, n_routed_experts=4, n_group=2, topk_group=1, first_k_dense_replace=1,
            moe_intermediate_size=48, n_shared_experts=1, **_MOE,
        ),
    ),
}


@cache
def target_model(name: str, attention: str = "", dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """The tiny model called ``name``; built once per session, shared, so not to be changed."""
    architecture = ARCHITECTURES[name]
    return architecture.build(attention or architecture.attention[0], dtype)


@cache
def draft_model(name: str, attention: str = "", dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A perturbed copy of `target_model`: right often enough and wrong often enough."""
    return perturbed(target_model(name, attention, dtype), 0.08, seed=1)

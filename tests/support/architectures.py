"""Tiny random models of every supported architecture, and of those that must be refused.

Weights are strong (see `foredraft.testing.strengthen`): at the default initialisation a wrong mask or
position hardly moves the logits, and a test over such a model cannot fail. Sliding windows are 8 wide, so
that they fill.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from foredraft.testing import perturbed, strengthen

VOCAB_SIZE = 96
CONTEXT = 256
WINDOW = 8
LONGROPE_BORDER = 64
SLIDING_FULL = ["sliding_attention", "full_attention"]

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


@dataclass(frozen=True)
class Architecture:
    """How to build one tiny model.

    Args:
      family: prefix of the transformers classes, as in ``LlamaConfig`` and ``LlamaForCausalLM``.
      options: changes to the common config; None drops a key.
      model_class: name of the model class when it is not ``{family}ForCausalLM``.
      attention: implementations the modelling code supports.
      rounds_in_float32: some matrix product is taken in float32 even in a float64 model, so that the number of
        rows shows by 1e-7: DeepSeek's router.
    """

    family: str
    options: dict[str, Any] = field(default_factory=dict)
    model_class: str = ""
    attention: tuple[str, ...] = ("sdpa", "eager")
    rounds_in_float32: bool = False

    def config(self) -> PreTrainedConfig:
        options = {**_COMMON, **self.options}
        options = {key: value for key, value in options.items() if value is not ...}
        return getattr(transformers, f"{self.family}Config")(**options)

    def build(self, attention: str = "sdpa", dtype: torch.dtype = torch.float64, seed: int = 0) -> PreTrainedModel:
        model_class = getattr(transformers, self.model_class or f"{self.family}ForCausalLM")
        torch.manual_seed(seed)
        config = self.config()
        config._attn_implementation = attention
        config._experts_implementation = "eager"  # the grouped kernel takes no float64
        model = model_class(config)
        model.generation_config.eos_token_id = None
        return strengthen(model, seed).to(dtype).eval()


def _only(**options: Any) -> dict[str, Any]:
    """Options of a config that does not know the common names."""
    return dict.fromkeys(_COMMON, ...) | options


_MOE = {"num_experts_per_tok": 2}
_IDS = {
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("Llama"),
    "qwen2": Architecture("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-sliding": Architecture(
        "Qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 0,
            "layer_types": SLIDING_FULL,
        },
    ),
    "qwen3": Architecture("Qwen3", {"head_dim": 16}),
    "qwen3-moe": Architecture(
        "Qwen3Moe", dict(head_dim=16, num_experts=4, moe_intermediate_size=48, decoder_sparse_step=1, **_MOE)
    ),
    "mistral": Architecture("Mistral", {"sliding_window": None}),
    "mistral-window": Architecture("Mistral", {"sliding_window": 128}),
    "mistral-filled": Architecture("Mistral", {"sliding_window": WINDOW}),
    "mixtral": Architecture("Mixtral", dict(num_local_experts=4, sliding_window=None, **_MOE)),
    "gemma": Architecture("Gemma", {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma2": Architecture(
        "Gemma2",
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": SLIDING_FULL,
            "query_pre_attn_scalar": 16,
            "final_logit_softcapping": 10.0,
        },
        attention=("eager",),
    ),
    "gemma3": Architecture(
        "Gemma3Text",
        {"head_dim": 16, "sliding_window": WINDOW, "layer_types": SLIDING_FULL, "query_pre_attn_scalar": 16},
        model_class="Gemma3ForCausalLM",
    ),
    "phi": Architecture("Phi", {"partial_rotary_factor": 0.5}),
    "phi3": Architecture("Phi3", {"sliding_window": None}),
    "phi3-longrope": Architecture(
        "Phi3",
        {
            "sliding_window": None,
            "original_max_position_embeddings": LONGROPE_BORDER,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 8,
                "long_factor": [4.0] * 8,
                "factor": CONTEXT / LONGROPE_BORDER,
            },
        },
    ),
    "gpt2": Architecture(
        "GPT2",
        _only(n_embd=64, n_layer=2, n_head=4, n_positions=CONTEXT, n_inner=96, **_IDS),
        model_class="GPT2LMHeadModel",
    ),
    "gpt-neox": Architecture("GPTNeoX", {"num_key_value_heads": ..., "rotary_pct": 0.25}),
    "opt": Architecture(
        "OPT",
        {
            "num_key_value_heads": ...,
            "intermediate_size": ...,
            "ffn_dim": 96,
            "word_embed_proj_dim": 64,
            "pad_token_id": 1,
        },
    ),
    "falcon": Architecture(
        "Falcon",
        {
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "alibi": False,
            "num_key_value_heads": ...,
            "intermediate_size": ...,
            "ffn_hidden_size": 96,
        },
    ),
    "falcon-multi-query": Architecture(
        "Falcon",
        {
            "new_decoder_architecture": False,
            "multi_query": True,
            "parallel_attn": True,
            "alibi": False,
            "num_key_value_heads": ...,
            "intermediate_size": ...,
            "ffn_hidden_size": 96,
            "bias": True,
        },
    ),
    "stablelm": Architecture("StableLm", {"partial_rotary_factor": 0.5, "use_qkv_bias": True}),
    "olmo2": Architecture("Olmo2"),
    "granite": Architecture(
        "Granite",
        {
            "embedding_multiplier": 2.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.7,
            "logits_scaling": 0.8,
        },
    ),
    "cohere": Architecture("Cohere", {"logit_scale": 0.8, "use_qk_norm": True, "tie_word_embeddings": True}),
    "smollm3": Architecture("SmolLM3", {"no_rope_layers": [1, 0]}),
    "smollm3-sliding": Architecture(
        "SmolLM3",
        {
            "no_rope_layers": [1, 0],
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": SLIDING_FULL,
        },
    ),
    "starcoder2": Architecture("Starcoder2", {"sliding_window": None, "use_bias": True}),
    "starcoder2-filled": Architecture("Starcoder2", {"sliding_window": WINDOW, "use_bias": True}),
    "gpt-oss": Architecture(
        "GptOss",
        dict(head_dim=16, num_local_experts=4, sliding_window=WINDOW, layer_types=SLIDING_FULL, **_MOE),
        attention=("eager",),
    ),
    "deepseek-v3": Architecture(
        "DeepseekV3",
        dict(
            num_key_value_heads=4,
            q_lora_rank=24,
            kv_lora_rank=32,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
            n_routed_experts=4,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            moe_intermediate_size=48,
            n_shared_experts=1,
            **_MOE,
        ),
        rounds_in_float32=True,
    ),
}


ALWAYS = frozenset({"llama", "gemma3", "gpt2"})
"""What the fast part has of them: rotary positions, windows and learned positions."""


VARIANTS = frozenset(
    {"qwen2-sliding", "mistral-window", "phi3-longrope", "falcon-multi-query", "smollm3-sliding", "starcoder2-filled"}
)
"""Of architectures that stand there, too, by the same code; windows are gemma3's and gpt-oss's as well."""


def kinds_of(chosen: Collection[str]) -> list[Any]:
    """All architectures, those that are not chosen in the whole matrix alone."""
    return [pytest.param(name, marks=() if name in chosen else pytest.mark.full) for name in ARCHITECTURES]


OF_EACH_CACHE = ALWAYS | {"qwen2-sliding", "phi3-longrope", "falcon-multi-query", "mixtral", "gpt-oss", "deepseek-v3"}
"""What differs in the keys and values that it keeps: windows, scaled positions, one head, experts, latent heads."""


def in_turns(others: Iterable[str], each: int = 1, whole: Collection[str] = (), marks: Any = ()) -> list[Any]:
    """Pairs (name, other): what differs in kind always, the rest of the product in the whole matrix.

    Args:
      each: how many of the others an architecture has, by turns; those of `ALWAYS` have all.
      whole: of the others, those that every architecture has besides, with these ``marks``.
    """
    rest = [other for other in others if other not in whole]
    turns = {
        (name, rest[(number * each + place) % len(rest)])
        for number, name in enumerate(ARCHITECTURES)
        for place in range(min(each, len(rest)))
    }
    return [
        pytest.param(name, other, marks=marks if other in whole else () if is_taken else pytest.mark.full)
        for other in others
        for name in ARCHITECTURES
        for is_taken in [name in ALWAYS or (name, other) in turns]
    ]


def but_variants(pairs: Iterable[Any]) -> list[Any]:
    """Pairs of `in_turns`, those of `VARIANTS` in the whole matrix alone."""
    return [
        pytest.param(*pair.values, marks=pytest.mark.full if pair.values[0] in VARIANTS else pair.marks)
        for pair in pairs
    ]


REFUSED: dict[str, Architecture] = {
    "bloom": Architecture("Bloom", _only(hidden_size=64, n_layer=2, n_head=4, **_IDS), attention=("eager",)),
    "falcon-alibi": Architecture(
        "Falcon",
        {
            "new_decoder_architecture": False,
            "multi_query": True,
            "alibi": True,
            "num_key_value_heads": ...,
            "intermediate_size": ...,
        },
    ),
    "mpt": Architecture(
        "Mpt", _only(d_model=64, n_layers=2, n_heads=4, max_seq_len=CONTEXT, **_IDS), attention=("eager",)
    ),
    "gpt-neo": Architecture(
        "GPTNeo",
        _only(
            hidden_size=64,
            num_layers=2,
            num_heads=4,
            attention_types=[[["global", "local"], 1]],
            window_size=WINDOW,
            max_position_embeddings=CONTEXT,
            **_IDS,
        ),
        attention=("eager",),
    ),
    "electra-encoder": Architecture("Electra", {"is_decoder": False}),
    "bert-generation-encoder": Architecture(
        "BertGeneration", {"is_decoder": False}, model_class="BertGenerationDecoder"
    ),
    "bart": Architecture(
        "Bart",
        _only(
            d_model=64,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            max_position_embeddings=CONTEXT,
            vocab_size=VOCAB_SIZE,
        ),
        model_class="BartForConditionalGeneration",
    ),
    "t5": Architecture(
        "T5",
        _only(d_model=64, d_kv=16, d_ff=64, num_layers=2, num_heads=4, vocab_size=VOCAB_SIZE),
        model_class="T5ForConditionalGeneration",
        attention=("eager",),  # transformers 5.9 has no other
    ),
    "mamba": Architecture(
        "Mamba", _only(hidden_size=64, num_hidden_layers=2, state_size=8, **_IDS), attention=("eager",)
    ),
    "mamba2": Architecture(
        "Mamba2",
        _only(hidden_size=64, num_hidden_layers=2, state_size=8, num_heads=8, head_dim=16, n_groups=1, **_IDS),
        attention=("eager",),
    ),
    "falcon-mamba": Architecture(
        "FalconMamba", _only(hidden_size=64, num_hidden_layers=2, state_size=8, **_IDS), attention=("eager",)
    ),
    "rwkv": Architecture(
        "Rwkv",
        _only(hidden_size=64, num_hidden_layers=2, context_length=CONTEXT, **_IDS),
        attention=("eager",),
    ),
    "recurrent-gemma": Architecture(
        "RecurrentGemma",
        {
            "lru_width": 64,
            "attention_window_size": WINDOW,
            "block_types": ["recurrent", "attention"],
            "num_key_value_heads": 1,
        },
        attention=("eager",),
    ),
    "jamba": Architecture(
        "Jamba",
        {
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 8,
            "use_mamba_kernels": False,
        },
    ),
    "bamba": Architecture(
        "Bamba",
        {
            "attn_layer_indices": [1],
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_d_state": 8,
            "mamba_n_groups": 1,
        },
    ),
    "zamba": Architecture(
        "Zamba",
        {
            "layer_types": ["mamba", "hybrid"],
            "mamba_d_state": 8,
            "mamba_dt_rank": 8,
            "n_mamba_heads": 2,
            "num_key_value_heads": 4,
            "attention_hidden_size": 128,
            "attention_head_dim": 32,
            "use_mamba_kernels": False,
        },
        attention=("eager",),
    ),
    "zamba2": Architecture(
        "Zamba2",
        {
            "mamba_d_state": 8,
            "n_mamba_heads": 8,
            "mamba_ngroups": 1,
            "num_key_value_heads": 4,
            "layers_block_type": ["mamba", "hybrid"],
            "hybrid_layer_ids": [1],
            "num_mem_blocks": 1,
        },
    ),
    "lfm2": Architecture("Lfm2", {"layer_types": ["conv", "full_attention"]}),
    "qwen3-next": Architecture(
        "Qwen3Next",
        dict(
            head_dim=16,
            layer_types=["linear_attention", "full_attention"],
            linear_num_value_heads=4,
            linear_num_key_heads=2,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            num_experts=4,
            moe_intermediate_size=48,
            shared_expert_intermediate_size=48,
            **_MOE,
        ),
    ),
    "falcon-h1": Architecture(
        "FalconH1",
        {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1},
    ),
}
"""Models whose state or positions allow no exact verification: refused before anything is drafted."""


@cache
def target_model(name: str, attention: str = "", dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """The tiny model called ``name``; built once per session, shared, so not to be changed."""
    architecture = ARCHITECTURES[name]
    return architecture.build(attention or architecture.attention[0], dtype)


@cache
def draft_model(name: str, attention: str = "", dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A perturbed copy of `target_model`: right often enough and wrong often enough."""
    return perturbed(target_model(name, attention, dtype), 0.08, seed=1)

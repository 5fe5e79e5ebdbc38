"""Small GGUF files, and the plain model with the very weights that are in them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from foredraft import zoo
from foredraft.testing import strengthen

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.down_proj": "ffn_down_exps",
}
SCALES = {
    Kind.Q2_K: slice(80, 84),
    Kind.Q3_K: slice(-2, None),
    Kind.Q4_K: slice(0, 4),
    Kind.Q5_K: slice(0, 4),
    Kind.Q6_K: slice(-2, None),
    Kind.IQ4_NL: slice(0, 2),
    Kind.IQ4_XS: slice(0, 2),
    Kind.IQ3_XXS: slice(0, 2),
}
"""Where random blocks have numbers in half precision; gguf unpacks them, and has no code to make them."""


SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": 0,
    "eos_token_id": 3,
    "pad_token_id": 0,
}
"""Wide enough for the widest blocks (256)."""


def llama_config(**changes: Any) -> LlamaConfig:
    return LlamaConfig(**{**SIZES, **changes})


@dataclass(frozen=True)
class Written:
    """A file, and the model that reading it must give, in float32."""

    path: Path
    model: PreTrainedModel


def write_llama(
    path: Path,
    kind: Kind = Kind.F32,
    *,
    speaks: bool = False,
    metadata: dict[str, Any] | None = None,
    kinds: dict[str, Kind] | None = None,
    **changes: Any,
) -> Written:
    """Write a random Llama whose matrices are stored as ``kind``.

    Args:
      speaks: whether it has the tokenizer of zoo:tiny, and as many tokens: reading it takes most of the time of a load.
      metadata: more entries, or others; None leaves one out.
      kinds: of matrices that are stored otherwise, by a part of their name in the file.
      changes: of the config.
    """
    config = llama_config(**({"vocab_size": 4096} if speaks else {}), **changes)
    model = strengthen(LlamaForCausalLM(config).eval(), 1, 0.05)
    entries = {"llama.rope.dimension_count": config.head_dim, "llama.feed_forward_length": config.intermediate_size}
    entries |= {**(tokenizer_entries() if speaks else {}), **(metadata or {})}
    return _write(path, "llama", model, entries, lambda name: _kind_of(name, kind, kinds), interleaves=True)


def write_mixture(
    path: Path,
    kind: Kind = Kind.F32,
    *,
    speaks: bool = False,
    metadata: dict[str, Any] | None = None,
    kinds: dict[str, Kind] | None = None,
    **changes: Any,
) -> Written:
    """Write a random mixture of eight experts, two for every token, whose matrices are stored as ``kind``.

    Args:
      speaks, metadata, kinds, changes: as in `write_llama`.
    """
    mixture = {"moe_intermediate_size": 256, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
    config = Qwen3MoeConfig(**{**SIZES, **mixture, **({"vocab_size": 4096} if speaks else {}), **changes})
    model = strengthen(Qwen3MoeForCausalLM(config).eval(), 1, 0.05)
    entries = {
        "qwen3moe.attention.key_length": config.head_dim,
        "qwen3moe.attention.value_length": config.head_dim,
        "qwen3moe.feed_forward_length": config.intermediate_size,
        "qwen3moe.expert_feed_forward_length": config.moe_intermediate_size,
        "qwen3moe.expert_count": config.num_experts,
        "qwen3moe.expert_used_count": config.num_experts_per_tok,
        **(tokenizer_entries() if speaks else {}),
        **(metadata or {}),
    }
    return _write(path, "qwen3moe", model, entries, lambda name: _kind_of(name, kind, kinds))


def _kind_of(name: str, kind: Kind, kinds: dict[str, Kind] | None) -> Kind:
    return next((other for part, other in (kinds or {}).items() if part in name), kind)


def _write(
    path: Path,
    architecture: str,
    model: PreTrainedModel,
    entries: dict[str, Any],
    kind_of: Callable[[str], Kind],
    *,
    interleaves: bool = False,
) -> Written:
    """Write a model, and change its weights to those in the file.

    Args:
      entries: further metadata.
      kind_of: type of the matrix with a name of llama.cpp.
      interleaves: whether rows of query and key heads are stored in llama.cpp's order of Llama models.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    common = {
        "general.name": "small",
        f"{architecture}.context_length": config.max_position_embeddings,
        f"{architecture}.embedding_length": config.hidden_size,
        f"{architecture}.block_count": config.num_hidden_layers,
        f"{architecture}.attention.head_count": config.num_attention_heads,
        f"{architecture}.attention.head_count_kv": config.num_key_value_heads,
        f"{architecture}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{architecture}.rope.freq_base": config.rope_parameters["rope_theta"],
        f"{architecture}.vocab_size": config.vocab_size,
    }
    for key, value in (common | entries).items():
        _add(writer, key, value)
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            heads = _heads(name, config) if interleaves else 0
            parts = [weight]
            if name.endswith("gate_up_proj"):
                parts = list(weight.chunk(2, 1))
            for part, known in zip(parts, _gguf_names(name), strict=True):
                data = part.numpy()
                is_float = data.ndim == 1 or known.endswith("ffn_gate_inp.weight")
                chosen = Kind.F32 if is_float else kind_of(known)
                stored, wanted = _encoded(_interleaved(data, heads) if heads else data, chosen, rng)
                writer.add_tensor(known, stored, raw_dtype=chosen)
                part.copy_(torch.from_numpy(_rotated(wanted, heads) if heads else wanted))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Written(path, model)


@cache
def tokenizer_entries() -> dict[str, Any]:
    """The tokenizer of zoo:tiny, as a GGUF file describes it."""
    folder = zoo.path("tiny", "tokenizer")
    described = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = described["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    control = {token["id"] for token in described["added_tokens"]}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if place in control else 1 for place in range(len(tokens))],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in described["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": (folder / "chat_template.jinja").read_text(encoding="utf-8"),
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, np.ndarray):
        writer.add_tensor(key, value)
    elif value is not None:
        writer.add_array(key, value)


def _gguf_names(name: str) -> list[str]:
    """Names in the file of the parts of a weight: gate and up of experts are two tensors there."""
    if name.endswith("gate_up_proj"):
        layer = name.split(".")[2]
        return [f"blk.{layer}.ffn_{part}_exps.weight" for part in ("gate", "up")]
    stem, _, suffix = name.rpartition(".") if name.endswith((".weight", ".bias")) else (name, "", "weight")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return [f"blk.{layer}.{NAMES[part]}.{suffix}"]
    return [f"{NAMES[stem]}.{suffix}"]


def _heads(name: str, config: LlamaConfig) -> int:
    """Heads whose rotary halves llama.cpp stores interleaved."""
    if ".q_proj." in name:
        return config.num_attention_heads
    return config.num_key_value_heads if ".k_proj." in name else 0


def _interleaved(data: np.ndarray, heads: int) -> np.ndarray:
    shape = data.shape
    return data.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def _rotated(data: np.ndarray, heads: int) -> np.ndarray:
    shape = data.shape
    return np.ascontiguousarray(
        data.reshape(heads, shape[0] // heads // 2, 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
    )


def _encoded(data: np.ndarray, kind: Kind, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """What is stored, and what it stands for."""
    data = np.ascontiguousarray(data)
    if kind in SCALES:
        elements, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        blocks = rng.integers(0, 256, size=(data.size // elements, num_bytes), dtype=np.uint8)
        scales = SCALES[kind]
        blocks[:, scales] = np.full(blocks[:, scales].shape[1] // 2, 1e-4, dtype=np.float16).view(np.uint8)
        stored = blocks.reshape(*data.shape[:-1], -1)
    else:
        stored = gguf.quantize(data, kind)
    return stored, np.asarray(gguf.dequantize(stored, kind), dtype=np.float32).reshape(data.shape)

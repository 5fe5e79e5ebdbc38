"""Convert a Llama checkpoint of transformers (float32) to GGUF: needs the wheels gguf and safetensors.

Matrices get the wanted type, norms stay float32. The byte-level tokenizer is carried over, though the benchmark feeds
token ids. llama.cpp rotates neighbouring pairs of channels where transformers rotates halves, so the rows of the
query and key projections are reordered: of a head with 4 rows, 0 1 2 3 becomes 0 2 1 3.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors import safe_open

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
TYPES = {
    "f32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "q4_1": (gguf.GGMLQuantizationType.Q4_1, gguf.LlamaFileType.MOSTLY_Q4_1),
    "q4_0": (gguf.GGMLQuantizationType.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0),
}


def gguf_name(name: str) -> str:
    """The name of a tensor there."""
    if name in NAMES:
        return NAMES[name]
    _, _, layer, *rest = name.split(".")
    return f"blk.{layer}.{LAYER_NAMES['.'.join(rest[:-1])]}.{rest[-1]}"


def in_pairs(weight: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """(heads * d, in): halves of a head's rows interleaved."""
    rows, columns = weight.shape
    split = weight.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return split.swapaxes(1, 2).reshape(rows, columns)


def add_tokenizer(writer: Any, folder: Path, size: int, eos: int) -> None:
    """Byte-level BPE alone."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    if tokenizer["model"]["type"] != "BPE":
        raise RuntimeError(
            f"the tokenizer is {tokenizer['model']['type']}; only byte-level BPE is converted to GGUF here"
        )
    special = {entry["id"] for entry in tokenizer["added_tokens"]}
    vocab = {**tokenizer["model"]["vocab"], **{entry["content"]: entry["id"] for entry in tokenizer["added_tokens"]}}
    token_of = {token_id: token for token, token_id in vocab.items()}
    ids = range(size)
    kinds = [gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL for i in ids]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([token_of.get(i, f"[PAD{i}]") for i in ids])
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(eos)
    writer.add_bos_token_id(eos)
    writer.add_add_bos_token(False)


def convert(folder: Path, out: Path, kind: str) -> None:
    """Write ``out`` with matrices of one of `TYPES`.

    Raises: RuntimeError for a checkpoint of another architecture than Llama, or with another kind of tokenizer.
    """
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] != "llama":
        raise RuntimeError(f"the checkpoint is a {config['model_type']} model; only Llama is converted to GGUF here")
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    eos = config["eos_token_id"]
    writer = gguf.GGUFWriter(str(out), "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    data_type, file_type = TYPES[kind]
    writer.add_file_type(file_type)
    add_tokenizer(writer, folder, config["vocab_size"], eos[0] if isinstance(eos, list) else eos)
    with safe_open(folder / "model.safetensors", framework="numpy") as tensors:
        for name in tensors.keys():  # noqa: SIM118
            weight = tensors.get_tensor(name).astype(np.float32)
            if name.endswith("q_proj.weight"):
                weight = in_pairs(weight, config["num_attention_heads"])
            if name.endswith("k_proj.weight"):
                weight = in_pairs(weight, config["num_key_value_heads"])
            wanted = data_type if weight.ndim > 1 else gguf.GGMLQuantizationType.F32
            stored = gguf.quants.quantize(np.ascontiguousarray(weight), wanted)
            writer.add_tensor(gguf_name(name), stored, raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

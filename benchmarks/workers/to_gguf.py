"""Convert a Llama checkpoint of transformers (float32) to GGUF: needs the wheels gguf and safetensors.

Matrices get the wanted type, or one each as llama.cpp's own program mixes them, norms stay float32. The byte-level
tokenizer is carried over, though the benchmark feeds token ids. llama.cpp rotates neighbouring pairs of channels where
transformers rotates halves, so the rows of the query and key projections are reordered: of a head with 4 rows, 0 1 2 3
becomes 0 2 1 3.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
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
MIXED = "q4_k_m"
BLOCK = 256  # inputs that matrices of K types have a multiple of
INSTEAD = {  # of a K type, where inputs are no multiple of its block
    gguf.GGMLQuantizationType.Q4_K: gguf.GGMLQuantizationType.Q5_0,
    gguf.GGMLQuantizationType.Q6_K: gguf.GGMLQuantizationType.Q8_0,
}


def mixed_type(name: str, inputs: int, num_layers: int, is_tied: bool) -> Any:
    """The type of a matrix in Q4_K_M.

    Source: ``llama_tensor_get_type`` of llama.cpp, for Llama without importances.
    """
    part = name.split(".")[-2]
    if name.startswith("blk."):
        layer, eighth = int(name.split(".")[1]), num_layers // 8
        has_more = layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2
        is_fine = has_more and part in ("attn_v", "ffn_down")
    else:
        is_fine = part == "output" or is_tied
    kind = gguf.GGMLQuantizationType.Q6_K if is_fine else gguf.GGMLQuantizationType.Q4_K
    return INSTEAD[kind] if inputs % BLOCK else kind


def quantize_chunk() -> Callable[[np.ndarray[Any, Any], Any], np.ndarray[Any, Any]]:
    """llama.cpp's own rounding to any type, by the library inside of xllamacpp: gguf rounds to no K type."""
    from xllamacpp import xllamacpp

    library = ctypes.CDLL(xllamacpp.__file__)
    run, size = library.ggml_quantize_chunk, ctypes.c_int64
    run.restype = ctypes.c_size_t
    run.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, size, size, size, ctypes.c_void_p]

    def rounded(weight: np.ndarray[Any, Any], kind: Any) -> np.ndarray[Any, Any]:
        rows, inputs = weight.shape
        block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        out = np.empty((rows, inputs // block * num_bytes), np.uint8)
        written = run(int(kind), weight.ctypes.data, out.ctypes.data, 0, rows, inputs, None)
        if written != out.nbytes:
            raise RuntimeError(f"llama.cpp wrote {written} bytes of {kind.name} for {weight.shape}, not {out.nbytes}")
        return out

    return rounded


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
    """Write ``out`` with matrices of one of `TYPES`, or `MIXED`, which needs xllamacpp, too.

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
    if kind == MIXED:
        rounded, file_type = quantize_chunk(), gguf.LlamaFileType.MOSTLY_Q4_K_M
    else:
        rounded, (data_type, file_type) = gguf.quants.quantize, TYPES[kind]
    writer.add_file_type(file_type)
    add_tokenizer(writer, folder, config["vocab_size"], eos[0] if isinstance(eos, list) else eos)
    with safe_open(folder / "model.safetensors", framework="numpy") as tensors:
        for name in tensors.keys():  # noqa: SIM118
            weight = tensors.get_tensor(name).astype(np.float32)
            if name.endswith("q_proj.weight"):
                weight = in_pairs(weight, config["num_attention_heads"])
            if name.endswith("k_proj.weight"):
                weight = in_pairs(weight, config["num_key_value_heads"])
            wanted = gguf.GGMLQuantizationType.F32
            if weight.ndim > 1 and kind == MIXED:
                layers, is_tied = config["num_hidden_layers"], config["tie_word_embeddings"]
                wanted = mixed_type(gguf_name(name), weight.shape[1], layers, is_tied)
            elif weight.ndim > 1:
                wanted = data_type
            weight = np.ascontiguousarray(weight)
            stored = weight if weight.ndim == 1 else rounded(weight, wanted)
            writer.add_tensor(gguf_name(name), stored, raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

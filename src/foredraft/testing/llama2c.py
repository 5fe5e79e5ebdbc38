"""Read models in the format of llama2.c (legacy checkpoints, version 0) as transformers objects.

A checkpoint is a header of seven int32 (dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, seq_len) and
float32 weights in a fixed order; a negative vocab_size means that the classifier is stored too and not shared with
the embedding. A tokenizer is one int32 (the longest piece) and, per token, a float32 score, an int32 byte length and
the bytes. Source: github.com/karpathy/llama2.c, export.py and run.c.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from foredraft.errors import CheckpointError

__all__ = ["load", "load_model", "load_tokenizer"]

_HEADER = struct.Struct("<7i")
_ENTRY = struct.Struct("<fi")
_VERSIONED_MAGIC = 0x616B3432
_UNKNOWN, _BEGIN, _END = 0, 1, 2
_SPECIAL = {_UNKNOWN: "<unk>", _BEGIN: "<s>", _END: "</s>"}


@dataclass(frozen=True)
class _Shape:
    hidden: int
    ffn: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab: int
    context: int
    shared_classifier: bool

    @property
    def head_dim(self) -> int:
        return self.hidden // self.num_heads

    @property
    def blocks(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every block of weights, in the order of the file."""
        depth, hidden, ffn, keys = self.num_layers, self.hidden, self.ffn, self.num_kv_heads * self.head_dim
        blocks: dict[str, tuple[int, ...]] = {
            "embedding": (self.vocab, hidden),
            "attention_norm": (depth, hidden),
            "query": (depth, hidden, hidden),
            "key": (depth, keys, hidden),
            "value": (depth, keys, hidden),
            "output": (depth, hidden, hidden),
            "ffn_norm": (depth, hidden),
            "gate": (depth, ffn, hidden),
            "down": (depth, hidden, ffn),
            "up": (depth, ffn, hidden),
            "final_norm": (hidden,),
            "rotary_cos": (self.context, self.head_dim // 2),
            "rotary_sin": (self.context, self.head_dim // 2),
        }
        return blocks if self.shared_classifier else {**blocks, "classifier": (self.vocab, hidden)}


def load(
    checkpoint_path: str | Path, tokenizer_path: str | Path, *, dtype: torch.dtype = torch.float32
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Read a llama2.c checkpoint and its tokenizer: ``(model, tokenizer)``, plain transformers objects.

    Raises:
        CheckpointError: a file is missing, too short, too long, or holds sizes that contradict each other; the
            message names the bytes expected and found.
    """
    model = load_model(checkpoint_path, dtype=dtype)
    return model, load_tokenizer(tokenizer_path, model.config.vocab_size, model.config.max_position_embeddings)


def load_model(checkpoint_path: str | Path, *, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """Read a legacy llama2.c checkpoint as a `LlamaForCausalLM` in evaluation mode.

    The stored rotary tables are skipped: transformers computes the same angles. Generation ends at BOS, as in run.c,
    or at EOS.

    Raises:
        CheckpointError: see `load`.

    Exactness: the same function up to float32 rounding. llama2.c rotates neighbouring entries of a head, transformers
    the two halves; the rows of queries and keys are reordered accordingly.
    """
    path = Path(checkpoint_path)
    content = _read(path)
    shape = _shape(path, content)
    weights = _blocks(path, content, shape)
    model = LlamaForCausalLM(_config(shape))
    model.load_state_dict(_state(weights, shape), strict=True)
    model.generation_config = GenerationConfig(bos_token_id=_BEGIN, eos_token_id=[_BEGIN, _END], pad_token_id=_UNKNOWN)
    return model.to(dtype).eval()


def load_tokenizer(
    tokenizer_path: str | Path, vocab_size: int, model_max_length: int | None = None
) -> PreTrainedTokenizerFast:
    """Read a llama2.c tokenizer.

    As in run.c a text gets BOS and one leading space, is split into characters (unknown ones into byte tokens), and
    the neighbouring pair whose union has the highest score is merged until none is left. Texts that spell a special
    token are ordinary text.

    Args:
        tokenizer_path: the ``.bin`` file.
        vocab_size: the number of entries, which the file does not store.
        model_max_length: context of the model.

    Raises:
        CheckpointError: see `load`.

    Exactness: the ids are run.c's, but for ties: where two overlapping pairs give the same piece (runs of one
    repeated character), run.c merges the left one and this tokenizer the one of the earlier ids.
    """
    path = Path(tokenizer_path)
    pieces, scores = _pieces(path, _read(path), vocab_size)
    return _tokenizer(pieces, scores, model_max_length)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def _shape(path: Path, content: bytes) -> _Shape:
    if len(content) < _HEADER.size:
        raise CheckpointError(f"{path} holds {len(content)} bytes; the header alone takes {_HEADER.size}")
    hidden, ffn, num_layers, num_heads, num_kv_heads, vocab, context = _HEADER.unpack_from(content)
    if hidden == _VERSIONED_MAGIC:
        raise CheckpointError(
            f"{path} is a versioned llama2.c checkpoint (version {ffn}); only the legacy layout is read. "
            "Export it again with --version 0."
        )
    shape = _Shape(hidden, ffn, num_layers, num_heads, num_kv_heads, abs(vocab), context, vocab > 0)
    sound = (
        min(hidden, ffn, num_layers, num_heads, num_kv_heads, abs(vocab), context) > 0
        and hidden % num_heads == 0
        and num_heads % num_kv_heads == 0
        and shape.head_dim % 2 == 0
    )
    if not sound:
        raise CheckpointError(
            f"{path} is not a llama2.c checkpoint: its first {_HEADER.size} bytes read dim={hidden}, hidden_dim={ffn}, "
            f"n_layers={num_layers}, n_heads={num_heads}, n_kv_heads={num_kv_heads}, vocab_size={vocab}, "
            f"seq_len={context}, which no model has"
        )
    return shape


def _blocks(path: Path, content: bytes, shape: _Shape) -> dict[str, Tensor]:
    expected = _HEADER.size + 4 * sum(math.prod(block) for block in shape.blocks.values())
    if len(content) != expected:
        raise CheckpointError(
            f"{path} holds {len(content)} bytes, but its header asks for {expected} "
            f"({abs(len(content) - expected)} {'missing' if len(content) < expected else 'too many'})"
        )
    numbers: NDArray[np.float32] = np.frombuffer(content, dtype="<f4", offset=_HEADER.size).astype(np.float32)
    weights, begin = {}, 0
    for name, block in shape.blocks.items():
        end = begin + math.prod(block)
        weights[name] = torch.from_numpy(numbers[begin:end]).reshape(block)
        begin = end
    return weights


def _config(shape: _Shape) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=shape.context,
        rms_norm_eps=1e-5,
        tie_word_embeddings=shape.shared_classifier,
        bos_token_id=_BEGIN,
        eos_token_id=[_BEGIN, _END],
        pad_token_id=_UNKNOWN,
    )


def _halves(weight: Tensor, head_dim: int) -> Tensor:
    """Rows of each head from pairs to halves: 0 1 2 3 4 5 -> 0 2 4 1 3 5. [heads * head_dim, H] in and out."""
    rows, hidden = weight.shape
    return weight.reshape(rows // head_dim, head_dim // 2, 2, hidden).transpose(1, 2).reshape(rows, hidden)


def _state(weights: dict[str, Tensor], shape: _Shape) -> dict[str, Tensor]:
    """Weights under the names of `LlamaForCausalLM`."""
    state = {
        "model.embed_tokens.weight": weights["embedding"],
        "model.norm.weight": weights["final_norm"],
        "lm_head.weight": weights["embedding" if shape.shared_classifier else "classifier"],
    }
    for index in range(shape.num_layers):
        layer = f"model.layers.{index}"
        state |= {
            f"{layer}.input_layernorm.weight": weights["attention_norm"][index],
            f"{layer}.self_attn.q_proj.weight": _halves(weights["query"][index], shape.head_dim),
            f"{layer}.self_attn.k_proj.weight": _halves(weights["key"][index], shape.head_dim),
            f"{layer}.self_attn.v_proj.weight": weights["value"][index],
            f"{layer}.self_attn.o_proj.weight": weights["output"][index],
            f"{layer}.post_attention_layernorm.weight": weights["ffn_norm"][index],
            f"{layer}.mlp.gate_proj.weight": weights["gate"][index],
            f"{layer}.mlp.up_proj.weight": weights["up"][index],
            f"{layer}.mlp.down_proj.weight": weights["down"][index],
        }
    return state


def _pieces(path: Path, content: bytes, vocab_size: int) -> tuple[list[str], list[float]]:
    pieces, scores, begin = [], [], 4
    for index in range(vocab_size):
        end = begin + _ENTRY.size
        score, length = _ENTRY.unpack_from(content, begin) if end <= len(content) else (0.0, 0)
        if length < 0 or end + length > len(content):
            raise CheckpointError(
                f"{path} ends inside token {index} of {vocab_size}: it holds {len(content)} bytes and "
                f"{max(end + length, end)} are needed so far; is this the tokenizer of another model?"
            )
        pieces.append(_piece(path, index, content[end : end + length]))
        scores.append(score)
        begin = end + length
    if begin != len(content):
        raise CheckpointError(
            f"{path} holds {len(content)} bytes, but its first {vocab_size} tokens take {begin}; "
            "is this the tokenizer of a model with a larger vocabulary?"
        )
    if len(set(pieces)) != len(pieces):
        raise CheckpointError(f"{path}: {len(pieces) - len(set(pieces))} of its {len(pieces)} pieces occur twice")
    return pieces, scores


def _piece(path: Path, index: int, raw: bytes) -> str:
    if index in _SPECIAL:
        return _SPECIAL[index]
    try:
        return raw.decode("utf8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: token {index} holds {len(raw)} bytes that are not UTF-8: {raw!r}") from error


def _merges(pieces: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, best score first; equal scores in the order of the ids."""
    ids = {piece: index for index, piece in enumerate(pieces)}
    ranked = []
    for index, piece in enumerate(pieces):
        for cut in range(1, len(piece)):
            left, right = ids.get(piece[:cut]), ids.get(piece[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[index], index, left, right))
    return [(pieces[left], pieces[right]) for _, _, left, right in sorted(ranked)]


def _tokenizer(pieces: list[str], scores: list[float], model_max_length: int | None) -> PreTrainedTokenizerFast:
    merges = [pair for pair in _merges(pieces, scores) if not set(pair) & set(_SPECIAL.values())]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    backend = Tokenizer(BPE(vocabulary, merges, unk_token=_SPECIAL[_UNKNOWN], byte_fallback=True))
    backend.normalizer = normalizers.Prepend(" ")
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.post_processor = processors.TemplateProcessing(
        single=f"{_SPECIAL[_BEGIN]} $A", special_tokens=[(_SPECIAL[_BEGIN], _BEGIN)]
    )
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in _SPECIAL.values()])
    options: dict[str, Any] = {} if model_max_length is None else {"model_max_length": model_max_length}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token=_SPECIAL[_UNKNOWN],
        bos_token=_SPECIAL[_BEGIN],
        eos_token=_SPECIAL[_END],
        pad_token=_SPECIAL[_UNKNOWN],
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
        **options,
    )

"""GGUF files whose headers lie: each is read or refused by name, and the process goes on."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import PreTrainedModel

from foredraft.errors import CheckpointError, ForedraftError, UnsupportedModelError
from foredraft.gguf.header import read_header
from foredraft.gguf.tokenizer import read_tokenizer
from foredraft.loading.models import load_model
from gguf_files import tokenizer_entries, write_llama

LIES = ("shape", "dimensions", "type", "offset", "bytes", "end", "exchange")
SIZES = (0, 1, 32, 128, 255, 256, 257, 512, 2**20, 2**40, 2**63, 2**64 - 1)
OFFSETS = (0, 32, 33, 2**20, 2**40, 2**63, 2**64 - 32)


def damaged(data: bytes, places: list[tuple[int, int]], front: int, lie: str, rng: random.Random) -> bytes:
    """A file with one lie in it.

    Args:
      places: of tensors: where what is said of them begins (dimensions, shape, type, offset), and how many dimensions.
      front: bytes of the header.
    """
    changed = bytearray(data)
    place, count = rng.choice(places)
    if lie == "shape":
        struct.pack_into("<Q", changed, place + 4 + 8 * rng.randrange(count), rng.choice(SIZES))
    elif lie == "dimensions":
        struct.pack_into("<I", changed, place, rng.choice((0, 1, 3, 4, 5, 2**31)))
    elif lie == "type":
        struct.pack_into("<I", changed, place + 4 + 8 * count, rng.choice((*range(45), 2**31, 2**32 - 1)))
    elif lie == "offset":
        struct.pack_into("<Q", changed, place + 8 + 8 * count, rng.choice(OFFSETS))
    elif lie == "bytes":
        for _ in range(rng.randint(1, 4)):
            changed[rng.randrange(front)] = rng.choice((0, 1, 255, rng.randrange(256)))
    elif lie == "end":
        del changed[rng.randrange(len(changed)) :]
    else:
        other, _ = rng.choice([each for each in places if each[1] == count])
        size = 12 + 8 * count
        mine, theirs = data[place + 4 : place + 4 + size], data[other + 4 : other + 4 + size]
        changed[place + 4 : place + 4 + size], changed[other + 4 : other + 4 + size] = theirs, mine
    return bytes(changed)


def loaded(file: Path, weights: str | None) -> tuple[PreTrainedModel | None, ForedraftError | None]:
    """A model, or why it is refused; any other error is a fault."""
    try:
        return load_model(file, dtype="float32", weights=weights).model, None
    except ForedraftError as error:
        return None, error


@pytest.mark.sample(5)
@pytest.mark.parametrize("num_files", [4, pytest.param(60, marks=pytest.mark.full)])
@pytest.mark.parametrize("lie", LIES)
def test_a_lie_in_the_header_is_refused_by_name_or_does_no_harm(lie: str, num_files: int, tmp_path: Path) -> None:
    """Whole loads, dequantised and as stored, of types that are mixed by layer; what is read runs."""
    kinds = {"attn_v": Kind.Q8_0, "ffn_down": Kind.Q6_K, "ffn_up": Kind.IQ4_NL}
    written = write_llama(tmp_path / "m.gguf", Kind.Q4_0, kinds=kinds)
    data, header = written.path.read_bytes(), read_header(written.path)
    places = []
    for tensor in header.tensors:
        name = struct.pack("<Q", len(tensor.name)) + tensor.name.encode()
        places.append((data.index(name) + len(name), len(tensor.shape)))
    rng, refused = random.Random(f"{lie} {num_files}"), 0
    for number in range(num_files):
        file = tmp_path / "damaged.gguf"
        file.write_bytes(damaged(data, places, header.data_start, lie, rng))
        model, error = loaded(file, ("stored", "dequantized")[number % 2])
        if model is None:
            refused += 1
            assert str(file) in str(error)
            continue
        with torch.inference_mode():
            assert model(torch.arange(8)[None]).logits.shape[:2] == (1, 8)
    if lie in ("dimensions", "offset", "end"):
        assert refused >= num_files // 2


def test_a_type_of_smaller_blocks_is_refused(tmp_path: Path) -> None:
    """Bytes behind the tensor would belong to nobody, and its weights would be others."""
    written = write_llama(tmp_path / "m.gguf", Kind.Q8_0)
    data, name = bytearray(written.path.read_bytes()), b"blk.0.ffn_up.weight"
    struct.pack_into("<I", data, data.index(name) + len(name) + 20, Kind.Q4_0)
    written.path.write_bytes(data)
    with pytest.raises(
        CheckpointError, match=r"damaged in its header \(blk.0.ffn_up.weight ends at \d+, but .* begins"
    ):
        load_model(written.path)


@pytest.mark.parametrize(
    ("entry", "size", "refusal"),
    [
        ("llama.block_count", 2**24, "states 16777216 layers .* but contains tensors of 1"),
        ("llama.feed_forward_length", 2**20, r"contains \d+ weights, but a model with the stated sizes has 8\d+"),
        ("llama.vocab_size", 2**20, r"contains \d+ weights, but a model with the stated sizes has 5\d+"),
    ],
)
def test_sizes_that_the_file_has_no_weights_for_are_refused(
    entry: str, size: int, refusal: str, tmp_path: Path
) -> None:
    """Before modules or weights are made of them: one damaged byte of a number of layers filled the memory."""
    written = write_llama(tmp_path / "m.gguf", Kind.Q8_0, metadata={entry: size})
    with pytest.raises(CheckpointError, match=refusal):
        load_model(written.path)


def test_an_alignment_below_nothing_is_refused(tmp_path: Path) -> None:
    """Tensors would begin within the header."""
    written = write_llama(tmp_path / "m.gguf", Kind.Q8_0, metadata={"general.alignment": 32})
    data, name = bytearray(written.path.read_bytes()), b"general.alignment"
    place = data.index(name) + len(name)
    struct.pack_into("<Ii", data, place, 5, -32)
    written.path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"damaged in its header \(general.alignment is -32\)"):
        read_header(written.path)


TINY = 4096
"""Tokens of zoo:tiny."""


@pytest.mark.sample(18)
@pytest.mark.parametrize(
    ("entry", "value", "refusal"),
    [
        ("llama.attention.layer_norm_rms_epsilon", None, r"has no llama\.attention\.layer_norm_rms_epsilon or"),
        ("llama.attention.layer_norm_rms_epsilon", 0.0, r"epsilon is 0\.0, but it should be a finite number above 0"),
        ("llama.attention.layer_norm_rms_epsilon", float("nan"), "epsilon is nan"),
        ("llama.attention.layer_norm_rms_epsilon", "1e-5", "epsilon is '1e-5'"),
        ("llama.context_length", 0, r"llama\.context_length is 0, but it should be a whole number above 0"),
        (
            "llama.context_length",
            None,
            r"has no llama\.context_length in its metadata, and another value would be assumed",
        ),
        ("llama.context_length", [512, 512], "context_length is a list of 2"),
        ("llama.block_count", None, "has no llama.block_count"),
        ("llama.embedding_length", None, "has no llama.embedding_length"),
        ("llama.attention.head_count", None, "has no llama.attention.head_count"),
        ("llama.attention.head_count", 0, "head_count is 0"),
        ("llama.attention.head_count_kv", 0, "head_count_kv is 0"),
        ("llama.feed_forward_length", 0.5, "feed_forward_length is 0.5"),
        ("llama.rope.freq_base", float("inf"), "freq_base is inf"),
        ("llama.rope.freq_base", -1.0, "freq_base is -1.0"),
        ("llama.rope.scaling.factor", "4", "rope.scaling.factor is '4'"),
        ("llama.rope.scaling.type", 5, "rope.scaling.type is 5"),
        ("tokenizer.ggml.eos_token_id", 512, "eos_token_id is 512, but tokens have ids from 0 to 511"),
        ("tokenizer.ggml.eot_token_id", 2**32 - 1, "eot_token_id is 4294967295"),
        ("tokenizer.ggml.eom_token_id", "3", "eom_token_id is '3'"),
        ("tokenizer.ggml.eot_token_id", True, "eot_token_id is True"),
    ],
)
def test_metadata_of_a_model_is_checked(entry: str, value: Any, refusal: str, tmp_path: Path) -> None:
    """Another value was taken in its place, in silence."""
    written = write_llama(tmp_path / "m.gguf", metadata={entry: value})
    with pytest.raises(CheckpointError, match=refusal):
        load_model(written.path)


def test_a_scaling_factor_without_its_type_is_refused(tmp_path: Path) -> None:
    """llama.cpp takes it for linear scaling, and transformers passed over it."""
    written = write_llama(tmp_path / "m.gguf", metadata={"llama.rope.scaling.factor": 4.0})
    with pytest.raises(UnsupportedModelError, match=r"scales its rotary positions \(linear\)"):
        load_model(written.path)


def changed(entry: str, place: int, value: Any) -> dict[str, Any]:
    """The tokenizer of zoo:tiny with one element of a list changed."""
    key = f"tokenizer.ggml.{entry}"
    values = list(tokenizer_entries()[key])
    values[place] = value
    return {key: values}


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("metadata", "refusal"),
    [
        (lambda: changed("merges", 5, f"{'Ġt' * 40} {'h' * 200}"), r"merges joins 'ĠtĠt.* is not among its tokens"),
        (lambda: changed("merges", 5, "a"), "a merge that is not two tokens"),
        (
            lambda: changed("tokens", 300, tokenizer_entries()["tokenizer.ggml.tokens"][7]),
            "twice, but each token has one",
        ),
        (lambda: {"tokenizer.ggml.tokens": list(range(TINY))}, "tokens contains 0, but tokens are text"),
        (
            lambda: {"tokenizer.ggml.token_type": [1, 3]},
            "token_type is a list of 2 .* it should be 4096 kinds of tokens",
        ),
        (lambda: changed("token_type", 9, 99), "token_type is a list of 4096 .* from 0 to 6"),
        (lambda: {"tokenizer.ggml.token_type": ["normal"] * TINY}, "token_type is a list of 4096"),
        (lambda: {"tokenizer.ggml.token_type": 3}, "token_type is 3"),
        (lambda: {"tokenizer.ggml.scores": [0.5]}, "scores is a list of 1"),
        (lambda: {"tokenizer.ggml.merges": [1, 2]}, "merges is a list of 2"),
        (lambda: {"tokenizer.ggml.bos_token_id": TINY}, "bos_token_id is 4096, but tokens have ids from 0 to 4095"),
        (lambda: {"tokenizer.ggml.padding_token_id": TINY}, "padding_token_id is 4096"),
        (lambda: {"tokenizer.ggml.add_bos_token": "yes"}, "add_bos_token is 'yes', but it should be true or false"),
        (lambda: {"tokenizer.ggml.pre": 7}, "ggml.pre is 7"),
        (lambda: {"tokenizer.chat_template": [1]}, "chat_template is a list of 1"),
    ],
)
def test_metadata_of_a_tokenizer_is_checked(metadata: Any, refusal: str, tmp_path: Path) -> None:
    """A merge longer than every token was a panic of Rust, which is no exception that programs catch."""
    written = write_llama(tmp_path / "m.gguf", metadata=metadata(), speaks=True)
    with pytest.raises(CheckpointError, match=refusal):
        read_tokenizer(read_header(written.path))


def test_a_token_that_there_is_not_is_none(tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.padding_token_id": 2**32 - 1}
    tokenizer = read_tokenizer(read_header(write_llama(tmp_path / "m.gguf", metadata=metadata, speaks=True).path))
    assert tokenizer is not None
    assert tokenizer.pad_token is None


def test_more_tokens_than_rows_of_the_embedding_are_refused(tmp_path: Path) -> None:
    """Prompts would be made of ids that the model does not have."""
    metadata = {"tokenizer.ggml.tokens": [str(number) for number in range(513)]}
    with pytest.raises(CheckpointError, match=r"tokens is a list of 513, but token_embd\.weight has 512 rows"):
        load_model(write_llama(tmp_path / "m.gguf", metadata=metadata).path)


@pytest.mark.parametrize(
    "odd", [b"", b"a" * 255, b"a" * 256, b"\0", b"a\0b", b"\0" * 9, b"\xff", b"\xe2\x96", "\u2581".encode()]
)
@pytest.mark.parametrize("at", [0, 1, 4095, 4096, 5000, -1])
def test_long_lists_of_text_are_read_exactly(tmp_path: Path, odd: bytes, at: int) -> None:
    """Short text is read thousands at a time; text that is empty, long or contains zeros stands for itself."""
    texts = [b"%d" % number for number in range(5001)]
    texts[at] = odd
    array = struct.pack("<IIQ", 9, 8, len(texts)) + b"".join(struct.pack("<Q", len(text)) + text for text in texts)
    entries = {
        b"general.architecture": struct.pack("<IQ", 8, 5) + b"llama",
        b"texts": array,
        b"after": struct.pack("<II", 4, 7),
    }
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, len(entries))
    header += b"".join(struct.pack("<Q", len(key)) + key + value for key, value in entries.items())
    file = tmp_path / "texts.gguf"
    file.write_bytes(header)
    read = read_header(file).metadata
    assert read["texts"] == [text.decode(errors="replace") for text in texts]
    assert read["after"] == 7
    file.write_bytes(header[: -(len(texts[-1]) + 30)])
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        read_header(file)

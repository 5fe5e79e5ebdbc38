"""GGUF files whose headers lie: each is read or refused by name, and the process goes on."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import PreTrainedModel

from foredraft.errors import CheckpointError, ForedraftError
from foredraft.gguf.header import read_header
from foredraft.loading.models import load_model
from gguf_files import write_llama

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
        model, error = loaded(file, ("stored", None)[number % 2])
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
        CheckpointError, match=r"damaged in its header \(blk.0.ffn_up.weight ends at \d+, and .* begins"
    ):
        load_model(written.path)


@pytest.mark.parametrize(
    ("entry", "size", "refusal"),
    [
        ("llama.block_count", 2**24, "states 16777216 layers .* and holds tensors of 1"),
        ("llama.feed_forward_length", 2**20, r"holds \d+ weights, and a model of the sizes that it states has 8\d+"),
        ("llama.vocab_size", 2**20, r"holds \d+ weights, and a model of the sizes that it states has 5\d+"),
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

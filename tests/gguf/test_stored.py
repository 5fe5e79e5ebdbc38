"""GGUF files whose blocks are multiplied as they lie: the same values, the same model, and every refusal by name."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from guarantee import Study
from typer.testing import CliRunner

from foredraft import LLM, SamplingParams, zoo
from foredraft.cli import app
from foredraft.errors import CheckpointError, ConfigError, ForedraftError, UnsupportedModelError
from foredraft.gguf.blocks import TYPES, BlockType
from foredraft.gguf.header import read_header
from foredraft.loading.models import load_model
from foredraft.native.codes import Codes, StoredBlocks, StoredCodes
from foredraft.native.library import KINDS as KINDS_OF_FLOATS
from foredraft.native.library import library
from foredraft.native.packed_matmul import CodesMatrix
from foredraft.testing import hostile_kernels
from foredraft.testing.hostile import KINDS
from gguf_files import write_llama
from quantised_files import assert_close

GREEDY = SamplingParams(temperature=0.0, seed=7, max_tokens=24)
SAMPLED = SamplingParams(temperature=1.0, seed=7, max_tokens=24)
COOL = SamplingParams(temperature=0.2, seed=7, max_tokens=24)  # so that some of what is drafted is accepted
PROMPTS = [[5, 6, 7] * 25, [9, 10, 11, 12] * 3, [3], [8, 300, 40] * 30, [500, 400]]
HALVES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0, 1)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    **{"Q2_K": (80, 2), "Q3_K": (108, 1), "Q6_K": (208, 1), "MXFP4": (0, 0)},
}
"""Where a block has numbers in half precision: first byte, and how many."""

needs_kernels = pytest.mark.skipif(library() is None, reason="no kernels here")


@pytest.mark.parametrize("number", TYPES, ids=lambda number: TYPES[number].name)
def test_codes_stand_for_the_very_values_that_gguf_dequantises(number: int) -> None:
    """Bit for bit, for any bytes and any finite scales, before and after they are packed for kernels."""
    kind: BlockType = TYPES[number]
    assert (kind.size, kind.num_bytes) == gguf.GGML_QUANT_SIZES[Kind(number)]
    rng = np.random.default_rng(number)
    blocks = rng.integers(0, 256, size=(80, kind.num_bytes), dtype=np.uint8)
    first, count = HALVES[kind.name]
    scales = (rng.standard_normal((80, count)) * 10.0 ** rng.integers(-7, 4, (80, count))).astype(np.float16)
    blocks[:, first : first + 2 * count] = scales.view(np.uint8)
    if kind.name == "MXFP4":
        blocks[:, 0] = rng.integers(0, 250, 80)  # exponents
    want = torch.from_numpy(np.asarray(gguf.dequantize(blocks, Kind(number)), dtype=np.float32)).view(40, -1)
    numbers, factors, zeros = kind.unpack(torch.from_numpy(blocks))
    groups = None if zeros is None else zeros.reshape(40, -1)
    codes = Codes(numbers.reshape(40, -1), kind.bits, factors.reshape(40, -1), groups, kind.group)
    assert torch.equal(codes.dense(), want)
    kernels = library()
    if kernels is not None:
        assert torch.equal(CodesMatrix(codes, None, kernels).dense(), want)
        order = torch.from_numpy(rng.permutation(40))
        rows, columns = torch.from_numpy(blocks).view(40, -1), want.shape[1]
        for dtype, number_of in KINDS_OF_FLOATS.items():
            got = torch.empty(40, columns, dtype=dtype)
            place = (number, columns, rows.data_ptr(), order.data_ptr(), 40, number_of, got.data_ptr(), 2)
            kernels.read_blocks(*place)
            assert torch.equal(got, want[order].to(dtype))
        stored = StoredCodes(want.shape, kind.form, lambda first, last: kind.codes(rows[order[first:last]]))
        direct = replace(stored, blocks=StoredBlocks(rows, number, order, lambda: None))
        for parts in ([stored], [direct], [direct, direct]):
            packed = CodesMatrix(parts, None, kernels)
            assert torch.equal(packed.dense(), want[order].repeat(len(parts), 1))
            assert packed.codes.form == kind.form


QUICK = (Kind.Q4_0, Kind.Q5_1, Kind.Q4_K, Kind.Q6_K)
"""Types with and without zeros, in small and large blocks; the codes of every type are tested above."""


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "kind",
    [pytest.param(Kind(number), marks=() if number in QUICK else pytest.mark.full) for number in TYPES],
    ids=lambda kind: kind.name,
)
def test_logits_are_those_of_the_dequantised_weights(kind: Kind, tmp_path: Path) -> None:
    """With heads whose rows llama.cpp interleaves, tied embeddings or not, and no weight left in its full size."""
    is_tied = kind in (Kind.Q8_0, Kind.Q4_K)
    written = write_llama(tmp_path / "m.gguf", kind, tie_word_embeddings=is_tied)
    loaded = load_model(written.path, dtype="float32", weights="stored" if is_tied else None)
    assert loaded.quantization == "stored"
    assert loaded.types == f"{8 if is_tied else 9} of {kind.name}"
    layer = loaded.model.model.layers[0]
    assert not any(each.weight.stride()[0] for each in (layer.mlp.up_proj, layer.self_attn.q_proj))
    assert_close(loaded.model, written.model)


def test_a_model_of_the_zoo_in_another_dtype_than_it_was_converted_into_comes_from_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was rounded to bfloat16 is another model in float32 than the blocks are."""
    written = write_llama(tmp_path / "m.gguf", Kind.Q4_1)
    monkeypatch.setattr(zoo, "stored_file", lambda name: written.path)
    loaded = load_model("zoo:tiny", dtype="float32", weights="stored", with_tokenizer=False)
    assert loaded.types == "9 of Q4_1"
    assert_close(loaded.model, written.model)


@needs_kernels
@pytest.mark.parametrize(
    ("kind", "params"),
    [pytest.param(Kind.Q4_1, GREEDY, marks=pytest.mark.full), (Kind.Q6_K, COOL)],
    ids=["Q4_1", "Q6_K"],
)
def test_bits_are_those_of_plain_decoding_whatever_stock_kernels_do(
    kind: Kind, params: SamplingParams, tmp_path: Path
) -> None:
    """Trees and chains for five rows of other lengths beside plain rows alone."""
    written = write_llama(tmp_path / "m.gguf", kind, kinds={"attn_v": Kind.Q8_0}, num_hidden_layers=2)
    with hostile_kernels(*KINDS):
        loaded = load_model(written.path, dtype="float32", weights="stored", with_tokenizer=False)
        study = Study(loaded.model, prompts=PROMPTS, execution="auto", max_num_seqs=len(PROMPTS))
        for method in ("token_recycling", "ngram"):
            found = study.cell(method, params, len(PROMPTS))
            assert found.guarantee == "bit-identical"
            assert found.is_good, found.line()


@needs_kernels
def test_texts_with_drafts_are_those_without(tmp_path: Path) -> None:
    plain = LLM(write_llama(tmp_path / "m.gguf", Kind.Q4_1).path, weights="stored")
    assert plain.target.execution.program is not None, plain.target.execution.why_no_program
    info = plain.model_info
    assert (info.quantization, info.weight_types) == ("stored", "9 of Q4_1")
    assert info.bits_per_weight == 5.0  # as in the file
    params = [GREEDY, SAMPLED, SAMPLED, GREEDY, SAMPLED]
    want = [output.outputs[0].token_ids for output in plain.generate(PROMPTS, params)]
    for method in ("jacobi", "token_recycling"):
        llm = plain.with_speculative_config({"method": method, "length_policy": "fixed"})
        assert [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)] == want, method
    with pytest.raises(ConfigError, match="4-bit weights already"):
        plain.with_speculative_config("quantized_self")


def test_mixed_types_are_read_and_what_has_no_kernel_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As in Q4_K_M, where values have more bits than queries and keys; IQ types and halves keep their full size."""
    kinds = {"attn_v": Kind.Q6_K, "blk.1.ffn_down": Kind.Q6_K, "ffn_up": Kind.IQ3_XXS, "output.weight": Kind.F16}
    written = write_llama(tmp_path / "m.gguf", Kind.Q4_K, kinds=kinds, num_hidden_layers=2)
    with caplog.at_level("INFO", "foredraft"):
        llm = LLM(written.path, dtype="float32", weights="stored")
    assert "float32, stored weights (dequantised: 2 of IQ3_XXS) · drafting: none" in caplog.text
    assert_close(llm.target.shadow, written.model)


def test_rows_that_differ_less_than_the_dtype_shows_are_not_mistaken(tmp_path: Path) -> None:
    """Every weight is found by its values: two layers that are equal, and rows that are, do no harm."""
    written = write_llama(tmp_path / "m.gguf", Kind.Q8_0)
    header = read_header(written.path)
    data = bytearray(written.path.read_bytes())
    of = {tensor.name: header.data_start + tensor.offset for tensor in header.tensors}
    size = 128 * 256 // 32 * 34
    place, key = of["blk.0.attn_v.weight"], of["blk.0.attn_k.weight"]
    data[place : place + size] = data[key : key + size]
    data[key : key + 272] = data[key + 272 : key + 544]  # two rows alike
    written.path.write_bytes(data)
    stored = load_model(written.path, dtype="float32", weights="stored")
    plain = load_model(written.path, dtype="float32", weights="dequantized")
    assert stored.types == "9 of Q8_0"
    assert_close(stored.model, plain.model)


def test_the_command_line_takes_them(tmp_path: Path) -> None:
    asked = ["info", "--model", str(write_llama(tmp_path / "m.gguf", Kind.Q4_0).path), "--weights", "stored"]
    result = CliRunner().invoke(app, [*asked, "--json"])
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["model"]["weight_types"] == "9 of Q4_0"
    result = CliRunner().invoke(app, asked)
    assert "stored (9 of Q4_0), 4.50 bits per weight" in " ".join(result.stdout.split())


@pytest.mark.full
@needs_kernels
@pytest.mark.skipif(not zoo.is_available("smollm2"), reason="smollm2 is not installed")
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.full)])
def test_smollm2_runs_in_its_4_bits(dtype: str) -> None:
    llm = LLM("zoo:smollm2", weights="stored", dtype=dtype)
    assert llm.model_info.weight_types == "210 of Q4_1 and 1 of Q8_0"
    assert llm.generate("A dog", {"temperature": 0, "max_tokens": 4})[0].finished


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("zoo:tiny", {"weights": "stored"}, "zoo:tiny has no GGUF file; leave weights out"),
        ("zoo:tiny", {"weights": "sorted"}, "weights is 'sorted'; use 'stored'"),
        ("zoo:tiny", {"weights": "stored", "quantization": "int8"}, "would round them again"),
        (None, {"weights": "stored"}, "the model is loaded already; give its GGUF file"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(model: str | None, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(zoo.load("tiny")[1] if model is None else model, **options)


def test_a_file_without_blocks_is_refused(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m.gguf", Kind.F16).path
    with pytest.raises(ConfigError, match=r"contains no matrix of a supported type \(it contains F16, F32;"):
        LLM(path, weights="stored")


def changed(path: Path, name: str, **fields: int) -> None:
    """Let the header say something else of a tensor: its first size, type or offset."""
    data = bytearray(path.read_bytes())
    place = data.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name) + 4
    for field, code, at in (("size", "<Q", 0), ("type_id", "<I", 16), ("offset", "<Q", 20)):
        if field in fields:
            struct.pack_into(code, data, place + at, fields[field])
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"type_id": 999}, UnsupportedModelError, "type number 999"),
        ({"type_id": int(Kind.Q8_0)}, CheckpointError, r"blk.0.ffn_up.weight overlaps"),
        ({"type_id": int(Kind.Q4_K)}, CheckpointError, r"blk.0.ffn_up.weight ends at \d+, but"),  # fewer bytes
        ({"offset": 2**40}, CheckpointError, r"damaged in its header \(blk.* ends at \d+, but"),
        ({"size": 2**40}, CheckpointError, "overlaps"),
        ({"size": 250}, CheckpointError, "has rows of 250, but Q4_1 has blocks of 32"),
        ({"size": 128}, CheckpointError, r"blk.0.ffn_up.weight ends at \d+, but"),
    ],
)
def test_headers_that_lie_are_refused(
    fields: dict[str, int], error: type[ForedraftError], message: str, tmp_path: Path
) -> None:
    path = write_llama(tmp_path / "m.gguf", Kind.Q4_1).path
    size = path.stat().st_size
    changed(path, "blk.0.ffn_up.weight", **fields)
    assert path.stat().st_size == size
    with pytest.raises(error, match=message):
        LLM(path, weights="stored")

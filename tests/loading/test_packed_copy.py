"""Packed weights that are kept: read back they are those of a load without them, to the bit, or they are not used."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import GemmaConfig, GemmaForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from foredraft import LLM, SamplingParams
from foredraft.errors import ConfigError
from foredraft.loading import packed_copy, tensor_file
from foredraft.loading.models import load_model
from foredraft.model.execution.packing import packed_products, weight_sums
from foredraft.model.nodes import Nodes
from foredraft.native.codes import Codes
from foredraft.native.library import library
from foredraft.native.packed_matmul import CodesMatrix, Facts
from gguf_files import write_llama
from programs import forked

pytestmark = pytest.mark.skipif(library() is None, reason="no kernels here")

PROMPT = [5, 6, 7, 5, 6, 7, 5]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
TINY = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**TINY, intermediate_size=128)),
    "llama-tied": lambda: LlamaForCausalLM(LlamaConfig(**TINY, intermediate_size=96, tie_word_embeddings=True)),
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**TINY, intermediate_size=96, head_dim=16, num_key_value_heads=2)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=64, n_layer=2, n_head=4)),
}
WAYS = [
    {},
    {"dtype": "bfloat16"},
    {"dtype": "float16", "execution": "packed"},
    {"execution": "compiled"},
    {"quantization": "int8"},
    {"quantization": "int4", "dtype": "bfloat16"},
]

QUICK = (("gpt2", 0), ("gemma", 2), ("llama", 4), ("llama-tied", 5))
"""Every model once, and every way but compilation that keeps other tensors."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, for packed copies."""
    monkeypatch.setattr(packed_copy, "cache_folder", lambda *parts: (tmp_path / "cache").joinpath(*parts))
    return tmp_path / "cache" / "packed"


def saved(folder: Path, name: str = "llama") -> Path:
    torch.manual_seed(0)
    MODELS[name]().save_pretrained(folder)
    return folder


def seen(llm: LLM) -> list[torch.Tensor]:
    """What a model says, in one call and as modules, and the digest of its weights."""
    output = llm.generate({"prompt_token_ids": PROMPT}, GREEDY)[0].outputs[0]
    forwards = [
        llm.target.forward(Nodes.from_chains([tokens]), llm.target.new_cache(1))
        for tokens in (PROMPT, list(range(96)))  # beyond 64 nodes modules run
    ]
    sums = dict(weight_sums(llm.target.shadow))
    return [torch.tensor(output.token_ids), *forwards, *(sums[name] for name in sorted(sums))]


def assert_same(one: LLM, other: LLM) -> None:
    found, wanted = seen(one), seen(other)
    assert len(found) == len(wanted)
    assert all(map(torch.equal, found, wanted))
    config, generation = one._pairing.loaded.model.config, one._pairing.loaded.model.generation_config
    of_other = other._pairing.loaded.model
    assert config.to_dict() == of_other.config.to_dict()
    assert generation.to_dict() == of_other.generation_config.to_dict()
    names = "num_parameters", "weight_bytes", "dtype", "execution", "quantization", "weight_types", "step_bytes"
    assert [getattr(one.model_info, name) for name in names] == [getattr(other.model_info, name) for name in names]
    assert one.eos_token_ids == other.eos_token_ids


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(name, way, marks=() if (name, place) in QUICK else pytest.mark.full)
        for name in MODELS
        for place, way in enumerate(WAYS)
    ],
    ids=str,
)
def test_a_copy_is_the_model(tmp_path: Path, name: str, way: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    folder = saved(tmp_path / name, name)
    plain = LLM(folder, "ngram", **way)
    with caplog.at_level(logging.INFO, "foredraft"):
        made = LLM(folder, "ngram", cache_packed=True, **way)
    (file,) = (tmp_path / "cache" / "packed").iterdir()
    assert f"are kept in {file}" in caplog.text
    assert made.model_info.packed_copy == str(file)
    assert made.model_info.packed_copy_bytes == file.stat().st_size
    assert plain.model_info.packed_copy is None
    caplog.clear()
    with caplog.at_level(logging.WARNING, "foredraft"):
        read = LLM(folder, "ngram", cache_packed=True, **way)
    assert not caplog.text
    assert read._pairing.loaded.is_from_copy
    assert_same(read, plain)
    assert_same(made, plain)


@pytest.mark.full
@pytest.mark.parametrize("way", [{}, pytest.param({"quantization": "int8"}, marks=pytest.mark.full)])
def test_a_model_of_the_zoo_and_its_drafter(way: dict[str, str], cache: Path) -> None:
    plain = LLM("zoo:tiny", "draft_model", **way)
    for number in range(2):
        kept = LLM("zoo:tiny", "draft_model", cache_packed=True, **way)
        assert kept._pairing.loaded.is_from_copy == bool(number)
    assert_same(kept, plain)
    assert len(list(cache.iterdir())) == 2


def test_weights_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tmp_path / "model")
    LLM(folder, cache_packed=True)
    monkeypatch.setattr("foredraft.loading.models._load_weights", None)
    llm = LLM(folder, cache_packed=True)
    assert len(packed_products(llm.target.shadow)) > 1


def flipped(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 5]) + content[place + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut off": lambda content: content[:-5000],
    "empty": lambda content: b"",
    "another file": lambda content: Random(1).randbytes(len(content)),
    "bits of a weight": lambda content: flipped(content, len(content) // 2),
    "the head": lambda content: flipped(content, 300),
    "the length of the head": lambda content: flipped(content, len(tensor_file.FORMAT) + 1),
}


def test_what_is_damaged_is_told_and_made_again(tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = saved(tmp_path / "model")
    plain = LLM(folder, cache_packed=True)
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    for how, damage in DAMAGES.items():
        file.write_bytes(damage(whole))
        caplog.clear()
        with caplog.at_level(logging.WARNING, "foredraft"):
            llm = LLM(folder, cache_packed=True)
        (line,) = caplog.messages
        assert line.startswith(f"the packed copy {file} is not used and will be made again: "), how
        assert file.read_bytes() == whole, how
    assert_same(llm, plain)


def test_what_is_stale_is_told_and_made_again(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = saved(tmp_path / "model")
    LLM(folder, cache_packed=True)
    torch.manual_seed(1)
    other = MODELS["llama"]()
    other.save_pretrained(folder)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "foredraft"):
        llm = LLM(folder, cache_packed=True)
    assert "it was made from other files" in caplog.messages[0]
    assert_same(llm, LLM(folder))
    monkeypatch.setattr("foredraft.__version__", "0.2")
    with caplog.at_level(logging.WARNING, "foredraft"):
        assert not LLM(folder, cache_packed=True)._pairing.loaded.is_from_copy
    assert "it was made from other foredraft" in caplog.messages[-1]
    assert len(list(cache.iterdir())) == 1


def test_a_full_disk_costs_the_copy_alone(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = saved(tmp_path / "model")

    def half(descriptor: object, *_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tensor_file.os, "replace", half)  # the last thing before a copy is there
    with caplog.at_level(logging.WARNING, "foredraft"):
        llm = LLM(folder, cache_packed=True)
    (line,) = caplog.messages
    assert "No space left on device" in line
    assert list(cache.iterdir()) == []
    monkeypatch.undo()
    assert llm.model_info.packed_copy is None
    assert_same(llm, LLM(folder))


@pytest.mark.parametrize("part", ["packed", "bias", "scales"])
def test_parts_of_other_matrices_are_refused(part: str) -> None:
    """Kernels would read past them."""
    kernels = library()
    assert kernels is not None
    matrix = CodesMatrix(Codes.rounded(torch.randn(40, 96), 8), torch.ones(40), kernels)
    facts, parts = Facts.of(matrix), dict(matrix.parts)
    x = torch.randn(3, 96)
    assert torch.equal(facts.matrix(kernels, parts)(x), matrix(x))
    parts[part] = parts[part][:-1]
    with pytest.raises(ValueError, match="are not the parts of a matrix of"):
        facts.matrix(kernels, parts)


@pytest.mark.parametrize("part", ["zeros", "scale_halves", "zero_halves"])
@pytest.mark.parametrize("change", ["cut", "gone", "other"])
def test_parts_of_scales_that_share_halves_are_refused(part: str, change: str) -> None:
    kernels = library()
    assert kernels is not None
    numbers = torch.randint(0, 16, (40, 512), dtype=torch.uint8)
    whole, halves = torch.ones(40, 16), torch.ones(40, 2).half()
    matrix = CodesMatrix(Codes(numbers, 4, whole, whole, 32, halves, halves), None, kernels)
    facts, parts = Facts.of(matrix), dict(matrix.parts)
    x = torch.randn(3, 512)
    assert torch.equal(facts.matrix(kernels, parts)(x), matrix(x))
    given = parts.pop(part)
    if change != "gone":
        parts[part] = given[:, :0] if change == "cut" else given.double()
    if (part, change) == ("zeros", "gone"):
        parts.pop("scale_halves")
    with pytest.raises(ValueError, match="are not the parts of a matrix of"):
        facts.matrix(kernels, parts)
    with pytest.raises(ValueError, match="are not the parts of a matrix of"):
        replace(facts, half_shift=9).matrix(kernels, matrix.parts)


def test_what_cannot_be_kept_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture, cache: Path) -> None:
    folder = saved(tmp_path / "model")
    with pytest.raises(ConfigError, match="execution='eager' packs none"):
        LLM(folder, cache_packed=True, execution="eager")
    with pytest.raises(ConfigError, match="the model is loaded already"):
        load_model(MODELS["llama"](), cache_packed=True)
    with caplog.at_level(logging.WARNING, "foredraft"):
        LLM(folder, cache_packed=True, dtype="float64", execution="auto")
    assert caplog.messages == [f"no packed copy of {folder} is kept: none of its layers is packed"]
    assert not cache.exists()


LIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "other sizes": lambda about: about["products"][0].update(sizes=[60, 68, 64]),
    "other inputs": lambda about: about["products"][0]["facts"].update(inputs=128),
    "another kind": lambda about: about["products"][0]["facts"].update(kind=5),
    "without a weight": lambda about: about["released"].popitem(),
    "of another library": lambda about: about.update(model=["os", "system"]),
}


def test_what_lies_about_itself_is_not_used(tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A whole file, as far as its sums tell, that holds no such model."""
    folder = saved(tmp_path / "model")
    plain = LLM(folder, cache_packed=True)
    (file,) = cache.iterdir()
    for name, lie in LIES.items():
        kept = tensor_file.TensorFile(file)
        lie(kept.about)
        tensor_file.write_tensors(file, kept.about, kept.read())
        caplog.clear()
        with caplog.at_level(logging.WARNING, "foredraft"):
            llm = LLM(folder, cache_packed=True)
        assert re.search(r"is not used and will be made again: (ValueError|KeyError): ", caplog.text), name
    assert_same(llm, plain)


def test_stored_weights_of_a_gguf_file_are_kept(tmp_path: Path, cache: Path) -> None:
    """With types mixed by layer, one with zeros and one that shares halves; a file that was changed is read again."""
    kinds = {"attn_v": Kind.Q4_0, "attn_q": Kind.Q4_1}
    file = write_llama(tmp_path / "m.gguf", Kind.Q6_K, kinds=kinds).path
    plain = LLM(file, "ngram", weights="stored")
    for is_second in (False, True):
        kept = LLM(file, "ngram", weights="stored", cache_packed=True)
        assert kept._pairing.loaded.is_from_copy == is_second
        assert_same(kept, plain)
    assert len(list(cache.iterdir())) == 1
    write_llama(file, Kind.Q5_1)
    other = LLM(file, weights="stored", cache_packed=True)
    assert not other._pairing.loaded.is_from_copy
    assert_same(other, LLM(file, weights="stored"))


def test_two_processes_may_write_one_copy(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each to a file of its own, which becomes the copy when it is whole: nothing else is left, and the texts agree."""
    folder = saved(tmp_path / "model")
    meeting, replace_file = get_context("fork").Barrier(2, timeout=120), os.replace

    def when_both_are_written(source: Any, target: Any) -> None:
        meeting.wait()
        replace_file(source, target)

    def warnings() -> list[str]:
        return [record.message for record in caplog.records if record.levelno >= logging.WARNING]

    def text() -> tuple[list[int], list[str]]:
        monkeypatch.setattr(tensor_file.os, "replace", when_both_are_written)
        llm = LLM(folder, "ngram", cache_packed=True)
        return list(llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids), warnings()

    one, other = forked(text, text)
    assert one == other == (one[0], [])
    (file,) = cache.iterdir()
    assert tensor_file.TensorFile(file).read()


def test_copies_of_all_settings_are_listed(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that a load may read, and those that none reads any more, with the reason."""
    assert packed_copy.kept_files() == []
    one, other = saved(tmp_path / "one"), saved(tmp_path / "other")
    for folder, quantization in ((one, None), (one, "int8"), (other, "int4")):
        LLM(folder, cache_packed=True, quantization=quantization)
    found = packed_copy.kept_files()
    assert [Path(each.file) for each in found] == sorted(cache.iterdir())
    assert [each.num_bytes for each in found] == [file.stat().st_size for file in sorted(cache.iterdir())]
    assert not any(each.why_unused for each in found)
    assert [f"quantization={each}" in " ".join(one.settings for one in found) for each in ("int8", "int4")] == [
        True
    ] * 2
    shutil.rmtree(other)
    (cache / ".x.packed.1-2.part").write_bytes(b"half")
    (cache / "y.packed").write_bytes(b"something else")
    told = {Path(each.file).name: each.why_unused for each in packed_copy.kept_files()}
    assert told.pop(".x.packed.1-2.part") == "it is incomplete, unless a process is writing it now"
    assert told.pop("y.packed").startswith("it is damaged (it is not a foredraft file of packed weights")
    assert sorted(why.rpartition("/")[2] for why in told.values())[:2] == ["", ""]
    assert sum(why.startswith(f"{other}/") and why.endswith("has changed or is gone") for why in told.values()) == 1
    monkeypatch.setattr("foredraft.__version__", "0.2")
    whys = [each.why_unused for each in packed_copy.kept_files()]
    assert whys.count("it was made by another foredraft") == 3

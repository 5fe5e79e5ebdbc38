"""GGUF files: the weights bit for bit, the tokenizer and the chat template; every file that is refused has a reason."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import struct
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

from foredraft import LLM, SamplingParams, zoo
from foredraft.cli import app
from foredraft.errors import CheckpointError, ConfigError, ForedraftError, UnsupportedModelError
from foredraft.gguf import NEEDED
from foredraft.gguf.header import read_header
from foredraft.gguf.model import check_readable, end_token_ids, llama3_factors
from foredraft.gguf.tokenizer import merges_by_score, read_tokenizer
from foredraft.loading.models import load_model, load_tokenizer
from gguf_files import write_llama
from quantised_files import assert_close

GREEDY = SamplingParams(temperature=0, max_tokens=12)
TEXT = "In 1969 I'd 12345 apples,\n\n  don't   you?  déjà vu 東京 🙂  5 <|user|>Hi<|end|>"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file in half precision with a tokenizer, which tests may read."""
    return write_llama(tmp_path_factory.mktemp("gguf") / "plain.gguf", Kind.F16, speaks=True).path


@pytest.fixture(scope="module")
def silent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small file without a tokenizer, which is read in no time."""
    return write_llama(tmp_path_factory.mktemp("gguf") / "silent.gguf", Kind.F16).path


@pytest.fixture
def file(silent: Path, tmp_path: Path) -> Path:
    """A copy, which a test may damage."""
    return Path(shutil.copy(silent, tmp_path / "model.gguf"))


# -- weights ---------------------------------------------------------------------------------------------------------


STORED = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.Q8_0: torch.bfloat16, Kind.Q4_K: torch.bfloat16}
"""Dtypes that files of a kind count as, in the fast part; blocks count as bfloat16."""
MORE = (Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q6_K)


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", [*STORED, *(pytest.param(kind, marks=pytest.mark.full) for kind in MORE)])
def test_logits_are_those_of_the_same_weights_from_safetensors(kind: Kind, tmp_path: Path) -> None:
    """Bit for bit, in float32 and bfloat16; with a separate output layer, which the tied files below lack."""
    written = write_llama(tmp_path / "model.gguf", kind, tie_word_embeddings=kind is Kind.Q8_0)
    written.model.save_pretrained(tmp_path / "saved")
    ids = torch.arange(40)[None] * 37 % 512
    for dtype in (torch.float32, torch.bfloat16):
        loaded = load_model(written.path, dtype=dtype, weights="dequantized").model
        expected = LlamaForCausalLM.from_pretrained(tmp_path / "saved", dtype=dtype)
        assert loaded.dtype == dtype
        with torch.no_grad():
            assert torch.equal(loaded(input_ids=ids).logits, expected(input_ids=ids).logits)
    assert load_model(written.path).stored_dtype == STORED.get(kind, torch.bfloat16)


def test_a_gguf_model_speaks_and_drafts_like_any_other(plain: Path) -> None:
    llm = LLM(str(plain), dtype="float32")
    assert llm.model_info.name == str(plain)
    expected = llm.generate("Once upon a time", GREEDY)[0].outputs[0].token_ids
    for config in ("ngram", {"model": str(plain)}):
        assert (
            llm.with_speculative_config(config).generate("Once upon a time", GREEDY)[0].outputs[0].token_ids == expected
        )
    (answer,) = llm.chat([{"role": "user", "content": "Hi"}], GREEDY)
    assert answer.prompt == "<|user|>Hi\n<|assistant|>"


def test_every_end_of_a_turn_ends_the_text(tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.eot_token_id": 9, "tokenizer.ggml.eom_token_id": 3}
    written = write_llama(tmp_path / "model.gguf", metadata=metadata, speaks=True)
    assert end_token_ids(read_header(written.path)) == [3, 9]
    assert load_model(written.path).model.generation_config.eos_token_id == [3, 9]


def test_a_small_file_is_read_without_bars(silent: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load_model(silent)
    assert capfd.readouterr().err == ""


# -- rotary positions ------------------------------------------------------------------------------------------------

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def test_scaled_positions_of_llama3_are_found_again(tmp_path: Path) -> None:
    """`transformers` drops the factors: every frequency below 1/8192 would turn eight times too fast."""
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3}
    factors = np.array(llama3_factors(32, 500000.0, **LLAMA3), dtype=np.float32)
    written = write_llama(tmp_path / "m.gguf", metadata={"rope_freqs.weight": factors}, rope_parameters=rope)
    loaded = load_model(written.path, dtype="float32").model
    found = loaded.config.rope_parameters
    assert found["rope_type"] == "llama3"
    assert {key: found[key] for key in LLAMA3} == LLAMA3
    ids = torch.arange(300)[None] * 37 % 512
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, written.model(input_ids=ids).logits)


def test_factors_of_one_change_nothing(tmp_path: Path) -> None:
    factors = np.ones(32, dtype=np.float32)
    written = write_llama(tmp_path / "m.gguf", metadata={"rope_freqs.weight": factors})
    assert load_model(written.path).model.config.rope_parameters["rope_type"] == "default"


def test_other_scaling_is_refused(tmp_path: Path) -> None:
    factors = np.linspace(1, 9, 32, dtype=np.float32)
    written = write_llama(tmp_path / "a.gguf", metadata={"rope_freqs.weight": factors})
    with pytest.raises(UnsupportedModelError, match=r"factors \(rope_freqs.weight\) that are not those of Llama 3.1"):
        LLM(written.path)
    written = write_llama(tmp_path / "b.gguf", metadata={"llama.rope.scaling.type": "yarn"})
    with pytest.raises(UnsupportedModelError, match=r"scales its rotary positions \(yarn\)"):
        LLM(written.path)


def test_tensors_that_nobody_reads_are_not_passed_over(tmp_path: Path) -> None:
    """A Llama with biases is written so, and `transformers` would load it without them."""
    bias = {"blk.0.attn_q.bias": np.ones(256, dtype=np.float32)}
    written = write_llama(tmp_path / "m.gguf", metadata=bias)
    with pytest.raises(UnsupportedModelError, match=r"has only \d+"):
        LLM(written.path)


# -- tokenizers ------------------------------------------------------------------------------------------------------


def test_the_tokenizer_and_the_chat_template_come_from_the_file(plain: Path) -> None:
    ours, original = load_tokenizer(plain), zoo.load("tiny")[2]
    assert ours.get_vocab() == original.get_vocab()
    for text in (TEXT, " leading", "", "\n"):
        assert ours(text)["input_ids"] == original(text)["input_ids"]
        assert ours.decode(ours(text)["input_ids"]) == text
    assert ours.chat_template == original.chat_template
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        assert getattr(ours, name) == getattr(original, name)


def split_by(pre: str, tmp_path: Path, text: str) -> list[str]:
    """The pieces of a text, in which tokens are single bytes, so that they show the splits and nothing else."""
    path = write_llama(tmp_path / f"{pre}.gguf", metadata={"tokenizer.ggml.pre": pre}, speaks=True).path
    backend = read_tokenizer(read_header(path)).backend_tokenizer
    return [text[slice(*span)] for _, span in backend.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["I", "'ve", " 2024", " x", " ", "\n", "don", "'", "T"]),
        ("smollm", ["I", "'ve", " ", "2", "0", "2", "4", " x", " ", "\n", "don", "'", "T"]),
        ("llama-bpe", ["I", "'ve", " ", "202", "4", " x", " \n", "don", "'T"]),
        ("qwen2", ["I", "'ve", " ", "2", "0", "2", "4", " x", " \n", "don", "'T"]),
        ("tekken", ["I", "'ve", " ", "2", "0", "2", "4", " x", " \n", "don", "'T"]),
        ("gpt-4o", ["I've", " ", "202", "4", " x", " \n", "don'T"]),
    ],
)
def test_text_is_split_as_the_model_was_trained(pre: str, pieces: list[str], tmp_path: Path) -> None:
    """llama.cpp names the way to split; read as another one, numbers and contractions become other tokens."""
    assert split_by(pre, tmp_path, "I've 2024 x \ndon'T") == pieces


def test_an_unknown_split_is_told(plain: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    metadata = {"tokenizer.ggml.pre": "of-tomorrow"}
    path = write_llama(tmp_path / "m.gguf", metadata=metadata, speaks=True).path
    assert load_tokenizer(path)(TEXT) == load_tokenizer(plain)(TEXT)
    assert "called 'of-tomorrow', which foredraft does not know" in caplog.text


def test_a_sentencepiece_tokenizer_gives_the_ids_of_sentencepiece(tmp_path: Path) -> None:
    """Scores only, as in files of Llama 2: the merges are found from them."""
    spm = pytest.importorskip("sentencepiece")
    lines = (zoo.path("tiny").parent / "README.md").read_text(encoding="utf-8").splitlines()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(tmp_path / "spm"),
        vocab_size=600,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    original = spm.SentencePieceProcessor(model_file=str(tmp_path / "spm.model"))
    size = original.get_piece_size()

    def type_of(token: int) -> int:
        kinds = [(2, original.is_unknown), (3, original.is_control), (6, original.is_byte)]
        return next((kind for kind, is_kind in kinds if is_kind(token)), 1)

    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [original.id_to_piece(token) for token in range(size)],
        "tokenizer.ggml.scores": [original.get_score(token) for token in range(size)],
        "tokenizer.ggml.token_type": [type_of(token) for token in range(size)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    tokenizer = load_tokenizer(write_llama(tmp_path / "m.gguf", metadata=metadata, vocab_size=size).path)
    for text in ("the target, with 4,096 entries", "a  b   c", " leading", "東京 🙂", "two\nlines"):
        ids = tokenizer(text)["input_ids"]
        assert ids == [1, *original.encode(text)]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    assert tokenizer.chat_template is None


def test_merges_follow_the_scores() -> None:
    vocab = {"a": 0, "b": 1, "ab": 2, "ba": 3, "aba": 4}
    assert merges_by_score(vocab, [0.0, 0.0, -1.0, -2.0, -3.0]) == [("a", "b"), ("b", "a"), ("ab", "a"), ("a", "ba")]


def test_a_tokenizer_that_is_not_read_can_be_given(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m.gguf", metadata={"tokenizer.ggml.model": "bert"}, speaks=True).path
    with pytest.raises(UnsupportedModelError, match=r"tokenizer of the kind 'bert' .* tokenizer=DIRECTORY"):
        LLM(path)
    assert LLM(path, tokenizer="zoo:tiny").generate("A dog", GREEDY)[0].finished


def test_a_file_without_tokens_takes_ids(tmp_path: Path) -> None:
    llm = LLM(write_llama(tmp_path / "m.gguf").path)
    assert llm.tokenizer is None
    assert llm.generate([[1, 2, 3]], GREEDY)[0].finished


# -- what a name means -----------------------------------------------------------------------------------------------


def test_a_file_is_chosen_in_a_directory(silent: Path, tmp_path: Path) -> None:
    one = tmp_path / "one"
    one.mkdir()
    shutil.copy(silent, one / "first.gguf")
    assert load_model(one).name == str(one)
    shutil.copy(silent, one / "second.gguf")
    with pytest.raises(ConfigError, match=r"2 models \(first.gguf, second.gguf\); choose one: gguf_file"):
        LLM(one)
    assert LLM(one, gguf_file="second.gguf").model_info.architecture == "LlamaForCausalLM"
    with pytest.raises(CheckpointError, match=r"no file 'third.gguf' \(first.gguf, second.gguf\); check gguf_file"):
        LLM(one, gguf_file="third.gguf")


def test_a_directory_with_a_config_is_read_as_ever(silent: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(zoo.path("tiny"), tmp_path / "model"))
    shutil.copy(silent, model / "beside.gguf")
    assert load_model(model).num_parameters == 5_475_584
    assert load_model(model, gguf_file="beside.gguf").num_parameters != 5_475_584


def test_gguf_file_has_no_place_beside_one_model(silent: Path) -> None:
    for model in (silent, "zoo:tiny"):
        with pytest.raises(ConfigError, match="give it with a directory or hub id"):
            LLM(model, gguf_file="x.gguf")
    with pytest.raises(ConfigError, match="the model is loaded already"):
        LLM(zoo.load("tiny")[1], gguf_file="x.gguf")


def test_the_command_line_reads_gguf(plain: Path) -> None:
    """A plain prompt goes through the chat template of the file, as for every model that has one."""
    arguments = ["generate", "Hi", "--max-new-tokens", "4", "--json", "--model"]
    for model in ([str(plain)], [str(plain.parent), "--gguf-file", plain.name]):
        result = CliRunner().invoke(app, [*arguments, *model])
        assert result.exit_code == 0, result.stderr
        line = json.loads(result.stdout)
        assert line["prompt"] == "Hi"
        assert line["chat_template"]
        assert len(line["token_ids"]) == 4


def test_a_file_at_a_hub_is_fetched(silent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def cached_file(*arguments: Any, **options: Any) -> str:
        asked.append((*arguments, options))
        return str(silent)

    monkeypatch.setattr("foredraft.loading.models.cached_file", cached_file)
    assert load_model("owner/name", gguf_file="part/x.gguf", revision="abc").name == "owner/name"
    assert asked[0] == ("owner/name", "part/x.gguf", {"revision": "abc"})


def test_a_hub_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def cached_file(*arguments: Any, **options: Any) -> str:
        raise OSError("no network")

    monkeypatch.setattr("foredraft.loading.models.cached_file", cached_file)
    with pytest.raises(CheckpointError, match=r"the GGUF file of owner/name cannot be loaded .*check the spelling"):
        LLM("owner/name", gguf_file="x.gguf")


def test_a_tokenizer_beside_gguf_files_is_found(silent: Path, tmp_path: Path) -> None:
    load_tokenizer("zoo:tiny").save_pretrained(tmp_path)
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(silent, tmp_path / name)
    assert load_tokenizer(tmp_path).get_vocab() == load_tokenizer("zoo:tiny").get_vocab()


# -- files that are refused --------------------------------------------------------------------------------------------


def test_a_file_that_is_not_gguf(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"PK\x03\x04 and so on")
    with pytest.raises(CheckpointError, match=r"is not a GGUF file: it begins with b'PK\\x03\\x04'"):
        LLM(tmp_path / "m.gguf")
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(CheckpointError, match=r"begins with b''"):
        LLM(tmp_path / "empty.gguf")
    with pytest.raises(CheckpointError, match="does not exist"):
        LLM(tmp_path / "none.gguf")


@pytest.mark.parametrize("share", [0.0001, 0.01, 0.5, 0.9999])
def test_a_truncated_file(share: float, file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(CheckpointError, match=r"ends after \d+ bytes.*truncated"):
        LLM(file)


@pytest.mark.parametrize("count", [2**30, 2**34])
def test_a_list_as_long_as_the_file_is_not_read(count: int, tmp_path: Path) -> None:
    """Bytes of a large file would become many times as much memory of Python, until the system ends the process."""
    path = tmp_path / "m.gguf"
    key = b"general.tags"
    front = [struct.pack("<IQQ", 3, 0, 1), struct.pack("<Q", len(key)), key, struct.pack("<IIQ", 9, 0, count)]
    path.write_bytes(b"".join([b"GGUF", *front]))
    os.truncate(path, 2**32)  # has holes: it takes no space
    with pytest.raises(CheckpointError, match=r"more than 128 MiB|truncated or damaged"):
        read_header(path)


def test_any_damage_in_the_header_is_a_typed_error(plain: Path, tmp_path: Path) -> None:
    """Bytes of names, lengths and kinds are overwritten, by a seed: what can be noticed is refused, nothing crashes."""
    file, rng = Path(shutil.copy(plain, tmp_path / "m.gguf")), random.Random(7)
    size, start = file.stat().st_size, read_header(file).data_start
    front = file.read_bytes()[:start]
    marks = [found.start() for found in re.finditer(rb"(general|llama|tokenizer|blk|token_embd)\.", front)]
    refused = 0
    for _ in range(60):
        damaged = bytearray(front)
        for _ in range(rng.randint(1, 3)):
            damaged[max(0, rng.choice(marks) + rng.randint(-12, 60))] = rng.choice([0, 1, 255, rng.randrange(256)])
        file.write_bytes(damaged)
        os.truncate(file, size)
        try:
            header = read_header(file)
            check_readable(header)
            read_tokenizer(header)
        except ForedraftError:
            refused += 1
    assert refused > 20


@pytest.mark.parametrize(
    ("place", "given", "message"),
    [
        (4, struct.pack("<I", 1), "of GGUF version 1"),
        (4, struct.pack("<I", 9), "of GGUF version 9"),
        (4, struct.pack("<I", 3 << 24), "is big-endian"),
        (16, struct.pack("<Q", 2**60), "damaged"),  # the number of entries
    ],
)
def test_other_versions_and_sizes(place: int, given: bytes, message: str, file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[place : place + len(given)] = given
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        LLM(file)


def test_types_that_cannot_be_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gguf

    written = write_llama(tmp_path / "m.gguf", Kind.Q8_0)

    def refuse(data: Any, kind: Kind) -> Any:
        if kind == Kind.Q8_0:
            raise NotImplementedError
        return unpack(data, kind)

    unpack = gguf.dequantize
    monkeypatch.setattr(gguf, "dequantize", refuse)
    with pytest.raises(
        UnsupportedModelError, match=r"tensors of type Q8_0 \(.*9 in all\), which gguf .* cannot dequantise"
    ):
        LLM(written.path)


def test_a_type_of_a_later_day(file: Path) -> None:
    data = file.read_bytes()
    name = b"output.weight"
    place = data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name) + 4 + 16
    file.write_bytes(data[:place] + struct.pack("<I", 999) + data[place + 4 :])
    with pytest.raises(UnsupportedModelError, match=r"tensors of type number 999 \(output.weight, 1 in all\)"):
        LLM(file)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.type": "adapter"}, "is of type 'adapter' and not a model"),
        ({"split.count": 3}, "is one of 3 parts"),
    ],
)
def test_files_that_are_no_whole_model(metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    written = write_llama(tmp_path / "m.gguf", metadata=metadata)
    with pytest.raises(CheckpointError, match=message):
        LLM(written.path)


def split(path: Path, folder: Path, sizes: Sequence[int]) -> list[Path]:
    """A model in several files: all metadata in the first, which may be without tensors, as llama.cpp writes them."""
    reader, names, files = gguf.GGUFReader(path), iter(gguf.GGUFReader(path).tensors), []
    for number, size in enumerate(sizes):
        file = folder / f"m-{number + 1:05}-of-{len(sizes):05}.gguf"
        writer = gguf.GGUFWriter(file, "llama")
        if number:
            writer.kv_data = [{}]
        else:
            for field in reader.fields.values():
                if not field.name.startswith(("GGUF.", "general.architecture")):
                    writer.add_key_value(field.name, field.contents(), field.types[0], *field.types[1:2])
        for key, value in {"split.no": number, "split.count": len(sizes)}.items():
            writer.add_uint16(key, value)
        for tensor in islice(names, size):
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        files.append(file)
    return files


@pytest.mark.parametrize("sizes", [(0, 4, 99), (5, 99)])
def test_a_model_in_several_files_is_one(sizes: tuple[int, ...], tmp_path: Path) -> None:
    """By the name of any of them or of their folder, and with the same weights; a missing or foreign one is named."""
    whole = write_llama(tmp_path / "whole.gguf", Kind.Q8_0)
    folder = tmp_path / "parts"
    folder.mkdir()
    files = split(whole.path, folder, sizes)
    for name in (files[0], files[-1], folder):
        assert_close(load_model(name, dtype="float32").model, whole.model)
    second, third = files[-1], folder / "kept"
    second.rename(third)
    with pytest.raises(CheckpointError, match=rf"has {len(sizes)} parts, but .*{second.name} does not exist"):
        load_model(files[0])
    shutil.copy(files[0], second)
    with pytest.raises(CheckpointError, match=rf"{second.name} is not part {len(sizes)} of {len(sizes)}"):
        load_model(files[0])
    second.unlink()
    third.rename(second)
    data = second.read_bytes()
    second.write_bytes(data[:-100])
    with pytest.raises(CheckpointError, match=rf"{second.name} ends after \d+ bytes, but its tensors need"):
        load_model(files[0])


def test_a_part_by_another_name_is_told_its_name(tmp_path: Path) -> None:
    files = split(write_llama(tmp_path / "whole.gguf", Kind.Q8_0).path, tmp_path, (3, 99))
    other = files[1].rename(tmp_path / "other.gguf")
    with pytest.raises(CheckpointError, match=r"is one of 2 parts of a model, .* -00001-of-00002.gguf"):
        load_model(other)


def test_an_architecture_that_is_not_known(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data.replace(b"llama", b"alpac"))
    with pytest.raises(CheckpointError, match=r"cannot read this GGUF file; load the original model"):
        LLM(file)


@pytest.mark.parametrize("package", NEEDED)
def test_a_missing_package_is_named_with_the_command(
    package: str, silent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foredraft.gguf.find_spec", lambda name: None if name == package else object())
    with pytest.raises(ConfigError, match=rf"needs {package}, .*: python -m pip install 'gguf"):
        LLM(silent)

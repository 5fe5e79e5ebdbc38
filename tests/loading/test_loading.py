"""Names become models, and what cannot be loaded becomes a typed error that says where, what and what to do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from foredraft import LLM, SamplingParams, zoo
from foredraft.errors import CheckpointError, ConfigError, TokenizerMismatchError, UnsupportedModelError
from foredraft.loading.info import eos_token_ids
from foredraft.loading.models import choose_device, is_on, load_model, load_tokenizer
from foredraft.loading.pairing import check_same_tokenizer, check_vocab_sizes
from foredraft.loading.sources import resolve
from foredraft.model.dtypes import choose_dtype
from foredraft.native.library import library
from foredraft.testing import toy_model

GREEDY = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A copy of the zoo's small drafter, which a test may damage."""
    return Path(shutil.copytree(zoo.path("tiny", "draft"), tmp_path / "model"))


def edit(checkpoint: Path, **changes: Any) -> None:
    path = checkpoint / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# -- what a name means -----------------------------------------------------------------------------------------------


def test_directories_zoo_names_and_hub_ids_are_told_apart(checkpoint: Path) -> None:
    assert resolve(checkpoint).is_local
    assert resolve("zoo:tiny").location == str(zoo.path("tiny"))
    assert resolve("zoo:tiny", part="draft").location == str(zoo.path("tiny", "draft"))
    hub = resolve("owner/name", revision="abc")
    assert not hub.is_local
    assert (hub.location, hub.options["revision"]) == ("owner/name", "abc")


def test_a_model_from_a_directory_speaks(checkpoint: Path) -> None:
    llm = LLM(checkpoint, tokenizer="zoo:tiny")
    (output,) = llm.generate("Once upon", GREEDY)
    assert len(output.outputs[0].token_ids) == 6
    assert llm.model_info.name == str(checkpoint)


@pytest.mark.parametrize("name", ["/no/such/place", "./nowhere", "~/no-such-foredraft-model", "a/b/c"])
def test_a_missing_directory_is_named(name: str) -> None:
    with pytest.raises(CheckpointError, match="does not exist; give a directory, a hub id"):
        LLM(name)


def test_a_name_like_one_that_is_there_is_answered_with_it(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A path with a spelling mistake was only ever said to be missing at the hub, after half a minute of silence."""
    with pytest.raises(CheckpointError, match=rf"does not exist; did you mean {checkpoint}\? give a directory"):
        resolve(f"{checkpoint}l")
    monkeypatch.chdir(checkpoint.parent.parent)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # its variable is read on import
    folder = checkpoint.parent.name
    with caplog.at_level("INFO", logger="foredraft"), pytest.raises(CheckpointError, match=rf"mean {folder}/model\?"):
        LLM(f"{folder}/modell")
    assert f"{folder}/modell is not a local directory, so it is looked up on the hub" in caplog.text


def test_a_file_is_no_model(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.safetensors is a file; give the directory"):
        LLM(checkpoint / "model.safetensors")


def test_an_unknown_model_of_the_zoo_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="tiny"):
        LLM("zoo:tinny")


@pytest.mark.parametrize("model", [None, 7, ""])
def test_what_is_no_name_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match="give a directory, a hub id, zoo:NAME or a loaded PreTrainedModel"):
        LLM(model)


# -- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("model.safetensors", lambda given: given[:50_000], "truncated or damaged: download or copy it again"),
        ("model.safetensors", None, r"the weights of .* cannot be loaded"),
        ("config.json", None, r"the configuration of .* needs config\.json"),
        ("config.json", lambda given: b"{", "the configuration of"),
    ],
)
def test_a_damaged_file_is_named(
    file: str, content: Callable[[bytes], bytes] | None, message: str, checkpoint: Path
) -> None:
    given = (checkpoint / file).read_bytes()
    (checkpoint / file).unlink() if content is None else (checkpoint / file).write_bytes(content(given))
    with pytest.raises(CheckpointError, match=message) as caught:
        LLM(checkpoint)
    assert str(checkpoint) in str(caught.value)
    with pytest.raises(CheckpointError, match=str(checkpoint)):
        LLM("zoo:tiny", {"method": "draft_model", "model": str(checkpoint)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "lllama"}, "lllama"),
        ({"num_hidden_layers": 2}, r"lacks 9 weights of its configuration \(model\.layers\.1\."),
        ({"num_hidden_layers": -1}, r"config\.json of .*states -1 layers"),
        ({"num_hidden_layers": 0}, r"config\.json of .*states 0 layers"),
        ({"num_hidden_layers": 10**7}, r"config\.json of .*contain \d+ "),
        ({"intermediate_size": 353}, "the weights of"),
    ],
)
def test_a_config_of_another_model_is_refused(changes: dict[str, Any], message: str, checkpoint: Path) -> None:
    """Weights that are missing do not start out random, and no modules are made of more layers than files can hold."""
    edit(checkpoint, **changes)
    with pytest.raises(CheckpointError, match=message):
        LLM(checkpoint)


def in_two_files(checkpoint: Path, edit: Callable[[list[dict[str, torch.Tensor]], dict[str, str]], None]) -> None:
    """Split the weights of a checkpoint; ``edit`` may change what its files and its index hold."""
    whole = checkpoint / "model.safetensors"
    tensors = load_file(whole)
    names, files = sorted(tensors), [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    parts = [{name: tensors[name] for name in names[number::2]} for number in (0, 1)]
    index = {name: file for file, part in zip(files, parts, strict=True) for name in part}
    edit(parts, index)
    whole.unlink()
    for file, part in zip(files, parts, strict=True):
        save_file(part, checkpoint / file, metadata={"format": "pt"})
    (checkpoint / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))


@pytest.mark.parametrize("file", ["../other/model.safetensors", "x/../../other/model.safetensors", "/other.bin", ""])
def test_an_index_does_not_name_files_outside_of_its_folder(file: str, checkpoint: Path) -> None:
    """They were read, wherever they lay."""
    shutil.copytree(checkpoint, checkpoint.parent / "other")
    in_two_files(checkpoint, lambda parts, index: index.update(dict.fromkeys(parts[0], file)))
    with pytest.raises(CheckpointError, match=f"names '{file}', which is not a file in its folder"):
        LLM(checkpoint)


INDEX = "model.safetensors.index.json"
"""Of split weights."""


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"metadata": ...}, 'has no object named metadata, .*; add "metadata": {} next to weight_map'),
        ({"metadata": None}, "has no object named metadata"),
        ({"metadata": [1]}, "has no object named metadata"),
        ({"weight_map": ...}, "has no weight_map from tensors to files"),
        ({"weight_map": ["lm_head.weight"]}, "has no weight_map from tensors to files"),
        ({"lm_head.weight": None}, "has no weight_map from tensors to files"),
        ({"lm_head.weight": ["a.safetensors"]}, "has no weight_map from tensors to files"),
        ({"lm_head.weight": "a\0b.safetensors"}, "names .*, which is not a file in its folder"),
        ({"lm_head.weight": "config.json"}, "names 'config.json', which is not a .safetensors file"),
        ({"lm_head.weight": "part/"}, "names 'part/', which is not a .safetensors file"),
        ({"lm_head.weight": "a.safetensors"}, "names 'a.safetensors', which does not exist; download or copy"),
        ({"lm_head.weight": f"{'a' * 300}.safetensors"}, "names 'aaa.*, which does not exist; download or copy"),
        ("[" * 100_000, "cannot be read .* download or copy it again"),
    ],
)
def test_a_damaged_index_is_refused_by_what_is_wrong_with_it(
    damage: dict[str, Any] | str, message: str, checkpoint: Path
) -> None:
    """One without metadata was "KeyError: 'metadata'", and one in too many brackets a RecursionError."""
    in_two_files(checkpoint, lambda parts, index: None)
    content = json.loads((checkpoint / INDEX).read_text())
    for key, value in {} if isinstance(damage, str) else damage.items():
        holder = content if key in content else content["weight_map"]
        holder.pop(key) if value is ... else holder.update({key: value})
    (checkpoint / INDEX).write_text(damage if isinstance(damage, str) else json.dumps(content))
    with pytest.raises(CheckpointError, match=f"{INDEX} {message}".replace("{}", r"\{\}")):
        LLM(checkpoint)


def test_a_tensor_in_two_files_is_that_of_the_index(checkpoint: Path) -> None:
    """A file of an earlier save may still hold it: the last one that was read counted, in silence."""
    name = "model.norm.weight"
    stale = torch.full_like(load_file(checkpoint / "model.safetensors")[name], 7.0)

    def listed_first(parts: list[dict[str, torch.Tensor]], index: dict[str, str]) -> None:
        files = sorted(set(index.values()))
        mine = 0 if name in parts[0] else 1
        parts[0][name], parts[1][name], index[name] = parts[mine][name], stale, files[0]

    in_two_files(checkpoint, listed_first)
    with pytest.raises(
        CheckpointError, match=r"contains model\.norm\.weight in .*00001.* and in .*00002.* names .*00001"
    ):
        LLM(checkpoint)


def test_a_checkpoint_in_two_files_is_read(checkpoint: Path) -> None:
    """Also where both hold a tensor, of which the last one is listed."""
    want = LLM(checkpoint).generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids
    name = "model.norm.weight"

    def listed_last(parts: list[dict[str, torch.Tensor]], index: dict[str, str]) -> None:
        right = parts[0].pop(name) if name in parts[0] else parts[1][name]
        parts[0][name], parts[1][name], index[name] = torch.full_like(right, 7.0), right, sorted(set(index.values()))[1]

    in_two_files(checkpoint, listed_last)
    assert LLM(checkpoint).generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids == want


def test_scales_without_a_layout_are_refused(checkpoint: Path) -> None:
    """Weights in 8 bits were taken as they lie, without their scales."""
    file = checkpoint / "model.safetensors"
    tensors, name = load_file(file), "model.layers.0.mlp.up_proj.weight"
    rounded = {name: tensors[name].to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(1)}
    save_file({**tensors, **rounded}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"up_proj\.weight_scale_inv, .*does not say how they were made"):
        LLM(checkpoint)


def test_an_encoder_decoder_model_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5", "is_encoder_decoder": True}))
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        LLM(tmp_path)


def test_a_damaged_tokenizer(tmp_path: Path) -> None:
    model = Path(shutil.copytree(zoo.path("tiny"), tmp_path / "model"))
    (model / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="the tokenizer of"):
        LLM(model)


def test_a_tokenizer_that_is_not_there(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match="contains no tokenizer"):
        LLM(checkpoint, tokenizer=checkpoint)
    with pytest.raises(ConfigError, match="tokenizer is int"):
        load_tokenizer(7)


# -- dtype and device ------------------------------------------------------------------------------------------------


CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_auto_keeps_what_the_device_computes_in(has_bfloat16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 checkpoints became bfloat16 without a word, and their texts others than those of `transformers`."""
    monkeypatch.setattr("foredraft.model.dtypes.cpu_has_bfloat16", lambda: has_bfloat16)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    kept = {CPU: {torch.float32, torch.float64}, GPU: {torch.float32, torch.float64, torch.float16, torch.bfloat16}}
    kept[CPU] |= {torch.bfloat16} if has_bfloat16 else set()
    for device, dtypes in kept.items():
        for stored in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            assert choose_dtype("auto", device, stored) == (stored if stored in dtypes else torch.float32)
        assert choose_dtype("auto", device) == choose_dtype("auto", device, torch.int8) == torch.float32
        assert choose_dtype("auto", device, torch.float32, widest=torch.bfloat16) == torch.bfloat16
    assert choose_dtype("fp16", CPU, torch.float32) == torch.float16
    with pytest.raises(ConfigError, match="dtype is 'int4'; choose auto"):
        choose_dtype("int4", CPU)


BFLOAT16_WITHOUT_PRODUCTS = {
    "llama": (torch.bfloat16, {"num_key_value_heads": 2}),
    "gemma3_text": (torch.bfloat16, {"num_key_value_heads": 2, "head_dim": 8}),
    "opt": (torch.bfloat16, {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "mixtral": (torch.bfloat16, {"num_key_value_heads": 2, "num_local_experts": 4}),
    "falcon": (torch.float32, {}),
}
"""By architecture the dtype in which its checkpoints in bfloat16 are loaded, and settings of a toy."""


@pytest.mark.parametrize("kind", BFLOAT16_WITHOUT_PRODUCTS)
def test_bfloat16_is_kept_where_kernels_of_the_library_multiply_all_weights(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a CPU read float32, twice the bytes of every step; torch's own products take several times as long there."""
    monkeypatch.setattr("foredraft.model.dtypes.cpu_has_bfloat16", lambda: False)
    expected, settings = BFLOAT16_WITHOUT_PRODUCTS[kind]
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = AutoConfig.for_model(kind, vocab_size=64, **sizes, **settings)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(tmp_path)
    found = load_model(tmp_path, device="cpu")
    assert found.model.dtype == (expected if library() is not None else torch.float32)
    monkeypatch.setattr("foredraft.model.dtypes.library", lambda: None)
    assert load_model(tmp_path, device="cpu").model.dtype == torch.float32


@pytest.mark.parametrize(
    ("own", "wanted", "expected"),
    [
        *(("cpu", "cpu", True), ("cpu", "cuda", False), ("cuda:1", "cuda", True)),
        *(("cuda:1", "cuda:1", True), ("cuda:0", "cuda:1", False)),
    ],
)
def test_a_loaded_model_is_where_it_is_wanted_or_not(own: str, wanted: str, expected: bool) -> None:
    """One on the first GPU was taken for one on the second."""
    assert is_on(torch.device(own), torch.device(wanted)) == expected


@pytest.mark.parametrize("names_dtype", [True, False], ids=["config", "weights"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_the_dtype_of_a_checkpoint_is_known(
    stored: torch.dtype, names_dtype: bool, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its config, or from the header of its weights where the config is silent."""
    monkeypatch.setattr("foredraft.model.dtypes.cpu_has_bfloat16", lambda: True)
    LlamaForCausalLM.from_pretrained(checkpoint, dtype=stored).save_pretrained(checkpoint)
    if not names_dtype:
        edit(checkpoint, dtype=None, torch_dtype=None)
    loaded = load_model(checkpoint, device="cpu")
    assert loaded.stored_dtype == stored
    assert loaded.model.dtype == (torch.float32 if stored == torch.float16 else stored)


def test_the_dtype_of_a_checkpoint_in_parts_is_known(tmp_path: Path) -> None:
    zoo.load("tiny")[1].save_pretrained(tmp_path, max_shard_size="1MB")
    edit(tmp_path, dtype=None)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert load_model(tmp_path).stored_dtype == torch.float32


def test_a_dtype_that_nobody_knows_is_single_precision(checkpoint: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    (checkpoint / "model.safetensors").unlink()
    torch.save(model.state_dict(), checkpoint / "pytorch_model.bin")
    edit(checkpoint, dtype=None)
    loaded = load_model(checkpoint)
    assert (loaded.stored_dtype, loaded.model.dtype) == (None, torch.float32)


def test_a_float32_checkpoint_gives_the_text_of_transformers(checkpoint: Path) -> None:
    LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).save_pretrained(checkpoint)
    llm = LLM(checkpoint, tokenizer="zoo:tiny")
    model = LlamaForCausalLM.from_pretrained(checkpoint)
    assert llm.model_info.dtype == str(model.dtype).removeprefix("torch.") == "float32"
    ids = torch.tensor([[260, 300, 17, 42]])
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24)
    output = llm.generate(ids.tolist(), SamplingParams(temperature=0, max_tokens=24))[0].outputs[0]
    assert list(output.token_ids) == expected[0, 4:].tolist()


def test_a_drafter_has_its_own_dtype_and_is_never_wider_than_its_target(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A choice for all counts for the drafter too; one of its own counts most."""
    monkeypatch.setattr("foredraft.model.dtypes.cpu_has_bfloat16", lambda: True)
    config = {"method": "draft_model", "model": str(checkpoint)}  # stored in bfloat16, as zoo:tiny is
    single = checkpoint.parent / "single"
    LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).save_pretrained(single)

    def dtypes(llm: LLM) -> tuple[str, str]:
        return llm.model_info.dtype, llm.drafting.info.dtype

    assert dtypes(LLM("zoo:tiny", config)) == ("bfloat16", "bfloat16")
    assert dtypes(LLM("zoo:tiny", {**config, "model": str(single)})) == ("bfloat16", "bfloat16")
    assert dtypes(LLM("zoo:tiny", config, dtype="float32")) == ("float32", "float32")
    mixed = LLM(single, config, tokenizer="zoo:tiny")
    assert dtypes(mixed) == ("float32", "bfloat16")
    assert dtypes(LLM("zoo:tiny", {**config, "dtype": "float32"})) == ("bfloat16", "float32")


def test_the_dtype_asked_for_is_the_dtype_loaded(checkpoint: Path) -> None:
    assert load_model(checkpoint, dtype="float64").model.dtype == torch.float64
    assert load_model(checkpoint, dtype=torch.bfloat16).model.dtype == torch.bfloat16


@pytest.mark.parametrize("device", ["toaster", "cuda:x"])
def test_an_unknown_device(device: str) -> None:
    with pytest.raises(ConfigError, match="device is"):
        choose_device(device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="torch sees no GPU"):
        LLM("zoo:tiny", device="cuda")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_loaded_model_keeps_its_dtype_and_its_weights(dtype: torch.dtype) -> None:
    model = toy_model(dtype=dtype)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    llm = LLM(model, "ngram")
    llm.generate([[1, 2, 3]], GREEDY)
    assert llm.model_info.dtype == str(dtype).removeprefix("torch.")
    after = model.state_dict()
    assert list(after) == list(before)
    for name, weight in after.items():
        assert weight.dtype == dtype
        assert torch.equal(weight, before[name])


def test_a_loaded_model_is_not_converted_silently() -> None:
    with pytest.raises(ConfigError, match="convert it with"):
        LLM(toy_model(dtype=torch.float32), dtype="bfloat16")


# -- end of sequence -------------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize(("eos", "ids"), [(None, ()), (5, (5,)), ([5, 7], (5, 7))], ids=str)
def test_eos_ids_come_from_the_generation_config(eos: Any, ids: tuple[int, ...]) -> None:
    model = toy_model()
    model.generation_config.eos_token_id = eos
    assert eos_token_ids(model) == ids
    plain = LLM(model).generate([[1, 2, 3]], SamplingParams(temperature=1, seed=0, max_tokens=200))[0].outputs[0]
    if ids:
        assert plain.finish_reason == "stop"
        assert plain.token_ids[-1] in ids
        assert not set(plain.token_ids[:-1]) & set(ids)
    else:
        assert plain.finish_reason == "length"


# -- one tokenizer for two models ------------------------------------------------------------------------------------


def word_tokenizer(words: list[str], **special: str) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def test_the_first_token_that_differs_is_named() -> None:
    ours = word_tokenizer(["?", "a", "b", "c"])
    check_same_tokenizer(ours, word_tokenizer(["?", "a", "b", "c"]), "T", "D")
    with pytest.raises(TokenizerMismatchError, match="of T and D differ: id 2 is 'b' in the first and 'x' in the"):
        check_same_tokenizer(ours, word_tokenizer(["?", "a", "x", "b"]), "T", "D")
    with pytest.raises(TokenizerMismatchError, match="id 3 is 'c' in the first and missing in the second"):
        check_same_tokenizer(ours, word_tokenizer(["?", "a", "b"]), "T", "D")
    first, second = (word_tokenizer(["?", "a", "b"], bos_token=bos) for bos in "ab")
    with pytest.raises(TokenizerMismatchError, match="bos_token is 'a' in the first and 'b' in the second"):
        check_same_tokenizer(first, second, "T", "D")


def test_padding_of_a_vocabulary_is_tolerated_and_another_size_is_not() -> None:
    for sizes in [(50257, 50304), (32000, 32000), (151936, 152064), (50304, 50257)]:
        check_vocab_sizes(*sizes, "T", "D")
    check_vocab_sizes(152064, 151680, "T", "D", num_tokens=151665)
    for sizes in [(32000, 50257), (64, 80), (32000, 32002)]:
        with pytest.raises(
            TokenizerMismatchError, match=f"T has {sizes[0]} token ids and its drafter, D, has {sizes[1]}"
        ):
            check_vocab_sizes(*sizes, "T", "D")


def test_a_drafter_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=4096, n_embd=16, n_layer=1, n_head=2, n_positions=64)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    word_tokenizer([f"w{i}" for i in range(4096)]).save_pretrained(tmp_path)
    with pytest.raises(TokenizerMismatchError, match=r"zoo:tiny and .* differ: id 0 is '<\|endoftext\|>'"):
        LLM("zoo:tiny", {"model": str(tmp_path)})
    with pytest.raises(TokenizerMismatchError, match="id 0 is"):  # known by the directory it came from
        LLM("zoo:tiny", {"model": GPT2LMHeadModel.from_pretrained(tmp_path)})


def test_loaded_models_without_tokenizers_are_compared_by_size() -> None:
    target, drafter = toy_model(64), toy_model(64, seed=1)
    llm = LLM(target, {"model": drafter})
    assert llm.generate([[1, 2]], GREEDY)[0].finished
    with pytest.raises(TokenizerMismatchError, match="64 token ids and its drafter, the llama model, has 80"):
        LLM(target, {"model": toy_model(80)})


@pytest.mark.parametrize(("target_size", "drafter_size"), [(60, 64), (64, 60)])
def test_padded_vocabularies_give_the_plain_tokens(target_size: int, drafter_size: int) -> None:
    target, drafter = toy_model(target_size), toy_model(drafter_size, seed=1)
    llm, prompts = LLM(target, {"model": drafter, "num_draft_branches": 2}), [[1, 2, 3], [5, 6]]
    for params in (GREEDY, SamplingParams(max_tokens=12, seed=3)):
        plain, drafted = (each.generate(prompts, params) for each in (llm.with_speculative_config(None), llm))
        assert [o.outputs[0].token_ids for o in drafted] == [o.outputs[0].token_ids for o in plain]


def test_the_drafter_of_the_zoo_is_the_default_and_another_may_be_named() -> None:
    own = LLM("zoo:tiny", "draft_model")
    assert own.drafting.info.name == "zoo:tiny (draft)"
    named = LLM("zoo:tiny", {"model": str(zoo.path("tiny", "draft")), "num_speculative_tokens": 2})
    loaded = LLM("zoo:tiny", {"model": LlamaForCausalLM.from_pretrained(zoo.path("tiny", "draft"))})
    outputs = [llm.generate("A dog", GREEDY)[0].outputs[0].token_ids for llm in (own, named, loaded)]
    assert outputs[0] == outputs[1] == outputs[2]


def test_a_tokenizer_over_which_its_library_panics_is_refused(tmp_path: Path) -> None:
    """tokenizers reads a merge beyond its end, and what Rust raises then is no Exception."""
    folder = Path(shutil.copytree(zoo.path("tiny", "tokenizer"), tmp_path / "m"))
    file = folder / "tokenizer.json"
    described = json.loads(file.read_text(encoding="utf-8"))
    described["model"] |= {"vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]}
    file.write_text(json.dumps({**described, "added_tokens": []}), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"the tokenizer of .* cannot be loaded \("):
        load_tokenizer(folder)

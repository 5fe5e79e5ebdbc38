"""Checkpoints in the layout of compressed-tensors: written and read back as the same model, or refused by name."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

from architectures import ARCHITECTURES
from foredraft import LLM, SamplingParams
from foredraft.cli import app
from foredraft.cli.prompts import is_instruct
from foredraft.errors import CheckpointError, ConfigError, UnsupportedModelError
from foredraft.loading import compressed
from foredraft.loading.compressed import METHOD, packed, unpacked
from foredraft.loading.layouts import codes_of
from foredraft.loading.models import load_model, load_tokenizer
from foredraft.model.execution.forwards import replacement
from foredraft.native.codes import Codes
from foredraft.native.library import library
from foredraft.testing import toy_model
from gguf_files import write_llama
from quantised_files import assert_close, change_parts, change_settings, parts_of, write_quantised

GREEDY = SamplingParams(temperature=0.0, seed=7, max_tokens=24)
SAMPLED = SamplingParams(temperature=1.0, seed=7, max_tokens=24)
PROMPTS = ["My liege,", "Once upon"]

needs_kernels = pytest.mark.skipif(library() is None, reason="no kernels here")


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dim", [0, 1])
def test_packing_and_unpacking_are_inverse(bits: int, dim: int) -> None:
    """Also the highest numbers, which make words negative, and sizes that fill no word."""
    numbers = torch.randint(0, 2**bits, (13, 11), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    numbers[3:9, 3:9] = 2**bits - 1
    words = packed(numbers, bits, dim)
    assert words.dtype == torch.int32
    assert words.shape[dim] == -(-numbers.shape[dim] * bits // 32)
    assert torch.equal(unpacked(words, bits, numbers.shape[dim], dim), numbers)


@pytest.mark.parametrize(("bits", "group", "has_zeros"), [(8, 0, False), (4, 32, True), (4, 64, False)])
def test_codes_come_back(bits: int, group: int, has_zeros: bool) -> None:
    weight = torch.randn(30, 128, generator=torch.Generator().manual_seed(0))
    codes = Codes.rounded(weight, bits, group, has_zeros=has_zeros)
    found = codes_of({"quant_method": METHOD}, "layer", compressed.parts_of(codes)).codes
    assert found.kind == codes.kind
    assert torch.equal(found.numbers, codes.numbers)
    assert torch.equal(found.dense(), codes.dense())


@needs_kernels
@pytest.mark.parametrize("quantization", [pytest.param("int8", marks=pytest.mark.full), "int4"])
def test_what_is_saved_is_the_same_model(quantization: str, tmp_path: Path) -> None:
    """The same codes in every layer, and the same texts, with drafts and without."""
    folder = tmp_path / "saved"
    given = LLM("zoo:tiny", quantization=quantization)
    given.save_quantized(folder)
    found = LLM(str(folder))
    info = found.model_info
    assert (info.quantization, info.dtype) == ("stored", given.model_info.dtype)
    assert info.bits_per_weight == given.model_info.bits_per_weight
    assert info.step_bytes == given.model_info.step_bytes
    modules = dict(found.target.shadow.named_modules())
    for name, module in given.target.shadow.named_modules():
        if type(module) is torch.nn.Linear:
            ours, theirs = replacement(module).codes(), replacement(modules[name]).codes()
            assert torch.equal(ours.numbers, theirs.numbers)
            assert torch.equal(ours.dense(), theirs.dense())
    assert found.eos_token_ids == given.eos_token_ids
    params = [GREEDY, SAMPLED]
    want = [output.outputs[0].token_ids for output in given.generate(PROMPTS, params)]
    for llm in (found, found.with_speculative_config("ngram")):
        assert [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)] == want
    assert load_model(folder, weights="stored").types == info.weight_types


@needs_kernels
def test_a_tied_embedding_is_kept_once_when_it_is_read_back(tmp_path: Path) -> None:
    """The file holds it twice, for other readers."""
    model = toy_model(512, dtype=torch.float32, hidden_size=64, intermediate_size=96, tie_word_embeddings=True)
    given = LLM(model, quantization="int8")
    given.save_quantized(tmp_path / "m")
    found = LLM(str(tmp_path / "m"), dtype="float32")
    assert not any(found.target.shadow.get_input_embeddings().weight.stride())
    prompts = [[5, 6, 7] * 9, [3]]
    want, got = (llm.generate(prompts, SAMPLED) for llm in (given, found))
    assert [each.outputs[0].token_ids for each in got] == [each.outputs[0].token_ids for each in want]


@needs_kernels
def test_the_command_line_writes_them(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["quantize", "zoo:tiny", str(tmp_path / "q"), "--quantization", "int4"])
    assert result.exit_code == 0, result.stderr
    settings = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    assert (settings["quant_method"], settings["format"]) == ("compressed-tensors", "pack-quantized")
    result = CliRunner().invoke(app, ["info", "--model", str(tmp_path / "q"), "--json"])
    assert "4 bits by 32 and 1 of 8 bits" in json.loads(result.stdout)["model"]["weight_types"]
    result = CliRunner().invoke(app, ["quantize", "zoo:tiny", str(tmp_path / "q")])
    assert result.exit_code == 2
    assert "is not empty; name a new folder" in " ".join(result.stderr.split())


@needs_kernels
def test_a_base_model_stays_one(tmp_path: Path) -> None:
    """zoo:tiny continues text and has a chat template: a copy of it, and a copy of that, took text for a message."""
    LLM("zoo:tiny", quantization="int8").save_quantized(tmp_path / "q")
    copy = LLM(str(tmp_path / "q"))
    assert not is_instruct(copy.tokenizer, str(tmp_path / "q"))
    copy.save_quantized(tmp_path / "again")
    again = LLM(str(tmp_path / "again"))
    assert not is_instruct(again.tokenizer, str(tmp_path / "again"))
    assert again.tokenizer.chat_template == load_tokenizer("zoo:tiny").chat_template  # which `chat` uses


# -- those of others -------------------------------------------------------------------------------------------------


def scheme(bits: int, group: int, **changes: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "strategy": "group" if group else "channel", "group_size": group}
    return {"targets": ["Linear"], "weights": {**weights, **changes}, "input_activations": None}


def write(folder: Path, bits: int, group: int, style: str, *, has_zeros: bool = False) -> LlamaForCausalLM:
    """A checkpoint as llm-compressor writes it, with an output embedding in full; the model that it stands for."""
    model = toy_model(512, dtype=torch.float32, hidden_size=128, intermediate_size=192).eval()
    generator = torch.Generator().manual_seed(1)

    def stored(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs, inputs = weight.shape
        columns, half = inputs // group if group else 1, 2 ** (bits - 1)
        numbers = torch.randint(-half, half, (outputs, inputs), generator=generator)
        scales = (torch.rand(outputs, columns, generator=generator) / 2**bits / 8).bfloat16()
        zeros = torch.randint(-half, half, (outputs, columns), generator=generator) if has_zeros else None
        is_packed = style == "pack-quantized"
        tensors = {"weight": numbers.to(torch.int8)}
        if is_packed:
            whole = packed((numbers + half).to(torch.uint8), bits, 1)
            tensors = {"weight_packed": whole, "weight_shape": torch.tensor([outputs, inputs])}
        tensors["weight_scale"] = scales
        if zeros is not None:
            tensors["weight_zero_point"] = (
                packed((zeros + half).to(torch.uint8), bits, 0) if is_packed else zeros.to(torch.int8)
            )
        wide = numbers if zeros is None else numbers - zeros.repeat_interleave(inputs // columns, 1)
        weight.copy_(wide * scales.float().repeat_interleave(inputs // columns, 1))
        return tensors

    of_weights = {**settings(), "format": style, "config_groups": {"group_0": scheme(bits, group)}}
    write_quantised(folder, model, of_weights, stored)
    return model


def settings() -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "quantization_status": "compressed", "ignore": ["lm_head"]}


@pytest.mark.parametrize(
    ("bits", "group", "style", "has_zeros"),
    [
        (4, 64, "pack-quantized", True),
        (8, 0, "int-quantized", False),
        (8, 0, "int-quantized", True),
        (8, 32, "naive-quantized", False),
    ],
)
def test_plain_checkpoints_of_others_are_read(
    bits: int, group: int, style: str, has_zeros: bool, tmp_path: Path
) -> None:
    model = write(tmp_path / "m", bits, group, style, has_zeros=has_zeros)
    loaded = load_model(tmp_path / "m", dtype="float32")
    assert loaded.types is not None
    assert f"of {bits} bits" in loaded.types
    assert not any(loaded.model.model.layers[0].mlp.up_proj.weight.stride())
    assert_close(loaded.model, model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "float-quantized"}, "its format is float-quantized"),
        ({"config_groups": {"a": {**scheme(8, 0), "input_activations": {"num_bits": 8}}}}, "rounds activations, too"),
        ({"config_groups": {"a": scheme(8, 0, type="float")}}, "its weights are float of 8 bits"),
        ({"config_groups": {"a": scheme(3, 0)}}, "its weights are int of 3 bits"),
        ({"config_groups": {"a": scheme(4, 32, strategy="block")}}, "its scales are by block"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "its weights are sparse"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "it has a kv_cache_scheme"),
    ],
)
def test_what_is_not_plain_is_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path / "m", 4, 32, "pack-quantized")
    change_settings(tmp_path / "m", **changes)
    with pytest.raises(UnsupportedModelError, match=f"cannot read compressed-tensors weights of .*: .*{message}"):
        load_model(tmp_path / "m", weights="stored")


def test_other_layouts_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any weight is read; transformers would read one with a package that is not here, or pass over it."""
    write(tmp_path / "m", 4, 32, "pack-quantized")
    (tmp_path / "m" / "model.safetensors").unlink()
    for method in ("bitsandbytes", "hqq"):
        change_settings(tmp_path / "m", quant_method=method)
        with pytest.raises(UnsupportedModelError, match=f"layout {method} of .* is not supported"):
            load_model(tmp_path / "m", weights="stored")
    for method in ("torchao", "hqq"):
        change_settings(tmp_path / "m", quant_method=method)
        monkeypatch.setitem(sys.modules, method, None)
        with pytest.raises(CheckpointError, match=rf"{method}, which foredraft leaves to .* install that, or load the"):
            load_model(tmp_path / "m")
    change_settings(tmp_path / "m", quant_method="newest")
    with pytest.raises(UnsupportedModelError, match=r"layout of newest, which neither foredraft nor transformers"):
        load_model(tmp_path / "m")


@pytest.mark.parametrize(
    ("order", "style"),
    [
        ("neighbours", "pack-quantized"),
        ("none", "int-quantized"),
        ("groups", "pack-quantized"),
        ("inputs", "int-quantized"),
    ],
)
def test_inputs_that_are_grouped_by_the_order_of_activations_are_read(order: str, style: str, tmp_path: Path) -> None:
    """By ``weight_g_idx``. Groups in another order are multiplied as they lie; inputs that are spread dequantised."""
    bits = 4 if style == "pack-quantized" else 8
    write(tmp_path / "m", bits, 32, style, has_zeros=True)
    change_settings(tmp_path / "m", config_groups={"group_0": scheme(bits, 32, actorder="group")})
    file = tmp_path / "m" / "model.safetensors"
    tensors, parts = load_file(file), parts_of(tmp_path / "m")
    generator = torch.Generator().manual_seed(2)
    groups = torch.arange(128) // 32
    wanted = {
        "neighbours": groups,
        "none": groups,
        "groups": 3 - groups,
        "inputs": groups[torch.randperm(128, generator=generator)],
    }[order]
    given = torch.full((128,), -1) if order == "none" else wanted
    file_of = {"quant_method": METHOD}
    own = codes_of(file_of, "layer", parts).codes
    assert own.zeros is not None
    scales, zeros = own.scales[:, wanted], own.zeros[:, wanted].float()
    dense = (own.numbers.float() - zeros) * scales
    parts["weight_g_idx"] = given.to(torch.int32)
    found = codes_of(file_of, "layer", parts)
    assert torch.equal(found.dense(), dense)
    assert (found.order is not None) == (order == "inputs")
    of_all = {
        f"{name.removesuffix('.weight_scale')}.weight_g_idx": torch.arange(32 * scales.shape[1], dtype=torch.int32)
        // 32
        for name, scales in tensors.items()
        if name.endswith(".weight_scale")
    }
    save_file({**tensors, **of_all, "model.layers.0.mlp.up_proj.weight_g_idx": given.to(torch.int32)}, file)
    loaded = load_model(tmp_path / "m", dtype="float32")
    assert loaded.types is not None
    assert ("1 with reordered inputs" in loaded.types) == (order == "inputs")


def without(file: Path, part: str, *, of_all: bool) -> None:
    """Take a part out of one layer of a checkpoint, or out of all."""
    tensors = load_file(file)
    names = [name for name in tensors if name.endswith(part)]
    for name in names if of_all else names[3:4]:
        del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("style", "symmetric"), [("pack-quantized", False), ("int-quantized", None), ("naive-quantized", None)]
)
def test_a_layer_that_has_lost_its_zero_points_is_refused(style: str, symmetric: bool | None, tmp_path: Path) -> None:
    """Its weights would be others, in silence."""
    bits = 4 if style == "pack-quantized" else 8
    write(tmp_path / "m", bits, 32, style, has_zeros=True)
    if symmetric is not None:
        change_settings(tmp_path / "m", config_groups={"group_0": scheme(bits, 32, symmetric=symmetric)})
    without(tmp_path / "m" / "model.safetensors", ".weight_zero_point", of_all=False)
    with pytest.raises(
        CheckpointError, match=r"lacks model.layers.0.*.weight_zero_point \(1 of 14 layers\), but 13 other"
    ):
        load_model(tmp_path / "m")


@pytest.mark.parametrize(("version", "is_read"), [("0.9.3", False), ("0.12.1", False), ("0.9.2", True), (None, True)])
def test_zero_points_that_no_layer_has_are_those_that_old_writers_left_out(
    version: str | None, is_read: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Up to 0.9.2 they were not written where all were in the middle; it is told. Newer ones always write them."""
    model = write(tmp_path / "m", 4, 32, "pack-quantized")
    change_settings(tmp_path / "m", version=version, config_groups={"group_0": scheme(4, 32, symmetric=False)})
    if is_read:
        assert_close(load_model(tmp_path / "m", dtype="float32").model, model)
        assert "layers have weight_zero_point, but none has" in caplog.text
    else:
        with pytest.raises(CheckpointError, match="14 of 14 layers"):
            load_model(tmp_path / "m")


def test_zero_points_of_codes_that_are_called_symmetric_are_refused(tmp_path: Path) -> None:
    """Readers that believe config.json pass over them."""
    write(tmp_path / "m", 4, 32, "pack-quantized", has_zeros=True)
    change_settings(tmp_path / "m", config_groups={"group_0": scheme(4, 32, symmetric=True)})
    with pytest.raises(CheckpointError, match="states that its codes are symmetric, but its zero points"):
        load_model(tmp_path / "m")


def test_layers_of_a_symmetric_scheme_need_no_zero_points(tmp_path: Path) -> None:
    """Schemes are told apart by the names of layers, also by patterns."""
    model = write(tmp_path / "m", 4, 32, "pack-quantized", has_zeros=True)
    file = tmp_path / "m" / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if "down_proj.weight_zero_point" in name]:
        layer = name.removesuffix(".weight_zero_point")
        own = {part.rsplit(".", 1)[1]: tensor for part, tensor in tensors.items() if part.startswith(f"{layer}.")}
        del own["weight_zero_point"], tensors[name]
        model.get_submodule(layer).weight.data = codes_of({"quant_method": METHOD}, layer, own).codes.dense()
    save_file(tensors, file, metadata={"format": "pt"})
    groups = {"a": scheme(4, 32, symmetric=False), "b": scheme(4, 32, symmetric=True)}
    change_settings(tmp_path / "m", config_groups={**groups, "b": {**groups["b"], "targets": ["re:.*down_proj$"]}})
    assert_close(load_model(tmp_path / "m", dtype="float32").model, model)


@pytest.mark.parametrize("actorder", ["group", "weight"])
def test_a_layer_that_has_lost_the_order_of_its_inputs_is_refused(actorder: str, tmp_path: Path) -> None:
    """Where groups follow the order of activations; by "weight" they are neighbours."""
    model = write(tmp_path / "m", 4, 32, "pack-quantized")
    change_settings(tmp_path / "m", config_groups={"group_0": scheme(4, 32, actorder=actorder)})
    change_parts(tmp_path / "m", weight_g_idx=torch.arange(128, dtype=torch.int32) // 32)
    if actorder == "weight":
        assert_close(load_model(tmp_path / "m", dtype="float32").model, model)
    else:
        with pytest.raises(CheckpointError, match=r"weight_g_idx \(13 of 14 layers\), but 1 other layers"):
            load_model(tmp_path / "m")


@pytest.mark.parametrize(
    ("part", "changed"),
    [
        ("weight_packed", lambda given: given[:, :3]),
        ("weight_scale", lambda given: given[:, :3]),
        ("weight_shape", lambda given: given[:1]),
        ("weight_shape", lambda _: torch.tensor([192.5, 128.0])),
        ("weight_shape", lambda _: torch.tensor(5)),
        ("weight_shape", lambda _: torch.tensor([10**12, 10**12])),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    part: str, changed: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    write(tmp_path / "m", 4, 32, "pack-quantized")
    change_parts(tmp_path / "m", **{part: changed(parts_of(tmp_path / "m")[part])})
    with pytest.raises(CheckpointError, match=r"weights of model.layers.0.mlp.up_proj do not fit together"):
        load_model(tmp_path / "m")


def test_damaged_settings_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "m", 4, 32, "pack-quantized")
    file = tmp_path / "m" / "config.json"
    given = file.read_text()
    for groups in ({"a": None}, ["a"], 5):
        change_settings(tmp_path / "m", config_groups=groups)
        with pytest.raises(CheckpointError, match=r"in config\.json of .* is not valid for compressed-tensors"):
            load_model(tmp_path / "m")
    file.write_text(json.dumps({**json.loads(given), "num_hidden_layers": 10**7}))
    with pytest.raises(CheckpointError, match=r"states 10000000 layers .* but its files contain \d+ tensors"):
        load_model(tmp_path / "m")


def test_plain_weights_that_claim_a_layout_are_refused(tmp_path: Path) -> None:
    """They would be called whole numbers in every line about them."""
    toy_model(512, hidden_size=128, intermediate_size=192).save_pretrained(tmp_path / "m")
    file = tmp_path / "m" / "config.json"
    of_weights = {**settings(), "format": "pack-quantized", "config_groups": {"a": scheme(4, 32)}}
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": of_weights}))
    with pytest.raises(CheckpointError, match="no layer is stored in it; if the weights are not quantised, remove"):
        load_model(tmp_path / "m")


@pytest.mark.parametrize("listed", [0, 1], ids=["first", "second"])
def test_a_tensor_in_two_shards_is_that_of_the_index(listed: int, tmp_path: Path) -> None:
    """A shard of an earlier save may still hold it, with other values."""
    model = write(tmp_path / "m", 4, 32, "pack-quantized")
    whole = tmp_path / "m" / "model.safetensors"
    tensors, name = load_file(whole), "model.norm.weight"
    whole.unlink()
    files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    names = sorted(tensors)
    parts = [{key: tensors[key] for key in names[number::2]} for number in (0, 1)]
    index = {key: file for file, part in zip(files, parts, strict=True) for key in part} | {name: files[listed]}
    parts[listed][name], parts[1 - listed][name] = tensors[name], torch.full_like(tensors[name], 7.0)
    for file, part in zip(files, parts, strict=True):
        save_file(part, tmp_path / "m" / file, metadata={"format": "pt"})
    (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    loaded = load_model(tmp_path / "m", dtype="float32").model
    assert torch.equal(loaded.model.norm.weight, model.model.norm.weight)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "m", 4, 32, "pack-quantized")
    file = tmp_path / "m" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        load_model(tmp_path / "m")


def test_what_cannot_be_saved_or_rounded_again_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no layer that multiplies by integer codes"):
        LLM("zoo:tiny").save_quantized(tmp_path / "q")
    assert not (tmp_path / "q").exists()
    write(tmp_path / "m", 4, 32, "pack-quantized")
    with pytest.raises(ConfigError, match="are integers already; leave it out"):
        load_model(tmp_path / "m", quantization="int8")


@needs_kernels
def test_steps_that_do_not_meet_zero_have_no_place_in_the_layout(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m.gguf", Kind.Q4_1).path
    with pytest.raises(ConfigError, match=r"zeros are not integers, since it was quantised before"):
        LLM(path, weights="stored").save_quantized(tmp_path / "q")


@needs_kernels
def test_layers_that_are_no_linears_have_no_place_in_the_layout(tmp_path: Path) -> None:
    model = ARCHITECTURES["gpt2"].build(dtype=torch.float32)
    with pytest.raises(ConfigError, match="is not a plain linear layer"):
        LLM(model, quantization="int8").save_quantized(tmp_path / "q")

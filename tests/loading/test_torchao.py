"""Checkpoints of torchao: read as the models that they stand for, or refused by name.

They are written here as torchao 0.18 and transformers 5.24 write them; files of these two were read once, too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from foredraft import LLM, SamplingParams
from foredraft.errors import CheckpointError, UnsupportedModelError
from foredraft.loading.layouts import codes_of
from foredraft.loading.models import load_model
from foredraft.native.library import library
from foredraft.testing import toy_model
from quantised_files import UP, assert_close, change_parts, change_settings, parts_of, write_quantised

needs_kernels = pytest.mark.skipif(library() is None, reason="no kernels here")


def configuration(bits: int, group: int, **changes: Any) -> dict[str, Any]:
    grain = (
        {"_type": "PerGroup", "_data": {"group_size": group}} if group else {"_type": "PerRow", "_data": {"dim": -1}}
    )
    data: dict[str, Any] = {"granularity": grain}
    if bits == 4:
        data |= {
            "weight_dtype": {"_type": "torch.dtype", "_data": "int4"},
            "intx_packing_format": {"_type": "IntxPackingFormat", "_data": "UNPACKED_TO_INT8"},
        }
    kind = "IntxWeightOnlyConfig" if bits == 4 else "Int8WeightOnlyConfig"
    return {"_type": kind, "_version": 2, "_data": data} | changes


def settings(of_all: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"quant_method": "torchao", "quant_type": {"default": of_all, **others}}


def write(folder: Path, bits: int, group: int, *, has_zeros: bool = False, **changes: Any) -> PreTrainedModel:
    """Write a checkpoint; the model that it stands for."""
    model = toy_model(512, dtype=torch.float32, hidden_size=128, intermediate_size=192).eval()
    generator = torch.Generator().manual_seed(1)
    half = 2 ** (bits - 1)

    def stored(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs, inputs = weight.shape
        columns = inputs // group if group else 1
        numbers = torch.randint(-half, half, (outputs, inputs), generator=generator)
        scales = (torch.rand(outputs, columns, generator=generator) / 2**bits / 8).bfloat16()
        zeros = torch.randint(-half if has_zeros else 0, half if has_zeros else 1, scales.shape, generator=generator)
        wide, steps = (each.repeat_interleave(inputs // columns, 1) for each in (zeros, scales.float()))
        weight.copy_((numbers - wide) * steps)
        parts = {"qdata": numbers.to(torch.int8), "scale": scales, "zero_point": zeros.to(torch.int8)}
        return {f"_weight_{part}": tensor for part, tensor in parts.items()}

    write_quantised(folder, model, settings(configuration(bits, group, **changes)), stored)
    return model


@pytest.mark.parametrize(("bits", "group", "has_zeros"), [(8, 0, False), (8, 32, False), (4, 64, True)])
def test_plain_checkpoints_are_the_models_that_they_stand_for(
    bits: int, group: int, has_zeros: bool, tmp_path: Path
) -> None:
    """Every weight has the very value, and logits are those of transformers with these weights."""
    model = write(tmp_path / "m", bits, group, has_zeros=has_zeros)
    given = json.loads((tmp_path / "m" / "config.json").read_text())["quantization_config"]
    assert torch.equal(codes_of(given, UP, parts_of(tmp_path / "m")).dense(), model.get_submodule(UP).weight)
    loaded = load_model(tmp_path / "m", dtype="float32")
    assert loaded.types is not None
    assert f"14 of {bits} bits" in loaded.types
    assert "dequantised" not in loaded.types
    assert not any(loaded.model.model.layers[0].mlp.up_proj.weight.stride())
    assert_close(loaded.model, model)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_layer_that_has_lost_its_zero_points_is_refused(bits: int, tmp_path: Path) -> None:
    """Its weights would be others, in silence."""
    write(tmp_path / "m", bits, 32, has_zeros=True)
    change_parts(tmp_path / "m", _weight_zero_point=None)
    with pytest.raises(
        CheckpointError, match=rf"lacks {UP}._weight_zero_point \(1 of 14 layers\), but 13 other layers"
    ):
        load_model(tmp_path / "m")


@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points_that_no_layer_has(bits: int, tmp_path: Path) -> None:
    """``Int8Tensor`` may have none; the other class always writes them."""
    model = write(tmp_path / "m", bits, 32)
    file = tmp_path / "m" / "model.safetensors"
    save_file({name: each for name, each in load_file(file).items() if not name.endswith("zero_point")}, file)
    if bits == 8:
        assert_close(load_model(tmp_path / "m", dtype="float32").model, model)
    else:
        with pytest.raises(CheckpointError, match=r"14 of 14 layers\), but config.json states"):
            load_model(tmp_path / "m")


@needs_kernels
def test_texts_with_drafts_are_those_without(tmp_path: Path) -> None:
    write(tmp_path / "m", 4, 32, has_zeros=True)
    plain = LLM(str(tmp_path / "m"), dtype="float32")
    assert plain.model_info.quantization == "stored"
    drafted = plain.with_speculative_config("ngram")
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=24)
    want, got = (llm.generate([[5, 6, 7] * 25, [3]], params) for llm in (plain, drafted))
    assert [each.outputs[0].token_ids for each in got] == [each.outputs[0].token_ids for each in want]


def config_of(**changes: Any) -> dict[str, Any]:
    found = configuration(4, 32)
    return found | {"_data": found["_data"] | changes}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"quant_type": "int8_weight_only"}, "its quant_type is 'int8_weight_only'"),
        (settings(configuration(8, 0, _type="Int4WeightOnlyConfig")), "its configuration is Int4WeightOnlyConfig"),
        (settings(configuration(8, 0, _type="Int8DynamicActivationInt8WeightConfig")), "Int8DynamicActivation"),
        (settings(configuration(8, 0, _version=1)), "version 1, which is pickled"),
        (settings(configuration(8, 0), lm_head=None), "lm_head has a configuration of its own"),
        (settings(config_of(weight_dtype={"_data": "int3"})), "its weights are int3"),
        (settings(config_of(intx_packing_format={"_data": "OPAQUE_ATEN_KLEIDIAI"})), "the format OPAQUE_ATEN_KLEIDIAI"),
        (settings(config_of(granularity={"_type": "PerAxis", "_data": {"axis": 1}})), "its scales are PerAxis"),
    ],
)
def test_what_is_not_plain_is_refused_by_name(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path / "m", 4, 32)
    change_settings(tmp_path / "m", **given)
    with pytest.raises(UnsupportedModelError, match=f"cannot read torchao weights of .*: .*{message}"):
        load_model(tmp_path / "m", weights="stored")


@pytest.mark.parametrize(
    ("part", "changed"),
    [
        ("qdata", torch.full((192, 128), 8, dtype=torch.int8)),  # five bits
        ("qdata", torch.zeros(192, 127, dtype=torch.int8)),
        ("scale", torch.ones(191, 4)),
        ("zero_point", torch.zeros(192, 4)),
        ("scale", None),
    ],
)
def test_parts_that_do_not_fit_are_refused_by_name(part: str, changed: torch.Tensor | None, tmp_path: Path) -> None:
    write(tmp_path / "m", 4, 32)
    change_parts(tmp_path / "m", **{f"_weight_{part}": changed})
    with pytest.raises(CheckpointError, match=f"the weights of {UP} do not fit together"):
        load_model(tmp_path / "m", dtype="float32")

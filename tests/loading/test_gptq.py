"""Checkpoints in the layouts of GPTQ and AWQ: read as the models that they stand for, or refused by name.

They are written here, number by number, from what the layers of AutoGPTQ, GPTQModel and AutoAWQ hold.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from foredraft import LLM, SamplingParams
from foredraft.errors import CheckpointError, ConfigError, UnsupportedModelError
from foredraft.loading.layouts import codes_of
from foredraft.loading.models import load_model
from foredraft.native.library import library
from foredraft.testing import strengthen, toy_model
from quantised_files import UP, assert_close, change_parts, change_settings, parts_of, write_quantised

GREEDY = SamplingParams(temperature=0.0, seed=7, max_tokens=24)
PROMPTS = [[5, 6, 7] * 25, [9, 10, 11, 12] * 3, [3]]
IDS = torch.arange(40)[None] * 37 % 512
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Outputs of a word, the lowest bits first."""

needs_kernels = pytest.mark.skipif(library() is None, reason="no kernels here")


def words(numbers: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """(rows, columns) of whole numbers -> int32 (rows, columns * bits / 32), the first in the lowest bits."""
    count = 32 // bits
    packed = np.zeros((len(numbers), numbers.shape[1] // count), dtype=np.uint32)
    for word in range(packed.shape[1]):
        for place in range(count):
            column = word * count + (place if order is None else order[place])
            packed[:, word] |= numbers[:, column].astype(np.uint32) << np.uint32(bits * place)
    return torch.from_numpy(packed.view(np.int32).copy())


def layer(
    outputs: int, inputs: int, settings: dict[str, Any], rng: np.random.Generator, act_order: str
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Parts of a random layer, and its weight (outputs, inputs) in float32."""
    bits, given = settings["bits"], settings["group_size"]
    size = inputs if given == -1 else given
    count = -(-inputs // size)
    groups = np.arange(inputs) // size
    if act_order == "groups":
        groups = (count - 1 - groups) % count
    elif act_order == "inputs":
        groups = rng.permutation(groups)
    numbers = rng.integers(0, 2**bits, (outputs, inputs))
    scales = (rng.random((count, outputs)) / 2**bits / 4).astype(np.float16)
    zeros = (
        np.full((count, outputs), 2 ** (bits - 1)) if settings["sym"] else rng.integers(1, 2**bits, (count, outputs))
    )
    parts = {"scales": torch.from_numpy(scales)}
    if settings["quant_method"] == "awq":
        parts["qweight"] = words(numbers.T, bits, AWQ_ORDER)
        parts["qzeros"] = words(zeros, bits, AWQ_ORDER)
    else:
        parts["qweight"] = words(numbers, bits).t().contiguous()
        parts["qzeros"] = words(zeros - (settings["checkpoint_format"] == "gptq"), bits)
        parts["g_idx"] = torch.from_numpy(groups.astype(np.int32))
    weight = (numbers - zeros[groups].T) * scales[groups].T.astype(np.float32)
    return parts, torch.from_numpy(weight.astype(np.float32))


def write(
    folder: Path, method: str, bits: int = 4, group: int = 32, *, sym: bool = False, act_order: str = "", **changes: Any
) -> PreTrainedModel:
    """Write a checkpoint with its output embedding in full; the model that it stands for."""
    settings = {"quant_method": method, "bits": bits, "group_size": group, "sym": sym, "desc_act": bool(act_order)}
    settings |= {"version": "gemm", "zero_point": True} if method == "awq" else {"checkpoint_format": "gptq"}
    settings |= changes
    model = toy_model(512, dtype=torch.float32, hidden_size=128, intermediate_size=192).eval()
    return _written(folder, model, settings, act_order)


def _written(folder: Path, model: PreTrainedModel, settings: dict[str, Any], act_order: str = "") -> PreTrainedModel:
    rng = np.random.default_rng(1)

    def stored(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        parts, dense = layer(*weight.shape, settings, rng, act_order)
        weight.copy_(dense)
        return parts

    write_quantised(folder, model, settings, stored)
    return model


PLAIN = [  # further bits, groups and sizes are in test_odd_sizes.py
    ("gptq", {"bits": 4, "group": 32, "sym": True}),
    ("gptq", {"bits": 4, "group": 32, "act_order": "groups"}),
    ("gptq", {"bits": 4, "group": 32, "checkpoint_format": "gptq_v2"}),
    ("awq", {"group": 32}),
]


@pytest.mark.parametrize(("method", "options"), PLAIN, ids=str)
def test_plain_checkpoints_are_the_models_that_they_stand_for(
    method: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Every weight has the very value, and logits are those of transformers with these weights."""
    model = write(tmp_path / "m", method, **options)
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    settings = json.loads((tmp_path / "m" / "config.json").read_text())["quantization_config"]
    for name, module in model.named_modules():
        if type(module) is torch.nn.Linear and name != "lm_head":
            parts = {part: tensors[f"{name}.{part}"] for part in ("qweight", "qzeros", "scales")}
            parts |= {"g_idx": tensors[f"{name}.g_idx"]} if method == "gptq" else {}
            assert torch.equal(codes_of(settings, name, parts).dense(), module.weight)
    loaded = load_model(tmp_path / "m", dtype="float32")
    assert loaded.types is not None
    assert f"of {options.get('bits', 4)} bits" in loaded.types
    assert "dequantised" not in loaded.types
    assert not any(loaded.model.model.layers[0].mlp.up_proj.weight.stride())
    assert_close(loaded.model, model)


@needs_kernels
def test_they_are_saved_in_the_layout_of_compressed_tensors(tmp_path: Path) -> None:
    write(tmp_path / "m", "awq")
    given = LLM(str(tmp_path / "m"), dtype="float32")
    assert given.model_info.quantization == "stored"
    given.save_quantized(tmp_path / "saved")
    found = LLM(str(tmp_path / "saved"), dtype="float32")
    want, got = (llm.generate(PROMPTS, GREEDY) for llm in (given, found))
    assert [each.outputs[0].token_ids for each in got] == [each.outputs[0].token_ids for each in want]


def test_inputs_in_an_order_of_their_own_are_dequantised_and_named(tmp_path: Path) -> None:
    """The order of activations: groups are spread over the inputs, and no kernel gathers these."""
    model = write(tmp_path / "m", "gptq", act_order="inputs")
    loaded = load_model(tmp_path / "m", dtype="float32")
    layers = sum(type(module) is torch.nn.Linear for module in model.modules()) - 1
    assert loaded.types is not None
    assert loaded.types.endswith(f"dequantised are {layers} with reordered inputs")
    with torch.inference_mode():
        assert torch.allclose(loaded.model(IDS).logits, model(IDS).logits, atol=1e-4)


def test_experts_are_dequantised_and_named(tmp_path: Path) -> None:
    """A mixture: its experts are no linear layers, and have no kernel."""
    config = Qwen3MoeConfig(
        vocab_size=512, hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    model = strengthen(Qwen3MoeForCausalLM(config).eval(), 1, 0.05)
    rng, modules, tensors = np.random.default_rng(1), dict(model.named_modules()), {}
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "checkpoint_format": "gptq"}
    for key, weight in model.state_dict().items():
        name = key.removesuffix(".weight")
        rows = {name: weight} if name.endswith("_proj") and name in modules else {}
        if key.endswith("experts.gate_up_proj"):
            stem = key.removesuffix(".gate_up_proj")
            rows = {
                f"{stem}.{number}.{part}_proj": half
                for number, each in enumerate(weight)
                for part, half in zip(("gate", "up"), each.chunk(2), strict=True)
            }
        elif key.endswith("experts.down_proj"):
            stem = key.removesuffix(".down_proj")
            rows = {f"{stem}.{number}.down_proj": each for number, each in enumerate(weight)}
        if not rows:
            tensors[key] = weight.clone()
        for name, row in rows.items():
            parts, dense = layer(*row.shape, settings, rng, "")
            tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
            row.copy_(dense)
    (tmp_path / "m").mkdir()
    save_file(tensors, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    whole = {**config.to_dict(), "architectures": ["Qwen3MoeForCausalLM"], "quantization_config": settings}
    (tmp_path / "m" / "config.json").write_text(json.dumps(whole))
    loaded = load_model(tmp_path / "m", dtype="float32")
    assert loaded.types is not None
    assert loaded.types.startswith(
        "4 of 4 bits by 32; dequantised are 12 that are not linear layers in this model, like model."
    )
    assert_close(loaded.model, model, 2e-3)


def test_biases_of_zeros_are_passed_over_and_others_refused(tmp_path: Path) -> None:
    """AutoGPTQ writes a bias of zeros to layers that have none."""
    model = write(tmp_path / "m", "gptq")
    change_parts(tmp_path / "m", bias=torch.zeros(192))
    loaded = load_model(tmp_path / "m", dtype="float32")
    assert_close(loaded.model, model)
    change_parts(tmp_path / "m", bias=torch.ones(192))
    with pytest.raises(UnsupportedModelError, match=rf"contains {UP}.bias, which .* llama model does not have"):
        load_model(tmp_path / "m", dtype="float32")


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("gptq", {"bits": 3}, "its number of bits is 3, but only 4 or 8 is supported"),
        ("gptq", {"checkpoint_format": "marlin"}, "its format is marlin, but only gptq or gptq_v2 is supported"),
        ("gptq", {"is_marlin_format": True}, "it is in Marlin's order"),
        ("gptq", {"pack_dtype": "int8"}, "its pack_dtype is int8, but only int32 is supported"),
        (
            "gptq",
            {"dynamic": {"-:lm_head": {}, r"+:.*\.down": {"bits": 8}}},
            "layers like .* have settings of their own",
        ),
        ("awq", {"version": "gemv"}, "its version is gemv, but only gemm is supported"),
        ("awq", {"bits": 8}, "its number of bits is 8, but only 4 is supported"),
        ("gptq", {"bits": "4"}, "is not valid for gptq .bits is '4' and should be a whole number"),
        ("awq", {"bits": 4.0}, "is not valid for awq .bits is 4.0 and should be a whole number"),
        ("gptq", {"group_size": [32]}, r"is not valid for gptq .group_size is \[32\] and should be a whole number"),
        ("gptq", {"quant_method": ["gptq"]}, r"has the quant_method \['gptq'\], which is not a name"),
    ],
)
def test_what_is_not_plain_is_refused_by_name(
    method: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path / "m", method)
    change_settings(tmp_path / "m", **changes)
    kind = CheckpointError if " is no" in message or "should be" in message else UnsupportedModelError
    with pytest.raises(
        kind, match=message if kind is CheckpointError else f"cannot read {method} weights of .*: .*{message}"
    ):
        load_model(tmp_path / "m", weights=None if kind is CheckpointError else "stored")


@pytest.mark.parametrize(
    ("part", "dtype", "message"),
    [
        ("qweight", torch.int16, "qweight in torch.int16"),
        ("qzeros", torch.int64, "qzeros in torch.int64"),
        ("scales", torch.int32, "scales in torch.int32"),
        ("scales", None, "scales is NaN or infinite"),
    ],
)
def test_numbers_of_another_kind_are_refused(
    part: str, dtype: torch.dtype | None, message: str, tmp_path: Path
) -> None:
    """They were taken for what they are not, such as the lower half of a word for all of it."""
    write(tmp_path / "m", "gptq")
    tensor = parts_of(tmp_path / "m")[part]
    changed = torch.full_like(tensor, float("nan")) if dtype is None else tensor.to(dtype)
    change_parts(tmp_path / "m", **{part: changed})
    with pytest.raises(CheckpointError, match=rf"the weights of {UP} do not fit together .*{message}"):
        load_model(tmp_path / "m")


@pytest.mark.parametrize(("method", "factor"), [("gptq", 0.0), ("awq", -1.0)])
def test_scales_of_zero_and_below_are_read(method: str, factor: float, tmp_path: Path) -> None:
    """float64 has no kernels, and multiplies by what the codes stand for."""
    write(tmp_path / "m", method)
    change_parts(tmp_path / "m", scales=parts_of(tmp_path / "m")["scales"] * factor)
    models = [load_model(tmp_path / "m", dtype=dtype).model for dtype in ("float32", "float64")]
    assert_close(*models)


def test_zero_points_that_readers_take_otherwise_each_are_refused(tmp_path: Path) -> None:
    """One more than the largest stored number: AutoGPTQ's layers take 16, others 0 or carry into the next one."""
    write(tmp_path / "m", "gptq")
    change_parts(tmp_path / "m", qzeros=torch.full((4, 24), -1, dtype=torch.int32))
    with pytest.raises(UnsupportedModelError, match=rf"{UP} has zero points of 16, which readers"):
        load_model(tmp_path / "m")


def test_groups_of_several_sizes_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "m", "gptq")
    change_parts(tmp_path / "m", g_idx=torch.tensor([0] * 33 + [1] * 31 + [2] * 32 + [3] * 32, dtype=torch.int32))
    with pytest.raises(UnsupportedModelError, match=rf"inputs of {UP} are in groups of several sizes"):
        load_model(tmp_path / "m")


@pytest.mark.parametrize(("method", "part"), [("gptq", "qzeros"), ("awq", "qzeros"), ("gptq", "g_idx")])
def test_a_layer_that_has_lost_a_part_is_refused(method: str, part: str, tmp_path: Path) -> None:
    """Without zero points, or its order of inputs, its weights would be others."""
    write(tmp_path / "m", method, **({"act_order": "inputs"} if part == "g_idx" else {}))
    change_parts(tmp_path / "m", **{part: None})
    with pytest.raises(CheckpointError, match=rf"{UP}.*{part}|{part}.*{UP}"):
        load_model(tmp_path / "m")


@pytest.mark.parametrize("part", ["qweight", "qzeros", "scales", "g_idx"])
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_parts_that_do_not_fit_are_refused(method: str, part: str, tmp_path: Path) -> None:
    write(tmp_path / "m", method)
    given = parts_of(tmp_path / "m").get(part)
    cut = None if given is None else given[:, :-1] if method == "awq" else given[:-1]
    change_parts(tmp_path / "m", **({"qzeros": None} if given is None else {part: cut}))
    with pytest.raises((CheckpointError, UnsupportedModelError), match=f"{UP}"):
        load_model(tmp_path / "m")


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_settings_in_another_file_are_missed_by_name(method: str, tmp_path: Path) -> None:
    """Early versions of AutoGPTQ and AutoAWQ wrote them into a file of their own."""
    write(tmp_path / "m", method)
    file = tmp_path / "m" / "config.json"
    config = json.loads(file.read_text())
    (tmp_path / "m" / "quantize_config.json").write_text(json.dumps(config.pop("quantization_config")))
    file.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"qweight, .*config\.json does not say how they were made"):
        load_model(tmp_path / "m")


def test_they_are_not_rounded_again(tmp_path: Path) -> None:
    write(tmp_path / "m", "gptq")
    with pytest.raises(ConfigError, match="are integers already; leave it out"):
        load_model(tmp_path / "m", quantization="int8")

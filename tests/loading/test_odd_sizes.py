"""Weights in whole numbers of sizes that fill no vector, block, span or group are the model that they stand for.

Sizes, architectures and roundings are drawn by a seed, so that a failure names one that can be looked at again.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from test_gptq import AWQ_ORDER, words
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM
from transformers.pytorch_utils import Conv1D

from foredraft import LLM, SamplingParams
from foredraft.errors import CheckpointError, UnsupportedModelError
from foredraft.loading.compressed import METHOD, packed
from foredraft.loading.models import load_model
from foredraft.model.execution.forwards import replacement
from foredraft.model.execution.packing import PackedLinear
from foredraft.model.execution.rounding import round_weights
from foredraft.native.library import library
from foredraft.testing import strengthen, toy_model
from quantised_files import write_quantised

QUICK = {"models": (0, 4, 3, 7), METHOD: (3, 22, 6, 5), "gptq": (12, 15, 6, 2), "awq": (22, 12, 14, 0)}
"""Seeds that together draw most of what 24 of them draw: kinds of models, roundings, groups, widths and zeros."""


def seeds(kind: str) -> list[Any]:
    given = () if kind == "models" else (kind,)
    return [pytest.param(*given, seed, marks=() if seed in QUICK[kind] else pytest.mark.full) for seed in range(24)]


METHODS = ["suffix", "ngram", "token_recycling"]
PARAMS = [SamplingParams(temperature=temperature, seed=7, max_tokens=12) for temperature in (0.0, 0.8)] * 2
DTYPES = ["float32", "bfloat16"]
HIDDEN = [(72, 4), (100, 2), (104, 2), (136, 4), (584, 4), (24, 2), (40, 4), (8, 1), (300, 6)]
"""Hidden sizes and heads; half of a head is turned by rotary positions."""

needs_kernels = pytest.mark.skipif(library() is None, reason="no kernels here")


def odd_model(random: Random) -> PreTrainedModel:
    """Llama, Qwen2 (with biases) or GPT-2, whose heads may have an odd size."""
    vocab_size, tied = random.choice([101, 515, 1003, 4099]), random.random() < 0.5
    kind, seed = random.choice(["llama", "qwen2", "gpt2"]), random.randrange(100)
    inner = random.choice([130, 76, 33, 200, 1])
    if kind == "gpt2":
        hidden, heads = random.choice([(100, 4), (36, 4), (75, 3), (57, 3)])
        config = GPT2Config(
            vocab_size=vocab_size, n_embd=hidden, n_head=heads, n_layer=2, n_inner=inner, n_positions=256
        )
        config.tie_word_embeddings = tied
        return strengthen(GPT2LMHeadModel(config), seed).float().eval()
    hidden, heads = random.choice(HIDDEN)
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": random.choice([1, heads]),
        "tie_word_embeddings": tied,
        "head_dim": random.choice([hidden // heads, 6, 18, 34]),
    }
    if kind == "llama":
        return toy_model(vocab_size, seed=seed, dtype=torch.float32, **sizes)
    config = Qwen2Config(vocab_size=vocab_size, num_hidden_layers=2, max_position_embeddings=256, **sizes)
    return strengthen(Qwen2ForCausalLM(config), seed).float().eval()


def check_texts(llm: LLM, random: Random) -> None:
    """Of a method by lot, in a ragged batch of greedy and drawn rows: those of plain decoding, also alone."""
    most, method = llm.target.vocab_size, random.choice(METHODS)
    prompts = [
        [random.randrange(most) for _ in range(random.choice([2, 3, 9]))] * random.choice([1, 7, 20]) for _ in PARAMS
    ]
    want = [output.outputs[0].token_ids for output in llm.generate(prompts, PARAMS)]
    alone = llm.generate(prompts[1:2], PARAMS[1])[0].outputs[0].token_ids
    assert alone == want[1]
    drafted = llm.with_speculative_config(method).generate(prompts, PARAMS)
    assert [output.outputs[0].token_ids for output in drafted] == want, method


def check_logits(model: PreTrainedModel, wanted: PreTrainedModel, random: Random) -> None:
    """Of transformers with the very weights that the whole numbers stand for: activations have 16 bits."""
    found = 0
    for name, layer in model.named_modules():
        forward = replacement(layer)
        codes = forward.codes() if isinstance(forward, PackedLinear) else None
        if codes is not None:
            weight, found = wanted.get_submodule(name).weight, found + 1
            assert torch.equal(codes.dense(), weight.t() if isinstance(layer, Conv1D) else weight), name
    assert found
    ids = torch.tensor([[random.randrange(model.config.vocab_size) for _ in range(40)]])
    with torch.inference_mode():
        got, want = model(ids).logits, wanted(ids).logits
    assert float((got - want).norm() / want.norm()) < 1e-2


@pytest.mark.sample(1)
@needs_kernels
@pytest.mark.parametrize("seed", seeds("models"))
def test_models_of_odd_sizes_are_rounded_on_loading(seed: int, tmp_path: Path) -> None:
    """And saved, where their layers have a place in the layout: loaded again they are the same.

    Codes of 8 bits were taken for 4 where all inputs of an output lie in one word.
    """
    random = Random(seed)
    model = odd_model(random)
    name = random.choice(["int8", "int4"])
    model.save_pretrained(tmp_path / "m")
    wanted = type(model).from_pretrained(tmp_path / "m", dtype="float32").eval()
    round_weights(wanted, name)
    check_logits(load_model(tmp_path / "m", dtype="float32", quantization=name).model, wanted, random)
    llm = LLM(str(tmp_path / "m"), dtype=(dtype := random.choice(DTYPES)), quantization=name)
    check_texts(llm, random)
    if dtype == "float32" and not isinstance(model, GPT2LMHeadModel):
        llm.save_quantized(tmp_path / "q")
        check_logits(load_model(tmp_path / "q", dtype="float32").model, wanted, random)


def of_layout(
    method: str,
    bits: int,
    group: int,
    has_zeros: bool,
    numbers: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """The tensors of a layer: numbers (outputs, inputs), scales and zeros (outputs, groups)."""
    if method == METHOD:
        parts = {"weight_packed": packed(numbers, bits, 1), "weight_shape": torch.tensor(numbers.shape)}
        parts |= {"weight_zero_point": packed(zeros, bits, 0)} if has_zeros else {}
        return {**parts, "weight_scale": scales}
    order = AWQ_ORDER if method == "awq" else None
    rows = numbers.t().contiguous()
    if method == "gptq":  # words along the inputs, the last filled up
        parts = {"qweight": packed(numbers, bits, 1).t().contiguous()}
        parts["g_idx"] = (torch.arange(len(rows)) // (group if group > 0 else len(rows))).to(torch.int32)
    else:
        parts = {"qweight": words(rows.numpy(), bits, order)}
    of_zeros = words(zeros.t().numpy() - (method == "gptq"), bits, order)
    return {**parts, "qzeros": of_zeros, "scales": scales.t().contiguous()}


def settings_of(method: str, bits: int, group: int, has_zeros: bool) -> dict[str, Any]:
    if method != METHOD:
        found = {"quant_method": method, "bits": bits, "group_size": group, "sym": not has_zeros}
        return found | ({"version": "gemm"} if method == "awq" else {"checkpoint_format": "gptq"})
    weights = {"num_bits": bits, "type": "int", "symmetric": not has_zeros}
    weights |= {"strategy": "group", "group_size": group} if group > 0 else {"strategy": "channel"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {"quant_method": METHOD, "format": "pack-quantized", "config_groups": groups, "ignore": ["lm_head"]}


def draw_layer(
    random: Random, method: str, bits: int, group: int, has_zeros: bool, shape: torch.Size
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Random tensors of a layer, and the weight that they stand for."""
    rng = np.random.default_rng(random.randrange(2**32))
    outputs, inputs = shape
    size = group if group > 0 else inputs
    count, middle = -(-inputs // size), 2 ** (bits - 1)
    numbers = torch.from_numpy(rng.integers(0, 2**bits, (outputs, inputs)).astype(np.uint8))
    scales = torch.from_numpy((rng.random((outputs, count)) / 2**bits / 4).astype(np.float16))
    zeros = torch.from_numpy(rng.integers(1, 2**bits, (outputs, count)).astype(np.uint8))
    zeros = zeros if has_zeros else torch.full_like(zeros, middle)
    wide_scales, wide_zeros = (each.float().repeat_interleave(size, 1)[:, :inputs] for each in (scales, zeros))
    parts = of_layout(method, bits, group, has_zeros, numbers, scales, zeros)
    return parts, (numbers.float() - wide_zeros) * wide_scales


@pytest.mark.sample(3)
@needs_kernels
@pytest.mark.parametrize(("method", "seed"), [*seeds(METHOD), *seeds("gptq"), *seeds("awq")])
def test_checkpoints_of_odd_sizes_are_read_or_refused(method: str, seed: int, tmp_path: Path) -> None:
    """Groups that are cut off were taken for smaller ones of one size, and all inputs with one zero were refused."""
    random = Random(1000 * seed + len(method))
    bits = 4 if method == "awq" else random.choice([4, 8])
    group, has_zeros = random.choice([-1, 16, 24, 32, 48, 64, 96, 128, 192]), random.random() < 0.6
    hidden, heads = random.choice([(72, 4), (104, 2), (136, 4), (584, 4), (24, 2), (40, 4), (8, 1)])
    sizes = {"hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": heads}
    inner = random.choice([136, 72, 200, 8] if method != METHOD else [130, 33, 76, 136])  # words of others are filled
    model = toy_model(random.choice([101, 515, 1003]), dtype=torch.float32, intermediate_size=inner, **sizes)

    def stored(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        parts, dense = draw_layer(random, method, bits, group, has_zeros, weight.shape)
        weight.copy_(dense)
        return parts

    write_quantised(tmp_path / "m", model, settings_of(method, bits, group, has_zeros), stored)
    without_kernel = group > 0 and (group % 16 or (group > 64 and group % 64)) and max(hidden, inner) > group
    if without_kernel:
        with pytest.raises(UnsupportedModelError, match=rf"{group} inputs of .* share a scale.*quantization='int8'"):
            load_model(tmp_path / "m")
        return
    loaded = load_model(tmp_path / "m", dtype="float32").model
    assert not any(loaded.model.layers[1].mlp.up_proj.weight.stride())  # multiplied as it lies
    check_logits(loaded, model, random)
    check_texts(LLM(str(tmp_path / "m"), dtype=random.choice(DTYPES)), random)


@pytest.mark.parametrize(("group", "said"), [(64, "64"), (24, "24")])
def test_groups_that_the_settings_do_not_have_are_refused(group: int, said: str, tmp_path: Path) -> None:
    """96 inputs in 3 groups are groups of 32, whatever the configuration says: one of the two is damaged."""
    model = toy_model(101, dtype=torch.float32, hidden_size=96, intermediate_size=96, num_key_value_heads=4)

    def stored(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        return draw_layer(Random(1), METHOD, 4, 32, False, weight.shape)[0]

    write_quantised(tmp_path / "m", model, settings_of(METHOD, 4, group, False), stored)
    with pytest.raises(CheckpointError, match=rf"96 inputs in 3 groups, but the schemes have groups of {said}"):
        load_model(tmp_path / "m")

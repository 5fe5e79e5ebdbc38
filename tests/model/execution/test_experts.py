"""Mixtures of experts in the library's own kernels: routers, products with chosen experts, and what is left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from guarantee import Study
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from foredraft import SamplingParams
from foredraft.model.execution.experts import packable_experts, why_not_packed
from foredraft.model.execution.packing import DenseMatrix, StackedWeight
from foredraft.model.execution.rounding import ROUNDINGS, quantize_weights, round_weights
from foredraft.model.lm import CausalLM
from foredraft.model.nodes import Nodes
from foredraft.native import library as native
from foredraft.native.codes import Codes
from foredraft.native.packed_matmul import CodesMatrix, NativeMatrix, PackedMatrix
from foredraft.testing import hostile_kernels, strengthen
from foredraft.testing.hostile import KINDS

EXPERTS, OUTPUTS, INPUTS = 5, 64, 96
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "num_experts_per_tok": 2,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}
MIXTURES: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel], dict[str, Any]]] = {
    "mixtral": (MixtralConfig, MixtralForCausalLM, {"num_local_experts": 8, "sliding_window": None}),
    "qwen3": (Qwen3MoeConfig, Qwen3MoeForCausalLM, {"num_experts": 8, "moe_intermediate_size": 96, "head_dim": 16}),
    "olmoe": (OlmoeConfig, OlmoeForCausalLM, {"num_experts": 8}),
    "qwen2": (
        Qwen2MoeConfig,
        Qwen2MoeForCausalLM,
        {"num_experts": 8, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 64},
    ),
}
"""Weights of the chosen experts that add up to 1 or not, and an expert that all tokens share."""
PROMPTS = [[5, 6, 7] * 25, [9, 10, 11, 12] * 3, [3], [8, 30, 40] * 30]
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
SAMPLED = SamplingParams(temperature=0.8, seed=3, max_tokens=20)

pytestmark = pytest.mark.skipif(native.library() is None, reason="no kernels here")


def mixture(name: str, dtype: torch.dtype = torch.float32, **more: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config, model, options = MIXTURES[name]
    return strengthen(model(config(**{**SIZES, **options, **more})).eval(), 1, 0.05).to(dtype)


# -- products --------------------------------------------------------------------------------------------------------


def matrix(form: str, weight: torch.Tensor) -> PackedMatrix:
    """A stack (E * out, in), packed."""
    kernels = native.library()
    assert kernels is not None
    if form in ("float32", "bfloat16", "float16"):
        return NativeMatrix(weight.to(getattr(torch, form)), None, kernels)
    bits, group = map(int, form.split(","))
    scales = Codes.rounded(weight, bits, group, has_zeros=group == 32)
    return CodesMatrix(scales, None, kernels)


FORMS = ["float32", "bfloat16", "float16", "8,0", "8,32", "4,32", "4,64", "5,32", "6,16"]
CHOICES = {
    "one token": [[3, 1]],
    "one choice": [[2], [0], [2], [2]],
    "all of one expert": [[4], [4], [4], [4], [4], [4], [4]],
    "experts without rows": [[0, 4], [4, 0], [0, 4]],
    "every expert": [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0]],
    "many": torch.rand(70, EXPERTS, generator=torch.Generator().manual_seed(1)).argsort(1)[:, :2].tolist(),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("choices", CHOICES.values(), ids=CHOICES)
def test_a_row_has_the_bits_of_its_product_with_its_expert_alone(form: str, choices: list[list[int]]) -> None:
    """With one input for all choices, and with an input for each."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(EXPERTS, OUTPUTS, INPUTS, generator=generator)
    stack, alone = matrix(form, weight.flatten(0, 1)), [matrix(form, each) for each in weight]
    chosen = torch.tensor(choices)
    dtype = stack.compute_dtype
    x = torch.randn(*chosen.shape, INPUTS, generator=generator).to(dtype)
    for rows in (x[:, 0], x):
        got = stack.grouped(rows, chosen, EXPERTS)
        assert got.shape == (*chosen.shape, OUTPUTS)
        for row, experts in enumerate(choices):
            for place, expert in enumerate(experts):
                given = rows[row] if rows.dim() == 2 else rows[row, place]
                assert torch.equal(got[row, place], alone[expert](given[None])[0]), (row, place)
        want = DenseMatrix(stack.dense().to(dtype), None).grouped(rows, chosen, EXPERTS)
        assert torch.allclose(got, want, atol=2e-2 if dtype == torch.bfloat16 else 2e-3)


def test_experts_that_do_not_exist_and_inputs_that_do_not_fit_are_refused() -> None:
    stack = matrix("8,32", torch.randn(EXPERTS * OUTPUTS, INPUTS))
    for wrong in (-1, EXPERTS):
        with pytest.raises(IndexError, match=f"of {EXPERTS}"):
            stack.grouped(torch.zeros(1, INPUTS), torch.tensor([[0, wrong]]), EXPERTS)
    with pytest.raises(ValueError, match="do not fit"):
        stack.grouped(torch.zeros(2, INPUTS), torch.tensor([[0, 1]]), EXPERTS)


# -- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantization", [None, *ROUNDINGS])
@pytest.mark.parametrize("name", MIXTURES)
def test_logits_are_those_of_transformers(name: str, quantization: str | None) -> None:
    """On the weights that codes stand for, by modules and in one call for a step. Routers are not rounded."""
    model, reference = mixture(name), mixture(name)
    if quantization is not None:
        round_weights(reference, quantization)
    lm = CausalLM(model, execution="packed", quantization=quantization)
    assert lm.execution.program is not None, lm.execution.why_no_program
    assert lm.guarantee("default").kind == "bit-identical"
    tokens = [3, 9, 4, 9, 7, 2, 9, 5]
    with torch.inference_mode():
        want = reference(torch.tensor([tokens])).logits
        by_modules = lm.execution.model(torch.tensor([tokens])).logits
        runs = lm.execution.program.num_runs
        in_one_call = lm.forward(Nodes.from_chains([tokens]), lm.new_cache(1))
    assert lm.execution.program.num_runs == runs + 1
    for got in (by_modules, in_one_call):
        assert float((got - want).norm() / want.norm()) < 1e-3  # activations have 16 bits


@pytest.mark.parametrize(
    ("name", "dtype", "quantization", "params"),
    [
        ("mixtral", torch.float32, "int4", GREEDY),
        ("qwen2", torch.bfloat16, None, SAMPLED),
        pytest.param("qwen3", torch.bfloat16, "int8", GREEDY, marks=pytest.mark.slow),
        pytest.param("olmoe", torch.float32, None, SAMPLED, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_tokens_and_logits_are_those_of_plain_decoding(
    name: str, dtype: torch.dtype, quantization: str | None, params: SamplingParams
) -> None:
    """To the bit, for rows alone and together, right and wrong drafts, whatever stock kernels do."""
    with hostile_kernels(*KINDS):
        model = mixture(name, dtype)
        quantize_weights(model, quantization)
        study = Study(model, prompts=PROMPTS, execution="auto", max_num_seqs=len(PROMPTS))
        for method in ("token_recycling", "ngram"):
            found = study.cell(method, params, len(PROMPTS))
            assert found.guarantee == "bit-identical"
            assert found.share == 1.0, found.line()


def test_a_step_reads_only_the_experts_that_its_tokens_choose() -> None:
    """NaN in the packed weights of an expert changes logits where it is chosen, and nothing elsewhere."""
    model, nodes = mixture("mixtral", num_hidden_layers=1), Nodes.from_chains([[5]])
    chosen: list[int] = []
    handle = model.model.layers[0].mlp.gate.register_forward_hook(
        lambda *args: chosen.extend(args[2][2].flatten().tolist())
    )
    with torch.inference_mode():
        model(torch.tensor([[5]]))
    handle.remove()
    assert len(chosen) == 2
    lm = CausalLM(model, execution="packed", probe=False)
    assert lm.execution.program is not None
    want, runs = lm.forward(nodes, lm.new_cache(1)), lm.execution.program.num_runs
    stacks = [each.matrix.packed for each in lm.execution.products if isinstance(each.layers[0], StackedWeight)]
    assert len(stacks) == 2
    for stack in stacks:
        for expert in range(8):
            with torch.inference_mode():  # packed weights are made in it
                weights = stack.view(8, -1)[expert]
                before = weights.clone()
                weights.fill_(torch.nan)
            got = lm.forward(nodes, lm.new_cache(1))
            assert got.isnan().all() if expert in chosen else torch.equal(got, want)
            with torch.inference_mode():
                weights.copy_(before)
    assert torch.equal(lm.forward(nodes, lm.new_cache(1)), want)
    assert lm.execution.program.num_runs == runs + 17


def test_experts_whose_outputs_are_no_whole_blocks_run_as_before_and_are_named() -> None:
    model = mixture("qwen3", moe_intermediate_size=48)
    assert not list(packable_experts(model))
    reason = "their projections have 48 and 64 outputs, which are no multiples of 32"
    assert {why_not_packed(layer.mlp.experts) for layer in model.model.layers} == {reason}
    lm = CausalLM(model, execution="packed")
    assert lm.execution.program is None
    guarantee = lm.guarantee("default")
    assert (guarantee.kind, reason in guarantee.reason) == ("up to rounding", True)


def test_weights_that_their_owner_changes_are_packed_again() -> None:
    model = mixture("mixtral")
    lm = CausalLM(model, execution="packed", probe=False)
    nodes = Nodes.from_chains([[3, 9, 4]])
    before = lm.forward(nodes, lm.new_cache(1))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.experts.down_proj.mul_(1.5)
            layer.mlp.gate.weight.neg_()
    assert lm.refresh()
    got = lm.forward(nodes, lm.new_cache(1))
    fresh = CausalLM(model, execution="packed", probe=False)
    assert torch.equal(got, fresh.forward(nodes, fresh.new_cache(1)))
    assert not torch.equal(got, before)

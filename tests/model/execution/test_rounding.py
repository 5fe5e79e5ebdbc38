"""Models whose weights are rounded are what transformers computes with these weights, whatever is drafted."""

from __future__ import annotations

import pytest
import torch
from guarantee import Cell, Study

from architectures import ARCHITECTURES, in_turns
from foredraft import LLM, SamplingParams
from foredraft.errors import ConfigError
from foredraft.loading.models import load_model
from foredraft.model.execution.rounding import ROUNDINGS, quantize_weights, round_weights
from foredraft.model.lm import CausalLM
from foredraft.native import library as native
from foredraft.native.codes import Codes, Unrounded
from foredraft.native.packed_matmul import CodesMatrix, NativeMatrix
from foredraft.testing import hostile_kernels, toy_model
from foredraft.testing.hostile import KINDS
from foredraft.zoo import path

SETS = list(native.OPTIONS)
CODES = [
    (8, 0, 100, 576),
    (8, 32, 33, 96),
    (8, 16, 70, 160),
    (8, 0, 5, 70),
    (4, 64, 100, 576),
    (4, 32, 33, 90),
    (4, 0, 1, 1),
    (4, 128, 33, 150),
    (5, 32, 70, 160),
    (5, 0, 33, 90),
    (6, 16, 70, 144),
    (6, 32, 5, 100),
    (6, 0, 33, 576),
]
PROMPTS = [[5, 6, 7] * 25, [9, 10, 11, 12] * 3, [3], [8, 300, 40] * 30, [500, 400]]
GREEDY = SamplingParams(temperature=0.0, seed=7, max_tokens=24)
SAMPLED = SamplingParams(temperature=0.8, seed=7, max_tokens=24)
NAMES = list(ROUNDINGS)
TURNS = in_turns(NAMES)
OF_EACH_KIND = {"llama", "gemma3", "gpt2", "qwen2", "phi3", "opt", "falcon", "mixtral", "starcoder2", "deepseek-v3"}
"""Linear layers and transposed ones, with biases, tied, several in one, of experts, and of low rank."""

needs_kernels = pytest.mark.skipif(native.library() is None, reason="no kernels here")


def codes(bits: int, group: int, outputs: int, inputs: int) -> tuple[Codes, torch.Tensor]:
    """With zeros where there are groups, whole or not; scales in half precision where there are 4 bits."""
    generator = torch.Generator().manual_seed(outputs + inputs)
    is_whole = (bits, group) == (4, 32)
    found = Codes.rounded(torch.randn(outputs, inputs, generator=generator), bits, group, has_zeros=is_whole)
    zeros = torch.randn(found.scales.shape, generator=generator) / 8 if group else None
    rows = torch.randn(70, inputs, generator=generator) * torch.rand(70, 1, generator=generator)
    if is_whole:
        return found, rows
    scales = found.scales.half() if bits == 4 else found.scales
    return Codes(found.numbers, bits, scales, zeros if zeros is None else zeros.to(scales.dtype), group), rows


def kernels(instruction: str) -> native.Library:
    widest = native.instruction_set()
    if widest is None or SETS.index(instruction) < SETS.index(widest):
        pytest.skip(f"this machine has {widest}")
    library = native.library(instruction)
    if library is None:
        pytest.skip("no C++ compiler builds the kernels here")
    return library


@pytest.mark.parametrize("instruction", SETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_kernels_round_as_torch_does(instruction: str, dtype: torch.dtype) -> None:
    """To the bit, also in cut-off groups and blocks, of weights that are tiny, huge, all 0, or on one side of 0."""
    generator = torch.Generator().manual_seed(3)
    for outputs, inputs in ((70, 100), (33, 577)):
        for factor, shift in ((1.0, 0.0), (1e-6, 0.0), (300.0, 3.0), (0.0, 0.0)):
            weight = ((torch.randn(outputs, inputs, generator=generator) + shift) * factor).to(dtype)
            steps = (torch.randint(0, 16, (outputs, inputs), generator=generator) * 0.01 + 0.003).to(dtype)
            for given in (weight, steps):  # steps have zeros that are no whole numbers
                for bits, group, has_zeros in ((8, 0, False), (4, 32, True), (8, 32, True), (4, 64, False)):
                    wanted = Unrounded.of(given, bits, group, has_zeros=has_zeros)
                    got = CodesMatrix([wanted], None, kernels(instruction))
                    torch_made = CodesMatrix(wanted.codes(), None, kernels(instruction))
                    assert torch.equal(got.packed, torch_made.packed)
                    assert got.parts.keys() == torch_made.parts.keys()
                    assert all(torch.equal(part, torch_made.parts[name]) for name, part in got.parts.items())


@pytest.mark.parametrize("instruction", SETS)
@pytest.mark.parametrize("shape", CODES, ids=str)
def test_a_product_is_right_and_has_the_same_bits_among_any_rows_and_on_any_cpu(
    instruction: str, shape: tuple[int, int, int, int]
) -> None:
    given, x = codes(*shape)
    bias = torch.linspace(-1, 1, shape[2])
    matrix = CodesMatrix(given, bias, kernels(instruction))
    assert torch.equal(matrix.dense(), given.dense())
    got = matrix(x)
    exact = torch.nn.functional.linear(x.double(), given.dense().double(), bias.double())
    bound = 2.0**-15 * (x.double().abs().amax(1, keepdim=True) * given.dense().double().abs().sum(1)) + 1e-5
    assert ((got - exact).abs() <= bound).all()
    for count in (1, 2, 3, 4, 5, 6, 7, 13, 64):
        assert torch.equal(matrix(x[:count]), got[:count])
    assert torch.equal(matrix(x[3:4]), got[3:4])
    own = native.library()
    assert own is not None
    assert torch.equal(CodesMatrix(given, bias, own)(x), got)
    half, x = CodesMatrix(given, bias, kernels(instruction), dtype=torch.bfloat16), x.bfloat16()
    assert torch.equal(half(x), matrix(x.float()).bfloat16())


def in_halves(bits: int, group: int, outputs: int, inputs: int) -> tuple[Codes, Codes]:
    """Codes as GGUF's K types have them, whose scales are multiples of numbers in half precision; the same without."""
    generator = torch.Generator().manual_seed(bits + group)
    groups, shared = inputs // group, inputs // 256

    def of(least: int, most: int) -> tuple[torch.Tensor, torch.Tensor]:
        halves = (torch.randn(outputs, shared, generator=generator) / 64).half()
        halves[0] = 0
        whole = torch.randint(least, most, (outputs, groups), generator=generator)
        return whole * halves.float().repeat_interleave(groups // shared, 1), halves

    numbers = torch.randint(0, 2**bits, (outputs, inputs), generator=generator, dtype=torch.uint8)
    scales, scale_halves = of(*((0, 64) if group == 32 else (-128, 128)))
    zeros, zero_halves = of(0, 64) if group == 32 else (None, None)
    return (
        Codes(numbers, bits, scales, zeros, group, scale_halves, zero_halves),
        Codes(numbers, bits, scales, zeros, group),
    )


@pytest.mark.parametrize("instruction", SETS)
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (5, 32), (6, 16), (8, 32), (8, 16)])
def test_scales_that_share_halves_have_the_bits_of_their_products(instruction: str, bits: int, group: int) -> None:
    """In less memory: a byte for a scale, and two for every 256 inputs."""
    given, wide = in_halves(bits, group, 70, 512)
    mine, theirs = (CodesMatrix(each, None, kernels(instruction)) for each in (given, wide))
    assert mine.num_bytes < theirs.num_bytes - 70 * 512 // group * (5 if group == 32 else 2)
    x = torch.randn(70, 512, generator=torch.Generator().manual_seed(1))
    for count in (1, 2, 3, 4, 5, 8, 13, 70):
        assert torch.equal(mine(x[:count]), theirs(x[:count]))
    every = torch.arange(70)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(mine.rows(every, dtype), theirs.rows(every, dtype))
    found = mine.codes
    assert found.form == given.form != wide.form
    assert torch.equal(found.dense(), wide.dense())
    assert torch.equal(found.rows(every.flip(0)).part(3, 9).dense(), wide.dense().flip(0)[3:9])


def test_what_was_rounded_before_is_hardly_rounded_again() -> None:
    """Weights of 4 bits whose zeros are no whole numbers, in bfloat16: a quarter worse in perplexity of zoo:smollm2."""
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    groups = weight.view(64, 3, 32)
    low, step = groups.amin(-1, keepdim=True), (groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)) / 15
    given = (((groups - low) / step).round() * step + low).view(64, 96).bfloat16()
    again, fresh = (Codes.rounded(each, 4, 32, has_zeros=True) for each in (given, weight))
    assert float((again.dense() - given).norm() / given.float().norm()) < 0.005
    assert (again.kind[2], fresh.kind[2]) == ("float", "whole")
    assert 0.05 < float((fresh.dense() - weight).norm() / weight.norm()) < 0.09
    joined = Codes.joined([again, fresh])
    assert torch.equal(joined.dense(), torch.cat([again.dense(), fresh.dense()]))


@needs_kernels
def test_what_is_no_number_stays_in_its_row() -> None:
    given, x = codes(8, 0, 40, 96)
    library = native.library()
    assert library is not None
    matrix = CodesMatrix(given, None, library)
    want = matrix(x)
    x[1, 5], x[2, 70] = float("nan"), float("-inf")
    got = matrix(x)
    assert got[1:3].isnan().all()
    assert torch.equal(got[[0, 3]], want[[0, 3]])


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "quantization"),
    [each if each.values[0] in OF_EACH_KIND else pytest.param(*each.values, marks=pytest.mark.full) for each in TURNS],
)
def test_logits_are_those_of_transformers_on_the_rounded_weights(name: str, quantization: str) -> None:
    architecture = ARCHITECTURES[name]
    model, reference = (architecture.build(architecture.attention[0], torch.float32) for _ in range(2))
    exact = {key: value.clone() for key, value in model.state_dict().items()}
    round_weights(reference, quantization)
    lm = CausalLM(model, quantization=quantization, probe=False)
    tokens = torch.tensor([[3, 9, 4, 9, 7, 2, 9, 5]])
    with torch.inference_mode():
        want, got = reference(tokens).logits, lm.execution.model(tokens).logits
        plain = model(tokens).logits
    assert float((got - want).norm() / want.norm()) < 1e-3  # activations have 16 bits
    assert float((plain - want).norm() / want.norm()) > 2e-3  # the control: rounding shows
    assert all(torch.equal(value, exact[key]) for key, value in model.state_dict().items())


def cell(method: str, quantization: str, params: SamplingParams, *kinds: str) -> Cell:
    with hostile_kernels(*kinds):
        model = toy_model(512, dtype=torch.float32, hidden_size=64, intermediate_size=96)
        quantize_weights(model, quantization)
        study = Study(model, prompts=PROMPTS, execution="auto", max_num_seqs=len(PROMPTS))
        return study.cell(method, params, len(PROMPTS))


@pytest.mark.sample(1)
@needs_kernels
@pytest.mark.parametrize(("quantization", "params"), [*zip(NAMES, [GREEDY, SAMPLED], strict=True)])
def test_bits_are_those_of_plain_decoding_whatever_stock_kernels_do(params: SamplingParams, quantization: str) -> None:
    """Trees for five rows of other lengths beside plain rows alone."""
    found = cell("token_recycling", quantization, params, *KINDS)
    assert found.guarantee == "bit-identical"
    assert found.is_good, found.line()


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", CODES, ids=str)
def test_rows_are_those_of_the_weight(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """To the bit, in any order, and none that there is not."""
    library = native.library()
    assert library is not None
    given, _ = codes(*shape)
    matrix = CodesMatrix(given, None, library)
    ids = torch.arange(shape[2]).flip(0).repeat(2, 1)
    assert torch.equal(matrix.rows(ids, dtype), given.dense()[ids].to(dtype))
    for wrong in (-1, shape[2]):
        with pytest.raises(IndexError, match=f"of {shape[2]}"):
            matrix.rows(torch.tensor([0, wrong]), dtype)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(32, 64), (75, 33), (7, 130)])
def test_rows_of_packed_floats_are_as_they_were_given(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = torch.randn(shape).to(dtype)
    for instructions in (None, "AVX2"):
        library = native.library(instructions)
        if library is None:
            continue
        matrix = NativeMatrix(weight, None, library)
        ids = torch.arange(shape[0]).flip(0).repeat(2, 1)
        assert torch.equal(matrix.rows(ids, dtype), weight[ids])
        with pytest.raises(TypeError, match=r"cannot be returned in torch\.float64"):
            matrix.rows(ids, torch.float64)


@needs_kernels
def test_zeros_without_groups_are_refused() -> None:
    """Products would leave them out."""
    found = Codes.rounded(torch.randn(40, 96), 4, has_zeros=True)
    library = native.library()
    assert library is not None
    with pytest.raises(ValueError, match="zeros but without groups has no kernel; give it one group of all 96 inputs"):
        CodesMatrix(found, None, library)


def test_scales_are_as_exact_as_a_whole_weight_needs() -> None:
    """The first outputs are of ordinary size, and all others too small for scales in half precision."""
    weight = torch.randn(4096, 64)
    weight[64:] *= 2.0**-20
    found = Codes.rounded(weight, 4, 32, has_zeros=True)
    assert found.scales.dtype == torch.float32
    assert float((found.dense() - weight)[64:].norm() / weight[64:].norm()) < 0.1


@pytest.mark.sample(1)
@needs_kernels
@pytest.mark.parametrize("quantization", NAMES)
def test_a_tied_embedding_is_kept_once(quantization: str) -> None:
    """Rows come from the codes of the output embedding: in modules, in one call, and in transformers' reference."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "tie_word_embeddings": True}
    owned, reference = (toy_model(512, dtype=torch.float32, **sizes) for _ in range(2))
    round_weights(reference, quantization)
    assert reference.lm_head.weight is reference.model.embed_tokens.weight
    quantize_weights(owned, quantization, dtype=torch.float32, release_originals=True)
    assert not any(owned.model.embed_tokens.weight.stride())
    ids = torch.arange(512)[None]
    assert torch.equal(owned.model.embed_tokens(ids), reference.model.embed_tokens.weight.detach()[None])
    lm = CausalLM(owned, quantization=quantization)
    assert lm.execution.program is not None, lm.execution.why_no_program
    study = Study(owned, prompts=PROMPTS, execution="auto", max_num_seqs=len(PROMPTS))
    for params in (GREEDY, SAMPLED):
        found = study.cell("token_recycling", params, len(PROMPTS))
        assert found.guarantee == "bit-identical"
        assert found.is_good, found.line()
    tokens = torch.tensor([[3, 9, 4, 9, 7, 2, 9, 5]])
    with torch.inference_mode():
        got, want = lm.execution.model(tokens).logits, reference(tokens).logits
    assert float((got - want).norm() / want.norm()) < 1e-3


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_a_model_that_is_loaded_lets_go_of_what_it_was_rounded_from(dtype: str) -> None:
    """It computes as one that is rounded by its adapter, in any dtype, and weights are released."""
    given = load_model(str(path("zoo:tiny")), dtype=dtype)
    lm = CausalLM(given.model, quantization="int8")
    owned = load_model(str(path("zoo:tiny")), dtype=dtype, quantization="int8")
    assert owned.model.dtype == given.model.dtype
    assert not any(layer.mlp.up_proj.weight.stride()[0] for layer in owned.model.model.layers)
    tokens = torch.tensor([[3, 9, 4, 9, 7, 2, 9, 5]])
    with torch.inference_mode():
        got, want = owned.model(tokens).logits.double(), lm.execution.model(tokens).logits.double()
    assert torch.isfinite(got).all()
    assert float((got - want).norm() / want.norm()) < (0.05 if dtype == "bfloat16" else 1e-3)


def test_weights_that_are_changed_are_rounded_again() -> None:
    model = toy_model(dtype=torch.float32)
    lm = CausalLM(model, quantization="int8")
    tokens = torch.tensor([[3, 9, 4]])
    with torch.inference_mode():
        model.model.layers[0].mlp.down_proj.weight.mul_(3)
    assert lm.refresh()
    fresh = CausalLM(model, quantization="int8")
    with torch.inference_mode():
        assert torch.equal(lm.execution.model(tokens).logits, fresh.execution.model(tokens).logits)


def test_what_cannot_be_done_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'int7'; did you mean 'int"):
        LLM("zoo:tiny", quantization="int7")
    with pytest.raises(ConfigError, match="4-bit weights already"):
        LLM("zoo:tiny", "quantized_self", quantization="int4")


@pytest.mark.sample(1)
@pytest.mark.parametrize("quantization", NAMES)
def test_texts_with_drafts_are_those_without(quantization: str) -> None:
    plain = LLM("zoo:tiny", quantization=quantization)
    want = [output.outputs[0].token_ids for output in plain.generate(["My liege,", "Once"], GREEDY)]
    for method in ["token_recycling", "draft_model"] + ["quantized_self"] * (quantization == "int8"):
        llm = plain.with_speculative_config({"method": method, "length_policy": "fixed"})
        assert [output.outputs[0].token_ids for output in llm.generate(["My liege,", "Once"], GREEDY)] == want, method
    assert plain.model_info.quantization == quantization

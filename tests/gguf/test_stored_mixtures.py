"""Mixtures in GGUF files: experts are multiplied as their blocks lie, and only those that a token chooses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from guarantee import Study

from foredraft import LLM, SamplingParams
from foredraft.errors import CheckpointError
from foredraft.loading.models import load_model
from foredraft.native.library import library
from foredraft.testing import hostile_kernels
from foredraft.testing.hostile import KINDS
from gguf_files import write_mixture
from quantised_files import assert_close

GREEDY = SamplingParams(temperature=0.0, seed=7, max_tokens=24)
SAMPLED = SamplingParams(temperature=1.0, seed=7, max_tokens=24)
COOL = SamplingParams(temperature=0.2, seed=7, max_tokens=24)  # so that some of what is drafted is accepted
PROMPTS = [[5, 6, 7] * 25, [9, 10, 11, 12] * 3, [3], [8, 300, 40] * 30, [500, 400]]
MIXED = {"ffn_up_exps": Kind.Q5_1, "ffn_down_exps": Kind.Q6_K, "attn_v": Kind.Q8_0}
"""Other types in one layer, and in the parts of one parameter."""

pytestmark = pytest.mark.skipif(library() is None, reason="no kernels here")


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q5_1, Kind.Q8_0, Kind.Q4_K, Kind.Q6_K], ids=lambda kind: kind.name)
def test_logits_are_those_of_the_dequantised_weights(kind: Kind, tmp_path: Path) -> None:
    """No matrix of the experts is kept in its full size."""
    written = write_mixture(tmp_path / "m.gguf", kind)
    loaded = load_model(written.path, dtype="float32")
    assert (loaded.quantization, loaded.types) == ("stored", f"9 of {kind.name}")
    experts = loaded.model.model.layers[0].mlp.experts
    assert not any(any(weight.stride()) for weight in experts.parameters())
    assert_close(loaded.model, written.model)
    assert_close(load_model(written.path, dtype="float32", weights="dequantized").model, written.model, 1e-5)


def test_types_may_differ_between_matrices_of_one_layer(tmp_path: Path) -> None:
    written = write_mixture(tmp_path / "m.gguf", Kind.Q4_K, kinds=MIXED)
    loaded = load_model(written.path, dtype="float32")
    assert loaded.types == "6 of Q4_K and 1 of Q8_0 and 1 of Q5_1 and 1 of Q6_K"
    assert_close(loaded.model, written.model)


def test_experts_without_a_kernel_are_dequantised_alone_and_named(tmp_path: Path) -> None:
    """Of a parameter with two parts, one of which has no kernel, both are; the other parameter stays as stored."""
    kinds = {"blk.0.ffn_up_exps": Kind.IQ3_XXS, "blk.1.ffn_down_exps": Kind.IQ3_XXS}
    written = write_mixture(tmp_path / "m.gguf", Kind.Q4_K, kinds=kinds, num_hidden_layers=2)
    llm = LLM(written.path, dtype="float32")
    assert llm.model_info.weight_types == "13 of Q4_K; dequantised are 2 of IQ3_XXS and 1 of Q4_K"
    assert llm.target.execution.program is not None, llm.target.execution.why_no_program
    assert_close(llm.target.shadow, written.model)


@pytest.mark.parametrize("params", [GREEDY, pytest.param(COOL, marks=pytest.mark.slow)], ids=["greedy", "sampled"])
def test_bits_are_those_of_plain_decoding_whatever_stock_kernels_do(params: SamplingParams, tmp_path: Path) -> None:
    """Trees and chains for five rows of other lengths beside plain rows alone."""
    written = write_mixture(tmp_path / "m.gguf", Kind.Q4_K, kinds=MIXED, num_hidden_layers=2)
    with hostile_kernels(*KINDS):
        loaded = load_model(written.path, dtype="float32", with_tokenizer=False)
        study = Study(loaded.model, prompts=PROMPTS, execution="auto", max_num_seqs=len(PROMPTS))
        for method in ("token_recycling", "ngram")[: 2 if params is GREEDY else 1]:  # ngram repeats nothing sampled
            found = study.cell(method, params, len(PROMPTS))
            assert found.guarantee == "bit-identical"
            assert found.is_good, found.line()


def test_texts_with_drafts_are_those_without(tmp_path: Path) -> None:
    """In the dtype that is chosen for such files, in a step of one call."""
    plain = LLM(write_mixture(tmp_path / "m.gguf", Kind.Q4_K, kinds=MIXED).path)
    assert plain.target.dtype == torch.bfloat16
    assert plain.target.execution.program is not None, plain.target.execution.why_no_program
    params = [GREEDY, SAMPLED, SAMPLED, GREEDY, SAMPLED]
    want = [output.outputs[0].token_ids for output in plain.generate(PROMPTS, params)]
    for method in ("jacobi", "token_recycling"):
        llm = plain.with_speculative_config({"method": method, "length_policy": "fixed"})
        assert [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)] == want, method


def test_experts_of_another_size_than_stated_are_a_damaged_file(tmp_path: Path) -> None:
    written = write_mixture(tmp_path / "m.gguf", Kind.Q8_0, metadata={"qwen3moe.expert_feed_forward_length": 128})
    with pytest.raises(CheckpointError, match=r"ffn_(gate|up|down)_exps.weight of shape"):
        load_model(written.path)

"""``activations="int8"`` from end to end: the model with rounded activations is the target."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foredraft import LLM, RequestOutput, SamplingParams, speculate, zoo
from foredraft.errors import ConfigError
from foredraft.model.nodes import Nodes
from foredraft.native.library import library
from foredraft.testing import hostile_kernels
from foredraft.testing.hostile import KINDS

PROMPTS = ["Once upon a time there was a boy. Once upon a time there was", "The", "One day, Tom and Lily went to " * 3]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, logprobs=2)
SAMPLED = SamplingParams(temperature=0.8, seed=5, max_tokens=24, logprobs=2)

pytestmark = pytest.mark.skipif(library() is None, reason="no kernels here")


def texts(results: list[RequestOutput]) -> list[Any]:
    return [(each.token_ids, each.logprobs) for output in results for each in output.outputs]


@pytest.mark.parametrize(
    ("quantization", "method", "params"),
    [("int8", "eagle3", GREEDY), ("int4", "suffix+draft_model", SAMPLED)],
    ids=["int8", "int4"],
)
def test_drafted_rows_have_the_bits_of_plain_ones(quantization: str, method: str, params: SamplingParams) -> None:
    """Trees for three rows beside plain rows alone; stock kernels round otherwise in every call."""
    with hostile_kernels(*KINDS):
        plain = LLM("zoo:tiny", "none", dtype="float32", quantization=quantization, activations="int8")
        want = [text for prompt in PROMPTS for text in texts(plain.generate([prompt], params))]
        drafting = plain.with_speculative_config({"method": method, "length_policy": "fixed"})
        assert drafting.guarantee.kind == "bit-identical"
        found = drafting.generate(PROMPTS, params)
        assert texts(found) == want
        assert any(output.metrics.speculative_decoding["num_accepted_draft_tokens"] for output in found)


def test_logits_change_a_little_and_the_model_says_why() -> None:
    nodes = Nodes.from_chains([[3, 9, 4, 9, 7, 2, 9, 5]])
    found = []
    for activations in (None, "int8"):
        llm = LLM("zoo:tiny", "none", dtype="float32", quantization="int8", activations=activations)
        assert llm.model_info.activations == activations
        found.append(llm.target.forward(nodes, llm.target.new_cache(1)))
    difference = float((found[1] - found[0]).norm() / found[0].norm())
    assert 1e-4 < difference < 5e-2


def test_the_hook_takes_it() -> None:
    model, _, tokenizer = zoo.load("tiny", dtype=torch.float32)
    ids = tokenizer(PROMPTS[0], return_tensors="pt").input_ids
    llm = LLM("zoo:tiny", "none", dtype="float32", quantization="int8", activations="int8")
    params = SamplingParams(temperature=0.0, max_tokens=16)
    want = llm.generate([{"prompt_token_ids": ids[0].tolist()}], params)[0].outputs[0].token_ids
    hook = speculate("suffix", quantization="int8", activations="int8")
    got = model.generate(ids, max_new_tokens=16, do_sample=False, custom_generate=hook)
    assert got[0, ids.shape[1] :].tolist() == list(want)


def test_a_model_without_integer_weights_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"activations is 'int8', but no layer of .* multiplies by integer weights"):
        LLM("zoo:tiny", dtype="float32", activations="int8")
    with pytest.raises(ConfigError, match="activations is 'int7'"):
        LLM("zoo:tiny", dtype="float32", quantization="int8", activations="int7")

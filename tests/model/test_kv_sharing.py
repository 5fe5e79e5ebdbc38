"""Models whose last layers attend to keys and values of an earlier one, and keep none of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel, cache_utils

from foredraft import LLM, SamplingParams, speculate
from foredraft.errors import UnsupportedModelError
from foredraft.model.lm import CausalLM
from foredraft.model.nodes import Nodes, Wanted
from foredraft.testing import strengthen
from generated import generated

pytestmark = pytest.mark.skipif(
    not hasattr(cache_utils, "DummyLayer") or not hasattr(transformers, "Gemma4ForCausalLM"),
    reason=f"transformers {transformers.__version__} keeps such layers otherwise",
)

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "sliding_window": 8,
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
NARROW: dict[str, Any] = {"laurel_rank": 4, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 4}


def made(name: str, dtype: torch.dtype) -> PreTrainedModel:
    more = NARROW if name == "Gemma3n" else {}
    config = getattr(transformers, f"{name}TextConfig")(**SIZES, **more)
    model: PreTrainedModel = strengthen(getattr(transformers, f"{name}ForCausalLM")(config)).to(dtype).eval()
    return model


def prompt(length: int) -> list[int]:
    return torch.randint(5, 59, (length,), generator=torch.Generator().manual_seed(length)).tolist()


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["Gemma3n", "Gemma4"])
@pytest.mark.parametrize(
    "method", ["ngram", *(pytest.param(each, marks=pytest.mark.slow) for each in ("token_recycling", "sparse_kv"))]
)
def test_texts_are_those_of_transformers(name: str, method: str) -> None:
    """Rows of several lengths beside each other, longer than the window, and inside `generate`."""
    model = made(name, torch.float64)
    prompts, wanted = [prompt(20), prompt(5), prompt(12)], []
    for tokens in prompts:
        wanted.append(generated(model, tokens, 20))
        assert generated(model, tokens, 20, custom_generate=speculate(method)) == wanted[-1]
    params = SamplingParams(temperature=0, max_tokens=20, detokenize=False)
    outputs = LLM(model, method, prefill_chunk_size=8).generate(prompts, params)
    assert [list(output.outputs[0].token_ids) for output in outputs] == wanted


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["Gemma3n", "Gemma4"])
def test_drafts_keep_the_tokens_of_plain_decoding_by_the_kernels(name: str) -> None:
    model = made(name, torch.float32)
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=24, detokenize=False)
    texts = [
        [list(output.outputs[0].token_ids) for output in LLM(model, method).generate([prompt(20), prompt(6)], params)]
        for method in ("none", "ngram", "suffix")
    ]
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("name", ["Gemma3n", "Gemma4"])
def test_shared_layers_run_over_all_nodes(name: str) -> None:
    """Gemma 4 gives them those alone whose logits are wanted, and features are wanted of all."""
    lm = CausalLM(made(name, torch.float64))
    assert lm.shares_keys
    nodes = Nodes.from_chains([prompt(6), prompt(4)])
    found = [
        lm.forward_with(Wanted(layer_inputs=(3,)), nodes, lm.new_cache(2), keep=keep).layer_inputs[3]
        for keep in (None, slice(5, 6))
    ]
    assert torch.equal(found[0], found[1])


def test_layers_are_not_left_out() -> None:
    """Later ones attend to their keys."""
    with pytest.raises(UnsupportedModelError, match=r"'layer_skip' skips layers.*num_kv_shared_layers"):
        LLM(made("Gemma4", torch.float64), {"method": "layer_skip", "exit_layer": 2})

"""Heads of EAGLE over every architecture: features are captured, tokens are those of plain decoding."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from test_eagle import drafter
from test_eagle_static import drafter as static_drafter

from architectures import VOCAB_SIZE, in_turns
from eagle_heads import model, trained
from foredraft import LLM, SamplingParams
from foredraft.drafters.none import EmptyDrafter
from foredraft.heads.eagle import EagleHead, EagleShape, default_streams
from foredraft.heads.layers import LayerShape
from foredraft.heads.vocabulary import DraftVocabulary
from foredraft.methods.rank_tree import RankTree
from foredraft.model.lm import CausalLM
from foredraft.testing import GREEDY, PROMPTS, SAMPLED, compare, decode
from harness import adapter


def random_head(target: CausalLM, generation: int) -> EagleHead:
    size = int(target.config.hidden_size)
    layer = LayerShape(hidden_size=size, intermediate_size=48, num_heads=4, num_kv_heads=2, head_dim=8)
    num_layers = target.num_layers
    streams = default_streams(num_layers) if generation == 3 else (num_layers,)
    shape = EagleShape(generation, layer, size, streams, num_layers)
    torch.manual_seed(3)
    vocabulary = DraftVocabulary.of(range(0, VOCAB_SIZE, 2), VOCAB_SIZE) if generation == 3 else None
    return EagleHead(shape, vocabulary).double().eval().requires_grad_(False)


@pytest.mark.sample(4)
@pytest.mark.parametrize(("name", "method"), in_turns(("eagle2", "eagle3")))
def test_tokens_are_those_of_plain_decoding(name: str, method: str) -> None:
    """Ragged rows, greedy and sampled; chains where trees cannot be verified. A random head is right by chance only."""
    target, generation = adapter(name), 3 if method == "eagle3" else 1
    if target.num_layers < 2:
        pytest.skip("no three streams in one layer")
    requests = [(prompt, replace(params, max_tokens=9)) for prompt in PROMPTS[:3] for params in (GREEDY, SAMPLED)]
    plain = decode(target, EmptyDrafter(), requests)
    head = random_head(target, generation)
    compare(decode(target, drafter(head, 3, lm=target), requests), plain, f"{name}, a dynamic tree")
    if generation == 1:
        tree = RankTree.published("eagle")
        compare(decode(target, static_drafter(head, 3, tree, lm=target), requests), plain, f"{name}, a static tree")


@cache
def narrow() -> LLM:
    """The toy in float32, by kernels of the library's own."""
    own = model()
    copied = type(own)(own.config)
    copied.load_state_dict(own.state_dict())
    return LLM(copied.float().eval())


@pytest.mark.parametrize(
    "method", [*(pytest.param(name, marks=pytest.mark.full) for name in ("eagle", "eagle2")), "eagle3"]
)
def test_a_native_model_gives_the_bits_of_plain_decoding(method: str) -> None:
    head = trained(3 if method == "eagle3" else 1)
    copied = EagleHead(head.shape, head.vocabulary)
    copied.load_state_dict(head.state_dict())
    plain = narrow()
    llm = plain.with_speculative_config({"method": method, "model": copied.float().eval()})
    prompts: list[Any] = [{"prompt_token_ids": list(prompt)} for prompt in PROMPTS]
    for params in (SamplingParams(temperature=0, max_tokens=20), SamplingParams(seed=1234, max_tokens=20, logprobs=2)):
        want, got = plain.generate(prompts, params), llm.generate(prompts, params)
        assert [each.outputs[0].token_ids for each in got] == [each.outputs[0].token_ids for each in want]
        assert [each.outputs[0].logprobs for each in got] == [each.outputs[0].logprobs for each in want]
    assert llm.profile.num_steps < len(prompts) * 2 * 20 / 2

"""Log-probabilities of prompts equal those of a plain forward, whatever reads the prompt and beside what."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from foredraft import LLM, SamplingParams
from foredraft.config.engine import EngineConfig
from foredraft.drafters.none import EmptyDrafter
from foredraft.engine.engine import Engine
from foredraft.engine.frontend import RequestOutput
from foredraft.model.lm import CausalLM
from foredraft.testing import toy_model
from harness import random_ids

VOCAB_SIZE = 64
PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=4, repetition_penalty=1.3, prompt_logprobs=3)
METHODS = (None, "ngram", "lookahead", {"method": "layer_skip", "exit_layer": 1})
LENGTHS = (1, 2, 9, 40, 70, 130)


def model(dtype: torch.dtype = torch.float32) -> Any:
    return toy_model(VOCAB_SIZE, dtype=dtype)


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    return [random_ids(length, length, VOCAB_SIZE) for length in lengths]


def check(output: RequestOutput, of: Any, k: int, tolerance: float) -> None:
    """Own values, ranks and the k best of every token but the first, by one forward of the model without a cache."""
    ids = list(output.prompt_token_ids)
    with torch.no_grad():
        table = of(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float().log_softmax(-1)
    assert output.prompt_logprobs is not None
    first, *others = output.prompt_logprobs
    assert first is None
    assert len(others) == len(ids) - 1
    for token, want, found in zip(ids[1:], table[:-1], others, strict=True):
        assert next(iter(found)) == token
        assert found[token].rank == int((want > want[token]).sum()) + 1
        best = want.topk(k)
        assert set(found) == {token, *best.indices.tolist()}
        for each, entry in found.items():
            assert entry.logprob == pytest.approx(float(want[each]), abs=tolerance)
        if k:  # as lm-eval asks
            is_greedy = found[token].logprob == max(entry.logprob for entry in found.values())
            assert is_greedy == (int(want.argmax()) == token)


@pytest.mark.parametrize(
    ("method", "chunk_size"),
    [
        pytest.param(method, size, marks=() if (row + place) % 2 and row < 2 else pytest.mark.full)
        for row, method in enumerate(METHODS)
        for place, size in enumerate((512, 7))
    ],
    ids=str,
)
def test_they_are_those_of_a_plain_forward(method: Any, chunk_size: int) -> None:
    plain = model()
    llm = LLM(model(), method, prefill_chunk_size=chunk_size, max_num_seqs=4)
    wanted = [PARAMS, replace(PARAMS, prompt_logprobs=None), replace(PARAMS, n=3), replace(PARAMS, prompt_logprobs=0)]
    several = [wanted[place % 4] for place in range(len(LENGTHS))]
    outputs = llm.generate(prompts(), several)
    for output, params in zip(outputs, several, strict=True):
        if params.prompt_logprobs is None:
            assert output.prompt_logprobs is None
        else:
            check(output, plain, params.prompt_logprobs, 1e-4)
    for output in llm.generate(prompts(), replace(PARAMS, max_tokens=0, n=2)):  # which are only read
        check(output, plain, 3, 1e-4)
        assert [(text.token_ids, text.text, text.finish_reason) for text in output.outputs] == [([], "", "length")] * 2
    without = llm.generate(prompts(), [replace(params, prompt_logprobs=None) for params in several])
    assert [[text.token_ids for text in output.outputs] for output in outputs] == [
        [text.token_ids for text in output.outputs] for output in without
    ]


def test_exact_in_float64() -> None:
    llm = LLM(model(torch.float64), "ngram", prefill_chunk_size=16)
    for output in llm.generate(prompts(), PARAMS):
        check(output, model(torch.float64), 3, 2e-6)  # sums of float32


def test_they_are_learned_anew_where_the_prompt_is_known() -> None:
    llm = LLM(model(), num_cached_prefixes=4, prefill_chunk_size=16)
    (prompt,) = prompts((40,))
    llm.generate(prompt, replace(PARAMS, prompt_logprobs=None))
    (known,) = llm.generate(prompt, replace(PARAMS, prompt_logprobs=None))
    (asked,) = llm.generate(prompt, PARAMS)
    assert known.num_cached_tokens > 0
    assert asked.num_cached_tokens == 0
    check(asked, model(), 3, 1e-4)


def test_a_prompt_that_is_read_twice_tells_them_once() -> None:
    """Rows leave for want of memory, and are read again."""
    of_row = 2 * 2 * 2 * 8 * 4  # keys and values of two layers and two heads of eight
    llm = LLM(model(), max_num_seqs=3, max_kv_bytes=600 * of_row)
    outputs = llm.generate(prompts((100, 101, 99)), replace(PARAMS, max_tokens=120, ignore_eos=True))
    assert llm.profile.num_preemptions > 0
    for output in outputs:
        check(output, model(), 3, 1e-4)


def test_no_more_logits_are_kept_at_once_than_of_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many prompts that could be read together: logits of all of them would be as large as one prompt of their sum."""
    target = CausalLM(model(), execution="eager")
    kept: list[int] = []
    forward = target.forward_with

    def watching(*args: Any, **options: Any) -> Any:
        output = forward(*args, **options)
        kept.append(output.logits.shape[:2].numel())
        return output

    monkeypatch.setattr(target, "forward_with", watching)
    engine = Engine(target, EmptyDrafter(), EngineConfig(prefill_chunk_size=32))
    for prompt in prompts((20, 20, 20, 30, 70)):
        engine.add_request(prompt, replace(PARAMS, max_tokens=1))
    list(engine.run())
    assert max(kept) == 32

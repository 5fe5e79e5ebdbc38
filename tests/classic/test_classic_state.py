"""What classic calls share and what they do not: adapters by model, traces by context."""

from __future__ import annotations

import contextvars
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from classic_models import PROMPT, drafter, hf_greedy, target
from transformers import PreTrainedModel

from foredraft.classic import last_trace
from foredraft.classic.adapters import adapter_of
from foredraft.classic.sampling import autoregressive_generate, speculative_generate
from foredraft.classic.utils.logits_processor import MultinomialProcessor
from foredraft.errors import PromptError
from foredraft.loading.adapters import ADAPTERS
from foredraft.model.lm import CausalLM
from foredraft.testing import toy_model


def test_a_model_is_probed_once(monkeypatch: Any) -> None:
    built: list[object] = []
    right = CausalLM.__init__

    def counting(self: CausalLM, *args: Any, **options: Any) -> None:
        built.append(args[0])
        right(self, *args, **options)

    monkeypatch.setattr(CausalLM, "__init__", counting)
    model, other = toy_model(16, seed=3), toy_model(16, seed=4)
    for _ in range(3):
        speculative_generate([1, 2], other, model, max_gen_len=3)
    assert built == [model, other]
    model.to(torch.float32)
    assert adapter_of(model).target.dtype == torch.float32
    assert len(built) == 3


def test_adapters_go_with_their_models() -> None:
    model = toy_model(16, seed=5)
    autoregressive_generate([1, 2], model, max_gen_len=2)
    gone = weakref.ref(model)
    gc.collect()
    before = len(ADAPTERS)
    del model
    gc.collect()
    assert gone() is None
    assert len(ADAPTERS) == before - 1


def packable_model() -> PreTrainedModel:
    """Large enough in float32 for packed weights."""
    return toy_model(
        512,
        seed=1,
        dtype=torch.float32,
        scale=0.1,
        hidden_size=256,
        intermediate_size=1024,  # 256 x 1024 is the smallest weight that is packed
        num_hidden_layers=1,
        num_key_value_heads=4,
        max_position_embeddings=64,
    )


def test_weights_that_were_written_are_seen() -> None:
    """In place, by a new tensor, and by a hook: every output is that of the model as it is."""
    model = packable_model()
    prompt = [5, 6, 7]
    outputs = [autoregressive_generate(prompt, model, 8, eos_tokens_id=[])]
    execution = adapter_of(model).target.execution
    assert execution.kind == "eager" or execution.num_packed_layers > 0
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(-1.5)
    outputs.append(autoregressive_generate(prompt, model, 8, eos_tokens_id=[]))
    assert outputs[-1] == hf_greedy(model, prompt, 8)
    model.lm_head.weight = torch.nn.Parameter(-model.lm_head.weight.detach())
    outputs.append(autoregressive_generate(prompt, model, 8, eos_tokens_id=[]))
    assert outputs[-1] == hf_greedy(model, prompt, 8)
    handle = model.lm_head.register_forward_hook(lambda module, inputs, output: output.flip(-1))
    outputs.append(autoregressive_generate(prompt, model, 8, eos_tokens_id=[]))
    assert outputs[-1] == hf_greedy(model, prompt, 8)
    handle.remove()
    assert autoregressive_generate(prompt, model, 8, eos_tokens_id=[]) == outputs[2]
    assert len({tuple(output) for output in outputs}) == 4


def test_a_model_in_training_mode_generates_as_in_evaluation() -> None:
    """Dropout belongs to training; the model's own mode is left alone."""
    model = toy_model(32, seed=6)
    wanted = autoregressive_generate([1, 2, 3], model, 8)
    model.train()
    assert autoregressive_generate([1, 2, 3], model, 8) == wanted
    assert model.training


# -- traces ------------------------------------------------------------------------------------------------------------


def test_the_last_trace_is_that_of_the_last_call() -> None:
    assert contextvars.Context().run(last_trace) is None
    autoregressive_generate(PROMPT, target(), 5, eos_tokens_id=[])
    trace = last_trace()
    assert (trace.function, trace.prompt_length, len(trace.steps)) == ("autoregressive_generate", len(PROMPT), 5)
    assert [step.position for step in trace.steps] == list(range(len(PROMPT), len(PROMPT) + 5))
    _, rate = speculative_generate(PROMPT, drafter(), target(), gamma=2, max_gen_len=9, eos_tokens_id=[])
    trace = last_trace()
    assert trace.function == "speculative_generate"
    assert trace.acceptance_rate == rate
    assert trace.steps[0].gamma == 0
    assert trace.steps[1].gamma == 2
    assert all(step.normalised_entropy is None for step in trace.steps)
    assert all(draft.uniform is None for step in trace.steps for draft in step.drafts)


def test_a_call_that_raises_leaves_its_steps() -> None:
    class Failing(MultinomialProcessor):
        calls = 0

        def __call__(self, logits: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls == 4:
                raise RuntimeError("enough")
            return super().__call__(logits)

    with pytest.raises(RuntimeError, match="enough"):
        autoregressive_generate(PROMPT, target(), 9, Failing(1.0), eos_tokens_id=[])
    trace = last_trace()
    assert len(trace.steps) == 3
    with pytest.raises(PromptError):
        autoregressive_generate([], target())
    assert last_trace() is trace


def test_threads_have_traces_of_their_own_and_share_models() -> None:
    prompts = [PROMPT[i:] for i in range(6)]
    wanted = [hf_greedy(target(), prompt, 10) for prompt in prompts]

    def call(prompt: list[int]) -> tuple[list[int], int]:
        tokens, _ = speculative_generate(prompt, drafter(), target(), max_gen_len=10, eos_tokens_id=[], use_cache=True)
        trace = last_trace()
        return tokens, trace.prompt_length

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(call, prompts))
    assert [tokens for tokens, _ in answers] == wanted
    assert [length for _, length in answers] == [len(prompt) for prompt in prompts]

"""What classic calls share and what they do not: adapters by model, traces by context."""

from __future__ import annotations

import contextvars
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from classic_models import PROMPT, drafter, target

from foredraft.classic import last_trace
from foredraft.classic.sampling import autoregressive_generate, speculative_generate
from foredraft.classic.utils.logits_processor import MultinomialProcessor
from foredraft.errors import PromptError
from foredraft.loading.adapters import ADAPTERS
from foredraft.testing import toy_model
from generated import generated


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
    wanted = [generated(target(), prompt, 10) for prompt in prompts]

    def call(prompt: list[int]) -> tuple[list[int], int]:
        tokens, _ = speculative_generate(prompt, drafter(), target(), max_gen_len=10, eos_tokens_id=[], use_cache=True)
        trace = last_trace()
        return tokens, trace.prompt_length

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(call, prompts))
    assert [tokens for tokens, _ in answers] == wanted
    assert [length for _, length in answers] == [len(prompt) for prompt in prompts]

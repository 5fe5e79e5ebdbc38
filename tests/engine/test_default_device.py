"""A default device that the caller has set reaches nothing that is made here: kernels would read addresses of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from foredraft import LLM, SamplingParams
from foredraft.classic.sampling import autoregressive_generate, speculative_generate
from foredraft.testing import toy_model

PROMPT = [5, 6, 7, 5, 6, 9]
PARAMS = SamplingParams(temperature=1, max_tokens=9, seed=5, ignore_eos=True)


@pytest.fixture
def meta() -> Iterator[None]:
    """A stand-in for a GPU that every machine has."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def models() -> tuple[torch.nn.Module, torch.nn.Module]:
    with torch.device("cpu"):
        return toy_model(seed=3), toy_model(seed=4)


def test_no_face_makes_tensors_on_the_callers_default_device(request: pytest.FixtureRequest) -> None:
    target, draft = models()
    begun = LLM(target, "ngram")
    expected = begun.generate(PROMPT, PARAMS)[0].outputs[0].token_ids
    ids = torch.tensor([PROMPT])
    plain = target.generate(ids, max_new_tokens=9, do_sample=False, eos_token_id=None)[0, len(PROMPT) :].tolist()
    request.getfixturevalue("meta")
    configs = [None, "ngram", {"method": "draft_model", "model": draft}, "token_recycling", "lookahead"]
    for llm in (begun, *(LLM(target, config) for config in configs), begun.with_speculative_config("suffix")):
        assert llm.generate(PROMPT, PARAMS)[0].outputs[0].token_ids == expected
    assert autoregressive_generate(PROMPT, target, 9, eos_tokens_id=[], use_cache=True) == plain
    assert speculative_generate(PROMPT, draft, target, max_gen_len=9, eos_tokens_id=[])[0] == plain
    torch.set_default_device(None)
    with torch.device("meta"):
        assert begun.generate(PROMPT, PARAMS)[0].outputs[0].token_ids == expected

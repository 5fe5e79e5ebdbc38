"""Models that read more tokens than they return: their embedding has more rows than they have logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from foredraft import LLM, SamplingParams, speculate
from foredraft.classic.ngram_assisted import NGramStorage
from foredraft.classic.ngram_assisted import ngram_assisted_speculative_generate as ngram_generate
from foredraft.classic.sampling import autoregressive_generate, speculative_generate
from foredraft.errors import PromptError
from foredraft.testing.toys import perturbed, toy_model
from foredraft.tree import DraftTree

NUM_LOGITS, NUM_EMBEDDINGS = 64, 72
PROMPTS = [[5, 70, 7, 8, 5, 70], [71, 70] * 5, [5, 6, 7, 70, 5, 6, 7, 70, 5, 6, 7]]
"""Tokens without a logit at the beginning, inside, at the end, and where a lookup finds them."""
NUM_TOKENS = 8


def widened() -> PreTrainedModel:
    model = toy_model(NUM_LOGITS)
    known = model.get_input_embeddings().weight
    torch.manual_seed(1)
    wide = torch.nn.Embedding(NUM_EMBEDDINGS, known.shape[1]).to(known.dtype)
    with torch.no_grad():
        wide.weight.mul_(0.25)
        wide.weight[:NUM_LOGITS] = known
    model.set_input_embeddings(wide)
    return model


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return widened()


@pytest.fixture(scope="module")
def plain(model: PreTrainedModel) -> list[list[int]]:
    return [generated(model, prompt) for prompt in PROMPTS]


def generated(model: PreTrainedModel, prompt: list[int], **options: Any) -> list[int]:
    ids = torch.tensor([prompt])
    asked = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NUM_TOKENS, "do_sample": False, **options}
    found: list[int] = model.generate(input_ids=ids, **asked)[0, len(prompt) :].tolist()
    return found


CONFIGS: dict[str, dict[str, Any]] = {
    **{
        name: {"method": name} for name in ("none", "ngram", "suffix", "nasd", "token_recycling", "jacobi", "lookahead")
    },
    "nasd, random": {"method": "nasd", "unknown": "random"},
    "token_recycling, prompt": {"method": "token_recycling", "initial_state": "prompt"},
    "token_recycling, vocabulary": {"method": "token_recycling", "initial_state": "vocabulary"},
    "sparse_kv": {"method": "sparse_kv", "kv_budget": 16, "kv_sinks": 2, "kv_window": 4, "kv_selector": "snapkv"},
}
QUICK = ("none", "nasd", "token_recycling, vocabulary", "jacobi", "draft_model", "ngram+suffix")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in CONFIGS]
)
def test_every_method_drafts_after_tokens_without_a_logit(
    model: PreTrainedModel, plain: list[list[int]], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Tables by token have rows for all that can be read, what only can be read is not drafted, and a draft model reads
    what it does not know as its last token."""
    config = CONFIGS[name] if name in ("none", "ngram+suffix") else {**CONFIGS[name], "length_policy": "fixed"}
    if name == "draft_model":
        config["model"] = perturbed(toy_model(NUM_LOGITS), 0.1)
    outputs = LLM(model, config).generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS))
    assert [output.outputs[0].token_ids for output in outputs] == plain
    assert "has failed" not in caplog.text


def test_generate_with_a_method_reads_them_as_it_does_without(model: PreTrainedModel, plain: list[list[int]]) -> None:
    for prompt, expected in zip(PROMPTS, plain, strict=True):
        assert generated(model, prompt, custom_generate=speculate("ngram")) == expected


def test_the_classic_functions_read_them(model: PreTrainedModel, plain: list[list[int]]) -> None:
    draft = perturbed(toy_model(NUM_LOGITS), 0.1)
    for prompt, expected in zip(PROMPTS, plain, strict=True):
        asked: dict[str, Any] = {"max_gen_len": NUM_TOKENS, "eos_tokens_id": -1}
        assert autoregressive_generate(prompt, model, **asked) == expected
        assert speculative_generate(prompt, draft, model, gamma=3, **asked)[0] == expected
        storage = NGramStorage(3, NUM_EMBEDDINGS)
        assert ngram_generate(prompt, storage, model, gamma=3, **asked)[0] == expected


def test_processors_and_log_probabilities_take_them(model: PreTrainedModel) -> None:
    """Penalties have no logit to change; the probability of a token that is never returned is 0."""
    params = SamplingParams(
        temperature=0.0, max_tokens=4, repetition_penalty=1.3, no_repeat_ngram_size=2, prompt_logprobs=1
    )
    (output,) = LLM(model, "none").generate([PROMPTS[0]], params)
    assert max(output.outputs[0].token_ids) < NUM_LOGITS
    assert output.prompt_logprobs[1][70].logprob == -float("inf")
    assert output.prompt_logprobs[2][7].logprob > -float("inf")


def test_tokens_beyond_the_embedding_are_refused(model: PreTrainedModel) -> None:
    with pytest.raises(PromptError, match=r"token id 72 lies outside the vocabulary of the model, 0\.\.71"):
        LLM(model, "none").generate([[5, 72]], SamplingParams(max_tokens=1))


def test_a_draft_keeps_what_stands_before_a_token_that_is_never_returned() -> None:
    tree = DraftTree((70, 5, 71, 6, 7), (-1, 0, 0, 2, 1))
    assert tree.below(64).tokens == (70, 5, 7)
    assert tree.below(64).parents == (-1, 0, 1)
    assert tree.below(72) is tree

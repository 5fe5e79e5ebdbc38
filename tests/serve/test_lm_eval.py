"""lm-eval's ``local-completions``: the requests that it sends, by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from foredraft import LLM
from foredraft.serve.served import Served
from serving import Running, running

TEXTS = ["The capital of France is Paris, and", "two and two are", "Grüße 世界 ."]
ASKED = {"model": "tiny", "temperature": 0, "logprobs": 1, "seed": 1234, "echo": True}
"""What lm-eval 0.4.13 sends for log-likelihoods, beside prompts and ``max_tokens``."""


@pytest.fixture(scope="module")
def running_server() -> Iterator[Running]:
    """In float32, whatever the processor multiplies best: figures are held against those of transformers."""
    with running(Served({"tiny": LLM("zoo:tiny", "ngram", dtype="float32")})) as found:
        yield found


def prompts_of(server: Running) -> list[list[int]]:
    return [list(server.llm.tokenizer(text)["input_ids"]) for text in TEXTS] + [[5]]


@torch.inference_mode()
def of_model(server: Running, ids: list[int]) -> torch.Tensor:
    """Log-probabilities of what follows each token, by transformers."""
    logits = server.llm.target.shadow(torch.tensor([ids]).long()).logits[0]
    return torch.as_tensor(logits).float().log_softmax(-1)


@pytest.mark.sample(1)
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_log_likelihoods_are_those_of_the_model(running_server: Running, max_tokens: int) -> None:
    prompts = prompts_of(running_server)
    found = running_server.post("/v1/completions", prompt=prompts, max_tokens=max_tokens, **ASKED).json()
    assert found["usage"]["completion_tokens"] == max_tokens * len(prompts)
    for ids, choice in zip(prompts, found["choices"], strict=True):
        told, log_probs = choice["logprobs"], of_model(running_server, ids)
        assert {len(each) for each in told.values()} == {len(ids) + max_tokens}
        assert (told["token_logprobs"][0], told["top_logprobs"][0]) == (None, None)
        own = [log_probs[place, token].item() for place, token in enumerate(ids[1:])]
        assert told["token_logprobs"][1 : len(ids)] == pytest.approx(own, abs=1e-4)
        is_greedy = [
            logprob == max(top.values())
            for logprob, top in zip(
                told["token_logprobs"][1 : len(ids)], told["top_logprobs"][1 : len(ids)], strict=True
            )
        ]
        assert is_greedy == [log_probs[place].argmax() == token for place, token in enumerate(ids[1:])]
        text = running_server.llm.tokenizer.decode(ids)
        assert choice["text"].startswith(text)
        assert choice["finish_reason"] == "length"
        assert max_tokens or choice["text"] == text


@pytest.mark.parametrize(
    ("fields", "max_tokens", "n"), [({}, 0, 2), ({}, 6, 1), ({"echo": False, "prompt_logprobs": 2}, 6, 2)]
)
def test_a_stream_tells_of_the_prompt_first(
    running_server: Running, fields: dict[str, Any], max_tokens: int, n: int
) -> None:
    """Chunks of a choice, put together, are the choice of the whole answer, what they tell of the prompt included."""
    body = {**ASKED, "prompt": prompts_of(running_server), "max_tokens": max_tokens, "n": n, **fields}
    whole = running_server.post("/v1/completions", **body).json()["choices"]
    chunks = [chunk["choices"][0] for chunk in running_server.events("/v1/completions", body)]
    assert len(whole) == n * len(body["prompt"])
    for choice in whole:
        first, *others = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        pieces = [chunk["logprobs"] for chunk in (first, *others) if chunk["logprobs"]]
        joined = {key: [one for piece in pieces for one in piece[key]] for key in choice["logprobs"]}
        assert joined == choice["logprobs"]
        assert "".join(chunk["text"] for chunk in (first, *others)) == choice["text"]
        assert first.get("prompt_logprobs") == choice.get("prompt_logprobs")
        assert not any("prompt_logprobs" in chunk for chunk in others)
        assert others[-1]["finish_reason"] == choice["finish_reason"]


def test_a_prompt_that_fills_the_context_is_read(running_server: Running) -> None:
    limit = running_server.http.get("/v1/models").json()["data"][0]["max_model_len"]
    read = running_server.post("/v1/completions", prompt=[7] * limit, max_tokens=0, **ASKED)
    assert len(read.json()["choices"][0]["logprobs"]["tokens"]) == limit
    for length, max_tokens in ((limit + 1, 0), (limit, 1)):
        refused = running_server.post("/v1/completions", prompt=[7] * length, max_tokens=max_tokens, **ASKED)
        assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert running_server.post("/v1/completions", prompt="a", max_tokens=1).status_code == 200

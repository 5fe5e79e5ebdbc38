"""How a request wants to be drafted for, what it is told of that, and that no text changes by it."""

from __future__ import annotations

from typing import Any

import pytest

from foredraft.config.sampling import SamplingParams
from serving import Running

BODY: dict[str, Any] = {
    "prompt": "one two three one two three one two",
    "max_tokens": 24,
    "temperature": 1.0,
    "seed": 7,
    "return_token_ids": True,
    "spec_decode_metrics": "detailed",
}
CHOICES: list[tuple[Any, str, int | None]] = [
    (None, "draft_model", None),
    (True, "draft_model", None),
    (False, "draft_model", 0),
    ("none", "draft_model", 0),
    ("lookup", "ngram", None),
    ("ngram", "ngram", None),
    ({"num_speculative_tokens": 2}, "draft_model", 2),
    ({"num_speculative_tokens": 1, "method": "ngram"}, "ngram", 1),
    ({"num_speculative_tokens": 0}, "draft_model", 0),
]


@pytest.mark.sample(7)
@pytest.mark.parametrize(("speculative", "method", "longest"), CHOICES)
def test_requests_choose_their_drafts(running_server: Running, speculative: Any, method: str, longest: Any) -> None:
    body = {**BODY, "speculative": speculative}
    found = running_server.post("/v1/completions", **body).json()
    plain = running_server.llm.generate(BODY["prompt"], SamplingParams(max_tokens=24, temperature=1.0, seed=7))
    assert found["choices"][0]["token_ids"] == list(plain[0].outputs[0].token_ids)
    counts = found["metrics"]["speculative_decoding"]
    assert (counts["method"], counts["lossless"]) == (method, True)
    assert counts["exactness"]["kind"] in ("bit-identical", "up to rounding")
    drafted = max(counts["per_step_drafted"])
    assert drafted <= longest if longest is not None else drafted > 0


def test_counts_add_up_and_have_vllms_shape(running_server: Running) -> None:
    counts = running_server.post("/v1/completions", **BODY).json()["metrics"]["speculative_decoding"]
    histogram = counts["acceptance_histogram"]
    assert len(histogram) == counts["num_spec_tokens"] + 1
    assert sum(histogram) == counts["num_spec_steps"]
    assert sum(j * steps for j, steps in enumerate(histogram)) == counts["num_accepted_draft_tokens"]
    assert sum(counts["per_step_drafted"]) == counts["num_draft_tokens"]
    assert counts["mean_acceptance_length"] == 1 + counts["num_accepted_draft_tokens"] / counts["num_spec_steps"]
    summary = running_server.post("/v1/completions", **{**BODY, "spec_decode_metrics": "summary"}).json()
    assert "per_step_drafted" not in summary["metrics"]["speculative_decoding"]
    assert "metrics" not in running_server.post("/v1/completions", **{**BODY, "spec_decode_metrics": None}).json()


@pytest.mark.parametrize("stream", [False, True])
def test_the_verdict_compares_with_plain_decoding(running_server: Running, stream: bool) -> None:
    body = {**BODY, "verify": True, "n": 2, "seed": None, "logprobs": 1, "ignore_eos": True}
    if stream:
        found = running_server.events("/v1/completions", body)[-1]
        assert found["choices"] == []
    else:
        found = running_server.post("/v1/completions", **body).json()
    assert found["verify"] == {"identical": True, "logprobs_identical": True, "num_tokens": 48, "differences": []}


def test_a_lossy_rule_is_told_and_seen(running_server: Running, llm: Any) -> None:
    """The control: texts of another seed are found to differ."""
    from foredraft.serve.answering import verdict_of

    first, second = (
        llm.generate(BODY["prompt"], SamplingParams(max_tokens=8, seed=seed), use_tqdm=False) for seed in (1, 2)
    )
    verdict = verdict_of(first, second)["verify"]
    assert not verdict["identical"]
    assert verdict["differences"][0]["index"] == 0


@pytest.mark.parametrize("kind", ["content", "parts", "ids"])
def test_predicted_output_is_drafted_and_counted(running_server: Running, kind: str) -> None:
    """Nothing of it is counted as completion but what the model says itself."""
    messages = [{"role": "user", "content": "Tell me a story"}]
    asked = {"messages": messages, "max_tokens": 24, "temperature": 0, "model": "plain", "ignore_eos": True}
    expected = running_server.post("/v1/chat/completions", **asked).json()
    text = expected["choices"][0]["message"]["content"]
    parts = [{"type": "text", "text": half} for half in (text[:5], text[5:])]
    prediction: Any = {
        "content": {"type": "content", "content": text},
        "parts": {"type": "content", "content": parts},
        "ids": list(running_server.llm.tokenizer(text, add_special_tokens=False)["input_ids"]),
    }[kind]
    found = running_server.post("/v1/chat/completions", **asked, prediction=prediction).json()
    assert found["choices"][0]["message"] == expected["choices"][0]["message"]
    details = found["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 2
    assert found["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]
    assert "completion_tokens_details" not in expected["usage"]


@pytest.mark.parametrize(("most", "of_prompt"), [(None, 2), (1, 2), (3, 1), (0, 0)])
@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_with_log_probabilities_of_the_prompt_beside_it(
    running_server: Running, stream: bool, most: int | None, of_prompt: int
) -> None:
    """They were learned and told to nobody; as many are told of either as were asked for."""
    body = {"prompt": "The quick brown", "max_tokens": 2, "temperature": 0, "seed": 1, "logprobs": most}
    (expected,) = running_server.post("/v1/completions", **body, prompt_logprobs=of_prompt).json()["choices"]
    asked = {**body, "prompt_logprobs": of_prompt, "echo": True}
    if stream:
        choices = [chunk["choices"][0] for chunk in running_server.events("/v1/completions", asked)]
        first, text = choices[0], "".join(choice["text"] for choice in choices)
    else:
        (first,) = running_server.post("/v1/completions", **asked).json()["choices"]
        text = first["text"]
    assert text == "The quick brown" + expected["text"]
    assert first["prompt_logprobs"] == expected["prompt_logprobs"]
    assert {len(table) for table in first["prompt_logprobs"][1:]} <= {max(of_prompt, 1), of_prompt + 1}
    assert (first["logprobs"] is None) == (most is None)
    if most:
        assert {len(table) for table in first["logprobs"]["top_logprobs"][1:]} <= {most, most + 1}


def test_log_probabilities_of_prompts_are_those_of_the_llm(running_server: Running) -> None:
    """In vLLM's shape."""
    ids = list(running_server.llm.tokenizer("The quick brown fox jumps")["input_ids"])
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    (expected,) = running_server.llm.generate([{"prompt_token_ids": ids}], params)
    tables = expected.prompt_logprobs[1:]
    wanted = [table[token].logprob for token, table in zip(ids[1:], tables, strict=True) if table is not None]
    body = {"prompt": [ids, ids], "max_tokens": 1, "temperature": 0, "prompt_logprobs": 2}
    (first, _) = running_server.post("/v1/completions", **body).json()["choices"]
    assert first["prompt_logprobs"][0] is None
    shown = [table[str(token)] for token, table in zip(ids[1:], first["prompt_logprobs"][1:], strict=True)]
    assert [entry["logprob"] for entry in shown] == pytest.approx(wanted, abs=1e-5)

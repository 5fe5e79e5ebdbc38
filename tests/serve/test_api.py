"""Answers of the server: the types of the openai client take them, and they say what `LLM` says."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from foredraft.config.sampling import SamplingParams
from foredraft.llm import LLM
from foredraft.serve.served import Served
from foredraft.testing.conformance import ungoverned
from serving import MODEL, Running

PROMPT = "The quick brown fox"
MESSAGES: list[Any] = [{"role": "user", "content": PROMPT}]

PARAMETERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "seed": 5},
    "filtered": {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "seed": 1},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2, "seed": 2},
    "samples": {"n": 3, "temperature": 1.0, "seed": 3},
    "bias": {"logit_bias": {"300": -100, "17": 2.5}, "temperature": 0.0},
    "allowed": {"allowed_token_ids": [17, 300, 301, 302, 17], "n": 2, "seed": 4, "temperature": 1.0},
    "stops": {"stop": ["the", " and"], "temperature": 0.0, "max_tokens": 40},
    "kept stop": {"stop": "the", "include_stop_str_in_output": True, "temperature": 0.0, "max_tokens": 40},
    "least": {"min_tokens": 10, "temperature": 0.0, "ignore_eos": True, "no_repeat_ngram_size": 2},
    "words": {"bad_words": ["the"], "temperature": 0.0, "skip_special_tokens": False},
}


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("name", "stream"),
    [
        pytest.param(name, stream, marks=() if stream or place % 3 == 0 else pytest.mark.full)
        for place, name in enumerate(PARAMETERS)
        for stream in (False, True)
    ],
)
def test_completions_say_what_the_llm_says(running_server: Running, name: str, stream: bool) -> None:
    given = {"max_tokens": 12, **PARAMETERS[name]}
    (expected,) = running_server.llm.generate(PROMPT, SamplingParams(**given, logprobs=2))
    body = {"model": "tiny", "prompt": PROMPT, "logprobs": 2, "return_token_ids": True, **given}
    for text, choice in zip(expected.outputs, choices_of(running_server, "/v1/completions", body, stream), strict=True):
        assert choice["text"] == text.text
        assert choice["token_ids"] == list(text.token_ids)
        assert (choice["finish_reason"], choice["stop_reason"]) == (text.finish_reason, text.stop_reason)
        kept = [table[token].logprob for token, table in zip(text.token_ids, text.logprobs, strict=True)]
        assert choice["token_logprobs"] == pytest.approx(kept, abs=1e-5)


def choices_of(server: Running, path: str, body: dict[str, Any], stream: bool) -> list[dict[str, Any]]:
    """Choices of completions; of a stream, its chunks put together."""
    if not stream:
        found = server.post(path, **body).json()
        Completion.model_validate(found, strict=True)
        return [{**choice, **choice["logprobs"]} for choice in found["choices"]]
    whole: dict[int, dict[str, Any]] = {}
    for chunk in server.events(path, {**body, "stream": True}):
        Completion.model_validate({**chunk, "choices": [_ended(each) for each in chunk["choices"]]}, strict=True)
        for choice in chunk["choices"]:
            joined = whole.setdefault(choice["index"], {"text": "", "token_ids": [], "token_logprobs": []})
            assert len(choice["token_ids"]) == 1, "one token per chunk"
            joined["text"] += choice["text"]
            joined["token_ids"] += choice["token_ids"]
            joined["token_logprobs"] += choice["logprobs"]["token_logprobs"]
            joined |= {key: choice[key] for key in ("finish_reason", "stop_reason")}
    return [choice for _, choice in sorted(whole.items())]


def _ended(choice: dict[str, Any]) -> dict[str, Any]:
    """The types of the client have no null for a text that goes on; OpenAI's own chunks have."""
    return {**choice, "finish_reason": choice["finish_reason"] or "stop"}


def test_a_chat_says_what_the_llm_says(running_server: Running) -> None:
    body = {"messages": MESSAGES, "max_tokens": 10, "temperature": 0, "logprobs": True, "top_logprobs": 3, "seed": 1}
    found = running_server.post("/v1/chat/completions", **body, n=2)
    whole = ChatCompletion.model_validate_json(found.content, strict=True)
    (expected,) = running_server.llm.chat(MESSAGES, SamplingParams(max_tokens=10, temperature=0, seed=1))
    num_tokens = len(expected.outputs[0].token_ids)
    for choice in whole.choices:
        assert choice.message.content == expected.outputs[0].text
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert [len(entry.top_logprobs) for entry in choice.logprobs.content] == [3] * num_tokens
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (
        len(expected.prompt_token_ids),
        2 * num_tokens,
    )
    events = running_server.events("/v1/chat/completions", {**body, "stream_options": {"include_usage": True}})
    chunks: list[Any] = [ChatCompletionChunk.model_validate(event, strict=True) for event in events]
    first, *middle, last = chunks
    assert first.choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in middle) == expected.outputs[0].text
    assert len(middle) == num_tokens
    assert all(chunk.choices[0].logprobs.content for chunk in middle)
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert (last.choices, last.usage.completion_tokens) == ([], num_tokens)
    assert middle[-1].choices[0].finish_reason == expected.outputs[0].finish_reason


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_streams_tell_the_seeds_that_give_their_texts_again(running_server: Running, path: str) -> None:
    """Whole answers did, and the documentation says that every text comes with its seed."""
    body: dict[str, Any] = {"max_tokens": 6, "temperature": 1.0, "n": 2, "return_token_ids": True}
    body |= {"prompt": PROMPT} if path == "/v1/completions" else {"messages": MESSAGES}
    if path == "/v1/responses":
        with running_server.http.stream(
            "POST", path, json={"input": PROMPT, "max_output_tokens": 6, "stream": True}
        ) as events:
            *_, last = [line for line in events.iter_lines() if line.startswith("data: ")]
        told = json.loads(last.removeprefix("data: "))["response"]
        again = running_server.post(path, input=PROMPT, max_output_tokens=6, seed=told["seed"]).json()
        assert again["output"][0]["content"] == told["output"][0]["content"]
        return
    chunks = [chunk["choices"][0] for chunk in running_server.events(path, body)]
    seeds = [choice["seed"] for choice in chunks if choice["finish_reason"] is not None]
    assert len(seeds) == 2
    assert not any("seed" in choice for choice in chunks if choice["finish_reason"] is None)
    for choice in running_server.post(path, **body, seed=seeds[0]).json()["choices"]:
        said = [token for one in chunks if one["index"] == choice["index"] for token in one.get("token_ids", ())]
        assert choice["token_ids"] == said


def test_prompts_are_texts_or_ids_or_lists_of_both(running_server: Running) -> None:
    tokenizer = running_server.llm.tokenizer
    ids = list(tokenizer(PROMPT)["input_ids"])
    expected = running_server.post("/v1/completions", prompt=PROMPT, temperature=0, max_tokens=6).json()
    text = expected["choices"][0]["text"]
    for prompt, count in ((ids, 1), ([PROMPT], 1), ([PROMPT, PROMPT], 2), ([ids, ids], 2), ([PROMPT, ids], 2)):
        found = running_server.post("/v1/completions", prompt=prompt, temperature=0, max_tokens=6).json()
        assert [choice["text"] for choice in found["choices"]] == [text] * count
        assert [choice["index"] for choice in found["choices"]] == list(range(count))
        assert found["usage"]["prompt_tokens"] == count * len(ids)
        echoed = running_server.post("/v1/completions", prompt=prompt, temperature=0, max_tokens=6, echo=True).json()
        assert echoed["choices"][0]["text"] == PROMPT + text


def test_a_chunk_of_a_step_holds_what_the_step_has_brought(running_server: Running) -> None:
    body = {"prompt": "one two one two one two one two", "temperature": 0, "max_tokens": 24, "model": "tiny"}
    fine = running_server.events("/v1/completions", {**body, "stream": True, "return_token_ids": True})
    coarse = running_server.events(
        "/v1/completions",
        {**body, "stream": True, "return_token_ids": True, "stream_granularity": "step"},
    )
    assert len(coarse) < len(fine)
    for key in ("text", "token_ids"):
        joined = [[chunk["choices"][0][key] for chunk in chunks] for chunks in (fine, coarse)]
        flat = [[one for part in parts for one in part] for parts in joined]
        assert flat[0] == flat[1]


def test_tokens_there_and_back(running_server: Running) -> None:
    text = "Grüße, 世界"
    found = running_server.post("/tokenize", prompt=text, add_special_tokens=False, return_token_strs=True).json()
    assert found["tokens"] == list(running_server.llm.tokenizer(text, add_special_tokens=False)["input_ids"])
    assert (found["count"], len(found["token_strs"])) == (len(found["tokens"]),) * 2
    assert running_server.post("/detokenize", tokens=found["tokens"]).json() == {"prompt": text}
    chat = running_server.post("/tokenize", messages=MESSAGES).json()
    assert chat["tokens"] == list(running_server.llm.chat_prompt(MESSAGES)["prompt_token_ids"])
    begun = {"messages": [*MESSAGES, {"role": "assistant", "content": "It"}], "continue_final_message": True}
    counted = running_server.post("/v1/chat/completions", **begun, max_tokens=1).json()["usage"]["prompt_tokens"]
    assert running_server.post("/tokenize", **begun).json()["count"] == counted  # it was told without
    kwargs = {"messages": MESSAGES, "chat_template_kwargs": {"tokenize": True}}
    assert running_server.post("/tokenize", **kwargs).status_code == 400
    nothing = running_server.post("/tokenize", model="tiny")
    assert nothing.status_code == 400
    assert nothing.json()["error"]["param"] == "prompt"
    info = running_server.http.get("/tokenizer_info").json()
    assert info["eos_token"] == running_server.llm.tokenizer.eos_token


def test_models_and_versions(running_server: Running) -> None:
    models = running_server.http.get("/v1/models").json()["data"]
    assert [model["id"] for model in models] == ["tiny", "lookup", "plain", "alias"]
    assert running_server.http.get("/v1/models/lookup").json()["id"] == "lookup"
    assert running_server.http.get("/health").status_code == 200
    assert running_server.http.get("/version").json()["version"]
    prints = {
        running_server.post("/v1/completions", prompt="a", model=m).json()["system_fingerprint"]
        for m in ("tiny", "plain")
    }
    assert len(prints) == 1
    unknown = running_server.post("/v1/completions", model="gpt", prompt="a")
    assert unknown.status_code == 404
    assert "does not exist; the served models are tiny" in unknown.json()["error"]["message"]


def test_partial_characters_and_stop_strings_are_held_back(running_server: Running) -> None:
    """Texts of chunks are what they were when they were sent: no replacement characters, nothing of the stop string."""
    for seed in range(6):
        body = {"prompt": "日本語", "max_tokens": 24, "seed": seed, "temperature": 1.5, "stop": ["e ", "ab", "."]}
        whole = running_server.post("/v1/completions", **body).json()["choices"][0]
        chunks = running_server.events("/v1/completions", {**body, "stream": True})
        pieces = [chunk["choices"][0]["text"] for chunk in chunks]
        assert "".join(pieces) == whole["text"]
        assert not any(stop in whole["text"] for stop in body["stop"])


@pytest.mark.sample(3)
@pytest.mark.parametrize("text", ["a 😀👩‍👩‍👧 b", "日本語、世界。", "<|im_start|>né", "plain words"])
def test_offsets_are_characters_of_the_text(running_server: Running, text: str) -> None:
    """Emoji and CJK are split over tokens, each of which was counted as a character of its own."""
    ids = list(running_server.llm.tokenizer(text, add_special_tokens=False)["input_ids"])
    bias = dict.fromkeys(ids, 100.0)  # texts of the very tokens that split
    body = {"model": "tiny", "prompt": text, "max_tokens": 24, "seed": 3, "logprobs": 1, "echo": True}
    body |= {"logit_bias": bias, "ignore_eos": True, "add_special_tokens": False, "return_token_ids": True}
    body |= {"skip_special_tokens": False}
    (choice,) = running_server.post("/v1/completions", **body).json()["choices"]
    offsets, said = choice["logprobs"]["text_offset"], [*ids, *choice["token_ids"]]
    tokenizer = running_server.llm.tokenizer
    assert len(offsets) == len(said)
    for place, offset in enumerate(offsets):
        spelled = [tokenizer.decode(part) for part in (said[: min(place, len(ids))], said[len(ids) : place])]
        assert offset == sum(len(part.rstrip("\ufffd")) for part in spelled)
    chunks = running_server.events("/v1/completions", body)
    assert [each for chunk in chunks for each in chunk["choices"][0]["logprobs"]["text_offset"]] == offsets


def test_warming_up_is_no_news(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """`foredraft serve` said before it was ready that its method does not pay, of texts that are nobody's."""
    monkeypatch.setattr("foredraft.engine.frontend.MIN_STEPS", 40)
    with caplog.at_level("INFO", "foredraft"), ungoverned():
        served = Served({"tiny": LLM(MODEL, "ngram", max_num_seqs=4)})
        served.warm()
        assert [line for line in caplog.messages if "gains little" in line] == []
        served.llm.generate(["Once", "There"], SamplingParams(max_tokens=60, seed=1, temperature=2.0, ignore_eos=True))
        assert [line for line in caplog.messages if "gains little" in line]


@pytest.mark.full
@pytest.mark.smollm2
def test_a_warm_server_has_compiled_for_long_prompts() -> None:
    """The first client with more than 64 tokens waited for it."""
    served = Served({"smollm2": LLM("zoo:smollm2", max_num_seqs=2)})
    late = "compiled for the first long prompt"
    if late not in served.llm.target.execution.describe():
        pytest.skip("nothing is compiled later on this processor")
    served.warm()
    assert late not in served.llm.target.execution.describe()

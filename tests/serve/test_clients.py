"""What real clients and frameworks send beside the text: null, empty, older or of another provider, and none of it an
error where vLLM has none. Each case is one that some client of docs/serve.md sends, or was seen to send."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from foredraft.config.sampling import SamplingParams
from foredraft.llm import LLM
from foredraft.serve.chat import read_chat
from foredraft.serve.errors import ApiError
from foredraft.serve.served import Served
from foredraft.serve.server import HEAD_SECONDS
from foredraft.serve.settings import ServerSettings
from serving import Running, received, with_template

MESSAGES: list[Any] = [{"role": "user", "content": "Say it"}]
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
NULLS: dict[str, None] = {
    **dict.fromkeys(["audio", "frequency_penalty", "function_call", "functions", "logit_bias", "logprobs", "metadata"]),
    **dict.fromkeys(["max_completion_tokens", "modalities", "n", "parallel_tool_calls", "prediction", "seed", "stop"]),
    **dict.fromkeys(["presence_penalty", "prompt_cache_key", "prompt_cache_retention", "reasoning_effort", "store"]),
    **dict.fromkeys(["response_format", "safety_identifier", "service_tier", "stream", "stream_options", "tools"]),
    **dict.fromkeys(["temperature", "tool_choice", "top_logprobs", "top_p", "user", "verbosity", "web_search_options"]),
}


def ask(server: Running, path: str = CHAT, **fields: Any) -> Any:
    text = {"messages": MESSAGES, "max_tokens": 3} if path == CHAT else {"input": "Say it", "max_output_tokens": 3}
    return server.post(path, **{"temperature": 0, **text, **fields})


@pytest.mark.parametrize(
    ("path", "fields", "ignored"),
    [
        (CHAT, NULLS, None),
        (
            CHAT,
            {"store": False, "reasoning_effort": "none", "verbosity": "medium", "prompt_cache_retention": "24h"},
            None,
        ),
        (CHAT, {"functions": [], "function_call": "auto", "tools": [], "tool_choice": "auto"}, None),
        (RESPONSES, {"tools": [], "include": [], "reasoning": {}, "store": False, "parallel_tool_calls": True}, None),
        (
            RESPONSES,
            {"include": ["reasoning.encrypted_content"], "text": {"verbosity": "medium"}, "reasoning": None},
            None,
        ),
        (CHAT, {"store": True, "verbosity": "low", "reasoning_effort": "high"}, "reasoning_effort, store, verbosity"),
        (RESPONSES, {"store": True, "text": {"verbosity": "low"}}, "store, verbosity"),
        (RESPONSES, {"reasoning": {"effort": "low", "summary": "auto"}}, "reasoning_effort"),
    ],
)
def test_what_has_no_effect_is_named_and_what_asks_for_nothing_is_not(
    running_server: Running, path: str, fields: dict[str, Any], ignored: str | None
) -> None:
    """Empty lists and objects of the openai-agents client were refused, and null was named as ignored."""
    found = ask(running_server, path, **fields)
    assert found.status_code == 200, found.text
    assert found.headers.get("x-foredraft-warning") == (ignored and f"fields were ignored: {ignored}")


def test_an_effort_reaches_a_template_that_has_one(llm: LLM) -> None:
    other = with_template(llm, "{{ reasoning_effort }}{% for m in messages %}{{ m.content }}{% endfor %}")
    asking, _ = read_chat({"messages": MESSAGES, "reasoning_effort": "low"}, Served({"a": other}), ServerSettings())
    assert asking.prompts[0]["prompt"] == "lowSay it"
    assert not asking.unknown


CONTENTS: list[tuple[Any, str | None]] = [
    (None, ""),
    ([], ""),
    (["a", "b"], "a\nb"),
    ([{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}], "a\nb"),
    ([{"type": "output_text", "text": "a", "annotations": []}, {"type": "refusal", "refusal": "b"}], "a\nb"),
    ([{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}], "a"),
    ([{"type": "image_url", "image_url": {"url": "a"}}], None),
    ([None], None),
    ({"type": "text"}, None),
    (3, None),
]
"""Contents of messages and their text; None for those that are refused."""


@pytest.mark.parametrize("role", ["user", "assistant", "tool", "developer"])
def test_contents_in_any_form_are_their_text(served: Served, role: str) -> None:
    """Parts stand apart by a line end, as in vLLM and llama.cpp; they were run together."""

    def prompt(content: Any) -> Any:
        body = {"messages": [*MESSAGES, {"role": role, "content": content}]}
        return read_chat(body, served, ServerSettings())[0].prompts[0]["prompt_token_ids"]

    for content, text in CONTENTS:
        if text is None:
            with pytest.raises(ApiError, match="content must be text"):
                prompt(content)
        else:
            assert prompt(content) == prompt(text)


def test_a_call_that_was_cut_off_goes_back(llm: LLM) -> None:
    """Agents send an answer that ended within its arguments, and the error of their tool; it was refused."""
    other = with_template(llm, "{% for m in messages %}{{ m.tool_calls[0].function.arguments }}{% endfor %}")
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"city": "Par'}}
    history = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    asking, _ = read_chat({"messages": history}, Served({"a": other}), ServerSettings())
    assert asking.prompts[0]["prompt"] == '{"city": "Par'


def test_functions_as_they_were_before_tools_go_back(llm: LLM) -> None:
    """Old clients send what they called and got by the role ``function``; it was refused."""
    other = with_template(
        llm,
        "{% for m in messages %}{{ m.role }} {{ m.name }} {{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }} {{ c.function.arguments.city }}{% endfor %};"
        "{% endfor %}",
    )
    history = [
        {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": '{"city": "Paris"}'}},
        {"role": "function", "name": "weather", "content": "sunny"},
    ]
    asking, _ = read_chat({"messages": history}, Served({"a": other}), ServerSettings())
    assert asking.prompts[0]["prompt"] == "assistant  weather Paris;tool weather sunny;"


def test_a_function_call_that_is_none_is_refused(served: Served) -> None:
    for call in (3, "f", ["f"]):
        body = {"messages": [*MESSAGES, {"role": "assistant", "content": "", "function_call": call}]}
        with pytest.raises(ApiError, match="tool_calls"):
            read_chat(body, served, ServerSettings())


def test_a_schema_beside_json_object_counts(running_server: Running) -> None:
    pytest.importorskip("llguidance")
    form = {"type": "json_object", "schema": {"enum": ["yes"]}}
    found = ask(running_server, response_format=form, max_tokens=20)
    assert found.json()["choices"][0]["message"]["content"] == '"yes"'


def test_best_of_all_is_no_choice(running_server: Running) -> None:
    """LangChain and Semantic Kernel send it beside n."""
    body = {"prompt": "a", "max_tokens": 2, "n": 2, "best_of": 2}
    assert len(running_server.post("/v1/completions", **body).json()["choices"]) == 2
    assert running_server.post("/v1/completions", **{**body, "best_of": 3}).status_code == 400


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/models/", 200),  # was 500
        ("GET", "/v1/models/tiny/", 200),
        ("GET", "/health/", 200),
        ("HEAD", "/v1/models", 200),
        ("POST", "/v1/completions/", 200),
        ("POST", "/v1/chat/completions//", 200),
        ("POST", "/v1/embeddings", 404),
        ("GET", "//", 200),
    ],
)
def test_slashes_at_the_end_mean_nothing(running_server: Running, method: str, path: str, status: int) -> None:
    body = {"prompt": "a", "max_tokens": 1} if "chat" not in path else {"messages": MESSAGES, "max_tokens": 1}
    sent = json.dumps(body).encode() if method == "POST" else b""
    with running_server.connected() as client:
        head = f"{method} {path} HTTP/1.0\r\nContent-Length: {len(sent)}\r\n\r\n"
        client.sendall(head.encode() + sent)
        found = received(client)
    assert int(found.split(b" ")[1]) == status
    if status == 404:
        assert b"the endpoints are /v1/chat/completions, /v1/completions, /v1/responses" in found


def test_a_slash_opens_no_guarded_path(running_server: Running) -> None:
    client = running_server.under("b", api_keys=("a",))
    assert client.get("/v1/models/").status_code == 401
    assert client.get("/health/").status_code == 200


def test_idle_connections_outlive_those_of_clients(running_server: Running) -> None:
    """httpx, and so the openai client, keeps one for 5 seconds; ended by both at once, a request is lost in between."""
    assert running_server.server.config.timeout_keep_alive > HEAD_SECONDS > httpx.Limits().keepalive_expiry * 2


@pytest.mark.parametrize("prompt", ["a " * 3000, "a" * 10**6])
def test_frameworks_know_prompts_that_are_too_long(running_server: Running, prompt: str) -> None:
    """By vLLM's words: litellm and others look for them, and shorten the conversation."""
    error = running_server.post("/v1/completions", prompt=prompt).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith("This model's maximum context length is 2048 tokens, ")


def test_texts_are_those_of_the_library(running_server: Running) -> None:
    """All of this beside a text changes none of it."""
    (expected,) = running_server.llm.chat(MESSAGES, SamplingParams(max_tokens=3, temperature=0))
    found = ask(running_server, store=True, reasoning_effort="low", metadata={"a": "b"}, user="u", service_tier="auto")
    assert found.json()["choices"][0]["message"]["content"] == expected.outputs[0].text


def test_whole_numbers_may_have_a_point(running_server: Running) -> None:
    """As JSON has them, and clients of languages without integers write them; vLLM takes them."""
    given = {"max_tokens": 5, "n": 2, "seed": 3, "top_k": 4, "top_logprobs": 1, "temperature": 1, "timeout": 30}
    floats = {name: float(value) for name, value in given.items()}
    found = [ask(running_server, logprobs=True, **fields) for fields in (given, floats)]
    assert [each.status_code for each in found] == [200, 200], found[1].text
    assert found[0].json()["choices"] == found[1].json()["choices"]
    for wrong in (5.5, 1e300, "5", True):
        assert ask(running_server, max_tokens=wrong).status_code == 400

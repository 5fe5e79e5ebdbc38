"""What the server refuses, with the error bodies of the OpenAI API; nothing of it touches other requests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import openai
import pytest

from foretoken.serve.errors import ApiError
from foretoken.serve.server import Server
from foretoken.serve.settings import ServerSettings
from serving import Running

BODIES: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "no prompt": ("/v1/completions", {}, 400, "prompt is null"),
    "empty prompt": ("/v1/completions", {"prompt": []}, 400, "prompt"),
    "no tokens": ("/v1/completions", {"prompt": [[]]}, 400, "no token ids"),
    "foreign token": ("/v1/completions", {"prompt": [10**9]}, 400, "token ids between"),
    "half a pair": ("/v1/completions", {"prompt": "a\ud800"}, 400, "not valid Unicode"),
    "long prompt": ("/v1/completions", {"prompt": [5] * 5000}, 400, "no room for a new token"),
    "temperature": ("/v1/completions", {"prompt": "a", "temperature": -1}, 400, "temperature is -1"),
    "kind": ("/v1/completions", {"prompt": "a", "max_tokens": "ten"}, 400, "max_tokens is 'ten'"),
    "many samples": ("/v1/completions", {"prompt": "a", "n": 1000}, 400, "n is 1000"),
    "many prompts": ("/v1/completions", {"prompt": ["a"] * 2000}, 400, "2000 prompts"),
    "many texts": ("/v1/completions", {"prompt": ["a"] * 100, "n": 64}, 400, "6400 texts"),
    "many logprobs": ("/v1/completions", {"prompt": "a", "logprobs": 50}, 400, "logprobs is 50"),
    "suffix": ("/v1/completions", {"prompt": "a", "suffix": "b"}, 400, "suffix is not supported"),
    "beams": ("/v1/completions", {"prompt": "a", "best_of": 3}, 400, "best_of is not supported"),
    "usage of no stream": ("/v1/completions", {"prompt": "a", "stream_options": {}, "stream": 1}, 400, "stream is 1"),
    "granularity": ("/v1/completions", {"prompt": "a", "stream_granularity": "word"}, 400, "token or step"),
    "drafter": ("/v1/completions", {"prompt": "a", "speculative": "eagle3"}, 400, "holds no drafter"),
    "timeout": ("/v1/completions", {"prompt": "a", "timeout": 0}, 400, "timeout is 0"),
    "model": ("/v1/completions", {"prompt": "a", "model": "b"}, 404, "does not exist"),
    "no messages": ("/v1/chat/completions", {}, 400, "messages is null"),
    "role": ("/v1/chat/completions", {"messages": [{"role": "<|im_start|>", "content": ""}]}, 400, "has the role"),
    "prompt in a stream": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "stream": True, "prompt_logprobs": 1},
        400,
        "leave stream out",
    ),
    "picture": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        "text",
    ),
    "template": ("/v1/chat/completions", {"messages": [], "chat_template": "x"}, 400, "chat_template is not"),
    "tools": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", "function": {"name": "f"}}]},
        400,
        "--tool-call-parser",
    ),
    "json": ("/v1/chat/completions", {"messages": [], "response_format": {"type": "nonsense"}}, 400, "response_format"),
    "tokens": ("/detokenize", {"tokens": [-1]}, 400, "tokens must be"),
    "path": ("/v1/embeddings", {}, 404, "Not Found"),
    "method": ("/v1/models", {}, 405, "Method Not Allowed"),
}


@pytest.mark.parametrize("name", BODIES)
def test_errors_name_what_is_wrong(running_server: Running, name: str) -> None:
    path, body, status, message = BODIES[name]
    response = running_server.http.post(path, content=_json(body))
    error = response.json()["error"]
    assert (response.status_code, set(error)) == (status, {"message", "type", "param", "code"}), error
    assert message in error["message"]
    assert "Traceback" not in response.text
    assert "/work" not in response.text


def _json(body: dict[str, Any]) -> bytes:
    import json

    return json.dumps(body).encode()


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"prompt": NaN}', b"[" * 10**5, b"\xff", b"9" * 10**4])
def test_bodies_that_are_no_object(running_server: Running, body: bytes) -> None:
    response = running_server.http.post("/v1/completions", content=body)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_json"


def test_keys(start: Callable[..., Running]) -> None:
    server = start(key="second", api_keys=("first", "second"))
    assert server.client.models.list().data
    for header in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Basic second"},
        {"Authorization": "second"},
    ):
        for path in ("/v1/models", "/metrics", "/tokenizer_info", "/nothing"):
            response = server.http.get(path, headers={"Authorization": "", **header})
            assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
    for path in ("/health", "/"):
        assert server.http.get(path, headers={"Authorization": ""}).status_code == 200
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.server.address}/v1", api_key="third", max_retries=0).models.list()


def test_unknown_fields_are_named_or_refused(start: Callable[..., Running], running_server: Running) -> None:
    body = {"prompt": "a", "max_tokens": 1, "temprature": 0, "x\r\nset-cookie: a": 1, "user": "me"}
    response = running_server.post("/v1/completions", **body)
    assert response.status_code == 200
    assert response.headers["x-foretoken-warning"].endswith(r"temprature, x\r\nset-cookie: a")
    assert "set-cookie" not in response.headers
    blank = running_server.post("/v1/completions", **{"prompt": "a", "max_tokens": 1, "": 1, " b ": 1})
    assert blank.headers["x-foretoken-warning"].endswith('"", b')  # no space at an end, which is no header
    refused = start(strict_fields=True).post("/v1/completions", **body)
    assert refused.status_code == 400
    assert "unknown fields: temprature" in refused.json()["error"]["message"]


def test_bodies_have_a_limit(start: Callable[..., Running]) -> None:
    server = start(max_body_bytes=1000)
    assert server.post("/v1/completions", prompt="a" * 2000).status_code == 413
    assert server.post("/v1/completions", prompt="a" * 100, max_tokens=1).status_code == 200


def test_web_pages_may_call_where_they_are_let(start: Callable[..., Running]) -> None:
    server = start(cors_origins=("https://a.example",), api_keys=("key",), key="key")
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    for origin, allowed in (("https://a.example", "https://a.example"), ("https://b.example", None)):
        response = server.http.options("/v1/completions", headers={"Origin": origin, **asked})
        assert response.headers.get("access-control-allow-origin") == allowed


def test_a_full_queue_is_told_with_a_time_to_come_again(start: Callable[..., Running]) -> None:
    server = start(max_queued_requests=0)
    server.server.bridge._num_running = 8  # as many as there are rows
    response = server.post("/v1/completions", prompt="a")
    assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
    assert int(response.headers["retry-after"]) > 0
    with pytest.raises(openai.RateLimitError):
        server.client.completions.create(model="tiny", prompt="a")
    assert 'foretoken:admission_rejections_total{model_name="tiny"} 2.0' in server.http.get("/metrics").text


def test_while_it_loads_and_when_loading_fails() -> None:
    """Everything is 503 meanwhile; an error ends the server."""
    gate = threading.Event()

    def load() -> Any:
        gate.wait(30)
        raise ApiError(500, "this checkpoint is broken")

    server = Server(load, "m", ServerSettings(), port=0, say=lambda _: None)
    failures: list[BaseException] = []

    def run() -> None:
        try:
            server.run_until_end()
        except ApiError as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    import httpx

    with httpx.Client(base_url=server.address, timeout=30) as http:
        for path in ("/health", "/v1/models"):
            response = http.get(path)
            assert (response.status_code, response.json()["error"]["code"]) == (503, "loading")
            assert response.headers["retry-after"]
    gate.set()
    thread.join(30)
    assert [str(failure) for failure in failures] == ["this checkpoint is broken"]

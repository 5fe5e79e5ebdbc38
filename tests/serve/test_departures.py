"""Clients that leave, requests that take too long, servers that end: nothing is left in the engine."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from foredraft.llm import LLM
from foredraft.serve.answering import answer
from foredraft.serve.completions import read_completion
from foredraft.serve.served import ServedModels
from foredraft.serve.settings import ServerSettings
from serving import MODEL, SETTINGS, Running, received, running

LONG = {"prompt": "Once", "max_tokens": 1900, "ignore_eos": True, "temperature": 0, "model": "plain"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_has_its_time(running_server: Running, stream: bool) -> None:
    response = running_server.post("/v1/completions", **LONG, stream=stream, timeout=0.2)
    if stream:
        events = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
        assert (response.status_code, events[-1]) == (200, "[DONE]")
        error = json.loads(events[-2])["error"]
    else:
        error = response.json()["error"]
        assert (response.status_code, response.headers["x-should-retry"]) == (504, "false")
    assert error["code"] == "timeout"
    running_server.wait_for_rows(0)


def test_a_client_that_reads_nothing_has_its_time_too(running_server: Running) -> None:
    """Its rows ran to their end, and what they said was kept for it for ever."""
    settings, served = ServerSettings(), running_server.server.application.served
    assert served is not None
    asking, form = read_completion({**LONG, "stream": True, "timeout": 0.2}, served, settings)

    async def ask() -> None:
        never = asyncio.Event()

        async def receive() -> Any:
            await never.wait()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                await never.wait()

        response = await answer(running_server.server.bridge, asking, form, settings, receive)
        await asyncio.wait_for(response({}, receive, send), 60)

    asyncio.run(ask())
    running_server.wait_for_rows(0)


def test_a_client_of_http_1_0_gets_its_stream_unframed(running_server: Running) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 3, "stream": True}).encode()
    with running_server.connected() as client:
        client.sendall(f"POST /v1/completions HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        head, _, events = received(client).partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower()
    assert events.startswith(b"data: {")
    assert events.endswith(b"data: [DONE]\n\n")


def test_the_head_of_a_request_has_a_limit(running_server: Running) -> None:
    """Whatever other parsers of HTTP are installed: httptools has none."""
    with running_server.connected() as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 100_000)
        assert client.recv(4096).startswith(b"HTTP/1.1 400")


def test_silence_is_broken_by_comments(running_server: Running) -> None:
    body = {"prompt": "a b c " * 250, "max_tokens": 2, "stream": True, "verify": True}
    response = running_server.under(keep_alive=0.02).post("/v1/completions", json=body)
    assert response.text.rstrip().endswith("[DONE]")
    assert ": keep-alive\n\n" in response.text


@pytest.mark.full
def test_a_signal_lets_requests_end_and_takes_no_more(start: Callable[..., Running]) -> None:
    server = start(shutdown_timeout=20)
    answers: list[int] = []
    thread = threading.Thread(
        target=lambda: answers.append(server.post("/v1/completions", **{**LONG, "max_tokens": 600}).status_code)
    )
    thread.start()
    server.wait_for_rows(1)
    server.server.handle_exit(15, None)
    thread.join(20)
    assert answers == [200]


@pytest.mark.full
def test_requests_that_take_too_long_are_told_that_the_server_ends(start: Callable[..., Running]) -> None:
    server = start(shutdown_timeout=0)
    texts: list[str] = []
    thread = threading.Thread(target=lambda: texts.append(server.post("/v1/completions", **LONG, stream=True).text))
    thread.start()
    server.wait_for_rows(1)
    server.server.handle_exit(15, None)
    thread.join(20)
    *_, error, done = [line for line in texts[0].splitlines() if line]
    assert done == "data: [DONE]"
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "shutting_down"


@pytest.mark.full
def test_a_server_that_has_ended_is_let_go() -> None:
    """FastAPI's own routes keep what they call in caches of the process, and with it the model: 100 MB a server."""

    def serve() -> list[weakref.ref[Any]]:
        llm = LLM(MODEL, "draft_model", max_num_seqs=4)
        with running(ServedModels.of(["tiny"], SETTINGS).over(llm)) as server:
            assert server.post("/v1/completions", prompt="a", max_tokens=2, verify=True).status_code == 200
            assert server.post("/v1/completions", prompt="a", logprobs=99).status_code == 400
            assert server.events("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})
            for path, status in (("/metrics", 200), ("/v1/models/tiny", 200), ("/nothing", 404)):
                assert server.http.get(path).status_code == status
            with server.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
                next(response.iter_lines())
            assert server.http.head("/health").status_code == 200
            kept = [server.server, server.server.application, server.server.bridge, llm, llm.target]
            return [weakref.ref(one) for one in kept]

    kept = serve()
    gc.collect()
    assert [one() for one in kept] == [None] * len(kept)

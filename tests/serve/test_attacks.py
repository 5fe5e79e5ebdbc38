"""Clients that break the rules of HTTP, or mean harm: each ends its rows within a step, and nothing else is touched."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from serving import Running, received

LONG = {"prompt": "Once", "max_tokens": 1900, "ignore_eos": True, "temperature": 0, "model": "plain"}
SHORT = {"prompt": "a", "max_tokens": 2}
RESET = b"\1\0\0\0\0\0\0\0"
"""Of SO_LINGER: closing sends a reset."""


@pytest.fixture(autouse=True)
def _tells_no_traceback(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    yield
    assert "Traceback" not in "".join(capfd.readouterr())


def posted(body: dict[str, Any], length: str | None = None) -> bytes:
    sent = json.dumps(body).encode()
    told = str(len(sent)) if length is None else length
    return f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {told}\r\n\r\n".encode() + sent


def check_nothing_is_left(server: Running) -> None:
    server.wait_for_rows(0)
    assert server.post("/v1/completions", **SHORT).status_code == 200
    assert server.num_open == 0


TARGETS = {
    "http://a/health": (b"200", b"200"),
    "HTTP://u:p@a:8000/v1/models?x=http://b/": (b"401", b"200"),
    "https://a/v1/models/tin%79": (b"401", b"200"),
    "http://a": (b"200", b"200"),
    "http://a?x": (b"200", b"200"),
    "http://a/http://a/health": (b"401", b"404"),
    "/http://a/health": (b"401", b"404"),
}
"""Statuses without and with a key."""


def test_targets_may_be_whole_addresses(start: Callable[..., Running]) -> None:
    """As clients of proxies write them (they were not found); keys are asked for by the path alone."""
    server = start(key="secret", api_keys=("secret",))
    for target, statuses in TARGETS.items():
        for key, status in zip(("", "Authorization: Bearer secret\r\n"), statuses, strict=True):
            with server.connected() as client:
                client.sendall(f"GET {target} HTTP/1.1\r\nHost: localhost\r\n{key}Connection: close\r\n\r\n".encode())
                assert received(client).split(b" ")[1] == status, target


def close(client: socket.socket) -> None:
    client.close()


def close_half(client: socket.socket) -> None:
    client.shutdown(socket.SHUT_WR)


def reset(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    client.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("leave", [close, close_half, reset])
def test_clients_that_leave_end_their_rows(
    running_server: Running, leave: Callable[[socket.socket], None], stream: bool
) -> None:
    with running_server.connected() as client:
        client.sendall(posted({**LONG, "stream": stream, "n": 2}))
        running_server.wait_for_rows(2)
        if stream:
            assert b"200 OK" in client.recv(4096)
        leave(client)
        running_server.wait_for_rows(0, seconds=3.0)
        check_nothing_is_left(running_server)
        if leave is close_half:
            received(client)  # which comes to an end


def test_pipelined_requests_are_answered_in_turn(running_server: Running) -> None:
    with running_server.connected() as client:
        last = b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        client.sendall(posted(SHORT) + posted({**SHORT, "temperature": -1}) + posted(SHORT) + last)
        found = received(client)
    assert re.findall(rb"HTTP/1.1 (\d+) ", found) == [b"200", b"400", b"200", b"200"]


@pytest.mark.parametrize("behind", [posted({**LONG, "stream": True}) * 40, b"\0garbage\r\n\r\n" * 1000])
def test_what_is_pipelined_behind_a_stream_waits_and_goes_with_it(running_server: Running, behind: bytes) -> None:
    with running_server.connected() as client:
        client.sendall(posted({**LONG, "stream": True}) + behind)
        assert b"200 OK" in client.recv(4096)
        running_server.wait_for_rows(1)
        assert running_server.num_open == 1
    check_nothing_is_left(running_server)


@pytest.mark.parametrize("length", ["-1", "+5", "1e3", "", "5\r\nContent-Length: 7"])
def test_lengths_that_are_none(running_server: Running, length: str) -> None:
    with running_server.connected() as client:
        client.sendall(posted(SHORT, length))
        assert received(client).startswith(b"HTTP/1.1 400 ")
    check_nothing_is_left(running_server)


@pytest.mark.parametrize("sent", [b"\x16\x03\x01 no HTTP\r\n\r\n", b"GET /health HTTP/1.1\r\nUpgrade: h2c\r\n"])
def test_what_clients_do_wrong_fills_no_log(
    running_server: Running, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, sent: bytes
) -> None:
    """Each such request wrote a warning, and one that asks for HTTP/2 two, with advice that does not help."""
    with running_server.connected() as client:
        client.sendall(sent + b"Host: localhost\r\nConnection: Upgrade, close\r\n\r\n")
        assert received(client).startswith(b"HTTP/1.1 ")
    assert "".join(capfd.readouterr()) == ""
    assert caplog.text == ""


def test_a_body_with_two_ends_is_refused_and_nothing_behind_it_read(running_server: Running) -> None:
    """A proxy that goes by the other end has let pass the second request as part of the first."""
    sent = posted(SHORT, "60\r\nTransfer-Encoding: chunked").split(b"\r\n\r\n")[0]
    with running_server.connected() as client:
        client.sendall(sent + b"\r\n\r\n0\r\n\r\n" + posted(SHORT))
        found = received(client)
    assert found.startswith(b"HTTP/1.1 400 ")
    assert b"send only one of them" in found
    assert found.count(b"HTTP/1.1") == 1
    check_nothing_is_left(running_server)


def test_a_body_shorter_than_it_says(running_server: Running) -> None:
    """The client then ends: nobody waits for the rest."""
    with running_server.connected() as client:
        client.sendall(posted(SHORT, "10000"))
        client.shutdown(socket.SHUT_WR)
        assert received(client) == b""
    check_nothing_is_left(running_server)


def test_a_body_longer_than_it_says(running_server: Running) -> None:
    """What is left over is no request."""
    with running_server.connected() as client:
        client.sendall(posted(SHORT, "10"))
        found = received(client)
    assert found.count(b"HTTP/1.1 400 ") == 2
    assert b"the body is not JSON" in found
    check_nothing_is_left(running_server)


def test_a_body_that_says_it_is_too_large_is_not_waited_for(
    running_server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foredraft.serve.guards.DRAINED_SECONDS", 0.05)
    with running_server.connected() as client:
        client.sendall(posted(SHORT, "99999999999999999999"))
        assert client.recv(4096).startswith(b"HTTP/1.1 413 ")
    check_nothing_is_left(running_server)


def test_heads_that_do_not_come_end_their_connections(running_server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were kept for ever, until the process had no files left."""
    monkeypatch.setattr("foredraft.serve.server.HEAD_SECONDS", 0.3)
    begun = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-"
    for before, sent in ((b"", b""), (b"", begun), (posted(SHORT), b"GET /health HT")):
        with running_server.connected() as first, running_server.connected() as second:
            for client in (first, second):
                client.sendall(before)
                if before:
                    assert b"200 OK" in client.recv(4096)
                client.sendall(sent)
            assert running_server.post("/v1/completions", **SHORT).status_code == 200
            assert not any(received(client).startswith(b"HTTP") for client in (first, second))
    check_nothing_is_left(running_server)


@pytest.mark.full
def test_a_long_answer_is_not_cut_by_the_limit_of_heads(
    running_server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foredraft.serve.server.HEAD_SECONDS", 0.2)  # on a busy machine 0.01 ended it before its head
    with running_server.connected() as client:
        client.sendall(
            posted({**LONG, "max_tokens": 900, "stream": True}).replace(b"Host", b"Connection: close\r\nHost")
        )
        assert received(client).rstrip(b"\r\n0").endswith(b"data: [DONE]")

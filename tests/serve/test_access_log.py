"""Log of requests: one line each, with tokens and speed; quiet where nobody asked for it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest

from foredraft.serve import access_log
from foredraft.serve.access_log import Access, AccessLog, line_of
from serving import Running

BODY = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 6, "temperature": 0}


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.name == "foredraft.serve"]


def test_every_request_has_a_line(start: Callable[..., Running], caplog: pytest.LogCaptureFixture) -> None:
    server = start(access_log=True)
    with caplog.at_level("INFO", "foredraft.serve"):
        server.post("/v1/completions", **BODY)
        server.events("/v1/completions", BODY)
        server.post("/v1/completions", **BODY, n=0)
        server.http.get("/health")
        server.http.get("/v1/models")
    whole, stream, refused, models = lines(caplog)
    for line in (whole, stream):
        pattern = r"\d\d:\d\d:\d\d POST /v1/completions 200 · \d+\.\d s · 6 tokens · \d+\.\d tok/s"
        assert re.fullmatch(pattern, line), line
    assert re.fullmatch(r"\S+ POST /v1/completions 400 · \d+\.\d s", refused)
    assert re.fullmatch(r"\S+ GET /v1/models 200 · \d+\.\d s", models)


def test_it_can_be_turned_off(start: Callable[..., Running], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "foredraft.serve"):
        start(access_log=False).post("/v1/completions", **BODY)
    assert lines(caplog) == []


@pytest.mark.parametrize(("is_ready", "num_lines"), [(False, 0), (True, 1)])
def test_refusals_have_lines_only_once_the_server_is_ready(
    caplog: pytest.LogCaptureFixture, is_ready: bool, num_lines: int
) -> None:
    """A client that waits for the server asks every second: it filled the log with lines of status 503."""
    log = AccessLog(is_shown=True)
    log.is_ready = is_ready

    async def refused(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 503, "headers": []})

    async def call(scope: Any = None) -> Any:
        return None

    with caplog.at_level("INFO", "foredraft.serve"):
        asyncio.run(log.around(refused)({"type": "http", "method": "GET", "path": "/v1/models"}, call, call))
    assert len(lines(caplog)) == num_lines


def test_paths_of_clients_break_no_line() -> None:
    line = line_of(Access("GET", "/a\nb \x1b[31m", 404), 0.25)
    assert re.fullmatch(r"\S+ GET /a\\nb \\x1b\[31m 404 · 0\.2 s", line)


def test_throughput_is_logged_while_tokens_come(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(access_log, "THROUGHPUT_SECONDS", 0.01)
    counts = iter([0, 0, 5, 5, 9])

    def num_tokens() -> float:
        return float(next(counts))

    with caplog.at_level("INFO", "foredraft.serve"), pytest.raises(RuntimeError):  # StopIteration in a coroutine
        asyncio.run(AccessLog(is_shown=True).log_throughput(num_tokens))
    assert [line.partition(" ")[2] for line in lines(caplog)] == [
        "throughput: 500.0 tok/s, 0 requests open",
        "throughput: 400.0 tok/s, 0 requests open",
    ]

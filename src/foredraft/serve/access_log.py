"""Log of requests: one line for each, and the throughput while the server is busy."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter, strftime
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foredraft.engine.frontend import decode_seconds
from foredraft.serve.queued_request import QueuedRequest

logger = logging.getLogger("foredraft.serve")

THROUGHPUT_SECONDS = 10.0
"""Seconds between two lines of throughput."""
QUIET_PATHS = ("/health", "/ping", "/metrics", "/")
"""Paths that monitors and the web page request again and again. They get no log line."""

_KEY = "foredraft.access"


@dataclass
class Access:
    """Facts of one request for its line.

    Args:
      queued: request in the engine; None if there is none.
    """

    method: str
    path: str
    status: int = 0
    queued: QueuedRequest | None = None


def note_request(scope: Scope, queued: QueuedRequest) -> None:
    """Attach the request in the engine to its line of the log."""
    access = scope.get(_KEY)
    if isinstance(access, Access):
        access.queued = queued


class AccessLog:
    """Logs requests, and counts open requests.

    Attributes:
      num_open: requests that have not been answered completely.
      is_ready: True once the model is loaded. Before that, answers with status 503 get no line, because clients that
        wait for the server repeat their requests.
    """

    def __init__(self, *, is_shown: bool) -> None:
        self.num_open = 0
        self.is_ready = False
        self._is_shown = is_shown

    def around(self, app: ASGIApp) -> ASGIApp:
        """Middleware that logs every request when it ends."""

        async def logged(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            access = Access(scope["method"], scope["path"])
            began = perf_counter()

            async def noting(message: Message) -> None:
                if message["type"] == "http.response.start":
                    access.status = message["status"]
                await send(message)

            self.num_open += 1
            try:
                await app({**scope, _KEY: access}, receive, noting)
            finally:
                self.num_open -= 1
                is_loading = access.status == 503 and not self.is_ready
                if self._is_shown and access.path not in QUIET_PATHS and not is_loading:
                    logger.info("%s", line_of(access, perf_counter() - began))

        return logged

    async def log_throughput(self, num_tokens: Callable[[], float]) -> None:
        """Log the tokens per second of the last seconds, as long as there are any.

        Args:
          num_tokens: function that returns the number of generated tokens.
        """
        before = num_tokens()
        while self._is_shown:
            await asyncio.sleep(THROUGHPUT_SECONDS)
            now = num_tokens()
            if now > before:
                requests = f"{self.num_open} request{'' if self.num_open == 1 else 's'}"
                logger.info(
                    "%s throughput: %.1f tok/s, %s open", clock(), (now - before) / THROUGHPUT_SECONDS, requests
                )
            before = now


def line_of(access: Access, seconds: float) -> str:
    """Line of one request.

    Example:
        ``14:02:11 POST /v1/chat/completions 200 · 2.4 s · 32 tokens · 15.3 tok/s``

    The speed counts decoding, not the time before the first step.
    """
    parts = [f"{clock()} {access.method} {access.path[:200]!a} {access.status or 'aborted'}".replace("'", "")]
    parts.append(f"{seconds:.1f} s")
    stream: Any = None if access.queued is None else access.queued.stream
    if stream is not None:
        num_tokens = stream.num_tokens
        parts.append(f"{num_tokens} token{'' if num_tokens == 1 else 's'}")
        decoding = decode_seconds(stream.outputs())
        if decoding > 0:
            parts.append(f"{num_tokens / decoding:.1f} tok/s")
    return " · ".join(parts)


def clock() -> str:
    """Local time of day."""
    return strftime("%H:%M:%S")

"""Who sends a request, and its id, from the client to the logs of every replica that has had a part in it."""

from __future__ import annotations

import re
import secrets
from typing import TYPE_CHECKING

from foretoken.serve.ray.failover import CALLER, Caller

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_ALLOWED = re.compile(rb"[\w.:-]{1,128}")


class Called:
    """Gives every request an id, or takes ``x-request-id``, and tells it with the answer; reads ``x-session-id``.

    Args:
      has_keys: whether clients are told apart by their keys; otherwise by their addresses.
    """

    def __init__(self, app: ASGIApp, has_keys: bool) -> None:
        self._app, self._has_keys = app, has_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        request_id = _told(headers.get(b"x-request-id")) or secrets.token_hex(8)
        key = headers.get(b"authorization", b"").decode("latin-1") if self._has_keys else ""
        client = key or (scope.get("client") or ("",))[0]
        CALLER.set(Caller(request_id, _told(headers.get(b"x-session-id")), client))

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        await self._app(scope, receive, tell)


def _told(header: bytes | None) -> str:
    """A header that may stand in a log; empty for another."""
    return header.decode() if header is not None and _ALLOWED.fullmatch(header) else ""

"""Who sends a request, and its id, from the client to the logs of every replica that has had a part in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foretoken.serve.guards import ALLOWED_ID, REQUEST_ID
from foretoken.serve.ray.failover import CALLER, Caller

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send


class Called:
    """Notes the id of every request, which it has by then, its ``x-session-id``, and who sends it.

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
        key = headers.get(b"authorization", b"").decode("latin-1") if self._has_keys else ""
        client = key or (scope.get("client") or ("",))[0]
        CALLER.set(Caller(_told(headers.get(REQUEST_ID)), _told(headers.get(b"x-session-id")), client))
        await self._app(scope, receive, send)


def _told(header: bytes | None) -> str:
    """A header that may stand in a log; empty for another."""
    return header.decode() if header is not None and ALLOWED_ID.fullmatch(header) else ""

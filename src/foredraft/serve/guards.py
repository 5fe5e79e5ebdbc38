"""What stands before the routes: targets in another form, keys, and bodies that nobody has read."""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
from contextlib import suppress
from hashlib import sha256
from ipaddress import ip_address
from urllib.parse import unquote

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foredraft.serve.errors import ApiError, unauthorized
from foredraft.serve.fields import shown

OPEN_PATHS = ("/health", "/ping", "/")
"""Paths that need no key."""
DRAINED_BYTES = 64 * 2**20
DRAINED_SECONDS = 5.0
"""Of a body that is not wanted; a client that sends more may find its connection reset instead of an answer."""

REQUEST_ID = b"x-request-id"
"""Header with the id of a request, which there always is."""
ALLOWED_ID = re.compile(rb"[\w.:-]{1,128}")
"""Ids in headers that may stand in a log."""

AMBIGUOUS = JSONResponse(
    ApiError(400, "the request has a content-length and a transfer-encoding; send one of them").body,
    400,
    {"connection": "close"},
)


_ORIGIN = re.compile(rb"https?://[^/]*", re.IGNORECASE)


class Targets:
    """Takes requests also whose target is a whole address, as clients of proxies write it (RFC 9112, 3.2.2).

    A slash at the end of a path means nothing: clients that join addresses leave one, and not all follow a redirect.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (origin := _ORIGIN.match(scope["raw_path"])) is not None:
            path = scope["raw_path"][origin.end() :] or b"/"
            host = (b"host", origin[0].partition(b"//")[2])  # which counts, whatever the header says
            headers = [*(one for one in scope["headers"] if one[0] != b"host"), host]
            scope = {**scope, "path": unquote(path.decode("ascii")), "raw_path": path, "headers": headers}
        if scope["type"] == "http" and len(scope["path"]) > 1 and scope["path"].endswith("/"):
            scope = {**scope, "path": scope["path"].rstrip("/") or "/"}
        await self._app(scope, receive, send)


class Numbered:
    """Gives every request an id, or takes ``x-request-id``, and tells it with the answer, whatever that is."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(REQUEST_ID, b"")
        header = (REQUEST_ID, given if ALLOWED_ID.fullmatch(given) else secrets.token_hex(12).encode())
        others = [(name, value) for name, value in scope["headers"] if name != REQUEST_ID]

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        await self._app({**scope, "headers": [*others, header]}, receive, tell)


class Keys:
    """Lets pass who has a key. Every key is compared, in constant time.

    Args:
      keys: at least one.
    """

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        self._digests = [sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not self._has_key(scope):
            error = unauthorized()
            await JSONResponse(error.body, error.status, error.headers)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        kind, _, key = given.partition(b" ")
        digest = sha256(key.strip()).digest()
        matches = [hmac.compare_digest(digest, one) for one in self._digests]
        return kind.lower() == b"bearer" and any(matches)


class Hosts:
    """Refuses requests to a loopback address under the name of another host.

    A page of the web can have its own name resolved to 127.0.0.1 (DNS rebinding). Its browser then lets it read what
    the server answers, since the origin stays the same, and sends that name as the host.

    Args:
      host: name or address that the server was told to listen on, which resolves to a loopback address.
    """

    def __init__(self, app: ASGIApp, host: str) -> None:
        self._app = app
        self._host = host.lower()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            told = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
            for name in filter(None, map(_host_of, told)):  # programs may send none, browsers always do
                if name != self._host and not is_loopback(name):
                    error = ApiError(
                        403,
                        f"the host is {shown(name)}, and without a key this server answers to localhost and loopback "
                        "addresses; ask for one of these, or start it with --api-key",
                        code="foreign_host",
                    )
                    await JSONResponse(error.body, error.status)(scope, receive, send)
                    return
        await self._app(scope, receive, send)


def _host_of(header: str) -> str:
    """The name or address of a header, without its port."""
    text = header.strip().lower().rpartition("@")[2]
    return text[1 : text.find("]")] if text.startswith("[") else text.partition(":")[0].rstrip(".")


def is_loopback(host: str) -> bool:
    """Whether a name or an address is of this machine alone."""
    if host.lower() == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


class Drain:
    """Reads what is left of a body before an answer begins, and throws it away.

    A connection that is closed around bytes which nobody has read is reset, and the reset overtakes the answer, so a
    client that writes all of its body first would never learn why it was refused. One whose end is told in two ways is
    refused, and its connection closed: a proxy may see another request where it ends (RFC 9112, 6.1).
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _comes_with_a_body(scope):
            await self._app(scope, receive, send)
            return
        app = AMBIGUOUS if _has_two_ends(scope) else self._app
        is_whole = False

        async def noting() -> Message:
            nonlocal is_whole
            message = await receive()
            is_whole = not message.get("more_body", False)  # also where the client has left
            return message

        async def draining(message: Message) -> None:
            if message["type"] == "http.response.start" and not is_whole and message["status"] != 408:
                with suppress(TimeoutError):
                    async with asyncio.timeout(DRAINED_SECONDS):
                        left = DRAINED_BYTES
                        while not is_whole and left > 0:
                            left -= len((await noting()).get("body", b""))
            await send(message)

        await app(scope, noting, draining)


def _has_two_ends(scope: Scope) -> bool:
    return {b"content-length", b"transfer-encoding"} <= dict(scope["headers"]).keys()


def _comes_with_a_body(scope: Scope) -> bool:
    """Whether one is on its way: a client that waits for "100 Continue" sends nothing before it has an answer."""
    headers = dict(scope["headers"])
    announced = headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers
    return announced and headers.get(b"expect", b"").lower() != b"100-continue"

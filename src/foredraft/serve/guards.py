"""Middleware in front of the routes: request ids, API keys, host checks, and draining of unread bodies."""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from ipaddress import ip_address
from urllib.parse import unquote

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foredraft.serve.errors import ApiError, unauthorized
from foredraft.serve.fields import shown

OPEN_PATHS = ("/health", "/ping", "/")
"""Paths that need no API key."""
DRAINED_BYTES = 64 * 2**20
DRAINED_SECONDS = 5.0
"""Limits on draining a rejected body, in bytes and seconds. A client that sends more may see a connection reset instead
of the response."""

REQUEST_ID = b"x-request-id"
"""Header with the request id; `with_request_ids` adds it to every request."""
ALLOWED_ID = re.compile(rb"[\w.:-]{1,128}")
"""Pattern of header ids that are safe in logs."""

_ORIGIN = re.compile(rb"https?://[^/]*", re.IGNORECASE)


def refusal(error: ApiError, **headers: str) -> JSONResponse:
    """Return the response for an error."""
    return JSONResponse(error.body, error.status, {**headers, **error.headers})


AMBIGUOUS = refusal(
    ApiError(400, "the request has a content-length and a transfer-encoding; send only one of them"),
    connection="close",
)


def with_plain_targets(app: ASGIApp) -> ASGIApp:
    """Accept requests whose target is an absolute URI, which clients of proxies send (RFC 9112, 3.2.2).

    A trailing slash is removed from the path. Clients that concatenate URLs often produce one, and not all of them
    follow redirects.
    """

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (origin := _ORIGIN.match(scope["raw_path"])) is not None:
            path = scope["raw_path"][origin.end() :] or b"/"
            host = (b"host", origin[0].partition(b"//")[2])  # takes precedence over the header
            headers = [*(one for one in scope["headers"] if one[0] != b"host"), host]
            scope = {**scope, "path": unquote(path.decode("ascii")), "raw_path": path, "headers": headers}
        if scope["type"] == "http" and len(scope["path"]) > 1 and scope["path"].endswith("/"):
            scope = {**scope, "path": scope["path"].rstrip("/") or "/"}
        await app(scope, receive, send)

    return guarded


def with_request_ids(app: ASGIApp) -> ASGIApp:
    """Give every request an id unless it has an ``x-request-id``, and return the id in a header of every response."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(REQUEST_ID, b"")
        header = (REQUEST_ID, given if ALLOWED_ID.fullmatch(given) else secrets.token_hex(12).encode())
        others = [(name, value) for name, value in scope["headers"] if name != REQUEST_ID]

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        await app({**scope, "headers": [*others, header]}, receive, send_with_id)

    return guarded


def with_api_keys(app: ASGIApp, keys: Sequence[str]) -> ASGIApp:
    """Refuse requests without a valid API key. Every key is compared, in constant time.

    Args:
      keys: valid keys, at least one.
    """
    digests = [sha256(key.encode()).digest() for key in keys]

    def has_key(scope: Scope) -> bool:
        kind, _, key = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        digest = sha256(key.strip()).digest()
        matches = [hmac.compare_digest(digest, one) for one in digests]
        return bool(kind.lower() == b"bearer") and any(matches)

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] != "http" or scope["path"] in OPEN_PATHS
        await (app if is_open or has_key(scope) else refusal(unauthorized()))(scope, receive, send)

    return guarded


def with_local_hosts(app: ASGIApp, host: str) -> ASGIApp:
    """Refuse requests to a loopback address that name another host.

    A web page can have its own host name resolved to 127.0.0.1 (DNS rebinding). The origin stays the same, so the
    browser lets the page read the responses of this server. But the header Host then contains the page's name.

    Args:
      host: host name or address that the server listens on; it resolves to a loopback address.
    """

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        given = [value.decode("latin-1") for name, value in scope.get("headers", ()) if name == b"host"]
        for name in filter(None, map(_host_of, given)):  # only browsers matter, and they always send a host
            if name != host.lower() and not is_loopback(name):
                error = ApiError(
                    403,
                    f"the request names the host {shown(name)}, but without an API key this server accepts only "
                    "localhost and loopback addresses; use one of these, or start the server with --api-key",
                    code="foreign_host",
                )
                await refusal(error)(scope, receive, send)
                return
        await app(scope, receive, send)

    return guarded


def _host_of(header: str) -> str:
    """Return the host name or address in a Host header, without the port."""
    text = header.strip().lower().rpartition("@")[2]
    return text[1 : text.find("]")] if text.startswith("[") else text.partition(":")[0].rstrip(".")


def is_loopback(host: str) -> bool:
    """Whether a host name or address refers to this machine only."""
    if host.lower() == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def with_drained_bodies(app: ASGIApp) -> ASGIApp:
    """Read and discard the rest of a request body before a response begins.

    If a connection is closed while received bytes are unread, TCP resets it, and the reset can overtake the response. A
    client that first writes its whole body would then never see why it was refused. A request that gives its length in
    two ways is refused and its connection closed, because a proxy may disagree about where it ends (RFC 9112, 6.1).
    """

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _comes_with_a_body(scope):
            await app(scope, receive, send)
            return
        is_whole = False

        async def noting() -> Message:
            nonlocal is_whole
            message = await receive()
            is_whole = not message.get("more_body", False)  # also true after a disconnect
            return message

        async def draining(message: Message) -> None:
            if message["type"] == "http.response.start" and not is_whole and message["status"] != 408:
                with suppress(TimeoutError):
                    async with asyncio.timeout(DRAINED_SECONDS):
                        left = DRAINED_BYTES
                        while not is_whole and left > 0:
                            left -= len((await noting()).get("body", b""))
            await send(message)

        await (AMBIGUOUS if _has_two_ends(scope) else app)(scope, noting, draining)

    return guarded


def _has_two_ends(scope: Scope) -> bool:
    return {b"content-length", b"transfer-encoding"} <= dict(scope["headers"]).keys()


def _comes_with_a_body(scope: Scope) -> bool:
    """Whether a body is on its way. A client that waits for "100 Continue" sends none before the response."""
    headers = dict(scope["headers"])
    announced = headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers
    return announced and headers.get(b"expect", b"").lower() != b"100-continue"

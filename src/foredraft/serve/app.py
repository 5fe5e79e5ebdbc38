"""HTTP application: routes, access control and request handlers."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import ASGIApp

from foredraft import __version__
from foredraft.errors import ForedraftError
from foredraft.serve.access_log import note_request
from foredraft.serve.answering import answer
from foredraft.serve.bridge import Backend
from foredraft.serve.chat import TEMPLATE_FIELDS, conversation, read_chat, template_options
from foredraft.serve.completions import read_completion
from foredraft.serve.errors import MODEL_CHANGED, ApiError, loading, stopping
from foredraft.serve.fields import REFUSED, Fields, shown, warning_of, wrong_field
from foredraft.serve.form import ResponseFormat
from foredraft.serve.guards import (
    REQUEST_ID,
    refusal,
    with_api_keys,
    with_drained_bodies,
    with_local_hosts,
    with_plain_targets,
)
from foredraft.serve.parsed_request import ParsedRequest
from foredraft.serve.responses import read_response
from foredraft.serve.served import Served
from foredraft.serve.settings import ServerSettings
from foredraft.serve.strict_json import strict_json
from foredraft.serve.tokens import encode, token_ids
from foredraft.views.token_view import page

logger = logging.getLogger("foredraft.serve")

BODY_SECONDS = 60.0
"""Time limit for receiving a request body."""
SMALL_BYTES = 64 * 2**10
"""Largest request body that is tokenized in a few milliseconds. Larger bodies share a separate thread, so that they do
not delay small ones."""

TEXT_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
"""Endpoints that generate text."""
CLIENT_LEFT = 499
"""Status of a request whose client has disconnected, as in nginx; it is never sent."""

EXPOSED = ("x-request-id", "x-foredraft-warning", "retry-after")
"""Response headers that pages of other origins may read."""

TOKENIZE_FIELDS = frozenset({
    "model", "prompt", "add_special_tokens", "return_token_strs",
    "messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs", "documents",
    "reasoning_effort",
})  # fmt: skip
"""Fields of ``/tokenize``."""

Reader = Callable[[dict[str, Any], Any, Any], tuple[ParsedRequest, ResponseFormat]]


class Application:
    """Routes and their handlers.

    Args:
      bridge: backend that decodes the requests.
      settings: limits and options.

    Attributes:
      served: served models; None until they are loaded.
      is_stopping: whether the server is shutting down; new requests are then refused with 503.
    """

    def __init__(self, bridge: Backend, settings: ServerSettings) -> None:
        self.served: Served | None = None
        self.is_stopping = False
        self._bridge, self._settings = bridge, settings
        self._reader = ThreadPoolExecutor(1, "foredraft-prompts")
        self._reader_of_large = ThreadPoolExecutor(1, "foredraft-large-prompts")
        self._created = int(time.time())

    def build(self, loopback: str = "") -> ASGIApp:
        """Return the ASGI application with its access checks.

        Args:
          loopback: host name or address that the server listens on, if it is a loopback address. Empty for other
            addresses, and if the address is unknown, as behind Ray's proxies.
        """
        app = FastAPI(title="foredraft", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
        for kind in (ApiError, ForedraftError, HTTPException, ClientDisconnect, Exception):
            app.add_exception_handler(kind, self._refuse)
        # Starlette's routes suffice. FastAPI's routes would keep the handlers, and through them the model, in
        # process-wide caches.
        for path, get in {
            "/": self.page,
            "/health": self.health,
            "/ping": self.health,
            "/version": self.version,
            "/metrics": self.metrics_page,
            "/v1/models": self.models,
            "/v1/models/{name:path}": self.model,
            "/tokenizer_info": self.tokenizer_info,
        }.items():
            app.add_route(path, get, methods=["GET"])
        for path, post in {
            **dict(zip(TEXT_PATHS, (self.chat, self.completions, self.responses), strict=True)),
            "/tokenize": self.tokenize,
            "/detokenize": self.detokenize,
        }.items():
            app.add_route(path, post, methods=["POST"])
        guarded: ASGIApp = app
        if self._settings.api_keys:
            guarded = with_api_keys(app, self._settings.api_keys)
        elif loopback:
            guarded = with_local_hosts(app, loopback)
        guarded = with_plain_targets(with_drained_bodies(guarded))
        if self._settings.cors_origins:
            guarded = CORSMiddleware(
                guarded,
                list(self._settings.cors_origins),
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=EXPOSED,
            )
        return guarded

    async def _refuse(self, request: Request, error: Exception) -> Response:
        if isinstance(error, ClientDisconnect):
            return Response(status_code=CLIENT_LEFT)
        beside: Mapping[str, str] = {}
        if isinstance(error, HTTPException):
            beside = error.headers or {}  # the header Allow
            served = f"; the endpoints are {', '.join(TEXT_PATHS)}" if error.status_code == 404 else ""
            error = ApiError(error.status_code, f"{request.method} {request.url.path[:200]}: {error.detail}{served}")
        api_error = ApiError.of(error)
        if api_error.status >= 500 and api_error is not error:
            logger.error("%s %s ended in an error", request.method, request.url.path, exc_info=error)
        return refusal(api_error, **beside)

    def _ready(self) -> Served:
        if self.is_stopping:
            raise stopping()
        if self.served is None:
            raise loading()
        return self.served

    # -- generation ------------------------------------------------------------------------------------------------

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, read_completion)

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, read_chat)

    async def responses(self, request: Request) -> Response:
        return await self._generate(request, read_response)

    async def _generate(self, request: Request, read: Reader) -> Response:
        self._ready()
        body = await self._body(request)
        if body.get("request_id") is None:
            body["request_id"] = request.headers.get(REQUEST_ID.decode())
        if self._settings.log_requests:
            logger.info("%s: %s", request.url.path, json.dumps(body)[:2000])
        try:
            try:
                return await self._answer(request, body, read)
            except ApiError as error:
                if error.code != MODEL_CHANGED:
                    raise
                return await self._answer(request, body, read)
        except ApiError as error:
            if error.status == 429:
                self._bridge.metrics.rejected.inc()
            raise

    async def _answer(self, request: Request, body: dict[str, Any], read: Reader) -> Response:
        parsed, form = await self._in_reader(request, read, body, self._ready(), self._settings)
        note = partial(note_request, request.scope)
        return await answer(self._bridge, parsed, form, self._settings, request.receive, note)

    async def _in_reader(self, request: Request, work: Callable[..., Any], *args: Any) -> Any:
        """Run a function that uses the tokenizer outside the event loop."""
        length = request.headers.get("content-length", "")  # absent with chunked transfer encoding
        is_small = length.isdecimal() and int(length) <= SMALL_BYTES
        reader = self._reader if is_small else self._reader_of_large
        return await asyncio.get_running_loop().run_in_executor(reader, work, *args)

    async def _body(self, request: Request) -> dict[str, Any]:
        """Read the JSON object in the body of a request.

        Raises: ApiError if the body is too large, compressed, too slow to arrive, or not a JSON object.
        """
        codings = [
            coding.strip() for header in request.headers.getlist("content-encoding") for coding in header.split(",")
        ]
        for coding in codings:
            if coding.lower() not in ("", "identity"):
                raise ApiError(
                    415,
                    f"Content-Encoding is {shown(coding)}; only uncompressed bodies are accepted, so send the body as "
                    "plain JSON",
                    code="coded_body",
                )
        limit = self._settings.max_body_bytes
        too_large = ApiError(
            413, f"the body is larger than {limit} bytes, the limit of this server; send less", code="body_too_large"
        )
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > limit:
            raise too_large
        try:
            async with asyncio.timeout(BODY_SECONDS):
                data = bytearray()
                async for piece in request.stream():
                    data += piece
                    if len(data) > limit:
                        raise too_large
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:g} seconds; send it again") from None
        try:
            body = strict_json(data)
        except ValueError as error:
            raise ApiError(400, f"the body is not JSON: {str(error)[:200]}", code="invalid_json") from None
        if not isinstance(body, dict):
            raise ApiError(400, "the body is JSON, but no object; send a JSON object", code="invalid_json")
        return body

    # -- status and models -----------------------------------------------------------------------------------------

    async def health(self, _: Request) -> Response:
        self._ready()
        return Response(status_code=200)

    async def version(self, _: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def metrics_page(self, _: Request) -> Response:
        page = await asyncio.get_running_loop().run_in_executor(self._reader, self._bridge.metrics.page)
        return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def page(self, _: Request) -> Response:
        policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
        headers = {"content-security-policy": policy, "x-content-type-options": "nosniff", "cache-control": "no-cache"}
        return HTMLResponse(page("foredraft.serve", "page.html"), headers=headers)

    async def models(self, _: Request) -> Response:
        served = self._ready()
        return JSONResponse({"object": "list", "data": [self._card(served, name) for name in served.names]})

    async def model(self, request: Request) -> Response:
        served, name = self._ready(), request.path_params["name"]
        served.choose(name, None)
        return JSONResponse(self._card(served, name))

    def _card(self, served: Served, name: str) -> dict[str, Any]:
        llm = served.names[name]
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "foredraft",
            "root": served.name,
            "max_model_len": served.max_model_len,
            "method": llm.speculative_config.title,
            "rejection_sample_method": llm.engine_config.acceptance,
            "prefill_chunk_size": llm.engine_config.prefill_chunk_size,
        }

    # -- tokens ----------------------------------------------------------------------------------------------------

    async def tokenize(self, request: Request) -> Response:
        served = self._ready()
        template = str(served.tokenizer.chat_template or "")
        known = TOKENIZE_FIELDS - {name for name in TEMPLATE_FIELDS if name not in template}
        given = Fields(await self._body(request), known, REFUSED)
        served.choose(given.text("model"), None)
        tokens = await self._in_reader(request, self._tokenized, given, served)
        return JSONResponse(tokens, headers=self._warning(given))

    def _tokenized(self, given: Fields, served: Served) -> dict[str, Any]:
        tokenizer = served.tokenizer
        if given.get("messages") is not None:
            if not isinstance(tools := given.get("tools") or [], list):
                wrong_field("tools", tools, "a list")
            options = template_options(given, str(tokenizer.chat_template or ""))
            ids = encode(tokenizer, conversation(given, options, tools, served), add_special_tokens=False)
        else:
            if given.get("prompt") is None:
                wrong_field("prompt", None, "text if the request has no messages")
            ids = encode(tokenizer, given.text("prompt"), given.flag("add_special_tokens", True))
        strings = tokenizer.convert_ids_to_tokens(ids) if given.flag("return_token_strs") else None
        limit = served.max_model_len
        return {"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": strings}

    async def detokenize(self, request: Request) -> Response:
        served = self._ready()
        given = Fields(await self._body(request), {"model", "tokens"}, {})
        served.choose(given.text("model"), None)
        ids = token_ids(given.get("tokens"), served.num_embeddings, "tokens")
        text = await self._in_reader(request, served.tokenizer.decode, ids)
        return JSONResponse({"prompt": text}, headers=self._warning(given))

    def _warning(self, given: Fields) -> dict[str, str]:
        """Return the response header that lists ignored fields.

        Raises: ApiError for unknown fields, if the settings refuse them.
        """
        if self._settings.strict_fields:
            given.refuse_unknown()
        return warning_of(given.unknown)

    async def tokenizer_info(self, _: Request) -> Response:
        tokenizer = self._ready().tokenizer
        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        info = {
            "tokenizer_class": type(tokenizer).__name__,
            **{name: None if getattr(tokenizer, name) is None else str(getattr(tokenizer, name)) for name in names},
            "chat_template": tokenizer.chat_template,
            "vocab_size": len(tokenizer),
        }
        return JSONResponse(info)

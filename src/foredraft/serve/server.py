"""A server from its start to its end: sockets, the time that requests have to begin, loading, signals, draining."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from foredraft.errors import ConfigError
from foredraft.llm import LLM
from foredraft.prompts.templates import TemplateFailure, renderer
from foredraft.serve.app import Application
from foredraft.serve.bridge import Backend, Bridge
from foredraft.serve.errors import stopping
from foredraft.serve.guards import is_loopback, with_request_ids
from foredraft.serve.metrics import Metrics
from foredraft.serve.served import Served
from foredraft.serve.settings import ServerSettings

logger = logging.getLogger("foredraft.serve")

GRACE_SECONDS = 5.0
"""Time for streams to send their errors, and for the current step."""

EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
QUIET_SECONDS = 60.0
"""Least time between two warnings that no connection can be accepted."""

FORCED_SECONDS = 1.0
"""Time for the current step after a second signal."""
HEAD_SECONDS = 20.0
"""Time limit of receiving the head of a request, from the start of a connection or the end of a response."""


def one_engine(load: Callable[[], Sequence[LLM]], name: str) -> Backend:
    """Backend with one engine, in this process."""
    return Bridge(load, Metrics(name))


class Server(uvicorn.Server):
    """Server of one model. It listens before the model is loaded, and prints a line when it is ready.

    After the first signal requests have `ServerSettings.shutdown_timeout` to end; the second signal ends the server.

    Args:
      load: loads the served models; called in the thread of the engine.
      name: name of the model.
      say: prints the line with the address.
      make: makes the backend from the function that loads and the name.
      wrap: middleware around the application.
    """

    def __init__(
        self,
        load: Callable[[], Served],
        name: str,
        settings: ServerSettings,
        *,
        host: str = "127.0.0.1",
        port: int = 8000,
        say: Callable[[str], None] = print,
        make: Callable[[Callable[[], Sequence[LLM]], str], Backend] = one_engine,
        wrap: Callable[[ASGIApp], ASGIApp] = lambda app: app,
    ) -> None:
        self._load, self._settings, self._say = load, settings, say
        self._socket = _bound(host, port)
        self._quiet_until = 0.0
        self.address = _address(host, self._socket.getsockname()[1])
        self.bridge = make(self._loaded, name)
        self.application = Application(self.bridge, settings)
        loopback = host if is_loopback(self._socket.getsockname()[0]) else ""
        config = uvicorn.Config(
            with_request_ids(wrap(self.application.build(loopback))),
            http=TimedHeads,  # over h11, whatever else is installed: it bounds heads of requests, and knows HTTP/1.0
            ws="none",
            loop="asyncio",
            log_level="error",  # what clients do wrong they are told, and no log
            access_log=False,
            lifespan="off",
            timeout_keep_alive=int(HEAD_SECONDS) + 1,  # `TimedHeads` ends them; 5 s is what clients wait, too
            server_header=False,
            timeout_graceful_shutdown=int(settings.shutdown_timeout + GRACE_SECONDS) + 1,
        )
        super().__init__(config)

    def run_until_end(self) -> bool:
        """Serve until a signal or an error while loading ends it.

        Returns: whether nothing computes any more. Where something does, the interpreter cannot end in order: it throws
        that thread out of compiled code when it asks for the interpreter again, and C++ answers that by an abort.

        Raises: what has kept the model from being loaded.
        """
        try:
            with self.capture_signals(), self._hanging_up():
                self.bridge.start(self._when_loaded)
                self.run(sockets=[self._socket])
                if self.bridge.error is not None:
                    raise self.bridge.error
                return self._stop_bridge()
        finally:
            gc.unfreeze()

    def _stop_bridge(self) -> bool:
        began = time.monotonic()
        while not self.bridge.stop(0.1):
            if time.monotonic() - began > (FORCED_SECONDS if self.force_exit else GRACE_SECONDS):
                return False
        return True

    def _loaded(self) -> list[LLM]:
        served = self._load()
        served.warm()
        with suppress(OSError, TemplateFailure):  # which the first chat is told
            renderer().render("", None)
        _ = served.fingerprint
        self.application.served = served
        gc.collect()
        gc.freeze()  # else every full collection walks all that was loaded, while streams wait
        return served.llms

    def _when_loaded(self) -> None:
        if self.bridge.error is not None:
            self.should_exit = True
        elif not self.should_exit:
            served = self.application.served
            assert served is not None
            self._say(f"serving {', '.join(served.names)} at {self.address}/v1 (also a page at {self.address}/)")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal has come."""
        if self.should_exit:
            self.force_exit = True
            return
        self.application.is_stopping = self.should_exit = True

    @contextmanager
    def _hanging_up(self) -> Iterator[None]:
        """Inside, a terminal that is gone ends the server as a signal does; it sends several, of which none forces."""
        is_heard = hasattr(signal, "SIGHUP") and threading.current_thread() is threading.main_thread()
        if not is_heard or signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
            yield
            return
        before = signal.signal(signal.SIGHUP, lambda *of: None if self.should_exit else self.handle_exit(*of))
        try:
            yield
        finally:
            signal.signal(signal.SIGHUP, before)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        asyncio.get_running_loop().set_exception_handler(self._note)
        await super().startup(sockets)

    def _note(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log an error of the event loop. Without file descriptors it reports thousands of them a second."""
        error = context.get("exception")
        if self.should_exit and self._quiet_until and isinstance(error, ValueError):
            return  # a try that it has put off, on a socket that is closed by now
        if not isinstance(error, OSError) or error.errno not in EXHAUSTED:
            loop.default_exception_handler(context)
        elif loop.time() >= self._quiet_until:
            self._quiet_until = loop.time() + QUIET_SECONDS
            logger.warning(
                "no further connection can be accepted (%s): clients wait until others leave; raise the limit of open "
                "files (ulimit -n, LimitNOFILE of systemd)",
                error.strerror,
            )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let requests come to their end, and end those that take too long."""
        timer = asyncio.get_running_loop().call_later(
            self._settings.shutdown_timeout, self.bridge.abort_all, stopping()
        )
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()


def _bound(host: str, port: int) -> socket.socket:
    """Raises: ConfigError where nobody can listen there."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        bound = socket.socket(family)
        if sys.platform != "win32":
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(1024)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen on {host}, port {port}: {error}; choose another --host or --port") from None
    return bound


def _address(host: str, port: int) -> str:
    shown = "127.0.0.1" if host in ("0.0.0.0", "") else "[::1]" if host == "::" else host
    return f"http://[{shown}]:{port}" if ":" in shown and "[" not in shown else f"http://{shown}:{port}"


class TimedHeads(H11Protocol):
    """Ends connections on which no request comes, or one byte by byte: uvicorn keeps them for ever.

    The bodies of requests have their own limit, and answers that of their request.
    """

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Limit the time until a request comes, where none runs."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop()
        elif self._timer is None and not self.transport.is_closing():
            self._timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

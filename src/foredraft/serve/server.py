"""HTTP server process: sockets, header timeouts, model loading, signals and graceful shutdown."""

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
from foredraft.serve.access_log import AccessLog
from foredraft.serve.app import Application
from foredraft.serve.bridge import Backend, Bridge
from foredraft.serve.errors import stopping
from foredraft.serve.guards import is_loopback, with_request_ids
from foredraft.serve.metrics import Metrics
from foredraft.serve.served import Served
from foredraft.serve.settings import ServerSettings

logger = logging.getLogger("foredraft.serve")

GRACE_SECONDS = 5.0
"""Time allowed after `ServerSettings.shutdown_timeout` for sending errors to streams and finishing the current step."""

EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
QUIET_SECONDS = 60.0
"""Minimum time between two warnings about connections that cannot be accepted."""

FORCED_SECONDS = 1.0
"""Time allowed for the current step after a second signal."""
HEAD_SECONDS = 20.0
"""Time limit for receiving the headers of a request, counted from the start of a connection or the end of the previous
response."""


def one_engine(load: Callable[[], Sequence[LLM]], name: str) -> Backend:
    """Return a backend that runs one engine in this process."""
    return Bridge(load, Metrics(name))


class Server(uvicorn.Server):
    """Server of one model. It listens before the model is loaded, and prints its address when it is ready.

    After the first signal, requests have `ServerSettings.shutdown_timeout` seconds to finish. A second signal ends the
    server at once.

    Args:
      load: function that loads the served models; called in the engine thread.
      name: model name.
      say: function that prints the line with the address.
      make: factory of the backend; its arguments are the load function and the model name.
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
        self._throughput: asyncio.Future[None] | None = None
        self.address = _address(host, self._socket.getsockname()[1])
        self.bridge = make(self._loaded, name)
        self.application = Application(self.bridge, settings)
        self._log = AccessLog(is_shown=settings.access_log)
        loopback = host if is_loopback(self._socket.getsockname()[0]) else ""
        config = uvicorn.Config(
            self._log.around(with_request_ids(wrap(self.application.build(loopback)))),
            http=TimedHeads,  # always based on h11, which limits header sizes and supports HTTP/1.0
            ws="none",
            loop="asyncio",
            log_level="error",  # errors of clients are reported in responses, not in the log
            access_log=False,
            lifespan="off",
            # `TimedHeads` closes idle connections first. uvicorn's default of 5 s would race with the usual timeout of
            # clients, which is also 5 s.
            timeout_keep_alive=int(HEAD_SECONDS) + 1,
            server_header=False,
            timeout_graceful_shutdown=int(settings.shutdown_timeout + GRACE_SECONDS) + 1,
        )
        super().__init__(config)

    def run_until_end(self) -> bool:
        """Serve until a signal arrives or loading fails.

        Returns: whether all computation has stopped. If it has not, the caller must end the process without the normal
          shutdown of the interpreter. That shutdown would unwind the engine thread out of compiled C++ code, and C++
          would abort the process.

        Raises: the error that prevented the model from being loaded.
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
        with suppress(OSError, TemplateFailure):  # the first chat request reports the error
            renderer().render("", None)
        _ = served.fingerprint
        self.application.served = served
        gc.collect()
        gc.freeze()  # otherwise every full collection scans all loaded objects and stalls the streams
        return served.llms

    def _when_loaded(self) -> None:
        if self.bridge.error is not None:
            self.should_exit = True
        elif not self.should_exit:
            served = self.application.served
            assert served is not None
            self._log.is_ready = True
            self._say(f"serving {', '.join(served.names)} at {self.address}/v1 (also a page at {self.address}/)")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin a graceful shutdown at the first signal, and force it at the second."""
        if self.should_exit:
            self.force_exit = True
            return
        self.application.is_stopping = self.should_exit = True

    @contextmanager
    def _hanging_up(self) -> Iterator[None]:
        """Handle SIGHUP like SIGTERM inside the context. A closing terminal sends several, and none of them forces the
        shutdown."""
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
        metrics = self.bridge.metrics
        if isinstance(metrics, Metrics):
            self._throughput = asyncio.ensure_future(self._log.log_throughput(lambda: metrics.num_generated))

    def _note(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log an error of the event loop, at a limited rate: without free file descriptors, asyncio reports thousands
        of errors a second."""
        error = context.get("exception")
        if self.should_exit and self._quiet_until and isinstance(error, ValueError):
            return  # a postponed accept on a socket that has been closed since
        if not isinstance(error, OSError) or error.errno not in EXHAUSTED:
            loop.default_exception_handler(context)
        elif loop.time() >= self._quiet_until:
            self._quiet_until = loop.time() + QUIET_SECONDS
            logger.warning(
                "no further connection can be accepted (%s); new clients wait until other connections close; raise the "
                "limit on open files (ulimit -n, or LimitNOFILE in systemd)",
                error.strerror,
            )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for running requests, and abort those that exceed the shutdown timeout."""
        if self._throughput is not None:
            self._throughput.cancel()
        if num_open := self._log.num_open:
            requests = "1 request" if num_open == 1 else f"{num_open} requests"
            self._say(f"stopping: waiting for {requests} (Ctrl-C again to stop now)")
        timer = asyncio.get_running_loop().call_later(
            self._settings.shutdown_timeout, self.bridge.abort_all, stopping()
        )
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()


def _bound(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises: ConfigError if the address or port cannot be used.
    """
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
    """HTTP protocol that closes connections whose request headers do not arrive in time. uvicorn itself has no such
    limit.

    Request bodies and responses have separate limits.
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
        """Start the header timeout if no request is running, and stop it otherwise."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop()
        elif self._timer is None and not self.transport.is_closing():
            self._timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

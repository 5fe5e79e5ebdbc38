"""HTTP as uvicorn speaks it, with a limit on the time that the head of a request may take."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 20.0
"""From the begin of a connection, or the end of an answer, until the head of the next request is there."""


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

"""Thread that steps the engine for all requests."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Protocol

from foredraft.errors import ForedraftError
from foredraft.llm import LLM
from foredraft.serve.errors import ApiError
from foredraft.serve.metrics import ClusterMetrics, Metrics
from foredraft.serve.queued_request import News, QueuedRequest, check_tokens, deliver_all

logger = logging.getLogger("foredraft.serve")


class Backend(Protocol):
    """Takes requests in, and brings news of them until they have ended or are abandoned."""

    error: BaseException | None

    @property
    def metrics(self) -> Metrics | ClusterMetrics:
        """Counters of all requests."""

    def start(self, when_loaded: Callable[[], None]) -> None:
        """Begin to load; ``when_loaded`` is called in another thread when that has come to an end, well or not."""

    def check_room(self, num_prompt_tokens: int, max_requests: int | None, max_tokens: int | None) -> None:
        """Raises: ApiError (429) where as many requests, or tokens of their prompts, wait as may."""

    def submit(self, ticket: QueuedRequest) -> None:
        """Take a request in."""

    def abandon(self, ticket: QueuedRequest) -> None:
        """End a request; one that has ended stays as it is."""

    def abort_all(self, error: ApiError) -> None:
        """End everything with an error."""

    def stop(self, timeout: float) -> bool:
        """Work no more; say whether nothing of this process computes any more, after `timeout` seconds at most."""


class Bridge:
    """The thread of the engine, with an inbox.

    It takes requests in, makes a step, hands out what it has brought, and ends what nobody waits for any more, in
    turns; so a client that leaves ends its rows within a step. Drafting settings have an engine each over the one
    model, and make their steps in turns.

    Args:
      load: makes what is served; called in the thread.
      metrics: counters of times, tokens and ends.
    """

    def __init__(self, load: Callable[[], Sequence[LLM]], metrics: Metrics) -> None:
        self.error: BaseException | None = None
        self.is_ready = False
        self._load, self.metrics = load, metrics
        self._llms: Sequence[LLM] = ()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._open: dict[QueuedRequest, None] = {}
        self._queued: list[QueuedRequest] = []  # as far as the asyncio side knows
        self._is_stopping = False
        self._num_running = 0
        self._step_began: float | None = None

    @property
    def is_running(self) -> bool:
        """Whether the thread takes requests."""
        return self.is_ready and self._thread.is_alive()

    @property
    def seconds_in_step(self) -> float:
        """Time of the current step so far; 0 between steps."""
        began = self._step_began
        return 0.0 if began is None else perf_counter() - began

    # -- the asyncio side ------------------------------------------------------------------------------------------

    def start(self, when_loaded: Callable[[], None]) -> None:
        """Begin to load; ``when_loaded`` is called in the thread when that has come to an end, well or not."""
        self._thread = threading.Thread(target=self._run, args=[when_loaded], name="foredraft-engine", daemon=True)
        self._thread.start()

    def check_room(self, num_prompt_tokens: int, max_requests: int | None, max_tokens: int | None) -> None:
        """Raises: ApiError (429) where as many requests, or tokens of their prompts, wait as may."""
        self._queued = [ticket for ticket in self._queued if ticket.is_queued]
        num_free = max(0, self._llms[0].engine_config.max_num_seqs - self._num_running)
        num_waiting = len(self._queued) - num_free
        if max_requests is not None and num_waiting >= max_requests:
            raise ApiError(
                429, f"{max(0, num_waiting)} requests are waiting, and no more may; try again", None, "queue_full"
            )
        check_tokens(self._queued, num_prompt_tokens, max_tokens)

    def submit(self, ticket: QueuedRequest) -> None:
        """Send a request to the engine."""
        self._queued.append(ticket)
        self._inbox.put(partial(self._begin, ticket))

    def abandon(self, ticket: QueuedRequest) -> None:
        """End a request before the next step; one that has ended stays as it is."""
        ticket.is_abandoned = True
        self._inbox.put(partial(self._end, ticket))

    def abort_all(self, error: ApiError) -> None:
        """End everything with an error."""
        self._inbox.put(partial(self._abort_all, error))

    def stop(self, timeout: float) -> bool:
        """End the thread after the step that it is in; say whether it has ended within `timeout` seconds."""
        self._is_stopping = True
        self._inbox.put(lambda: None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self, when_loaded: Callable[[], None]) -> None:
        try:
            self._llms = self._load()
            self.metrics.watch(self._llms)
            self.is_ready = True
        except BaseException as error:
            self.error = error
        when_loaded()
        while self.is_ready and not self._is_stopping:
            self._read_inbox()
            self._step()
            self._hand_out()

    def _read_inbox(self) -> None:
        """Act on what was sent; wait for something where there is nothing to do."""
        if not self._open:
            self._inbox.get()()
        with suppress(queue.Empty):
            while True:
                self._inbox.get_nowait()()

    def _begin(self, ticket: QueuedRequest) -> None:
        if ticket.is_abandoned:
            ticket.is_queued = False
            return
        try:
            ticket.stream = ticket.llm.stream(ticket.prompts, ticket.params)
        except Exception as error:
            self._fail(ticket, error)
            return
        self._open[ticket] = None
        ticket.deliver([])

    def _step(self) -> None:
        """Make a step of every engine that has work."""
        self._step_began = perf_counter()
        for llm in self._llms:
            try:
                llm.step()
            except Exception as error:  # which belongs to no request in particular
                for ticket in [ticket for ticket in self._open if ticket.llm is llm]:
                    self._fail(ticket, error)
        self._step_began = None
        self._num_running = sum(llm.num_running for llm in self._llms)

    def _hand_out(self) -> None:
        num_waiting = 0
        came: list[tuple[QueuedRequest, News]] = []
        for ticket in list(self._open):
            assert ticket.stream is not None
            news = ticket.stream.take()
            if ticket.is_queued and not ticket.stream.is_waiting:
                ticket.is_queued = False
                self.metrics.started(ticket)
            num_waiting += ticket.is_queued
            if news:
                self.metrics.emitted(ticket, news)
                if ticket.wants_news:
                    came.append((ticket, news))
            if isinstance(fault := ticket.stream.fault, Exception):  # one of several texts, too: all of them end
                self._fail(ticket, fault)
            elif ticket.stream.is_finished:
                self._end(ticket)
                came.append((ticket, None))
        self.metrics.load(self._num_running, num_waiting)
        deliver_all(came)  # last, so that figures are up to date for whoever has an answer

    def _fail(self, ticket: QueuedRequest, error: Exception) -> None:
        """End a request with an error."""
        if not isinstance(error, (ApiError, ForedraftError)):
            logger.error("a request ended in an error", exc_info=error)
        self._end(ticket, has_failed=True)
        ticket.deliver(error)

    def _end(self, ticket: QueuedRequest, has_failed: bool = False) -> None:
        """Leave nothing of a request in the engine."""
        ticket.is_queued = False
        if ticket in self._open and ticket.stream is not None:
            ticket.stream.close()
            self.metrics.ended(ticket, has_failed)
            del self._open[ticket]  # last, so that what is not open is counted

    def _abort_all(self, error: ApiError) -> None:
        for ticket in list(self._open):
            self._fail(ticket, error)

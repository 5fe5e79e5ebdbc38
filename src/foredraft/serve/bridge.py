"""Engine thread that serves all requests."""

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
    """Interface of a backend: it accepts requests and delivers their output until they end or are abandoned."""

    error: BaseException | None

    @property
    def metrics(self) -> Metrics | ClusterMetrics:
        """Metrics of all requests."""

    def start(self, when_loaded: Callable[[], None]) -> None:
        """Begin to load the model. ``when_loaded`` is called from another thread when loading has succeeded or
        failed."""

    def check_room(self, num_prompt_tokens: int, max_requests: int | None, max_tokens: int | None) -> None:
        """Refuse a request when the queue is full.

        Args:
          num_prompt_tokens: number of prompt tokens of the new request.
          max_requests: maximum number of waiting requests; None for no limit.
          max_tokens: maximum number of prompt tokens of waiting requests; None for no limit.

        Raises: ApiError (429) if a limit is reached.
        """

    def submit(self, queued: QueuedRequest) -> None:
        """Accept a request."""

    def abandon(self, queued: QueuedRequest) -> None:
        """End a request; no effect on one that has already ended."""

    def abort_all(self, error: ApiError) -> None:
        """End all requests with an error."""

    def stop(self, timeout: float) -> bool:
        """Stop all work.

        Returns: whether all computation in this process has ended within `timeout` seconds.
        """


class Bridge:
    """Engine thread with an inbox.

    Each iteration of the thread reads the inbox, runs one step, delivers the output and ends abandoned requests. The
    rows of a client that disconnects therefore end within one step. Every drafting method has its own engine over the
    shared model, and each iteration steps all of them.

    Args:
      load: function that loads the engines; called in the thread.
      metrics: counters of times, tokens and finished requests.
    """

    def __init__(self, load: Callable[[], Sequence[LLM]], metrics: Metrics) -> None:
        self.error: BaseException | None = None
        self.is_ready = False
        self._load, self.metrics = load, metrics
        self._llms: Sequence[LLM] = ()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._open: dict[QueuedRequest, None] = {}
        self._queued: list[QueuedRequest] = []  # as seen by the event loop
        self._is_stopping = False
        self._num_running = 0
        self._step_began: float | None = None

    @property
    def is_running(self) -> bool:
        """Whether the thread accepts requests."""
        return self.is_ready and self._thread.is_alive()

    @property
    def num_open(self) -> int:
        """Number of requests that have not ended."""
        return len(self._open)

    @property
    def seconds_in_step(self) -> float:
        """Duration of the current step, in seconds; 0 between steps."""
        began = self._step_began
        return 0.0 if began is None else perf_counter() - began

    # -- called from the event loop --------------------------------------------------------------------------------

    def start(self, when_loaded: Callable[[], None]) -> None:
        """Begin to load the model. ``when_loaded`` is called in the thread when loading has succeeded or failed."""
        self._thread = threading.Thread(target=self._run, args=[when_loaded], name="foredraft-engine", daemon=True)
        self._thread.start()

    def check_room(self, num_prompt_tokens: int, max_requests: int | None, max_tokens: int | None) -> None:
        """Refuse a request when the queue is full.

        Raises: ApiError (429) if the limit of waiting requests, or of tokens in their prompts, is reached.
        """
        self._queued = [queued for queued in self._queued if queued.is_queued]
        num_free = max(0, self._llms[0].engine_config.max_num_seqs - self._num_running)
        num_waiting = len(self._queued) - num_free
        if max_requests is not None and num_waiting >= max_requests:
            raise ApiError(
                429,
                f"the queue is full: {max(0, num_waiting)} requests are waiting, and the limit is {max_requests}; try "
                "again later",
                None,
                "queue_full",
            )
        check_tokens(self._queued, num_prompt_tokens, max_tokens)

    def submit(self, queued: QueuedRequest) -> None:
        """Send a request to the engine."""
        self._queued.append(queued)
        self._inbox.put(partial(self._begin, queued))

    def abandon(self, queued: QueuedRequest) -> None:
        """End a request before the next step; no effect on one that has already ended."""
        queued.is_abandoned = True
        self._inbox.put(partial(self._end, queued))

    def abort_all(self, error: ApiError) -> None:
        """End all requests with an error."""
        self._inbox.put(partial(self._abort_all, error))

    def stop(self, timeout: float) -> bool:
        """End the thread after its current step.

        Returns: whether the thread has ended within `timeout` seconds.
        """
        self._is_stopping = True
        self._inbox.put(lambda: None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    # -- called in the engine thread -------------------------------------------------------------------------------

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
        """Process the messages of the inbox; wait for one if there are no open requests."""
        if not self._open:
            self._inbox.get()()
        with suppress(queue.Empty):
            while True:
                self._inbox.get_nowait()()

    def _begin(self, queued: QueuedRequest) -> None:
        if queued.is_abandoned:
            queued.is_queued = False
            return
        try:
            queued.stream = queued.llm.stream(queued.prompts, queued.params)
        except Exception as error:
            self._fail(queued, error)
            return
        self._open[queued] = None
        queued.deliver([])

    def _step(self) -> None:
        """Run one step of every engine that has work."""
        self._step_began = perf_counter()
        for llm in self._llms:
            try:
                llm.step()
            except Exception as error:  # an error of the engine, which affects all of its requests
                for queued in [queued for queued in self._open if queued.llm is llm]:
                    self._fail(queued, error)
        self._step_began = None
        self._num_running = sum(llm.num_running for llm in self._llms)

    def _hand_out(self) -> None:
        num_waiting = 0
        came: list[tuple[QueuedRequest, News]] = []
        for queued in list(self._open):
            assert queued.stream is not None
            news = queued.stream.take()
            if queued.is_queued and not queued.stream.is_waiting:
                queued.is_queued = False
                self.metrics.started(queued)
            num_waiting += queued.is_queued
            if news:
                self.metrics.emitted(queued, news)
                if queued.wants_news:
                    came.append((queued, news))
            if isinstance(fault := queued.stream.fault, Exception):  # an error in one row ends the whole request
                self._fail(queued, fault)
            elif queued.stream.is_finished:
                self._end(queued)
                came.append((queued, None))
        self.metrics.load(self._num_running, num_waiting)
        deliver_all(came)  # last, so that the metrics already include what clients have received

    def _fail(self, queued: QueuedRequest, error: Exception) -> None:
        """End a request with an error."""
        if not isinstance(error, (ApiError, ForedraftError)):
            logger.error("a request ended in an error", exc_info=error)
        self._end(queued, has_failed=True)
        queued.deliver(error)

    def _end(self, queued: QueuedRequest, has_failed: bool = False) -> None:
        """Remove a request from the engine."""
        queued.is_queued = False
        if queued in self._open and queued.stream is not None:
            queued.stream.close()
            self.metrics.ended(queued, has_failed)
            del self._open[queued]  # last, so that a request is always either open or counted

    def _abort_all(self, error: ApiError) -> None:
        for queued in list(self._open):
            self._fail(queued, error)

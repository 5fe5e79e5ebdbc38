"""The ingress's end of every request: what was delivered, and where it goes on when a replica is lost.

A token depends on the seed, the position and the ids before it alone, so another replica that is given the seed and
what was delivered goes on to the same text. Only whole steps are delivered, with their ids and their text.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from threading import Thread
from typing import Any, NamedTuple, cast

from starlette.types import ASGIApp, Receive, Scope, Send

from foredraft.llm import LLM
from foredraft.prompts.prompts import seeded
from foredraft.serve.backend import QueuedRequest, check_tokens
from foredraft.serve.errors import ApiError, ModelChanged
from foredraft.serve.fair import PROMPT_COST, FairQueue
from foredraft.serve.guards import ALLOWED_ID, REQUEST_ID
from foredraft.serve.metrics import ClusterMetrics
from foredraft.serve.ray.journal import FailoverState, Journal
from foredraft.serve.ray.messages import (
    Accepted,
    Delta,
    Failed,
    Finished,
    Fleet,
    Message,
    OtherWeights,
    Rejected,
    ReplicaRequest,
    Routed,
    Started,
)
from foredraft.serve.settings import FailoverSettings

logger = logging.getLogger("foredraft.serve")


class Caller(NamedTuple):
    """Who sent a request.

    Args:
      request_id: for logs.
      session: that the client has named, or nothing.
      client: whose requests take turns with those of others.
    """

    request_id: str = ""
    session: str = ""
    client: str = ""


NOBODY = Caller()
CALLER: ContextVar[Caller] = ContextVar("foredraft_caller", default=NOBODY)
"""Of the request that is being answered."""

SILENT_SECONDS = 60.0
"""For which a replica that was silent is avoided, at least: by then Ray has replaced it, or it runs again."""
MOST_LATE = 1.0
"""Seconds by which a timer may be late; by more, this process was stopped, and others may have spoken meanwhile."""


class ClusterBridge:
    """What `foredraft.serve.bridge.Bridge` is to one engine, to a fleet of them.

    Args:
      load: starts what the fleet needs; called in a thread.
      metrics: told of failovers.
    """

    def __init__(
        self,
        fleet: Fleet,
        metrics: ClusterMetrics,
        settings: FailoverSettings | None = None,
        load: Callable[[], Sequence[LLM]] = tuple,
    ) -> None:
        self.error: BaseException | None = None
        self._fleet, self._metrics, self._load = fleet, metrics, load
        self._settings = settings or FailoverSettings()
        self._open: dict[QueuedRequest, asyncio.Task[None]] = {}
        self._client_of: dict[QueuedRequest, str] = {}
        self._queue: FairQueue | None = None
        self._silent: dict[str, float] = {}  # replicas, and until when they are avoided, in seconds of the loop
        self._heard = 0.0  # when there last was a replica, in seconds of the loop

    def start(self, when_loaded: Callable[[], None]) -> None:
        """Begin to load; ``when_loaded`` is called in the thread when that has come to an end, well or not."""

        def run() -> None:
            try:
                self._load()
            except BaseException as error:
                self.error = error
            when_loaded()

        Thread(target=run, name="foredraft-cluster", daemon=True).start()

    def check_room(self, num_prompt_tokens: int, max_requests: int | None, max_tokens: int | None) -> None:
        """Make room where as many requests wait for a replica as may: the newest of the client with most of them goes.

        Raises: ApiError (429) where that is this client, or as many tokens of prompts wait as may.
        """
        waiting = [ticket for ticket in self._open if ticket.is_queued and not ticket.is_abandoned]
        check_tokens(waiting, num_prompt_tokens, max_tokens)
        if max_requests is None or len(waiting) < max(1, max_requests):
            return
        error = ApiError(
            429, f"{len(waiting)} requests are waiting for a replica, and no more may; try again", None, "queue_full"
        )
        counts = Counter(self._client_of[ticket] for ticket in waiting)
        client, most = counts.most_common(1)[0]
        if counts[CALLER.get().client] + 1 >= most:
            raise error
        newest = next(ticket for ticket in reversed(waiting) if self._client_of[ticket] == client)
        newest.deliver(error)
        self.abandon(newest)

    def submit(self, ticket: QueuedRequest) -> None:
        """Send a request to a replica."""
        task = asyncio.ensure_future(self._carry(ticket))
        self._open[ticket], self._client_of[ticket] = task, CALLER.get().client
        task.add_done_callback(lambda _: self._forget(ticket))

    def _forget(self, ticket: QueuedRequest) -> None:
        self._open.pop(ticket, None)
        self._client_of.pop(ticket, None)

    def abandon(self, ticket: QueuedRequest) -> None:
        """End a request on its replica; one that has ended stays as it is."""
        ticket.is_abandoned = True
        if (task := self._open.get(ticket)) is not None:
            task.cancel()

    def abort_all(self, error: ApiError) -> None:
        """End everything with an error."""
        for ticket in list(self._open):
            ticket.deliver(error)
            self.abandon(ticket)

    def stop(self, timeout: float) -> bool:
        """Nothing of a fleet computes in this process."""
        return True

    # -- one request -----------------------------------------------------------------------------------------------

    async def _carry(self, ticket: QueuedRequest) -> None:
        """See a request through, from replica to replica."""
        try:
            await self._see_through(ticket)
        except (ApiError, Failed) as error:
            ticket.deliver(error if isinstance(error, ApiError) else _unavailable(str(error)))
        except Exception as error:
            logger.error("request %s ended in an error", CALLER.get().request_id, exc_info=error)
            ticket.deliver(error)
        else:
            ticket.deliver(None)

    async def _see_through(self, ticket: QueuedRequest) -> None:
        facts = self._fleet.facts
        assert facts is not None
        params = tuple(seeded(one, None, 0) for one in ticket.params)
        ticket.params = list(params)
        journal = Journal(params)
        ticket.stream = cast("Any", journal)
        request_id, session, client = CALLER.get()
        name = next((name for name, llm in facts.llms.items() if llm is cast("Any", ticket.llm)), None)
        if name is None:
            raise ModelChanged
        work = ReplicaRequest(
            request_id,
            name,
            tuple(ticket.prompts),
            params,
            facts.weights,
            facts.fingerprint,
            session=session,
            wants_trees=ticket.wants_trees,
            wants_news=ticket.wants_news,
        )
        if self._queue is None:
            self._queue = FairQueue(facts.num_rows)
        with self._queue.entered(client) as turn:
            await turn.granted
            self._queue.charge(turn, PROMPT_COST * ticket.num_prompt_tokens)
            await self._try(FailoverState(ticket, journal, work, self._metrics, self._queue, turn))

    async def _try(self, course: FailoverState) -> None:
        """One replica after the other, until one brings the request to its end."""
        request_id, journal = course.work.request_id, course.journal
        for attempt in range(self._settings.max_failovers + 1):
            try:
                await self._attempt(course)
                return
            except Failed as error:
                course.lose()
                logger.warning("request %s: %s after %d tokens", request_id, error, journal.num_tokens)
                if attempt == self._settings.max_failovers:
                    raise Failed(f"{attempt + 1} replicas were lost") from None
                await asyncio.sleep(self._settings.retry_seconds * 2**attempt)

    async def _attempt(self, course: FailoverState) -> None:
        """One replica's part of a request.

        Raises: Failed; ApiError where the request is to blame, or nothing answers it.
        """
        now = asyncio.get_running_loop().time()
        self._silent = {replica: until for replica, until in self._silent.items() if until > now}
        course.avoid(self._silent)
        async with aclosing(self._fleet.generate(course.work)) as messages:
            async for message in self._in_time(messages, course):
                match message:
                    case Routed():
                        course.replica = message.replica
                    case Accepted():
                        self._silent.pop(message.replica, None)
                        course.take(message)
                    case Started():
                        course.begin(message)
                    case Delta():
                        course.deliver(message)
                    case Finished():
                        course.journal.end(message)
                        return
                    case OtherWeights() if course.journal.num_tokens:
                        raise Failed(f"{message.replica} has other weights than the request was begun on")
                    case OtherWeights():
                        self._fleet.adopt(message.facts)
                        raise ModelChanged
                    case Rejected() if message.may_work_elsewhere:
                        raise Failed(f"a replica refused the request ({message.message})")
                    case Rejected():
                        raise message.error
        raise Failed("a replica ended the stream before its end")

    async def _in_time(self, messages: AsyncGenerator[Message, None], course: FailoverState) -> AsyncIterator[Message]:
        """Messages of the router, and of the replica that the request was sent to, which gives signs of life.

        A request that waits for a replica with room has the time that its client gives it.

        Raises: Failed; ApiError.
        """
        loop, patience = asyncio.get_running_loop(), self._settings.stall_timeout
        began = loop.time()
        while True:
            awaited = asyncio.ensure_future(anext(messages))
            try:
                last = loop.time()
                while not (await asyncio.wait([awaited], timeout=patience))[0]:
                    if loop.time() < last + patience + MOST_LATE:  # otherwise this process has not run itself
                        self._check_silence(course.replica, max(began, self._heard), loop.time())
                    last = loop.time()
                message = await awaited
            except StopAsyncIteration:
                return
            finally:
                if awaited.cancel():
                    await asyncio.wait([awaited])  # messages must not be closed while it runs
            self._heard = loop.time()
            yield message

    def _check_silence(self, replica: str, since: float, now: float) -> None:
        """Raises: Failed where a replica was silent; ApiError where there has been none for long."""
        if replica:
            self._silent[replica] = now + max(SILENT_SECONDS, 2 * self._settings.stall_timeout)
            raise Failed(f"{replica} was silent for {self._settings.stall_timeout:g} seconds")
        if now - since >= self._settings.absence_timeout:
            raise _absent(self._settings.absence_timeout)


def _absent(seconds: float) -> ApiError:
    return ApiError(503, f"there has been no replica for {seconds:g} seconds; try again", code="no_replicas")


def _unavailable(reason: str) -> ApiError:
    return ApiError(503, f"no replica could finish the request: {reason}; try again", code="replicas_lost")


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

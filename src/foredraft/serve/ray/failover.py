"""Requests of an ingress on replicas: delivery of output, and failover when a replica is lost.

A token depends only on the seed, the position and the ids before it. Another replica that receives the seed and the
delivered output therefore continues the same sequence. Only whole steps are delivered, with their ids and text.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from threading import Thread
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from starlette.types import ASGIApp, Receive, Scope, Send

from foredraft.config.sampling import SamplingParams
from foredraft.engine.frontend import CompletionOutput, FrozenList, Logprob, RequestOutput, StreamOutput
from foredraft.engine.stats import RowStats
from foredraft.llm import LLM
from foredraft.prompts.prompts import seeded
from foredraft.serve.errors import ApiError, model_changed
from foredraft.serve.fair import OUTPUT_COST, PROMPT_COST, FairQueue, Turn
from foredraft.serve.guards import ALLOWED_ID, REQUEST_ID
from foredraft.serve.metrics import ClusterMetrics
from foredraft.serve.queued_request import QueuedRequest, check_tokens
from foredraft.serve.ray.messages import (
    Delta,
    DistantServed,
    Failed,
    Finished,
    Message,
    OutputIds,
    ReplicaRequest,
    Routed,
    Started,
)
from foredraft.serve.settings import FailoverSettings

if TYPE_CHECKING:
    from foredraft.serve.ray.fleet import RayFleet

logger = logging.getLogger("foredraft.serve")


class Caller(NamedTuple):
    """Sender of a request.

    Args:
      request_id: id for logs.
      session: session named by the client; empty for none.
      client: API key or address, which identifies the client in the fair queue.
    """

    request_id: str = ""
    session: str = ""
    client: str = ""


NOBODY = Caller()
CALLER: ContextVar[Caller] = ContextVar("foredraft_caller", default=NOBODY)
"""Sender of the current request."""

SILENT_SECONDS = 60.0
"""Minimum time for which a silent replica is avoided. By then Ray has replaced it, or it runs again."""
MOST_LATE = 1.0
"""Delay of a timer, in seconds, above which this process itself was stopped; replicas may have sent messages
meanwhile."""


@dataclass
class Text:
    """Delivered output of one sample."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None


class Journal:
    """Delivered output of a request. The journal replaces `foredraft.engine.frontend.Stream`, with the parts that
    responses need.

    Args:
      params: sampling parameters of each prompt, with a seed.
    """

    def __init__(self, params: Sequence[SamplingParams]) -> None:
        self.texts = [[Text() for _ in range(one.n)] for one in params]
        self.is_waiting = True
        self._before = RowStats()
        self._now = RowStats()
        self._cached = 0
        self._outputs: list[RequestOutput] = []

    @property
    def output_ids(self) -> tuple[OutputIds, ...]:
        """Delivered output for the next replica to continue; empty if nothing was delivered."""
        if not any(text.token_ids for texts in self.texts for text in texts):
            return ()
        return tuple(tuple(tuple(text.token_ids) for text in texts) for texts in self.texts)

    @property
    def num_tokens(self) -> int:
        return sum(len(text.token_ids) for texts in self.texts for text in texts)

    @property
    def num_cached_tokens(self) -> int:
        return self._cached

    @property
    def finish_reasons(self) -> list[str | None]:
        return [text.finish_reason for texts in self.texts for text in texts]

    @property
    def stats(self) -> RowStats:
        """Counters summed over all replicas of the request."""
        pooled = RowStats()
        pooled.add(self._before)
        pooled.add(self._now)
        return pooled

    def take(self, news: Delta) -> list[StreamOutput]:
        """Add the output of a replica.

        Returns: the deltas that are new. A replica that continues a request repeats the final deltas of finished
          samples.
        """
        self._now, self._cached = news.stats or self._now, news.num_cached_tokens
        return [delta for delta in news.deltas if self._append(delta)]

    def _append(self, delta: StreamOutput) -> bool:
        text = self.texts[delta.prompt_index][delta.index]
        if text.finish_reason is not None:  # finished on an earlier replica; this replica repeats the last delta
            return False
        text.token_ids += delta.token_ids
        text.logprobs += delta.logprobs or ()
        text.finish_reason = delta.finish_reason
        return True

    def turn(self) -> None:
        """Keep the counters of a lost replica, and start new ones."""
        self._before.add(self._now)
        self._now = RowStats()

    def end(self, ended: Finished) -> None:
        self._now, self._cached = ended.stats, ended.num_cached_tokens
        pairs = zip(ended.outputs, self.texts, strict=True)
        self._outputs = [replace(output, outputs=_whole(output.outputs, texts)) for output, texts in pairs]

    def outputs(self) -> list[RequestOutput]:
        """Results of a finished request, as if a single replica had generated them."""
        return self._outputs


def _whole(outputs: Sequence[CompletionOutput], texts: Sequence[Text]) -> FrozenList[CompletionOutput]:
    """Samples with the log-probabilities of all their tokens."""
    return FrozenList(
        output if output.logprobs is None else _with_logprobs(output, text.logprobs)
        for output, text in zip(outputs, texts, strict=True)
    )


def _with_logprobs(output: CompletionOutput, logprobs: list[dict[int, Logprob]]) -> CompletionOutput:
    total = sum(table[token].logprob for token, table in zip(output.token_ids, logprobs, strict=True))
    return replace(output, logprobs=logprobs, cumulative_logprob=total)


class FailoverState:
    """State of a request that may move from replica to replica."""

    def __init__(
        self,
        queued: QueuedRequest,
        journal: Journal,
        work: ReplicaRequest,
        metrics: ClusterMetrics,
        queue: FairQueue,
        turn: Turn,
    ) -> None:
        self.queued, self.journal, self.work = queued, journal, work
        self._metrics, self._queue, self._turn = metrics, queue, turn
        self.replica = ""
        """Replica that has the request; empty while the request waits for one."""
        self._has_begun = False
        self._is_paused = False
        self._last = perf_counter()

    def avoid(self, silent: Iterable[str]) -> None:
        """Add replicas that the router must avoid."""
        self.replica = ""
        if not self.work.avoided.issuperset(silent):
            self.work = replace(self.work, avoided=self.work.avoided.union(silent))

    def accept(self, replica: str) -> None:
        """Record that a replica has accepted the request."""
        self.replica = replica
        self.queued.is_queued = False
        self._queue.begin(self._turn)

    def begin(self, begun: Started) -> None:
        """Record that an engine has started the request."""
        if self._has_begun:
            is_same = begun.fingerprint == self.work.fingerprint
            self.queued.notes["failover"]["is_same_fingerprint"] &= is_same
            return
        if begun.fingerprint != self.work.fingerprint:
            self.queued.notes["replica_fingerprint"] = begun.fingerprint
            self.work = replace(self.work, fingerprint=begun.fingerprint)
        self._has_begun = True
        self.queued.deliver([])

    def deliver(self, news: Delta) -> None:
        """Send new deltas to the client."""
        deltas = self.journal.take(news)
        if not deltas:
            return
        if self._is_paused:
            self._metrics.pause.observe(perf_counter() - self._last)
        self._is_paused, self._last = False, perf_counter()
        self._queue.charge(self._turn, OUTPUT_COST * sum(len(delta.token_ids) for delta in deltas))
        self.journal.is_waiting = False
        self.queued.deliver(deltas)

    def lose(self) -> None:
        """Prepare the request for another replica after its replica was lost."""
        self.journal.turn()
        avoided = self.work.avoided | ({self.replica} if self.replica else set())
        self.work = replace(self.work, output_ids=self.journal.output_ids, avoided=avoided)
        if self._has_begun:
            note = self.queued.notes.setdefault("failover", {"count": 0, "is_same_fingerprint": True, "at_tokens": []})
            note["count"] += 1
            note["at_tokens"].append(self.journal.num_tokens)
            self._is_paused = True
            self._metrics.failovers.inc()


class ClusterBridge:
    """Backend that sends requests to a fleet of replicas; the counterpart of `foredraft.serve.bridge.Bridge` for one
    engine.

    Args:
      fleet: replicas.
      metrics: counters of failovers.
      settings: limits of failover; the defaults if None.
      load: function that starts the replicas; called in a thread.
    """

    def __init__(
        self,
        fleet: RayFleet,
        metrics: ClusterMetrics,
        settings: FailoverSettings | None = None,
        load: Callable[[], Sequence[LLM]] = tuple,
    ) -> None:
        self.error: BaseException | None = None
        self._fleet, self.metrics, self._load = fleet, metrics, load
        self._settings = settings or FailoverSettings()
        self._open: dict[QueuedRequest, asyncio.Task[None]] = {}
        self._client_of: dict[QueuedRequest, str] = {}
        self.queue: FairQueue | None = None  # of the rows of the first request's model
        self._silent: dict[str, float] = {}  # end of the time for which each replica is avoided, on the loop's clock
        self._heard = 0.0  # time of the last message, on the loop's clock

    @property
    def num_open(self) -> int:
        """Number of requests that have not ended."""
        return len(self._open)

    def start(self, when_loaded: Callable[[], None]) -> None:
        """Begin to load. ``when_loaded`` is called in the thread when loading has succeeded or failed."""

        def run() -> None:
            try:
                self._load()
            except BaseException as error:
                self.error = error
            when_loaded()

        Thread(target=run, name="foredraft-cluster", daemon=True).start()

    def check_room(self, num_prompt_tokens: int, max_requests: int | None, max_tokens: int | None) -> None:
        """Make room in a full queue by refusing the newest request of the client that has most requests waiting.

        Raises: ApiError (429) if that client sent this request, or the limit of waiting prompt tokens is exceeded.
        """
        waiting = [queued for queued in self._open if queued.is_queued and not queued.is_abandoned]
        check_tokens(waiting, num_prompt_tokens, max_tokens)
        if max_requests is None or len(waiting) < max(1, max_requests):
            return
        error = ApiError(
            429,
            f"the queue is full: {len(waiting)} requests are waiting for a replica, and the limit is {max_requests}; "
            "try again later",
            None,
            "queue_full",
        )
        counts = Counter(self._client_of[queued] for queued in waiting)
        client, most = counts.most_common(1)[0]
        if counts[CALLER.get().client] + 1 >= most:
            raise error
        newest = next(queued for queued in reversed(waiting) if self._client_of[queued] == client)
        newest.deliver(error)
        self.abandon(newest)

    def submit(self, queued: QueuedRequest) -> None:
        """Send a request to a replica."""
        task = asyncio.ensure_future(self._carry(queued))
        self._open[queued], self._client_of[queued] = task, CALLER.get().client
        task.add_done_callback(lambda _: self._forget(queued))

    def _forget(self, queued: QueuedRequest) -> None:
        self._open.pop(queued, None)
        self._client_of.pop(queued, None)

    def abandon(self, queued: QueuedRequest) -> None:
        """End a request on its replica; no effect on one that has already ended."""
        queued.is_abandoned = True
        if (task := self._open.get(queued)) is not None:
            task.cancel()

    def abort_all(self, error: ApiError) -> None:
        """End all requests with an error."""
        for queued in list(self._open):
            queued.deliver(error)
            self.abandon(queued)

    def stop(self, timeout: float) -> bool:
        """Return True, because this process does no computation for the replicas."""
        return True

    # -- one request -----------------------------------------------------------------------------------------------

    async def _carry(self, queued: QueuedRequest) -> None:
        """Run a request to its end or its error, and deliver that to the client."""
        try:
            await self._see_through(queued)
        except (ApiError, Failed) as error:
            queued.deliver(error if isinstance(error, ApiError) else _unavailable(str(error)))
        except Exception as error:
            logger.error("request %s ended in an error", CALLER.get().request_id, exc_info=error)
            queued.deliver(error)
        else:
            queued.deliver(None)

    async def _see_through(self, queued: QueuedRequest) -> None:
        served = self._fleet.served
        assert served is not None
        params = tuple(seeded(one, None, 0) for one in queued.params)
        queued.params = list(params)
        journal = Journal(params)
        queued.stream = cast("Any", journal)
        request_id, session, client = CALLER.get()
        name = next((name for name, llm in served.names.items() if llm is queued.llm), None)
        if name is None:
            raise model_changed()
        work = ReplicaRequest(
            request_id,
            name,
            tuple(queued.prompts),
            params,
            served.weights,
            served.fingerprint,
            session=session,
            wants_trees=queued.wants_trees,
            wants_news=queued.wants_news,
        )
        if self.queue is None:
            self.queue = FairQueue(served.num_rows)
        with self.queue.entered(client) as turn:
            await turn.granted
            self.queue.charge(turn, PROMPT_COST * queued.num_prompt_tokens)
            await self._try(FailoverState(queued, journal, work, self.metrics, self.queue, turn))

    async def _try(self, course: FailoverState) -> None:
        """Send the request to one replica after another until one finishes it."""
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
        """Send the request to one replica, and deliver its output.

        Raises: Failed if the replica is lost; ApiError if the request is wrong or no replica exists.
        """
        now = asyncio.get_running_loop().time()
        self._silent = {replica: until for replica, until in self._silent.items() if until > now}
        course.avoid(self._silent)
        async with aclosing(self._fleet.generate(course.work)) as messages:
            async for message in self._in_time(messages, course):
                match message:
                    case Routed(has_accepted=True):
                        self._silent.pop(message.replica, None)
                        course.accept(message.replica)
                    case Routed():
                        course.replica = message.replica
                    case Started():
                        course.begin(message)
                    case Delta():
                        course.deliver(message)
                    case Finished():
                        course.journal.end(message)
                        return
                    case DistantServed() if course.journal.num_tokens:
                        raise Failed("a replica has other weights than the replica that began the request")
                    case DistantServed():
                        self._fleet.adopt(message)
                        raise model_changed()
                    case ApiError(status=503):
                        raise Failed(f"a replica refused the request ({message.message})")
                    case ApiError():
                        raise message
        raise Failed("a replica ended the stream before its end")

    async def _in_time(self, messages: AsyncGenerator[Message, None], course: FailoverState) -> AsyncIterator[Message]:
        """Yield messages of the router and of the replica, as long as the replica sends signs of life.

        The wait for a replica with a free row is limited only by the timeout of the request.

        Raises: Failed; ApiError.
        """
        loop, patience = asyncio.get_running_loop(), self._settings.stall_timeout
        began = loop.time()
        while True:
            awaited = asyncio.ensure_future(anext(messages))
            try:
                last = loop.time()
                while not (await asyncio.wait([awaited], timeout=patience))[0]:
                    if loop.time() < last + patience + MOST_LATE:  # otherwise this process itself was stopped
                        self._check_silence(course.replica, max(began, self._heard), loop.time())
                    last = loop.time()
                message = await awaited
            except StopAsyncIteration:
                return
            finally:
                if awaited.cancel():
                    await asyncio.wait([awaited])  # the generator must not be closed while `anext` runs
            self._heard = loop.time()
            yield message

    def _check_silence(self, replica: str, since: float, now: float) -> None:
        """Raise the error for a silence.

        Raises: Failed if a replica was silent; ApiError if there has been no replica for ``absence_timeout``.
        """
        if replica:
            self._silent[replica] = now + max(SILENT_SECONDS, 2 * self._settings.stall_timeout)
            raise Failed(f"{replica} was silent for {self._settings.stall_timeout:g} seconds")
        if now - since >= self._settings.absence_timeout:
            raise _absent(self._settings.absence_timeout)


def _absent(seconds: float) -> ApiError:
    return ApiError(503, f"no replica has been available for {seconds:g} seconds; try again later", code="no_replicas")


def _unavailable(reason: str) -> ApiError:
    return ApiError(503, f"no replica could finish the request: {reason}; try again later", code="replicas_lost")


def with_callers(app: ASGIApp, has_keys: bool) -> ASGIApp:
    """Set `CALLER` for every request: its id, its ``x-session-id``, and its client.

    Args:
      has_keys: whether clients are identified by API key; otherwise by address.
    """

    async def noted(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            key = headers.get(b"authorization", b"").decode("latin-1") if has_keys else ""
            client = key or (scope.get("client") or ("",))[0]
            CALLER.set(
                Caller(_header_text(headers.get(REQUEST_ID)), _header_text(headers.get(b"x-session-id")), client)
            )
        await app(scope, receive, send)

    return noted


def _header_text(header: bytes | None) -> str:
    """Value of a header if it is safe in logs; otherwise empty."""
    return header.decode() if header is not None and ALLOWED_ID.fullmatch(header) else ""

"""One engine of a cluster: the thread of `foredraft.serve.bridge`, reached by messages instead of HTTP."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import platform
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from prometheus_client import Gauge

from foredraft.engine.frontend import StreamOutput
from foredraft.llm import LLM
from foredraft.serve.bridge import Bridge
from foredraft.serve.errors import ApiError
from foredraft.serve.metrics import OWN, Metrics
from foredraft.serve.queued_request import QueuedRequest
from foredraft.serve.ray.messages import Delta, DistantServed, Finished, Message, ReplicaRequest, Routed, Started
from foredraft.serve.served import Served
from foredraft.serve.settings import SIGN_SECONDS

logger = logging.getLogger("foredraft.serve")

INFO = ("model_name", "pid", "host", "fingerprint")
MESSAGE_SECONDS = 0.002
"""Between the messages of a replica, which take processors' time at both ends. With many requests at once, what several
steps have brought one of them travels together."""


class Replica:
    """Models in memory that take requests of an ingress.

    Args:
      load: loads the models; called in the thread of the engine.
      model: label of the metrics.
      name: name of the replica.
      step_timeout: seconds that a step may take; during a longer step the replica counts as not alive.
      message_seconds: least time between messages of one request.

    Attributes:
      description: served models, as an ingress gets them.

    Raises: whatever error kept the models from being loaded.
    """

    def __init__(
        self,
        load: Callable[[], Served],
        model: str,
        name: str,
        step_timeout: float = math.inf,
        message_seconds: float = MESSAGE_SECONDS,
    ) -> None:
        self._load = load
        self.name = name
        self._step_timeout, self._message_seconds = step_timeout, message_seconds
        self._num_open = 0
        loaded = threading.Event()
        self._metrics = Metrics(model)
        self._bridge = Bridge(self._loaded, self._metrics)
        self._bridge.start(loaded.set)
        loaded.wait()
        if self._bridge.error is not None:
            raise self._bridge.error
        info = Gauge(OWN + "replica_info", "Where a replica runs.", INFO, registry=self._metrics.registry)
        info.labels(model, str(os.getpid()), platform.node(), self.description.fingerprint).set(1)

    def _loaded(self) -> Sequence[LLM]:
        self._served = self._load()
        self._served.warm()
        self.description = DistantServed(self._served)
        return self._served.llms

    @property
    def is_alive(self) -> bool:
        return self._bridge.is_running and self._bridge.seconds_in_step < self._step_timeout

    @property
    def page(self) -> bytes:
        """All samples in the text format of Prometheus."""
        return self._metrics.page()

    async def generate(self, work: ReplicaRequest) -> AsyncGenerator[Message, None]:
        """Do a request from where it stands; ending early ends it in the engine before the next step."""
        if work.weights != self.description.weights:
            yield self.description
            return
        yield Routed(self.name, has_accepted=True)
        self._num_open += 1
        try:
            async with aclosing(self._generate(work)) as messages:
                async for message in messages:
                    yield message
        finally:
            self._num_open -= 1

    async def _generate(self, work: ReplicaRequest) -> AsyncGenerator[Message, None]:
        llm = self._served.names.get(work.name, self._served.llm)  # deployed anew without it: the texts are the same
        prepared = asyncio.ensure_future(asyncio.to_thread(_prepare, llm, work))
        while not (await asyncio.wait([prepared], timeout=SIGN_SECONDS))[0]:
            yield Delta()
        if (error := prepared.exception()) is not None:
            yield ApiError.of(error)
            return
        ticket = QueuedRequest(llm, work.continued, work.params)
        logger.info("request %s: taken in by %s after %d tokens", work.request_id, self.name, _num_delivered(work))
        self._bridge.submit(ticket)
        try:
            async with aclosing(self._messages(ticket, work)) as messages:
                async for message in messages:
                    yield message
        finally:
            self._bridge.abandon(ticket)

    async def _messages(self, ticket: QueuedRequest, work: ReplicaRequest) -> AsyncGenerator[Message, None]:
        now = asyncio.get_running_loop().time
        awaited = asyncio.ensure_future(ticket.news())
        came: list[StreamOutput] = []
        has_begun, due = False, now()
        try:
            while True:
                await asyncio.wait([awaited], timeout=max(0.0, due - now()) if came else SIGN_SECONDS)
                if not awaited.done() and not came:
                    if not self.is_alive:
                        yield ApiError(503, f"a step takes longer than {self._step_timeout:g} seconds")
                        return
                    yield Delta()
                if awaited.done():
                    try:
                        news = awaited.result()
                    except Exception as error:
                        if came:
                            yield _news(ticket, work, came)
                        yield ApiError.of(error)
                        return
                    if not has_begun:
                        has_begun = True
                        yield Started(self.description.fingerprint)
                    if news is None:
                        break
                    came += news
                    awaited = asyncio.ensure_future(ticket.news())
                if came and now() >= due:
                    yield _news(ticket, work, came)
                    came = []
                    due = now() + (self._message_seconds * self._num_open if work.wants_news else SIGN_SECONDS)
            if came:
                yield _news(ticket, work, came)
            assert ticket.stream is not None
            yield Finished(tuple(ticket.outputs()), ticket.stream.stats, ticket.stream.num_cached_tokens)
        finally:
            awaited.cancel()


def _prepare(llm: LLM, work: ReplicaRequest) -> None:
    """Compile grammars, which takes time."""
    for params in {id(one): one for one in work.params}.values():
        llm.prepare(params)


def _news(ticket: QueuedRequest, work: ReplicaRequest, came: Sequence[StreamOutput]) -> Delta:
    assert ticket.stream is not None
    deltas = tuple(_light(delta, work) for delta in came)
    return Delta(deltas, ticket.stream.stats, ticket.stream.num_cached_tokens)


def _light(delta: StreamOutput, work: ReplicaRequest) -> StreamOutput:
    """A delta without what nobody reads."""
    return delta if work.wants_trees else replace(delta, tree=None, segments=())


def _num_delivered(work: ReplicaRequest) -> int:
    return sum(len(ids) for said in work.output_ids for ids in said)

"""Replica of a cluster: one engine thread of `foredraft.serve.bridge`, driven by messages instead of HTTP."""

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
"""Minimum time between messages of a replica, per open request, because messages cost processor time on both sides.
With many open requests, one message carries the output of several steps."""


class Replica:
    """Models in memory that process requests of an ingress.

    Args:
      load: function that loads the models; called in the engine thread.
      model: value of the label ``model_name`` of the metrics.
      name: name of the replica.
      step_timeout: maximum duration of a step, in seconds; during a longer step the replica counts as not alive.
      message_seconds: minimum time between messages of one request, in seconds, per open request.

    Attributes:
      description: served models in the form that an ingress receives.

    Raises: the error that prevented the models from being loaded.
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
        info = Gauge(OWN + "replica_info", "Process and host of a replica.", INFO, registry=self._metrics.registry)
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
        """All samples in the Prometheus text format."""
        return self._metrics.page()

    async def generate(self, work: ReplicaRequest) -> AsyncGenerator[Message, None]:
        """Run a request from its current state and yield its messages. Closing the generator early ends the request
        before the next step."""
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
        # A new deployment may lack the name. The default method generates the same tokens.
        llm = self._served.names.get(work.name, self._served.llm)
        prepared = asyncio.ensure_future(asyncio.to_thread(_prepare, llm, work))
        while not (await asyncio.wait([prepared], timeout=SIGN_SECONDS))[0]:
            yield Delta()
        if (error := prepared.exception()) is not None:
            yield ApiError.of(error)
            return
        queued = QueuedRequest(llm, work.continued, work.params)
        logger.info("request %s: accepted by %s after %d tokens", work.request_id, self.name, _num_delivered(work))
        self._bridge.submit(queued)
        try:
            async with aclosing(self._messages(queued, work)) as messages:
                async for message in messages:
                    yield message
        finally:
            self._bridge.abandon(queued)

    async def _messages(self, queued: QueuedRequest, work: ReplicaRequest) -> AsyncGenerator[Message, None]:
        now = asyncio.get_running_loop().time
        awaited = asyncio.ensure_future(queued.news())
        came: list[StreamOutput] = []
        has_begun, due = False, now()
        try:
            while True:
                await asyncio.wait([awaited], timeout=max(0.0, due - now()) if came else SIGN_SECONDS)
                if not awaited.done() and not came:
                    if not self.is_alive:
                        yield ApiError(
                            503, f"an engine step takes longer than {self._step_timeout:g} seconds (step_timeout)"
                        )
                        return
                    yield Delta()
                if awaited.done():
                    try:
                        news = awaited.result()
                    except Exception as error:
                        if came:
                            yield _news(queued, work, came)
                        yield ApiError.of(error)
                        return
                    if not has_begun:
                        has_begun = True
                        yield Started(self.description.fingerprint)
                    if news is None:
                        break
                    came += news
                    awaited = asyncio.ensure_future(queued.news())
                if came and now() >= due:
                    yield _news(queued, work, came)
                    came = []
                    due = now() + (self._message_seconds * self._num_open if work.wants_news else SIGN_SECONDS)
            if came:
                yield _news(queued, work, came)
            assert queued.stream is not None
            yield Finished(tuple(queued.outputs()), queued.stream.stats, queued.stream.num_cached_tokens)
        finally:
            awaited.cancel()


def _prepare(llm: LLM, work: ReplicaRequest) -> None:
    """Compile the grammars of a request, which is slow."""
    for params in {id(one): one for one in work.params}.values():
        llm.prepare(params)


def _news(queued: QueuedRequest, work: ReplicaRequest, came: Sequence[StreamOutput]) -> Delta:
    assert queued.stream is not None
    deltas = tuple(_light(delta, work) for delta in came)
    return Delta(deltas, queued.stream.stats, queued.stream.num_cached_tokens)


def _light(delta: StreamOutput, work: ReplicaRequest) -> StreamOutput:
    """Delta without the parts that the ingress does not read."""
    return delta if work.wants_trees else replace(delta, tree=None, segments=())


def _num_delivered(work: ReplicaRequest) -> int:
    return sum(len(ids) for said in work.output_ids for ids in said)

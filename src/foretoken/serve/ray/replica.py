"""One engine of a cluster: the thread of `foretoken.serve.bridge`, asked in messages instead of HTTP."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from prometheus_client import Gauge

from foretoken.errors import ForetokenError
from foretoken.serve.bridge import Bridge, Ticket
from foretoken.serve.metrics import OWN, Metrics
from foretoken.serve.ray.messages import Begun, Ended, Facts, Message, News, Other, Refused, Work

if TYPE_CHECKING:
    from foretoken.llm import LLM
    from foretoken.serve.served import Served
    from foretoken.sessions.outputs import StreamOutput

logger = logging.getLogger("foretoken.serve")

INFO = ("model_name", "pid", "host", "fingerprint")
SIGN_SECONDS = 1.0
"""Of silence, after which a replica shows that it is alive."""


class Replica:
    """A model in memory that takes requests of an ingress.

    Args:
      load: makes what is served; called in the thread of the engine.
      model: label of its figures.
      name: of the replica.

    Raises: what has kept the model from being loaded.
    """

    def __init__(self, load: Callable[[], Served], model: str, name: str) -> None:
        self._load = load
        self.name = name
        loaded = threading.Event()
        self._metrics = Metrics(model)
        self._bridge = Bridge(self._loaded, self._metrics)
        self._bridge.start(loaded.set)
        loaded.wait()
        if self._bridge.error is not None:
            raise self._bridge.error
        info = Gauge(OWN + "replica_info", "Where a replica runs.", INFO, registry=self._metrics.registry)
        info.labels(model, str(os.getpid()), platform.node(), self.facts.fingerprint).set(1)

    def _loaded(self) -> Sequence[LLM]:
        self._served = self._load()
        self._served.warm()
        self.facts = Facts.of(self._served)
        return self._served.llms

    @property
    def is_alive(self) -> bool:
        return self._bridge.is_running

    @property
    def page(self) -> bytes:
        """What Prometheus reads."""
        return self._metrics.page()

    async def generate(self, work: Work) -> AsyncGenerator[Message, None]:
        """Do a request from where it stands; ending early ends it in the engine before the next step."""
        if work.weights != self.facts.weights:
            yield Other(self.name, self.facts)
            return
        llm = self._served.names.get(work.name, self._served.llm)  # deployed anew without it: the texts are the same
        try:
            for params in {id(one): one for one in work.params}.values():
                await asyncio.get_running_loop().run_in_executor(None, llm.prepare, params)
        except ForetokenError as error:
            yield Refused.of(error)
            return
        ticket = Ticket(llm, work.continued, work.params)
        logger.info("request %s: taken in by %s after %d tokens", work.request_id, self.name, _num_delivered(work))
        self._bridge.submit(ticket)
        try:
            async for message in self._messages(ticket, work):
                yield message
        finally:
            self._bridge.abandon(ticket)

    async def _messages(self, ticket: Ticket, work: Work) -> AsyncGenerator[Message, None]:
        awaited = asyncio.ensure_future(ticket.news())
        has_begun = False
        try:
            while True:
                await asyncio.wait([awaited], timeout=SIGN_SECONDS)
                if not awaited.done():
                    if has_begun:
                        yield News()
                    continue
                try:
                    news = awaited.result()
                except Exception as error:
                    yield Refused.of(error)
                    return
                assert ticket.stream is not None
                if news is None:
                    stream = ticket.stream
                    yield Ended(tuple(ticket.outputs()), stream.stats, stream.num_cached_tokens)
                    return
                awaited = asyncio.ensure_future(ticket.news())
                if not has_begun:
                    has_begun = True
                    yield Begun(self.name, self.facts.fingerprint)
                if news:
                    yield News(
                        tuple(_light(delta, work) for delta in news),
                        ticket.stream.stats,
                        ticket.stream.num_cached_tokens,
                    )
        finally:
            awaited.cancel()


def _light(delta: StreamOutput, work: Work) -> StreamOutput:
    """A delta without what nobody reads."""
    return delta if work.wants_trees else replace(delta, tree=None, segments=())


def _num_delivered(work: Work) -> int:
    return sum(len(ids) for said in work.output_ids for ids in said)

"""Connection of one process to the replicas of a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import replace

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from foredraft.serve.app import Application
from foredraft.serve.ray.messages import DistantServed, Failed, Message, ReplicaRequest, Routed

DESCRIBE_SECONDS = 600.0


class RayFleet:
    """Replicas behind a Ray Serve handle.

    Attributes:
      served: models that the replicas serve; None before `learn`.
      application: application that is updated when other weights are deployed; None for none.
    """

    def __init__(self) -> None:
        self.served: DistantServed | None = None
        self.application: Application | None = None

    def adopt(self, served: DistantServed) -> None:
        """Switch to newly deployed models."""
        self.served = served
        if self.application is not None:
            self.application.served = served

    def connect(self, handle: DeploymentHandle) -> None:
        """Set the handle of the replicas."""
        self._describe = handle.options(method_name="describe")
        self._generate = handle.options(method_name="generate", stream=True)

    async def generate(self, work: ReplicaRequest) -> AsyncGenerator[Message, None]:
        """Yield the messages of the router and of one replica for a request.

        Raises: Failed for every error that is not caused by the request.
        """
        loop = asyncio.get_running_loop()
        routed: asyncio.Queue[Routed] = asyncio.Queue()

        def route(replica: str) -> None:  # called in the thread of the router
            with suppress(RuntimeError):  # the loop has been closed, together with the request
                loop.call_soon_threadsafe(routed.put_nowait, Routed(replica))

        answer = self._generate.remote(replace(work, route=route))
        try:
            async with aclosing(merged(routed, answer)) as messages:
                async for message in messages:
                    yield message
        except (RayError, RayServeException):
            raise Failed("a replica was lost") from None
        finally:
            answer.cancel()

    def learn(self) -> DistantServed:
        """Fetch the served models from one of the replicas. Fetching blocks, so it must not be called in the event
        loop."""
        served: DistantServed = self._describe.remote().result(timeout_s=DESCRIBE_SECONDS)
        self.adopt(served)
        return served


async def merged(routed: asyncio.Queue[Routed], answer: AsyncIterator[Message]) -> AsyncGenerator[Message, None]:
    """Yield messages of the router until the replica answers, then messages of the replica."""
    first, sent = asyncio.ensure_future(anext(answer)), asyncio.ensure_future(routed.get())
    try:
        while not first.done():
            await asyncio.wait([first, sent], return_when=asyncio.FIRST_COMPLETED)
            if sent.done():
                yield sent.result()
                sent = asyncio.ensure_future(routed.get())
        yield first.result()
    except StopAsyncIteration:
        return
    finally:
        first.cancel()
        sent.cancel()
    async for message in answer:
        yield message

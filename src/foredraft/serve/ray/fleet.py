"""Replicas of a cluster as one process sees them."""

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
    """Engines behind a handle, once there is one.

    Attributes:
      served: models that the engines serve; None before they were asked.
      application: gets the models when other weights are deployed; None for nobody.
    """

    def __init__(self) -> None:
        self.served: DistantServed | None = None
        self.application: Application | None = None

    def adopt(self, served: DistantServed) -> None:
        """Take over models with other weights, which were deployed."""
        self.served = served
        if self.application is not None:
            self.application.served = served

    def connect(self, handle: DeploymentHandle) -> None:
        """Ask these engines from now on."""
        self._describe = handle.options(method_name="describe")
        self._generate = handle.options(method_name="generate", stream=True)

    async def generate(self, work: ReplicaRequest) -> AsyncGenerator[Message, None]:
        """Messages of the router and of one replica.

        Raises: Failed for every error that is not the fault of the request.
        """
        loop = asyncio.get_running_loop()
        routed: asyncio.Queue[Routed] = asyncio.Queue()

        def route(replica: str) -> None:  # called in the thread of the router
            with suppress(RuntimeError):  # the loop has ended, and the request with it
                loop.call_soon_threadsafe(routed.put_nowait, Routed(replica))

        answer = self._generate.remote(replace(work, route=route))
        try:
            async with aclosing(merged(routed, answer)) as messages:
                async for message in messages:
                    yield message
        except (RayError, RayServeException) as error:
            raise Failed(f"a replica was lost ({type(error).__name__})") from None
        finally:
            answer.cancel()

    def learn(self) -> DistantServed:
        """Ask one of the engines for its models, from a thread that may wait."""
        served: DistantServed = self._describe.remote().result(timeout_s=DESCRIBE_SECONDS)
        self.adopt(served)
        return served


async def merged(routed: asyncio.Queue[Routed], answer: AsyncIterator[Message]) -> AsyncGenerator[Message, None]:
    """Messages of the router until a replica answers, then the messages of the replica."""
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

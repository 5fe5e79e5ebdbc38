"""The two deployments: engines that hold the model, and ingresses that speak HTTP."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import Any, cast

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from foredraft.errors import ForedraftError, described
from foredraft.serve.app import Application
from foredraft.serve.guards import Numbered
from foredraft.serve.metrics import ClusterMetrics
from foredraft.serve.ray.config import ClusterConfig
from foredraft.serve.ray.failover import Called, ClusterBridge
from foredraft.serve.ray.messages import Distant, Facts, Failed, Message, ReplicaRequest, Route
from foredraft.serve.ray.replica import Replica
from foredraft.serve.ray.router import PrefixRouter
from foredraft.serve.ray.watchdog import start_watchdog
from foredraft.serve.served import Served, with_kv_limit

COLLECTOR = "foredraft-figures"
NUM_CHECKS = 3
"""Checks of its health that a replica must miss in a row before Ray replaces it; together they are one stall."""
CHECK_SECONDS = 2.0
"""Between one check and the next."""
MIN_PAUSE_SECONDS = 0.01
MAX_PAUSE_SECONDS = 0.05
"""From one question to full replicas whether they have room to the next: each costs both ends some of a processor."""
PUSH_SECONDS = 1.0
PAGE_SECONDS = 2.0
"""In which the collector must have answered; without it a page shows the ingress alone."""
STALE_SECONDS = 10.0
DESCRIBE_SECONDS = 600.0
MANY = 10_000
"""Requests that an ingress holds at once: all, since limits are told by its application and not by Ray."""


def load_served(config: ClusterConfig) -> Served:
    """The model of a config, in this process."""
    from foredraft.llm import LLM

    options = with_kv_limit(config.llm, config.num_engines)  # all replicas may run on one machine
    return config.offer.over(LLM(config.model, config.speculative_config, **options))


# -- figures -------------------------------------------------------------------------------------------------------


class Collector:
    """Keeps the newest page of every replica."""

    def __init__(self) -> None:
        self._pages: dict[str, tuple[float, bytes]] = {}

    def tell(self, replica: str, page: bytes) -> None:
        self._pages[replica] = (time.monotonic(), page)

    def pages(self) -> dict[str, bytes]:
        """Of the replicas that have been heard of lately."""
        now = time.monotonic()
        self._pages = {name: told for name, told in self._pages.items() if now - told[0] < STALE_SECONDS}
        return {name: page for name, (_, page) in self._pages.items()}


def collector() -> Any:
    """The one of this cluster, made by whoever asks first."""
    kind = ray.remote(Collector)
    options = {"name": COLLECTOR, "namespace": COLLECTOR, "get_if_exists": True, "lifetime": "detached"}
    return kind.options(**options, num_cpus=0, max_restarts=-1).remote()


def pages() -> Mapping[str, bytes]:
    """Pages of all replicas; none where the collector does not answer in time."""
    try:
        return cast("Mapping[str, bytes]", ray.get(collector().pages.remote(), timeout=PAGE_SECONDS))
    except RayError:
        return {}


# -- engines -------------------------------------------------------------------------------------------------------


class Engine:
    """A replica as Ray Serve runs it."""

    def __init__(self, config: ClusterConfig) -> None:
        context = serve.get_replica_context()
        try:
            name, patience = context.replica_id.unique_id, config.limits.step_timeout
            self._replica = Replica(partial(load_served, config), config.name, name, patience)
        except ForedraftError as error:  # in words that need no class of ours to be read
            raise RuntimeError(described(error)) from None
        start_watchdog(config.limits.stall_timeout + NUM_CHECKS * CHECK_SECONDS + config.drain_seconds)
        threading.Thread(target=self._push, name="foredraft-figures", daemon=True).start()

    def _push(self) -> None:
        pause = threading.Event()
        while not pause.wait(PUSH_SECONDS):
            with suppress(Exception):  # the collector is being moved; the next push finds it
                ray.get(collector().tell.remote(self._replica.name, self._replica.page), timeout=PAGE_SECONDS)

    async def generate(self, work: ReplicaRequest) -> AsyncGenerator[Message, None]:
        """See `Replica.generate`."""
        async with aclosing(self._replica.generate(work)) as messages:
            async for message in messages:
                yield message

    async def describe(self) -> Facts:
        return self._replica.facts

    def record_replica_metadata(self) -> dict[str, str]:
        """What the router knows of a replica."""
        return {"weights": self._replica.facts.weights, "fingerprint": self._replica.facts.fingerprint}

    def check_health(self) -> None:
        """Raises: where no request would be answered any more; Ray then replaces the replica."""
        if not self._replica.is_alive:
            raise RuntimeError("the thread of the engine has ended, or does not end its step")


def engines(config: ClusterConfig) -> serve.Application:
    """All engines, without HTTP."""
    scaling: dict[str, Any] = (
        {"num_replicas": config.num_replicas}
        if config.autoscaling is None
        else {"autoscaling_config": dict(config.autoscaling)}
    )
    deployment = serve.deployment(Engine).options(
        name="engine",
        max_ongoing_requests=config.max_ongoing_requests,
        graceful_shutdown_timeout_s=config.drain_seconds,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=CHECK_SECONDS,
        health_check_timeout_s=config.limits.stall_timeout / NUM_CHECKS,
        ray_actor_options={"num_cpus": config.num_cpus, "num_gpus": config.num_gpus},
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter,
            request_router_kwargs=dict(config.routing),
            initial_backoff_s=MIN_PAUSE_SECONDS,
            max_backoff_s=MAX_PAUSE_SECONDS,
        ),
        **scaling,
    )
    return deployment.bind(config)


class RayFleet:
    """The engines behind a handle, once there is one.

    Attributes:
      facts: what they serve, once they have said so.
      when_changed: told of it where that has become something else.
    """

    def __init__(self) -> None:
        self.facts: Facts | None = None
        self.when_changed: Callable[[Facts], None] = lambda facts: None

    def adopt(self, facts: Facts) -> None:
        """Other weights were deployed."""
        self.facts = facts
        self.when_changed(facts)

    def connect(self, handle: DeploymentHandle) -> None:
        """Ask these engines from now on."""
        self._describe = handle.options(method_name="describe")
        self._generate = handle.options(method_name="generate", stream=True)

    async def generate(self, work: ReplicaRequest) -> AsyncGenerator[Message, None]:
        """One of them does it.

        Raises: Failed, for all that is not the fault of the request.
        """
        route = Route()
        answer = self._generate.remote(replace(work, route=route))
        try:
            async with aclosing(merged(route, answer)) as messages:
                async for message in messages:
                    yield message
        except (RayError, RayServeException) as error:
            raise Failed(f"a replica was lost ({type(error).__name__})") from None
        finally:
            answer.cancel()

    def learn(self) -> Facts:
        """Ask one of them what it serves, from a thread that may wait."""
        self.facts = self._describe.remote().result(timeout_s=DESCRIBE_SECONDS)
        return self.facts


async def merged(route: Route, answer: AsyncIterator[Message]) -> AsyncGenerator[Message, None]:
    """Where a request was sent, until a replica answers; then what that one says."""
    first, sent = asyncio.ensure_future(anext(answer)), asyncio.ensure_future(route.sent())
    try:
        while not first.done():
            await asyncio.wait([first, sent], return_when=asyncio.FIRST_COMPLETED)
            if sent.done():
                yield sent.result()
                sent = asyncio.ensure_future(route.sent())
        yield first.result()
    except StopAsyncIteration:
        return
    finally:
        first.cancel()
        sent.cancel()
    async for message in answer:
        yield message


# -- ingresses -----------------------------------------------------------------------------------------------------


class Ingress:
    """The application of `foredraft serve` as Ray Serve runs it."""

    def __init__(self, config: ClusterConfig, handle: DeploymentHandle) -> None:
        fleet = RayFleet()
        fleet.connect(handle)
        metrics = ClusterMetrics(config.name, pages)
        bridge = ClusterBridge(fleet, metrics, config.limits)
        self._application = Application(bridge, config.settings, metrics)
        self._has_keys = bool(config.settings.api_keys)
        fleet.when_changed = partial(Distant.serve, self._application)
        # Ray sends requests here once this has returned: a rolling update keeps the old ingress as long
        with ThreadPoolExecutor(1, "foredraft-facts") as pool:
            self._application.served = Distant(pool.submit(fleet.learn).result())

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return Numbered(Called(self._application.build(), self._has_keys))


def build(app_config: Mapping[str, Any]) -> serve.Application:
    """A Serve application: ``serve run foredraft.serve.ray:build model=...``, or a YAML file's ``import_path``.

    Args:
      app_config: see `ClusterConfig`.

    Raises: ConfigError.
    """
    config = ClusterConfig.of(app_config)
    ingress = serve.deployment(serve.ingress()(Ingress)).options(
        name="ingress",
        num_replicas=config.num_ingresses,
        max_ongoing_requests=MANY,
        max_queued_requests=-1,
        graceful_shutdown_timeout_s=config.settings.request_timeout,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=2.0,
        health_check_timeout_s=10.0,
        ray_actor_options={"num_cpus": 0},
    )
    return ingress.bind(config, engines(config))

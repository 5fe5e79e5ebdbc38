"""Ray Serve deployments: engines, which run the model, and ingresses, which serve HTTP."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, cast

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from foredraft.errors import ForedraftError, error_with_type
from foredraft.serve.app import Application
from foredraft.serve.guards import with_request_ids
from foredraft.serve.metrics import ClusterMetrics
from foredraft.serve.ray.config import ClusterConfig
from foredraft.serve.ray.failover import ClusterBridge, with_callers
from foredraft.serve.ray.fleet import RayFleet
from foredraft.serve.ray.messages import DistantServed, Message, ReplicaRequest
from foredraft.serve.ray.replica import Replica
from foredraft.serve.ray.router import PrefixRouter
from foredraft.serve.ray.watchdog import start_watchdog
from foredraft.serve.served import Served, with_kv_limit

COLLECTOR = "foredraft-figures"
NUM_CHECKS = 3
"""Number of consecutive health checks that a replica must miss before Ray replaces it; together they last one stall
timeout."""
CHECK_SECONDS = 2.0
"""Interval of health checks."""
MIN_PAUSE_SECONDS = 0.01
MAX_PAUSE_SECONDS = 0.05
"""Minimum and maximum pause between attempts to find a free row on full replicas. Each attempt costs processor time on
both sides."""
PUSH_SECONDS = 1.0
PAGE_SECONDS = 2.0
"""Time limit for the collector; if it does not respond in time, the metrics page contains only the ingress's own
metrics."""
STALE_SECONDS = 10.0
MANY = 10_000
"""Maximum number of requests on an ingress for Ray; effectively no limit, because the application enforces its own."""


def load_served(config: ClusterConfig) -> Served:
    """Load the model of a config in this process."""
    from foredraft.llm import LLM

    options = with_kv_limit(config.llm, config.num_engines)  # all replicas may run on one machine
    return config.offer.over(LLM(config.model, config.speculative_config, **options))


# -- metrics -------------------------------------------------------------------------------------------------------


class Collector:
    """Actor that stores the newest metrics page of every replica."""

    def __init__(self) -> None:
        self._pages: dict[str, tuple[float, bytes]] = {}

    def tell(self, replica: str, page: bytes) -> None:
        self._pages[replica] = (time.monotonic(), page)

    def pages(self) -> dict[str, bytes]:
        """Pages of the replicas that have reported recently."""
        now = time.monotonic()
        self._pages = {name: page for name, page in self._pages.items() if now - page[0] < STALE_SECONDS}
        return {name: page for name, (_, page) in self._pages.items()}


def collector() -> Any:
    """Return the collector of this cluster; the first caller creates it."""
    kind = ray.remote(Collector)
    options = {"name": COLLECTOR, "namespace": COLLECTOR, "get_if_exists": True, "lifetime": "detached"}
    return kind.options(**options, num_cpus=0, max_restarts=-1).remote()


def pages() -> Mapping[str, bytes]:
    """Metrics pages of all replicas; empty if the collector does not respond in time."""
    try:
        return cast("Mapping[str, bytes]", ray.get(collector().pages.remote(), timeout=PAGE_SECONDS))
    except RayError:
        return {}


# -- engines -------------------------------------------------------------------------------------------------------


class Engine:
    """Ray Serve deployment class of a replica."""

    def __init__(self, config: ClusterConfig) -> None:
        context = serve.get_replica_context()
        try:
            name, patience = context.replica_id.unique_id, config.limits.step_timeout
            self._replica = Replica(partial(load_served, config), config.name, name, patience)
        except ForedraftError as error:  # Ray may unpickle the error where foredraft is not installed
            raise RuntimeError(error_with_type(error)) from None
        start_watchdog(config.limits.stall_timeout + NUM_CHECKS * CHECK_SECONDS + config.drain_seconds)
        threading.Thread(target=self._push, name="foredraft-figures", daemon=True).start()

    def _push(self) -> None:
        pause = threading.Event()
        while not pause.wait(PUSH_SECONDS):
            with suppress(Exception):  # the collector may be restarting; the next push reaches it
                ray.get(collector().tell.remote(self._replica.name, self._replica.page), timeout=PAGE_SECONDS)

    async def generate(self, work: ReplicaRequest) -> AsyncGenerator[Message, None]:
        """Run a request; see `Replica.generate`."""
        async with aclosing(self._replica.generate(work)) as messages:
            async for message in messages:
                yield message

    async def describe(self) -> DistantServed:
        return self._replica.description

    def record_replica_metadata(self) -> dict[str, str]:
        """Facts about this replica for the router."""
        return {name: getattr(self._replica.description, name) for name in ("weights", "fingerprint")}

    def check_health(self) -> None:
        """Report whether the replica can serve requests; Ray replaces it if not.

        Raises: RuntimeError if the engine thread has ended or its step takes too long.
        """
        if not self._replica.is_alive:
            raise RuntimeError("the engine thread has ended, or its current step takes longer than step_timeout")


def engines(config: ClusterConfig) -> serve.Application:
    """Return the application of the engines, without HTTP."""
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


# -- ingresses -----------------------------------------------------------------------------------------------------


class Ingress:
    """Ray Serve deployment class of the application of `foredraft serve`."""

    def __init__(self, config: ClusterConfig, handle: DeploymentHandle) -> None:
        fleet = RayFleet()
        fleet.connect(handle)
        bridge = ClusterBridge(fleet, ClusterMetrics(config.name, pages), config.limits)
        self._application = fleet.application = Application(bridge, config.settings)
        self._has_keys = bool(config.settings.api_keys)
        # Ray routes requests to this ingress once __init__ has returned. Until then a rolling update keeps the old one.
        with ThreadPoolExecutor(1, "foredraft-facts") as pool:
            pool.submit(fleet.learn).result()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return with_request_ids(with_callers(self._application.build(), self._has_keys))


def build(app_config: Mapping[str, Any]) -> serve.Application:
    """Return a Serve application, for ``serve run foredraft.serve.ray:build model=...`` or the ``import_path`` of a
    YAML file.

    Args:
      app_config: fields of `ClusterConfig`.

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

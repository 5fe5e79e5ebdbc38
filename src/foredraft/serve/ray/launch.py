"""``foredraft serve --replicas``: engines in a Ray cluster, and the HTTP server in this process."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial

from foredraft.errors import ConfigError
from foredraft.llm import LLM
from foredraft.serve.bridge import Backend
from foredraft.serve.metrics import ClusterMetrics
from foredraft.serve.ray.config import ClusterConfig
from foredraft.serve.ray.failover import ClusterBridge, with_callers
from foredraft.serve.served import Served
from foredraft.serve.server import Server

APPLICATION = "foredraft"
STORE_BYTES = 100_000_000
"""Size of Ray's object store, in bytes; messages are small."""


def start_ray(address: str | None, num_cpus: float) -> None:
    """Join a Ray cluster, or start one on this machine.

    Ray runs its workers at niceness 15, at which they get little processor time beside other work. A cluster that
    `start_ray` starts runs its workers at the niceness of this process. A cluster that is joined keeps its own setting.

    Args:
      address: address of the cluster to join; None to start one.
      num_cpus: number of processors that the new cluster reports, whatever the machine has.

    Raises: ConfigError if no cluster can be joined or started.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    quiet = {"logging_level": logging.ERROR, "log_to_driver": False, "configure_logging": False}
    try:
        if address is not None:
            ray.init(address=address, **quiet)
        else:
            ray.init(
                address="local",
                num_cpus=max(1, round(num_cpus)),
                object_store_memory=STORE_BYTES,
                _system_config={"worker_niceness": 0},
                include_dashboard=False,
                **quiet,
            )
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"no Ray cluster could be joined or started: {str(error)[:300]}; check --ray-address, or leave it out to "
            "start a cluster on this machine"
        ) from None


def serve_cluster(
    config: ClusterConfig, address: str | None, *, host: str, port: int, say: Callable[[str], None]
) -> None:
    """Serve until a signal arrives. The engines end together with this process.

    Raises: ConfigError; the error that prevented the engines from starting.
    """
    start_ray(address, config.num_replicas * config.num_cpus)
    import ray
    from ray import serve

    from foredraft.serve.ray import deployment
    from foredraft.serve.ray.fleet import RayFleet

    fleet = RayFleet()

    def load() -> Served:
        serve.start(proxy_location="Disabled")
        application = deployment.engines(config)
        try:
            handle = serve.run(application, name=APPLICATION, route_prefix=None)
        except RuntimeError as error:
            raise ConfigError(f"the replicas did not start: {error}") from None
        fleet.connect(handle)
        return fleet.learn()

    def make(loaded: Callable[[], Sequence[LLM]], name: str) -> Backend:
        return ClusterBridge(fleet, ClusterMetrics(name, deployment.pages), config.limits, loaded)

    wrap = partial(with_callers, has_keys=bool(config.settings.api_keys))
    try:
        server = Server(load, config.name, config.settings, host=host, port=port, say=say, make=make, wrap=wrap)
        fleet.application = server.application
        server.run_until_end()
    finally:
        serve.shutdown()
        ray.shutdown()

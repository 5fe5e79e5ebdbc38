"""Several servers behind one endpoint with Ray Serve. `build` returns a Serve application; `foredraft serve --replicas`
is its short form."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from foredraft.errors import ConfigError
from foredraft.extras import install_command

if TYPE_CHECKING:
    from ray.serve import Application


def check_ray(address: str | None) -> None:
    """Check that Ray is installed and that the address allows routing to replicas.

    Raises: ConfigError.
    """
    if address is not None and address.startswith("ray://"):
        raise ConfigError(
            f"--ray-address is {address!r}, an address of Ray Client, with which requests cannot be routed to "
            "replicas; run this command on a machine of the cluster, with HOST:6379 or auto"
        )
    if find_spec("ray") is None:
        raise ConfigError(f"--replicas needs Ray; install it with: {install_command('ray')}")


def build(app_config: Mapping[str, Any]) -> Application:
    """Return the Serve application of `foredraft.serve.ray.deployment.build`. `build` can be imported without Ray."""
    from foredraft.serve.ray import deployment

    return deployment.build(app_config)

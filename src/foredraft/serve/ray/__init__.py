"""Many servers as one, by Ray Serve: `build` is a Serve application, `foredraft serve --replicas` its short form."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from foredraft.errors import ConfigError
from foredraft.extras import install_command

if TYPE_CHECKING:
    from ray.serve import Application


def check_ray(address: str | None) -> None:
    """Raises: ConfigError where Ray is not installed, or cannot be reached so that replicas can be chosen."""
    if address is not None and address.startswith("ray://"):
        raise ConfigError(
            f"--ray-address is {address!r}, of Ray's client, which cannot choose among replicas; run on a machine of "
            "the cluster, with HOST:6379 or auto"
        )
    if find_spec("ray") is None:
        raise ConfigError(f"--replicas needs Ray; install it with: {install_command('ray')}")


def build(app_config: Mapping[str, Any]) -> Application:
    """The Serve application of `foredraft.serve.ray.deployment.build`, importable without Ray."""
    from foredraft.serve.ray import deployment

    return deployment.build(app_config)

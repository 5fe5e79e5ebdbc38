"""Cluster configuration as plain data: the ``args`` of a Serve YAML file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from foredraft.config.engine import EngineConfig
from foredraft.errors import ConfigError
from foredraft.serve.served import ServedModels
from foredraft.serve.settings import FailoverSettings, ServerSettings


@dataclass(frozen=True)
class ClusterConfig:
    """Options of `foredraft.serve.ray.build`.

    Args:
      model: model, as for `foredraft.LLM`; every machine must be able to load it.
      speculative_config: drafting method, as for `foredraft.LLM`.
      drafting: additional drafting methods as ``NAME=METHOD`` or ``NAME=JSON``.
      served_model_name: names of the model in requests; the value of ``model`` by default.
      chat_template: template that replaces the model's own.
      llm: additional arguments of `foredraft.LLM`.
      server: fields of `ServerSettings`.
      failover: fields of `FailoverSettings`.
      routing: arguments of `Affinity`.
      num_replicas: number of replicas; ignored with ``autoscaling``, which has min_replicas and max_replicas.
      num_ingresses: number of HTTP processes; ignored by ``foredraft serve``, which is the HTTP process itself.
      num_cpus, num_gpus: resources of each replica; num_cpus is also its number of threads.
      autoscaling: fields of Ray Serve's ``autoscaling_config``.
      drain_seconds: time in which requests can finish on a replica that is being removed. After it, they continue on
        another replica.
    """

    model: str
    speculative_config: Any = None
    drafting: tuple[str, ...] = ()
    served_model_name: tuple[str, ...] = ()
    chat_template: str | None = None
    llm: Mapping[str, Any] = field(default_factory=dict)
    server: Mapping[str, Any] = field(default_factory=dict)
    failover: Mapping[str, Any] = field(default_factory=dict)
    routing: Mapping[str, Any] = field(default_factory=dict)
    num_replicas: int = 1
    num_ingresses: int = 1
    num_cpus: float = 1
    num_gpus: float = 0
    autoscaling: Mapping[str, Any] | None = None
    drain_seconds: float = 20.0

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> ClusterConfig:
        """Parse a mapping of options.

        Raises: ConfigError for an unknown key or a value out of range.
        """
        _check("the application", given, cls)
        config = cls(**_frozen(given))
        for name, kind in (("server", ServerSettings), ("failover", FailoverSettings)):
            _check(name, getattr(config, name), kind)
        config.settings, config.limits, config.offer  # noqa: B018  # validates them before they reach another machine
        if config.num_replicas < 1 or config.num_ingresses < 1:
            raise ConfigError("num_replicas and num_ingresses must be 1 or more")
        return config

    @property
    def name(self) -> str:
        """First name of the model in requests."""
        return self.served_model_name[0] if self.served_model_name else self.model

    @property
    def max_ongoing_requests(self) -> int:
        """Maximum number of requests on a replica, equal to the number of rows that run at once."""
        return int(self.llm.get("max_num_seqs", EngineConfig.max_num_seqs))

    @property
    def num_engines(self) -> int:
        """Maximum number of engines in all replicas together, one per drafting method and replica."""
        num_replicas = int((self.autoscaling or {}).get("max_replicas", self.num_replicas))
        return num_replicas * self.offer.num_engines

    @property
    def offer(self) -> ServedModels:
        """Served names and drafting methods."""
        return ServedModels.of(self.served_model_name or [self.model], self.drafting, self.chat_template)

    @property
    def settings(self) -> ServerSettings:
        return ServerSettings(**_frozen(self.server))

    @property
    def limits(self) -> FailoverSettings:
        return FailoverSettings(**self.failover)


def _check(what: str, given: Mapping[str, Any], kind: type) -> None:
    known = [each.name for each in fields(kind)]
    unknown = sorted(set(given) - set(known))
    if unknown or ("model" in known and "model" not in given):
        said = f"{what} has no option {unknown[0]!r}" if unknown else f"{what} needs the option 'model'"
        raise ConfigError(f"{said}; the options are {', '.join(known)}")


def _frozen(given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert lists to tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}

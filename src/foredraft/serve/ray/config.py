"""Configuration of a cluster as plain data: the ``args`` of a YAML file."""

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
      speculative_config: how to draft.
      drafting: further ways, ``NAME=METHOD`` or ``NAME=JSON``.
      served_model_name: names of the model in requests, by default what was given as the model.
      chat_template: in place of the model's own.
      llm: further arguments of `foredraft.LLM`.
      server: fields of `ServerSettings`.
      failover: fields of `FailoverSettings`.
      routing: arguments of `Affinity`.
      num_replicas: number of engines; with ``autoscaling``, its min_replicas and max_replicas count instead.
      num_ingresses: processes that take HTTP; not for the command line, which is one itself.
      num_cpus, num_gpus: resources of each replica; num_cpus is also its number of threads.
      autoscaling: fields of Ray Serve's ``autoscaling_config``.
      drain_seconds: time that requests have on a replica that is removed; then they continue elsewhere.
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
        """Raises: ConfigError for a key that is not known, or a value out of range."""
        _check("the application", given, cls)
        config = cls(**_frozen(given))
        for name, kind in (("server", ServerSettings), ("failover", FailoverSettings)):
            _check(name, getattr(config, name), kind)
        config.settings, config.limits, config.offer  # noqa: B018  # checked here instead of on another machine
        if config.num_replicas < 1 or config.num_ingresses < 1:
            raise ConfigError("num_replicas and num_ingresses must be 1 or more")
        return config

    @property
    def name(self) -> str:
        """The first name of the model in requests."""
        return self.served_model_name[0] if self.served_model_name else self.model

    @property
    def max_ongoing_requests(self) -> int:
        """Requests that a replica takes: as many as rows run at once."""
        return int(self.llm.get("max_num_seqs", EngineConfig.max_num_seqs))

    @property
    def num_engines(self) -> int:
        """Engines that there may be at once, in all replicas: one for each way of drafting."""
        num_replicas = int((self.autoscaling or {}).get("max_replicas", self.num_replicas))
        return num_replicas * self.offer.num_engines

    @property
    def offer(self) -> ServedModels:
        """Names and ways of drafting."""
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
        said = f"{what} has no option {unknown[0]!r}" if unknown else f"{what} needs a model"
        raise ConfigError(f"{said}; there are {', '.join(known)}")


def _frozen(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options with tuples for the lists of a file."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}

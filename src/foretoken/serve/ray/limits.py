"""How long requests are patient with replicas, and how many they may lose."""

from __future__ import annotations

from dataclasses import dataclass

from foretoken.errors import ConfigError

SIGN_SECONDS = 1.0
"""Of silence, after which a replica shows that it is alive; also between news that no client waits for."""
LEAST_STALL_SECONDS = 2 * SIGN_SECONDS
"""Of silence, before a replica may count as lost."""


@dataclass(frozen=True)
class FailoverSettings:
    """When a replica counts as lost, and what follows.

    Args:
      max_failovers: replicas that one request may lose, before it ends with an error.
      stall_timeout: seconds without a sign of life from a replica that a request was sent to; replicas give one every
        second.
      step_timeout: seconds that one step of an engine may take, while its process is alive.
      absence_timeout: seconds after which requests that wait are refused where there is no replica at all.
      retry_seconds: to wait before the first new try, and twice as long before each further one.
    """

    max_failovers: int = 3
    stall_timeout: float = 10.0
    step_timeout: float = 300.0
    absence_timeout: float = 60.0
    retry_seconds: float = 0.05

    def __post_init__(self) -> None:
        if not self.stall_timeout >= LEAST_STALL_SECONDS:
            least = (
                f"{LEAST_STALL_SECONDS:g} seconds or more, since replicas show once in {SIGN_SECONDS:g} that they live"
            )
            raise ConfigError(f"stall_timeout is {self.stall_timeout:g}; it must be {least}")
        for name in ("step_timeout", "absence_timeout"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be positive")
        if self.max_failovers < 0 or self.retry_seconds < 0:
            raise ConfigError("max_failovers and retry_seconds must be 0 or more")

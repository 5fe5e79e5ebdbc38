"""Settings of a server: limits, names, what it tells, and how patient it is with replicas."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields

from foredraft.errors import ConfigError

GRANULARITIES = ("token", "step")
DETAILS = ("none", "summary", "detailed")
PARSERS = ("hermes",)

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")


@dataclass(frozen=True)
class ServerSettings:
    """Limits and options of a server, under vLLM's names where vLLM has one.

    Args:
      api_keys: any of them opens everything; without one, everything is open.
      cors_origins: web pages that may call the server from a browser; ``*`` for all of them.
      max_body_bytes: size limit of a body; larger ones are refused with 413.
      max_n, max_prompts: samples of a prompt, and prompts of a request, which also bounds all texts of it.
      max_logprobs: most likely tokens that may be asked for.
      max_queued_requests, max_queued_tokens: limits of waiting requests and of tokens in their prompts; more are
        refused with 429. None for no limit.
      request_timeout: seconds after which a request ends with an error; a request may ask for less.
      keep_alive: seconds of silence after which a stream sends a comment.
      shutdown_timeout: seconds that requests have left after the first signal to end.
      strict_fields: refuse fields that are not known; otherwise a header of the answer names them.
      stream_granularity: "token": one token per chunk; "step": all that a step has brought.
      spec_decode_metrics: "summary" or "detailed" counts of speculation with every answer; "none" unless asked for.
      tool_call_parser: "hermes" reads the calls of models that write ``<tool_call>``; None refuses tools.
      log_requests: write prompts to the log.
    """

    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 4 * 2**20
    max_n: int = 64
    max_prompts: int = 1024
    max_logprobs: int = 20
    max_queued_requests: int | None = 256
    max_queued_tokens: int | None = None
    request_timeout: float = 600.0
    keep_alive: float = 15.0
    shutdown_timeout: float = 30.0
    strict_fields: bool = False
    stream_granularity: str = "token"
    spec_decode_metrics: str = "none"
    tool_call_parser: str | None = None
    log_requests: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                least = 0 if field.name in ("shutdown_timeout", "max_logprobs", "max_queued_requests") else 1e-3
                if not least <= value < math.inf:
                    what = "positive" if least else "0 or more"
                    raise ConfigError(
                        f"{field.name} is {value}; it must be {what if math.isfinite(value) else 'finite'}"
                    )
        for name, known in (("stream_granularity", GRANULARITIES), ("spec_decode_metrics", DETAILS)):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; choose one of {', '.join(known)}")
        if self.tool_call_parser not in (None, *PARSERS):
            raise ConfigError(f"tool_call_parser is {self.tool_call_parser!r}; choose {', '.join(PARSERS)}, or none")
        for origin in self.cors_origins:
            if origin not in ("*", "null") and not _ORIGIN.fullmatch(origin):
                raise ConfigError(f"cors_origins is {origin!r}; give *, or an origin without a path: https://a.example")
        if not all(self.api_keys):
            raise ConfigError("an API key is empty; give one, or leave the option out to serve without")
        if any(key != key.strip() for key in self.api_keys):
            raise ConfigError("an API key has white space at an end, which no client can send; leave it out")


SIGN_SECONDS = 1.0
"""Longest silence of a replica that is alive. Output that no client waits for is sent as often."""
LEAST_STALL_SECONDS = 2 * SIGN_SECONDS
"""Shortest silence after which a replica may count as lost."""


@dataclass(frozen=True)
class FailoverSettings:
    """When a replica counts as lost, and what follows.

    Args:
      max_failovers: replicas that one request may lose, before it ends with an error.
      stall_timeout: seconds without a sign of life from a replica that a request was sent to; replicas give one every
        second.
      step_timeout: seconds that one step of an engine may take, while its process is alive.
      absence_timeout: seconds after which requests that wait are refused where there is no replica at all.
      retry_seconds: pause before the first retry; it doubles with each further one.
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

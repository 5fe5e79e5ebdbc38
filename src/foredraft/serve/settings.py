"""Server settings: limits, names, logging, and failover timeouts for replicas."""

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
    """Limits and options of a server, with vLLM's names where vLLM has the option.

    Args:
      api_keys: accepted API keys; empty to accept requests without a key.
      cors_origins: origins of web pages that may call the server from a browser; ``*`` for all.
      max_body_bytes: maximum size of a request body, in bytes; larger bodies are refused with 413.
      max_n: maximum number of samples per prompt.
      max_prompts: maximum number of prompts in a request, and of its completions (prompts times n).
      max_logprobs: maximum number of top log-probabilities per token.
      max_queued_requests, max_queued_tokens: maximum number of waiting requests and of tokens in their prompts; beyond
        it requests are refused with 429. None for no limit.
      request_timeout: seconds after which a request ends with an error; a request may set a shorter timeout.
      keep_alive: seconds without output after which a stream sends a comment.
      shutdown_timeout: seconds that running requests have to finish after the first signal.
      strict_fields: whether unknown fields are refused; otherwise a response header lists them.
      stream_granularity: "token" for one token per chunk; "step" for all tokens of a step in one chunk.
      spec_decode_metrics: default detail of the speculation counts in responses: "none", "summary" or "detailed".
      tool_call_parser: "hermes" to parse calls written as ``<tool_call>``; None to refuse tools.
      log_requests: whether prompts are written to the log.
      access_log: whether to log a line per request, and the throughput every ten seconds while requests are running.
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
    access_log: bool = False

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
            raise ConfigError("an API key is empty; set a key, or leave the option out to serve without keys")
        if any(key != key.strip() for key in self.api_keys):
            raise ConfigError(
                "an API key begins or ends with white space, which HTTP clients cannot send; remove the white space"
            )


SIGN_SECONDS = 1.0
"""Interval at which a live replica sends a message. Output that is not streamed to a client is sent at this interval
too."""
LEAST_STALL_SECONDS = 2 * SIGN_SECONDS
"""Minimum of `FailoverSettings.stall_timeout`."""


@dataclass(frozen=True)
class FailoverSettings:
    """Limits that decide when a replica counts as lost, and how often a request is retried.

    Args:
      max_failovers: number of replicas that one request may lose before it ends with an error.
      stall_timeout: seconds without a message after which the replica of a request counts as lost; live replicas send
        one every second.
      step_timeout: maximum duration of one engine step, in seconds, while the process is alive.
      absence_timeout: seconds without any replica after which waiting requests are refused.
      retry_seconds: pause before the first retry, in seconds; it doubles with each further retry.
    """

    max_failovers: int = 3
    stall_timeout: float = 10.0
    step_timeout: float = 300.0
    absence_timeout: float = 60.0
    retry_seconds: float = 0.05

    def __post_init__(self) -> None:
        if not self.stall_timeout >= LEAST_STALL_SECONDS:
            least = (
                f"{LEAST_STALL_SECONDS:g} seconds or more, because replicas send a sign of life every "
                f"{SIGN_SECONDS:g} seconds"
            )
            raise ConfigError(f"stall_timeout is {self.stall_timeout:g}; it must be {least}")
        for name in ("step_timeout", "absence_timeout"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be positive")
        if self.max_failovers < 0 or self.retry_seconds < 0:
            raise ConfigError("max_failovers and retry_seconds must be 0 or more")

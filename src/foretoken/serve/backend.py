"""What an application asks of whatever decodes for it: an engine in this process, or replicas in others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from foretoken.serve.errors import ApiError

if TYPE_CHECKING:
    from foretoken.serve.bridge import Ticket


class Backend(Protocol):
    """Takes requests in, and brings news of them until they have ended or are abandoned."""

    error: BaseException | None

    def start(self, when_loaded: Callable[[], None]) -> None:
        """Begin to load; ``when_loaded`` is called in another thread when that has come to an end, well or not."""

    def check_room(self, num_prompt_tokens: int, max_requests: int | None, max_tokens: int | None) -> None:
        """Raises: ApiError (429) where as many requests, or tokens of their prompts, wait as may."""

    def submit(self, ticket: Ticket) -> None:
        """Take a request in."""

    def abandon(self, ticket: Ticket) -> None:
        """End a request; one that has ended stays as it is."""

    def abort_all(self, error: ApiError) -> None:
        """End everything with an error."""

    def stop(self, timeout: float) -> bool:
        """Work no more; say whether nothing of this process computes any more, after `timeout` seconds at most."""


class Figures(Protocol):
    """What is counted of all requests."""

    rejected: Any
    """Counter of requests that were refused because too many waited."""

    def page(self) -> bytes:
        """What Prometheus reads."""


def check_tokens(waiting: Sequence[Ticket], num_prompt_tokens: int, max_tokens: int | None) -> None:
    """Raises: ApiError (429) where prompts of as many tokens wait as may."""
    num_tokens = sum(ticket.num_prompt_tokens for ticket in waiting)
    if max_tokens is not None and waiting and num_tokens + num_prompt_tokens > max_tokens:
        message = f"prompts of {num_tokens} tokens are waiting, and {max_tokens} may; try again"
        raise ApiError(429, message, None, "queue_full")

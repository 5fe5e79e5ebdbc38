"""What takes requests in, and a request on its way through it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import perf_counter
from typing import Any, Protocol, TypeAlias

from foredraft.config.sampling import SamplingParams
from foredraft.engine.frontend import RequestOutput, Stream, StreamOutput
from foredraft.llm import LLM
from foredraft.serve.errors import ApiError

News: TypeAlias = "list[StreamOutput] | Exception | None"
"""What has come for a request; an error that ends it; None at its end."""


class Backend(Protocol):
    """Takes requests in, and brings news of them until they have ended or are abandoned."""

    error: BaseException | None

    def start(self, when_loaded: Callable[[], None]) -> None:
        """Begin to load; ``when_loaded`` is called in another thread when that has come to an end, well or not."""

    def check_room(self, num_prompt_tokens: int, max_requests: int | None, max_tokens: int | None) -> None:
        """Raises: ApiError (429) where as many requests, or tokens of their prompts, wait as may."""

    def submit(self, ticket: QueuedRequest) -> None:
        """Take a request in."""

    def abandon(self, ticket: QueuedRequest) -> None:
        """End a request; one that has ended stays as it is."""

    def abort_all(self, error: ApiError) -> None:
        """End everything with an error."""

    def stop(self, timeout: float) -> bool:
        """Work no more; say whether nothing of this process computes any more, after `timeout` seconds at most."""


class MetricsBackend(Protocol):
    """What is counted of all requests."""

    rejected: Any
    """Counter of requests that were refused because too many waited."""

    def page(self) -> bytes:
        """What Prometheus reads."""


def check_tokens(waiting: Sequence[QueuedRequest], num_prompt_tokens: int, max_tokens: int | None) -> None:
    """Raises: ApiError (429) where prompts of as many tokens wait as may."""
    num_tokens = sum(ticket.num_prompt_tokens for ticket in waiting)
    if max_tokens is not None and waiting and num_tokens + num_prompt_tokens > max_tokens:
        message = f"prompts of {num_tokens} tokens are waiting, and {max_tokens} may; try again"
        raise ApiError(429, message, None, "queue_full")


class QueuedRequest:
    """One request on its way through the engine, which brings news of it step by step.

    Args:
      llm, prompts, params: what is asked for; prompts hold token ids.

    Attributes:
      wants_news: whether anybody waits for what single steps bring, or for the end alone.
      wants_trees: whether its client is shown drafts.
      notes: fields of the answer that tell how it came about.
    """

    def __init__(self, llm: LLM, prompts: Sequence[dict[str, Any]], params: Sequence[SamplingParams]) -> None:
        self.llm, self.prompts, self.params = llm, list(prompts), list(params)
        self.num_prompt_tokens = sum(len(prompt["prompt_token_ids"]) for prompt in prompts)
        self.arrived = perf_counter()
        self.is_queued = True
        self.is_abandoned = False
        self.wants_news = True
        self.wants_trees = False
        self.notes: dict[str, Any] = {}
        self.stream: Stream | None = None
        self._loop = asyncio.get_running_loop()
        self._news: asyncio.Queue[News] = asyncio.Queue()

    def deliver(self, news: News) -> None:
        """Hand on what has come, from the thread of the engine."""
        deliver_all([(self, news)])

    def wake(self) -> None:
        """Let who waits look around, from the event loop: it gets nothing new."""
        self._news.put_nowait([])

    async def news(self) -> list[StreamOutput] | None:
        """Wait for what the next steps bring, nothing at first: the engine has taken the request in. None at the end.

        Raises: what is wrong with the request, or has ended it.
        """
        news = await self._news.get()
        if isinstance(news, Exception):
            raise news
        return news

    def outputs(self) -> list[RequestOutput]:
        """The results, once the request has ended."""
        assert self.stream is not None
        return self.stream.outputs()


def deliver_all(came: Sequence[tuple[QueuedRequest, News]]) -> None:
    """Hand on what has come for requests of one event loop, from the thread of the engine, and wake it once."""
    if came:
        with suppress(RuntimeError):  # the loop has ended, and who waited with it
            came[0][0]._loop.call_soon_threadsafe(_put_all, came)


def _put_all(came: Sequence[tuple[QueuedRequest, News]]) -> None:
    for ticket, news in came:
        ticket._news.put_nowait(news)

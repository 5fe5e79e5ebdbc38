"""State of one request in a backend, and delivery of its output to the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from time import perf_counter
from typing import Any, TypeAlias

from foredraft.config.sampling import SamplingParams
from foredraft.engine.frontend import RequestOutput, Stream, StreamOutput
from foredraft.llm import LLM
from foredraft.serve.errors import ApiError

News: TypeAlias = "list[StreamOutput] | Exception | None"
"""New output of a request, an error that ends it, or None at its end."""


def check_tokens(waiting: Sequence[QueuedRequest], num_prompt_tokens: int, max_tokens: int | None) -> None:
    """Refuse a request when the prompts in the queue have too many tokens.

    Raises: ApiError (429) if the limit is exceeded and other requests are waiting.
    """
    num_tokens = sum(queued.num_prompt_tokens for queued in waiting)
    if max_tokens is not None and waiting and num_tokens + num_prompt_tokens > max_tokens:
        message = f"the queue is full: prompts with {num_tokens} tokens are waiting, and the limit is {max_tokens}; "
        message += "try again later"
        raise ApiError(429, message, None, "queue_full")


class QueuedRequest:
    """Request in a backend, which delivers its output step by step.

    Args:
      llm: model and drafting method.
      prompts: prompts with token ids.
      params: sampling parameters of each prompt.

    Attributes:
      wants_news: whether output is delivered after every step; otherwise only the results are, at the end.
      wants_trees: whether the output contains the draft trees.
      notes: additional fields of the response.
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
        """Deliver output; called from the engine thread."""
        deliver_all([(self, news)])

    def wake(self) -> None:
        """Wake the waiting task without new output; called from the event loop."""
        self._news.put_nowait([])

    async def news(self) -> list[StreamOutput] | None:
        """Wait for the output of the next steps. The first item is empty and means that the engine has accepted the
        request; None marks the end.

        Raises: the error that ended the request, or with which the engine refused it.
        """
        news = await self._news.get()
        if isinstance(news, Exception):
            raise news
        return news

    def outputs(self) -> list[RequestOutput]:
        """Return the results of a finished request."""
        assert self.stream is not None
        return self.stream.outputs()


def deliver_all(came: Sequence[tuple[QueuedRequest, News]]) -> None:
    """Deliver output for several requests of one event loop from the engine thread, and wake the loop once."""
    if came:
        with suppress(RuntimeError):  # the loop has been closed, together with the waiting tasks
            came[0][0]._loop.call_soon_threadsafe(_put_all, came)


def _put_all(came: Sequence[tuple[QueuedRequest, News]]) -> None:
    for queued, news in came:
        queued._news.put_nowait(news)

"""State of one request in whatever decodes it, and delivery of its output."""

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
    """Raises: ApiError (429) where prompts of as many tokens wait as may."""
    num_tokens = sum(ticket.num_prompt_tokens for ticket in waiting)
    if max_tokens is not None and waiting and num_tokens + num_prompt_tokens > max_tokens:
        message = f"prompts of {num_tokens} tokens are waiting, and {max_tokens} may; try again"
        raise ApiError(429, message, None, "queue_full")


class QueuedRequest:
    """Request in a backend, which delivers its output step by step.

    Args:
      llm, prompts, params: model, prompts with token ids, and parameters of each prompt.

    Attributes:
      wants_news: whether the client gets the output of single steps, or the results at the end.
      wants_trees: whether the client gets drafts.
      notes: further fields of the answer.
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

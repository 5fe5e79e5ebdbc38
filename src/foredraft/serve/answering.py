"""Responses to generation requests, complete or as server-sent events. A client may disconnect at any time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from foredraft.beginnings import shared_length
from foredraft.engine.frontend import FrozenList, RequestOutput, StreamOutput, speculative_metrics
from foredraft.serve.bridge import Backend
from foredraft.serve.errors import ApiError
from foredraft.serve.form import ResponseFormat
from foredraft.serve.parsed_request import ParsedRequest
from foredraft.serve.queued_request import QueuedRequest
from foredraft.serve.settings import ServerSettings

KEEP_ALIVE = b": keep-alive\n\n"


class RequestHandler:
    """A request in the engine, together with the connection of its client.

    Args:
      bridge: backend that decodes the request.
      parsed: the request.
      receive: ASGI receive function. The body has already been read, so it only reports a disconnect.
    """

    def __init__(self, bridge: Backend, parsed: ParsedRequest, receive: Receive) -> None:
        self.queued = QueuedRequest(parsed.llm, parsed.prompts, [parsed.params] * len(parsed.prompts))
        self.queued.wants_news, self.queued.wants_trees = parsed.streams, parsed.returns_drafts
        self._bridge = bridge
        self._deadline = self.queued.arrived + parsed.timeout
        self._timeout = parsed.timeout
        self._departure = asyncio.ensure_future(_departure(receive))
        self._departure.add_done_callback(lambda _: self.queued.wake())
        self._heard = perf_counter()  # time of the last output
        self._pulse: asyncio.TimerHandle | None = None

    @property
    def left(self) -> float:
        """Remaining time of the request, in seconds."""
        return max(0.0, self._deadline - perf_counter())

    @asynccontextmanager
    async def within_its_time(self) -> AsyncIterator[None]:
        """Limit the work inside the context to the remaining time of the request. One timer covers all of it, because a
        timer per token would be too slow.

        Raises: ApiError (504) when the time is over.
        """
        try:
            async with asyncio.timeout(self.left) as timer:
                yield
        except TimeoutError:
            if not timer.expired():
                raise
            message = f"the request took longer than its timeout of {self._timeout:g} seconds"
            raise ApiError(504, message, "timeout", "timeout") from None

    def wake_after(self, silence: float) -> None:
        """Wake the waiting task each time this many seconds have passed without output."""
        silent = perf_counter() - self._heard
        if silent >= silence:
            self.queued.wake()
        self._pulse = asyncio.get_running_loop().call_later(
            silence if silent >= silence else silence - silent, self.wake_after, silence
        )

    async def begin(self) -> None:
        """Send the request to the engine, and wait until the engine has accepted it.

        Raises: the error with which the engine refused the request.
        """
        self._bridge.submit(self.queued)
        try:
            await self.news()
        except BaseException:
            self.end()
            raise

    async def news(self) -> list[StreamOutput] | None:
        """Wait for the output of the next steps.

        Returns: the output; an empty list after a silence (see `wake_after`); None at the end of the request.
        Raises: ClientDisconnect if the client has disconnected; the error that ended the request.
        """
        news: list[StreamOutput] | None = []
        if not self._departure.done():
            news = await self.queued.news()
            self._heard = perf_counter()
        if self._departure.done():
            raise ClientDisconnect
        return news

    async def collect(self) -> list[RequestOutput]:
        """Wait for the end of the request and return its results."""
        while await self.news() is not None:
            pass
        return self.queued.outputs()

    async def again(self, outputs: Sequence[RequestOutput]) -> None:
        """Send the same request again with plain decoding and the seeds of the first run."""
        first = self.queued
        params = [
            replace(given, seed=output.outputs[0].seed, num_speculative_tokens=0)
            for given, output in zip(first.params, outputs, strict=True)
        ]
        self.queued = QueuedRequest(first.llm, first.prompts, params)
        self.queued.wants_news = False
        await self.begin()

    def end(self) -> None:
        """Release everything that belongs to the request. Calling it twice is harmless."""
        if self._pulse is not None:
            self._pulse.cancel()
        self._bridge.abandon(self.queued)
        if not self._departure.cancel() and not self._departure.cancelled():
            self._departure.exception()  # marks the exception as retrieved; nobody awaits this task any more


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def answer(
    bridge: Backend,
    parsed: ParsedRequest,
    form: ResponseFormat,
    settings: ServerSettings,
    receive: Receive,
    note: Callable[[QueuedRequest], None] = lambda queued: None,
) -> Response:
    """Run a request and return its response.

    Args:
      note: function that is called with the request in the engine.

    Raises: ApiError, PromptError or another error of the request, before anything was sent; ClientDisconnect if the
      client has disconnected.
    """
    bridge.check_room(parsed.num_prompt_tokens, settings.max_queued_requests, settings.max_queued_tokens)
    handler = RequestHandler(bridge, parsed, receive)
    note(handler.queued)
    try:
        async with handler.within_its_time():
            await handler.begin()
            if parsed.streams:
                return EventStream(handler, parsed, form, settings.keep_alive)
            outputs = await handler.collect()
            usage = usage_of(handler.queued)
            beside = counts_of(handler.queued, parsed.detail) | handler.queued.notes
            if parsed.verifies:
                await handler.again(outputs)
                beside |= verdict_of(outputs, await handler.collect())
    finally:
        if not parsed.streams:
            handler.end()
    return Response(
        json.dumps(form.body(outputs, usage, beside)), media_type="application/json", headers=parsed.warning
    )


class EventStream(Response):
    """Response as server-sent events. All chunks of a step are sent together.

    Args:
      handler: handler of the request, which the engine has accepted.
      parsed: the request.
      form: format of the events.
      keep_alive: seconds of silence after which a comment is sent.
    """

    def __init__(self, handler: RequestHandler, parsed: ParsedRequest, form: ResponseFormat, keep_alive: float) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no", **parsed.warning}
        super().__init__(media_type="text/event-stream", headers=headers)
        self.raw_headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
        self._handler, self._parsed, self._form, self._keep_alive = handler, parsed, form, keep_alive
        self._is_sending = False
        self._last_put = perf_counter()
        self._begun: set[tuple[int, int]] = set()  # (prompt, sample) of rows with sent output
        self._held: dict[tuple[int, int], StreamOutput] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            try:
                async with self._handler.within_its_time():
                    await self._send_all(send)
            except ClientDisconnect:
                raise
            except Exception as error:
                if self._is_sending:
                    raise ClientDisconnect from None
                await self._put_last(send, *self._form.failure(ApiError.of(error)))
            else:
                await self._put_last(send)
        except ClientDisconnect:
            return
        finally:
            self._handler.end()

    async def _send_all(self, send: Send) -> None:
        handler, form, parsed = self._handler, self._form, self._parsed
        usage = partial(usage_of, handler.queued)
        handler.wake_after(self._keep_alive)
        await self._put(send, *form.opening())
        while (news := await handler.news()) is not None:
            events = form.events(self._ready(news), usage)
            is_silent = not news or perf_counter() - self._last_put > self._keep_alive
            await self._put(send, *(events or [KEEP_ALIVE] * is_silent))
        beside = counts_of(handler.queued, parsed.detail) | handler.queued.notes
        used = usage()
        if parsed.verifies:
            outputs = handler.queued.outputs()
            await handler.again(outputs)
            while (news := await handler.news()) is not None:
                if not news:
                    await self._put(send, KEEP_ALIVE)
            beside |= verdict_of(outputs, handler.queued.outputs())
        await self._put(send, *form.ending(used, beside))

    def _ready(self, news: Sequence[StreamOutput]) -> list[StreamOutput]:
        """Return the deltas to send now, merged with those held back. The first and the last delta of a row are sent at
        once, the others when they contain ``stream_interval`` tokens."""
        if self._parsed.interval == 1:
            return list(news)
        ready = []
        for delta in news:
            sequence = (delta.prompt_index, delta.index)
            held = self._held.pop(sequence, None)
            delta = delta if held is None else joined(held, delta)
            is_first = sequence not in self._begun
            self._begun.add(sequence)
            if is_first or delta.finish_reason is not None or len(delta.token_ids) >= self._parsed.interval:
                ready.append(delta)
            else:
                self._held[sequence] = delta
        return ready

    async def _put(self, send: Send, *pieces: bytes, more: bool = True) -> None:
        if pieces:
            self._is_sending = True  # sending blocks only while the buffers are full
            await send({"type": "http.response.body", "body": b"".join(pieces), "more_body": more})
            self._is_sending = False
            self._last_put = perf_counter()

    async def _put_last(self, send: Send, *pieces: bytes) -> None:
        """Send the last pieces and end the response.

        Raises: ClientDisconnect if the client reads nothing within the remaining time of the request.
        """
        try:
            async with asyncio.timeout(self._handler.left):
                await self._put(send, *pieces, self._form.last, more=False)
        except TimeoutError:
            raise ClientDisconnect from None


def joined(first: StreamOutput, second: StreamOutput) -> StreamOutput:
    """Merge two consecutive deltas of one row. The result contains no draft tree. Text that arrived without a token
    belongs to the token before it."""
    texts, later = first.texts, second.texts
    if not second.token_ids and texts:
        texts = (*texts[:-1], texts[-1] + second.text)
    elif not first.token_ids and later:
        later = (first.text + later[0], *later[1:])
    return replace(
        second,
        text=first.text + second.text,
        segments=first.segments + second.segments,
        token_ids=FrozenList(first.token_ids + second.token_ids),
        num_accepted=first.num_accepted + second.num_accepted,
        texts=texts + later,
        logprobs=None if second.logprobs is None else [*(first.logprobs or ()), *second.logprobs],
        tree=None,
        prompt_logprobs=first.prompt_logprobs,
    )


DETAILED = ("by_drafter", "num_proposed_tokens", "num_cut_tokens", "num_undrafted_steps")


def usage_of(queued: QueuedRequest) -> dict[str, Any]:
    """Current token counts of a request. Each prompt is counted once, however many samples it has.

    Accepted tokens of a prediction count as completion tokens, because plain decoding generates them too.
    """
    assert queued.stream is not None
    prompt, completion = queued.num_prompt_tokens, queued.stream.num_tokens
    stats = queued.stream.stats
    predicted = {
        "accepted_prediction_tokens": stats.accepted_prediction_tokens,
        "rejected_prediction_tokens": stats.rejected_prediction_tokens,
    }
    has_prediction = queued.params[0].prediction is not None
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": queued.stream.num_cached_tokens},
        **({"completion_tokens_details": predicted} if has_prediction else {}),
    }


def counts_of(queued: QueuedRequest, detail: str) -> dict[str, Any]:
    """Return ``metrics.speculative_decoding`` in vLLM's format, summed over all rows of the request; empty if the
    detail is "none".

    In addition to vLLM's fields it contains ``tokens_per_step``, ``lossless``, ``exactness``, the method, and the
    report of the governor.
    """
    if detail == "none":
        return {}
    assert queued.stream is not None
    llm, outputs = queued.llm, queued.outputs()
    config = llm.speculative_config
    rule = config.rule
    counts = speculative_metrics(queued.stream.stats, config.num_speculative_tokens, rule.is_lossless)
    histogram = counts["acceptance_histogram"]
    longest = max([config.num_speculative_tokens, *map(int, histogram)])
    counts["acceptance_histogram"] = [histogram.get(str(length), 0) for length in range(longest + 1)]
    governors = [output.metrics.governor for output in outputs if output.metrics.governor is not None]
    counts |= {
        "method": config.title,
        "exactness": llm.guarantee.as_dict() if rule.keeps_tokens else None,
        "governor": governors[-1] if governors else None,
    }
    if detail == "summary":
        counts = {name: value for name, value in counts.items() if name not in DETAILED}
    else:
        trace = [step for output in outputs for step in output.metrics.trace]
        counts["per_step_drafted"] = [step.drafted for step in trace]
        counts["per_step_accepted"] = [step.accepted for step in trace]
    return {"metrics": {"speculative_decoding": counts}}


def verdict_of(outputs: Sequence[RequestOutput], plain: Sequence[RequestOutput]) -> dict[str, Any]:
    """Return the field ``verify``: whether the output equals plain decoding token by token, and the first difference of
    each row that differs."""
    differences = []
    pairs = [
        pair
        for ours, theirs in zip(outputs, plain, strict=True)
        for pair in zip(ours.outputs, theirs.outputs, strict=True)
    ]
    for place, (text, reference) in enumerate(pairs):
        if text.token_ids != reference.token_ids:
            differences.append({"index": place, "token": shared_length(text.token_ids, reference.token_ids)})
    return {
        "verify": {
            "identical": not differences,
            "logprobs_identical": all(text.logprobs == reference.logprobs for text, reference in pairs),
            "num_tokens": sum(len(text.token_ids) for text, _ in pairs),
            "differences": differences,
        }
    }

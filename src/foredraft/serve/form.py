"""Response format: the interface, and the base of the formats for completions and chat."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from foredraft.engine.frontend import RequestOutput, StreamOutput
from foredraft.serve.errors import ApiError
from foredraft.serve.parsed_request import ParsedRequest
from foredraft.serve.served import Served
from foredraft.serve.tokens import TokenNames
from foredraft.views.token_view import tell_drafts

DONE = b"data: [DONE]\n\n"


class ResponseFormat(ABC):
    """Converts the output of a request to the response of an endpoint.

    Attributes:
      last: final bytes of every stream.
    """

    last: ClassVar[bytes] = b""

    @abstractmethod
    def opening(self) -> list[bytes]:
        """Events before the first token."""

    @abstractmethod
    def events(self, news: Sequence[StreamOutput], usage: Callable[[], dict[str, Any]]) -> list[bytes]:
        """Events for the output of steps.

        Args:
          news: output of the steps.
          usage: function that returns the current token counts.
        """

    @abstractmethod
    def ending(self, usage: dict[str, Any], beside: dict[str, Any]) -> list[bytes]:
        """Events after the last token.

        Args:
          usage: token counts.
          beside: additional fields: speculation counts, verification result and notes.
        """

    @abstractmethod
    def failure(self, error: ApiError) -> list[bytes]:
        """Events for a request that has failed."""

    @abstractmethod
    def body(self, outputs: Sequence[RequestOutput], usage: dict[str, Any], beside: dict[str, Any]) -> dict[str, Any]:
        """Complete response of a request that is not streamed.

        Args:
          outputs: results.
          usage: token counts.
          beside: additional fields, as in `ending`.
        """


written = json.JSONEncoder(separators=(",", ":")).encode
"""Serialize a value as JSON without spaces."""


def event(data: dict[str, Any], name: str = "") -> bytes:
    """Encode a server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {written(data)}\n\n".encode()


def parts_of(delta: StreamOutput, by_token: bool) -> list[slice]:
    """Split the tokens of a step into the slices that form one event each."""
    length = len(delta.token_ids)
    return [slice(i, i + 1) for i in range(length)] if by_token else [slice(0, length)]


class ChoicesForm(ResponseFormat):
    """Response format with a list of choices.

    Attributes:
      prefix: prefix of response ids.
      kinds: values of ``object`` for complete responses and for chunks.
    """

    last = DONE
    prefix: ClassVar[str]
    kinds: ClassVar[tuple[str, str]]

    def __init__(self, parsed: ParsedRequest, served: Served) -> None:
        self._parsed = parsed
        self._fingerprint = served.fingerprint
        self._names = TokenNames(served.llm.tokenizer, parsed.names_ids)
        self._tokenizer = served.llm.tokenizer
        self._id, self._created = f"{self.prefix}-{parsed.request_id}", int(time.time())
        self._chunk = self._frame(is_chunk=True) | ({"usage": None} if parsed.includes_usage else {})
        self._beginning = written(self._chunk)[:-1]

    def _frame(self, is_chunk: bool) -> dict[str, Any]:
        """First fields of every object."""
        return {
            "id": self._id,
            "object": self.kinds[is_chunk],
            "created": self._created,
            "model": self._parsed.model,
            "system_fingerprint": self._fingerprint,
        }

    def opening(self) -> list[bytes]:
        return self._chunks(self.first_choices())

    def events(self, news: Sequence[StreamOutput], usage: Callable[[], dict[str, Any]]) -> list[bytes]:
        choices = []
        for delta in news:
            choices += self.choices(delta)
            if delta.finish_reason is not None:
                choices[-1]["seed"] = delta.seed
        extra = {"usage": usage()} if choices and self._parsed.continues_usage else {}
        return self._chunks(choices, **extra)

    def _chunks(self, choices: Sequence[dict[str, Any]], **extra: Any) -> list[bytes]:
        if extra:
            return [event({**self._chunk, **extra, "choices": [choice]}) for choice in choices]
        return [f'data: {self._beginning},"choices":[{written(choice)}]}}\n\n'.encode() for choice in choices]

    def ending(self, usage: dict[str, Any], beside: dict[str, Any]) -> list[bytes]:
        extra = ({"usage": usage} if self._parsed.includes_usage else {}) | beside
        return [event({**self._chunk, "choices": [], **extra})] if extra else []

    def failure(self, error: ApiError) -> list[bytes]:
        return [event(error.body)]

    def body(self, outputs: Sequence[RequestOutput], usage: dict[str, Any], beside: dict[str, Any]) -> dict[str, Any]:
        return {**self._frame(is_chunk=False), "choices": self.whole(outputs), "usage": usage, **beside}

    @abstractmethod
    def first_choices(self) -> list[dict[str, Any]]:
        """Choices of the chunks before the first token."""

    @abstractmethod
    def choices(self, delta: StreamOutput) -> list[dict[str, Any]]:
        """Choices of the chunks for one row's output of a step: one choice per token, or one for all tokens."""

    @abstractmethod
    def whole(self, outputs: Sequence[RequestOutput]) -> list[dict[str, Any]]:
        """Choices of a complete response."""

    def _parts(self, delta: StreamOutput) -> list[slice]:
        return parts_of(delta, self._parsed.by_token)

    def _tell(self, choice: dict[str, Any], delta: StreamOutput, part: slice) -> dict[str, Any]:
        """Add the requested token ids and drafts to a choice."""
        if self._parsed.returns_ids:
            choice["token_ids"] = list(delta.token_ids[part])
        if self._parsed.returns_drafts:
            choice["draft"] = tell_drafts(self._tokenizer, delta, part)
        return choice

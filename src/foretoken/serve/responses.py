"""``/v1/responses``: the text part of it, over the path of chat."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from foretoken.config.keywords import Foreign
from foretoken.serve.asking import Asking
from foretoken.serve.chat import KNOWN as OF_CHAT
from foretoken.serve.chat import read_chat, read_messages
from foretoken.serve.errors import ApiError
from foretoken.serve.fields import SAMPLING, Fields, wrong_field
from foretoken.serve.form import Form, event, parts_of

if TYPE_CHECKING:
    from foretoken.serve.served import Served
    from foretoken.serve.settings import ServerSettings
    from foretoken.sessions.outputs import RequestOutput, StreamOutput

PASSED_ON = (SAMPLING - {"max_tokens", "prompt_logprobs"}) | {
    "model",
    "stream",
    "stream_granularity",
    "structured_outputs",
    "prediction",
    "speculative",
    "spec_decode_metrics",
    "verify",
    "timeout",
    "chat_template_kwargs",
}
"""Fields that mean what they mean in chat."""
KNOWN = PASSED_ON | {"input", "instructions", "max_output_tokens", "metadata", "text", "reasoning"}

_KEEPS_NOTHING = "the server keeps no answers; send the whole conversation as input"
_NO_TOOLS = "tools are offered in /v1/chat/completions"
REFUSED = {
    **{name: Foreign("it is not a field of /v1/responses; use /v1/chat/completions") for name in OF_CHAT - KNOWN},
    "n": Foreign("a response has one text; use /v1/chat/completions", (None, 1)),
    "messages": Foreign("use input"),
    "max_tokens": Foreign("use max_output_tokens"),
    "max_completion_tokens": Foreign("use max_output_tokens"),
    "response_format": Foreign("use text.format"),
    "stream_options": Foreign("usage comes with the last event; leave it out", (None, {"include_obfuscation": False})),
    "tools": Foreign(_NO_TOOLS, (None, [])),
    "tool_choice": Foreign(_NO_TOOLS, (None, "auto", "none")),
    "parallel_tool_calls": Foreign(_NO_TOOLS, (None, True, False)),
    "max_tool_calls": Foreign(_NO_TOOLS),
    "previous_response_id": Foreign(_KEEPS_NOTHING),
    "conversation": Foreign(_KEEPS_NOTHING),
    "background": Foreign("answers come with their request; leave it out", (None, False)),
    "include": Foreign("a response holds its text alone; leave it out", (None, [], ["reasoning.encrypted_content"])),
    "top_logprobs": Foreign("log-probabilities are told in /v1/chat/completions", (None, 0)),
    "prompt": Foreign("templates of prompts are not kept; write the text into input"),
    "truncation": Foreign("prompts are used whole or refused; shorten the input", (None, "disabled")),
}
"""Fields of the API, and of chat, without a counterpart here: why, and what to do instead."""

MOST_METADATA = 16
TEXT = {"type": "text"}


def read_response(body: dict[str, Any], served: Served, settings: ServerSettings) -> tuple[Asking, ResponseForm]:
    """Writes and reads the prompt, which takes time: not to be called in the event loop.

    Raises: ApiError, PromptError.
    """
    given = Fields(body, KNOWN, REFUSED)
    instructions, metadata = given.get("instructions"), _metadata(given)
    longest = given.whole("max_output_tokens", None, 1, 2**31 - 1)
    chat = {name: value for name, value in body.items() if name in PASSED_ON or name in given.unknown}
    chat["messages"] = [{"role": "system", "content": given.text("instructions")}] if instructions is not None else []
    chat["messages"] += _messages(given.get("input"))
    chat |= {"max_completion_tokens": longest, "response_format": _format(given)}
    chat |= {"reasoning_effort": _effort(given), "verbosity": given.mapping("text").get("verbosity")}
    asking, _ = read_chat(chat, served, settings)
    told = {"instructions": instructions, "metadata": metadata, "max_output_tokens": longest}
    return asking, ResponseForm(asking, served, told | {"text": {"format": given.mapping("text").get("format", TEXT)}})


def _messages(given: Any) -> list[dict[str, Any]]:
    """A conversation as chat has it, from text or from items that are messages."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        wrong_field("input", given, "text, or a list of messages with role and content")
    return read_messages([_message(item, f"input[{place}]") for place, item in enumerate(given)], "input")


def _message(item: Any, where: str) -> Any:
    if not isinstance(item, dict):
        wrong_field(where, item, "a message with role and content")
    if item.get("type", "message") != "message" or item.get("role") == "tool":
        wrong_field(f"{where}.type", item.get("type"), "'message', of a user, an assistant or a system")
    return {"role": item.get("role"), "content": item.get("content")}


def _metadata(given: Fields) -> dict[str, str]:
    metadata = given.mapping("metadata")
    if len(metadata) > MOST_METADATA or not all(isinstance(value, str) for value in metadata.values()):
        wrong_field("metadata", metadata, f"an object of at most {MOST_METADATA} strings")
    return metadata


def _effort(given: Fields) -> Any:
    """``reasoning.effort``, for templates that have one; nothing else of it means anything here."""
    return given.mapping("reasoning").get("effort")


def _format(given: Fields) -> dict[str, Any] | None:
    """``text.format`` as chat's ``response_format``."""
    text = Fields(given.mapping("text"), {"format", "verbosity"}, {})
    form = text.mapping("format")
    if text.unknown:
        raise ApiError(400, f"text has no {text.unknown[0][:40]!r}; it has format", "text", "unknown_field")
    if form.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": form}
    return form or None


class ResponseForm(Form):
    """Shape of the answers of ``/v1/responses``: one message of one text.

    Args:
      told: fields of the request that its answer repeats.
    """

    def __init__(self, asking: Asking, served: Served, told: dict[str, Any]) -> None:
        self._by_token = asking.by_token
        self._item_id = f"msg_{secrets.token_hex(12)}"
        self._num_events = 0
        self._text, self._reason, self._seed = "", "", 0
        self._response = {
            "id": f"resp_{secrets.token_hex(12)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": asking.model,
            "system_fingerprint": served.fingerprint,
            "temperature": asking.params.temperature,
            "top_p": asking.params.top_p,
            "tools": [],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "truncation": "disabled",
            "background": False,
            "store": False,
            **told,
        }

    def opening(self) -> list[bytes]:
        response = self._responded("in_progress", [], None)
        item = self._item("in_progress") | {"content": []}
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
            self._event("response.output_item.added", output_index=0, item=item),
            self._event("response.content_part.added", **self._place, part=_part("")),
        ]

    def events(self, news: Sequence[StreamOutput], usage: Callable[[], dict[str, Any]]) -> list[bytes]:
        events = []
        for delta in news:
            pieces = ["".join(delta.texts[part]) for part in parts_of(delta, self._by_token)]
            for piece in pieces if delta.token_ids else [delta.text]:
                if piece:  # tokens that only begin a character have none
                    events.append(self._event("response.output_text.delta", **self._place, delta=piece, logprobs=[]))
            self._text += delta.text
            self._reason, self._seed = delta.finish_reason or self._reason, delta.seed
        return events

    def ending(self, usage: dict[str, Any], beside: dict[str, Any]) -> list[bytes]:
        response = self._finished(usage, beside)
        item = response["output"][0]
        return [
            self._event("response.output_text.done", **self._place, text=self._text, logprobs=[]),
            self._event("response.content_part.done", **self._place, part=_part(self._text)),
            self._event("response.output_item.done", output_index=0, item=item),
            self._event(f"response.{response['status']}", response=response),
        ]

    def failure(self, error: ApiError) -> list[bytes]:
        told = error.body["error"]
        failed = self._responded("failed", [], None) | {"error": {"code": "server_error", "message": told["message"]}}
        said = {"code": str(told["code"]), "message": told["message"], "param": told["param"]}
        return [self._event("error", **said), self._event("response.failed", response=failed)]

    def body(self, outputs: Sequence[RequestOutput], usage: dict[str, Any], beside: dict[str, Any]) -> dict[str, Any]:
        (text,) = outputs[0].outputs
        self._text, self._reason, self._seed = text.text, text.finish_reason, text.seed
        return self._finished(usage, beside)

    def _finished(self, usage: dict[str, Any], beside: dict[str, Any]) -> dict[str, Any]:
        status = "completed" if self._reason == "stop" else "incomplete"
        return self._responded(status, [self._item(status)], usage) | {"seed": self._seed} | beside

    def _responded(self, status: str, output: list[Any], usage: dict[str, Any] | None) -> dict[str, Any]:
        why = {"reason": "max_output_tokens"} if status == "incomplete" else None
        found = {"status": status, "error": None, "incomplete_details": why, "output": output}
        return {**self._response, **found, "usage": None if usage is None else _usage(usage)}

    def _item(self, status: str) -> dict[str, Any]:
        said = {"role": "assistant", "status": status, "content": [_part(self._text)]}
        return {"id": self._item_id, "type": "message", **said}

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **data: Any) -> bytes:
        self._num_events += 1
        return event({"type": kind, "sequence_number": self._num_events - 1, **data}, kind)


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    """Chat's usage in the words of responses."""
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cache_write_tokens": 0, **usage["prompt_tokens_details"]},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0, **usage.get("completion_tokens_details", {})},
        "total_tokens": usage["total_tokens"],
    }

"""``/v1/responses``: parsing of requests and format of responses, on top of the chat endpoint."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from foredraft.config.other_systems import UnsupportedOption
from foredraft.engine.frontend import RequestOutput, StreamOutput
from foredraft.serve.chat import KNOWN as CHAT_FIELDS
from foredraft.serve.chat import read_conversation, read_messages
from foredraft.serve.errors import ApiError
from foredraft.serve.fields import SAMPLING, Fields, wrong_field
from foredraft.serve.form import ResponseFormat, event, parts_of
from foredraft.serve.parsed_request import ParsedRequest
from foredraft.serve.served import Served
from foredraft.serve.settings import ServerSettings
from foredraft.serve.tools import Tools, refuse_custom

PASSED_ON = (SAMPLING - {"max_tokens", "prompt_logprobs", "logprob_token_ids"}) | {
    "model",
    "stream",
    "stream_granularity",
    "stream_interval",
    "cache_salt",
    "structured_outputs",
    "prediction",
    "speculative",
    "spec_decode_metrics",
    "verify",
    "timeout",
    "request_id",
    "truncate_prompt_tokens",
    "truncation_side",
    "chat_template_kwargs",
    "parallel_tool_calls",
}
"""Fields with the same meaning as in chat."""
KNOWN = PASSED_ON | {
    "input", "instructions", "max_output_tokens", "metadata", "text", "reasoning", "tools", "tool_choice",
}  # fmt: skip

_KEEPS_NOTHING = "the server stores no responses; send the whole conversation as input"
REFUSED = {
    **{
        name: UnsupportedOption("it is not a field of /v1/responses; use /v1/chat/completions")
        for name in CHAT_FIELDS - KNOWN
    },
    "n": UnsupportedOption("a response has one sample; use /v1/chat/completions for several", (None, 1)),
    "messages": UnsupportedOption("use input"),
    "max_tokens": UnsupportedOption("use max_output_tokens"),
    "max_completion_tokens": UnsupportedOption("use max_output_tokens"),
    "response_format": UnsupportedOption("use text.format"),
    "stream_options": UnsupportedOption(
        "the last event always contains the usage; leave it out", (None, {"include_obfuscation": False})
    ),
    "max_tool_calls": UnsupportedOption("the server itself runs no tools; leave it out"),
    "previous_response_id": UnsupportedOption(_KEEPS_NOTHING),
    "conversation": UnsupportedOption(_KEEPS_NOTHING),
    "background": UnsupportedOption("the server runs no background jobs; leave it out", (None, False)),
    "include": UnsupportedOption(
        "a response has no additional output; leave it out", (None, [], ["reasoning.encrypted_content"])
    ),
    "top_logprobs": UnsupportedOption(
        "log-probabilities are available only in /v1/chat/completions; use it", (None, 0)
    ),
    "prompt": UnsupportedOption("the server stores no prompt templates; write the text into input"),
    "truncation": UnsupportedOption(
        "input that is too long is refused; shorten it or use truncate_prompt_tokens", (None, "disabled")
    ),
}
"""Fields of the Responses API and of chat that are not supported, with the reason and the remedy."""

MOST_METADATA = 16
FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
ITEMS = "'message', 'function_call' or 'function_call_output'"


def read_response(body: dict[str, Any], served: Served, settings: ServerSettings) -> tuple[ParsedRequest, ResponseForm]:
    """Parse the body of a request. Parsing renders and tokenizes the prompt, which is slow, so it must not be called in
    the event loop.

    Returns: the request and the format of its response.
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
    tools, choice = _tools(given.get("tools")), given.get("tool_choice")
    chat |= {"tools": [{"type": "function", "function": tool} for tool in tools], "tool_choice": _choice(choice)}
    parsed, offered = read_conversation(chat, served, settings)
    echoed = {"instructions": instructions, "metadata": metadata, "max_output_tokens": longest}
    echoed |= {"text": {"format": given.mapping("text").get("format", TEXT)}, "tool_choice": choice or "auto"}
    echoed |= {"tools": [{"type": "function", **dict.fromkeys(FUNCTION_FIELDS), **tool} for tool in tools]}
    echoed |= {"parallel_tool_calls": bool(tools) and given.flag("parallel_tool_calls", True)}
    return parsed, ResponseForm(parsed, served, offered, echoed)


def _tools(given: Any) -> list[dict[str, Any]]:
    """Functions that the model may call, in the form of the chat endpoint."""
    if given is None:
        return []
    if not isinstance(given, list):
        wrong_field("tools", given, "a list of {type: 'function', name: ...}")
    for place, tool in enumerate(given):
        refuse_custom(tool, f"tools[{place}]")
        if not isinstance(tool, dict) or tool.get("type") != "function":
            what = "{type: 'function', name: ...}, because the server runs no built-in tools"
            wrong_field(f"tools[{place}]", tool, what)
    return [{name: tool[name] for name in FUNCTION_FIELDS if tool.get(name) is not None} for tool in given]


def _choice(choice: Any) -> Any:
    """``tool_choice`` in the form of the chat endpoint, which nests the function name."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "allowed_tools" and isinstance(tools := choice.get("tools"), list):
        return {"type": "allowed_tools", "allowed_tools": {**choice, "tools": [_choice(tool) for tool in tools]}}
    return {"type": choice.get("type"), "function": {"name": choice.get("name")}}


def _messages(given: Any) -> list[dict[str, Any]]:
    """Convert the input, text or a list of items, to messages of the chat endpoint."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        wrong_field("input", given, "text, or a list of messages with role and content")
    messages: list[dict[str, Any]] = []
    for place, item in enumerate(given):
        message = _message(item, f"input[{place}]")
        if "tool_calls" in message and messages and messages[-1]["role"] == "assistant":  # calls of one response
            messages[-1].setdefault("tool_calls", []).extend(message["tool_calls"])
        else:
            messages.append(message)
    return read_messages(messages, "input")


def _message(item: Any, where: str) -> dict[str, Any]:
    """Convert one input item to a message of the chat endpoint."""
    if not isinstance(item, dict):
        wrong_field(where, item, "a message with role and content")
    kind = item.get("type", "message")
    if kind == "function_call":
        function = {"name": _text_field(item, "name", where), "arguments": _text_field(item, "arguments", where)}
        call = {"id": _text_field(item, "call_id", where), "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": _text_field(item, "call_id", where), "content": item.get("output")}
    if kind != "message" or item.get("role") == "tool":
        wrong_field(f"{where}.type", item.get("type"), ITEMS)
    return {"role": item.get("role"), "content": item.get("content")}


def _text_field(item: dict[str, Any], name: str, where: str) -> str:
    if not isinstance(value := item.get(name), str):
        wrong_field(f"{where}.{name}", value, "a string")
    return value


def _metadata(given: Fields) -> dict[str, str]:
    metadata = given.mapping("metadata")
    if len(metadata) > MOST_METADATA or not all(isinstance(value, str) for value in metadata.values()):
        wrong_field("metadata", metadata, f"an object of at most {MOST_METADATA} strings")
    return metadata


def _effort(given: Fields) -> Any:
    """Value of ``reasoning.effort``, for templates that use it. All other fields of ``reasoning`` are ignored."""
    return given.mapping("reasoning").get("effort")


def _format(given: Fields) -> dict[str, Any] | None:
    """Convert ``text.format`` to the ``response_format`` of the chat endpoint."""
    text = Fields(given.mapping("text"), {"format", "verbosity"}, {})
    form = text.mapping("format")
    if text.unknown:
        message = f"text has no field {text.unknown[0][:40]!r}; its fields are format and verbosity"
        raise ApiError(400, message, "text", "unknown_field")
    if form.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": form}
    return form or None


TEXT = {"type": "text"}
"""Default of ``text.format``."""


class ResponseForm(ResponseFormat):
    """Response format of ``/v1/responses``: the text of one row and its function calls, as items.

    Args:
      tools: tools of the request.
      echoed: fields of the request that the response repeats.
    """

    def __init__(self, parsed: ParsedRequest, served: Served, tools: Tools, echoed: dict[str, Any]) -> None:
        self._by_token = parsed.by_token
        self._reader = tools.reader()
        self._num_events = 0
        self._reason, self._seed = "", 0
        self._items: list[dict[str, Any]] = []  # finished items
        self._item: dict[str, Any] | None = None  # item that is being generated
        self._response = {
            "id": f"resp_{parsed.request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": parsed.model,
            "system_fingerprint": served.fingerprint,
            "temperature": parsed.params.temperature,
            "top_p": parsed.params.top_p,
            "truncation": "disabled",
            "background": False,
            "store": False,
            **echoed,
        }

    def opening(self) -> list[bytes]:
        response = self._responded("in_progress", None)
        events = [self._event(f"response.{kind}", response=response) for kind in ("created", "in_progress")]
        return events if self._reader else [*events, *self._begin(_new_message())]

    def events(self, news: Sequence[StreamOutput], usage: Callable[[], dict[str, Any]]) -> list[bytes]:
        events = []
        for delta in news:
            pieces = ["".join(delta.texts[part]) for part in parts_of(delta, self._by_token)]
            pieces = pieces if delta.token_ids else [delta.text]
            for place, piece in enumerate(pieces):
                events += self._take(piece, is_last=bool(delta.finish_reason) and place == len(pieces) - 1)
            self._reason, self._seed = delta.finish_reason or self._reason, delta.seed
        return events

    def _take(self, piece: str, is_last: bool) -> list[bytes]:
        """Events for a piece of the output."""
        events = []
        for part in self._reader.read(piece, is_last) if self._reader else [piece] * bool(piece):
            events += self._take_text(part) if isinstance(part, str) else self._take_call(part)
        return events

    def _take_text(self, text: str) -> list[bytes]:
        events = []
        if self._item is None or self._item["type"] != "message":
            events += [*self._end("completed"), *self._begin(_new_message())]
        assert self._item is not None
        self._item["content"][0]["text"] += text
        return [*events, self._event("response.output_text.delta", **self._part_place, delta=text, logprobs=[])]

    def _take_call(self, call: dict[str, Any]) -> list[bytes]:
        events = []
        if "id" in call:
            events += [*self._end("completed"), *self._begin(_new_call(call["id"], call["function"]["name"]))]
        assert self._item is not None
        if said := call["function"]["arguments"]:
            self._item["arguments"] += said
            events.append(self._event("response.function_call_arguments.delta", **self._place, delta=said))
        return events

    def _begin(self, item: dict[str, Any]) -> list[bytes]:
        """Events for the start of an item."""
        self._item = item
        if item["type"] != "message":
            return [self._event("response.output_item.added", output_index=len(self._items), item=item)]
        added = self._event("response.output_item.added", output_index=len(self._items), item=item | {"content": []})
        return [added, self._event("response.content_part.added", **self._part_place, part=item["content"][0])]

    def _end(self, status: str) -> list[bytes]:
        """Events for the end of the open item; empty if none is open."""
        item = self._item
        if item is None:
            return []
        item["status"] = status
        if item["type"] == "message":
            (part,) = item["content"]
            events = [
                self._event("response.output_text.done", **self._part_place, text=part["text"], logprobs=[]),
                self._event("response.content_part.done", **self._part_place, part=part),
            ]
        else:
            said = {"name": item["name"], "arguments": item["arguments"]}
            events = [self._event("response.function_call_arguments.done", **self._place, **said)]
        events.append(self._event("response.output_item.done", output_index=len(self._items), item=item))
        self._items.append(item)
        self._item = None
        return events

    def ending(self, usage: dict[str, Any], beside: dict[str, Any]) -> list[bytes]:
        events = self._end_all()
        return [*events, self._event(f"response.{self._status}", response=self._finished(usage, beside))]

    def failure(self, error: ApiError) -> list[bytes]:
        body = error.body["error"]
        self._items = []
        kind = "server_error" if error.status >= 500 else "invalid_prompt"  # the only two codes of the API that fit
        failed = self._responded("failed", None) | {"error": {"code": kind, "message": body["message"]}}
        said = {"code": str(body["code"]), "message": body["message"], "param": body["param"]}
        return [self._event("error", **said), self._event("response.failed", response=failed)]

    def body(self, outputs: Sequence[RequestOutput], usage: dict[str, Any], beside: dict[str, Any]) -> dict[str, Any]:
        (text,) = outputs[0].outputs
        self._reason, self._seed = text.finish_reason, text.seed
        self._take(text.text, is_last=True)
        self._end_all()
        return self._finished(usage, beside)

    @property
    def _status(self) -> str:
        return "completed" if self._reason == "stop" else "incomplete"

    def _end_all(self) -> list[bytes]:
        """Events for the end of the last item. An empty response has one empty message."""
        events = [] if self._items or self._item else self._begin(_new_message())
        return events + self._end(self._status)

    def _finished(self, usage: dict[str, Any], beside: dict[str, Any]) -> dict[str, Any]:
        return self._responded(self._status, usage) | {"seed": self._seed} | beside

    def _responded(self, status: str, usage: dict[str, Any] | None) -> dict[str, Any]:
        why = {"reason": "max_output_tokens"} if status == "incomplete" else None
        found = {"status": status, "error": None, "incomplete_details": why, "output": list(self._items)}
        return {**self._response, **found, "usage": None if usage is None else _usage(usage)}

    @property
    def _place(self) -> dict[str, Any]:
        assert self._item is not None
        return {"item_id": self._item["id"], "output_index": len(self._items)}

    @property
    def _part_place(self) -> dict[str, Any]:
        return {**self._place, "content_index": 0}

    def _event(self, kind: str, **data: Any) -> bytes:
        self._num_events += 1
        return event({"type": kind, "sequence_number": self._num_events - 1, **data}, kind)


def _new_message() -> dict[str, Any]:
    part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    said = {"role": "assistant", "status": "in_progress", "content": [part]}
    return {"id": f"msg_{secrets.token_hex(12)}", "type": "message", **said}


def _new_call(call_id: str, name: str) -> dict[str, Any]:
    said = {"call_id": call_id, "name": name, "arguments": "", "status": "in_progress"}
    return {"id": f"fc_{secrets.token_hex(12)}", "type": "function_call", **said}


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    """Convert the usage of the chat endpoint to that of ``/v1/responses``."""
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cache_write_tokens": 0, **usage["prompt_tokens_details"]},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0, **usage.get("completion_tokens_details", {})},
        "total_tokens": usage["total_tokens"],
    }

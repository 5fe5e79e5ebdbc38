"""The shape of the answers of ``/v1/responses``: items, which are messages and calls of functions."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from foretoken.serve.form import Form, event, parts_of

if TYPE_CHECKING:
    from foretoken.serve.asking import Asking
    from foretoken.serve.errors import ApiError
    from foretoken.serve.served import Served
    from foretoken.serve.tools import Tools
    from foretoken.sessions.outputs import RequestOutput, StreamOutput

TEXT = {"type": "text"}
"""The form of texts that have none."""


class ResponseForm(Form):
    """Shape of the answers of ``/v1/responses``: what one text says, and the calls in it.

    Args:
      tools: that the model may call, or must.
      told: fields of the request that its answer repeats.
    """

    def __init__(self, asking: Asking, served: Served, tools: Tools, told: dict[str, Any]) -> None:
        self._by_token = asking.by_token
        self._reader = tools.reader()
        self._num_events = 0
        self._reason, self._seed = "", 0
        self._items: list[dict[str, Any]] = []  # that have come to their end
        self._item: dict[str, Any] | None = None  # that is being said
        self._response = {
            "id": f"resp_{asking.request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": asking.model,
            "system_fingerprint": served.fingerprint,
            "temperature": asking.params.temperature,
            "top_p": asking.params.top_p,
            "truncation": "disabled",
            "background": False,
            "store": False,
            **told,
        }

    def opening(self) -> list[bytes]:
        response = self._responded("in_progress", None)
        events = [self._event(f"response.{kind}", response=response) for kind in ("created", "in_progress")]
        return events if self._reader else [*events, *self._begin(_message())]

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
        """Events for a piece of the text."""
        events = []
        text, calls = self._reader.read(piece, is_last) if self._reader else (piece, [])
        if text:  # tokens that only begin a character have none
            if self._item is None or self._item["type"] != "message":
                events += [*self._end("completed"), *self._begin(_message())]
            assert self._item is not None
            self._item["content"][0]["text"] += text
            events.append(self._event("response.output_text.delta", **self._part_place, delta=text, logprobs=[]))
        for call in calls:
            if "id" in call:
                events += [*self._end("completed"), *self._begin(_call(call["id"], call["function"]["name"]))]
            assert self._item is not None
            if said := call["function"]["arguments"]:
                self._item["arguments"] += said
                events.append(self._event("response.function_call_arguments.delta", **self._place, delta=said))
        return events

    def _begin(self, item: dict[str, Any]) -> list[bytes]:
        """Events for an item that begins."""
        self._item = item
        if item["type"] != "message":
            return [self._event("response.output_item.added", output_index=len(self._items), item=item)]
        added = self._event("response.output_item.added", output_index=len(self._items), item=item | {"content": []})
        return [added, self._event("response.content_part.added", **self._part_place, part=item["content"][0])]

    def _end(self, status: str) -> list[bytes]:
        """Events for the end of the item that is being said, if one is."""
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
        told = error.body["error"]
        self._items = []
        kind = "server_error" if error.status >= 500 else "invalid_prompt"  # what the API has of these
        failed = self._responded("failed", None) | {"error": {"code": kind, "message": told["message"]}}
        said = {"code": str(told["code"]), "message": told["message"], "param": told["param"]}
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
        """Events for the end of the last item; an answer without a word has an empty message."""
        events = [] if self._items or self._item else self._begin(_message())
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


def _message() -> dict[str, Any]:
    part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    said = {"role": "assistant", "status": "in_progress", "content": [part]}
    return {"id": f"msg_{secrets.token_hex(12)}", "type": "message", **said}


def _call(call_id: str, name: str) -> dict[str, Any]:
    said = {"call_id": call_id, "name": name, "arguments": "", "status": "in_progress"}
    return {"id": f"fc_{secrets.token_hex(12)}", "type": "function_call", **said}


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    """Chat's usage in the words of responses."""
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cache_write_tokens": 0, **usage["prompt_tokens_details"]},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0, **usage.get("completion_tokens_details", {})},
        "total_tokens": usage["total_tokens"],
    }

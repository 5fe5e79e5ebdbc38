"""Tool calls in the text of a model: Hermes' format, which SmolLM2 and Qwen write, too."""

from __future__ import annotations

import json
import secrets
from typing import Any

from foretoken.serve.errors import ApiError
from foretoken.serve.fields import Fields, wrong_field

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def read_tools(given: Fields, parser: str | None, template: str) -> list[dict[str, Any]]:
    """The tools that the model may call; none where none are offered, or none are to be called.

    Raises: ApiError where tools cannot be offered, or one is to be called whatever the model says.
    """
    tools, choice = given.get("tools"), given.get("tool_choice")
    if tools is None or tools == []:
        if choice not in (None, "none", "auto"):
            raise ApiError(400, "tool_choice is given without tools", "tool_choice")
        return []
    if not isinstance(tools, list) or not all(_is_tool(tool) for tool in tools):
        wrong_field("tools", tools, "a list of {type: 'function', function: {name: ...}}")
    if choice == "none":
        return []
    if choice not in (None, "auto"):
        raise ApiError(
            400, "tool_choice can be 'none' or 'auto': a call cannot be forced by this server", "tool_choice"
        )
    if parser is None:
        raise ApiError(400, "tools need a parser of calls; start the server with --tool-call-parser hermes", "tools")
    if "tools" not in template:
        raise ApiError(
            400, "the chat template of this model has no tools; start the server with --chat-template FILE", "tools"
        )
    return tools


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


class CallReader:
    """Takes calls out of a text as it grows; what may yet become a call is held back.

    A call is ``<tool_call>`` with a JSON object, or a list of them, of a name and arguments. What is none stays text.

    Attributes:
      num_calls: found so far.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self._held = ""

    def read(self, piece: str, is_last: bool = False) -> tuple[str, list[dict[str, Any]]]:
        """The text that is certain to be none of a call, and the calls that have come to their end."""
        self._held += piece
        text, calls = "", []
        while self._held:
            before, opened, rest = self._held.partition(OPEN)
            if not opened:
                kept = 0 if is_last else _overlap(self._held)
                text += self._held[: len(self._held) - kept]
                self._held = self._held[len(self._held) - kept :]
                break
            inside, closed, after = rest.partition(CLOSE)
            if not closed and not is_last:
                text += before
                self._held = opened + rest
                break
            found = _calls(inside)
            text += before if found else before + opened + inside + closed
            calls += [self._numbered(call) for call in found]
            self._held = after
        if self.num_calls and not text.strip():
            text = ""  # line ends around calls
        return text, calls

    def _numbered(self, call: dict[str, Any]) -> dict[str, Any]:
        self.num_calls += 1
        function = {"name": call["name"], "arguments": json.dumps(call.get("arguments", {}), ensure_ascii=False)}
        identity = f"call_{secrets.token_hex(12)}"
        return {"index": self.num_calls - 1, "id": identity, "type": "function", "function": function}


def _calls(text: str) -> list[dict[str, Any]]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return []
    found = found if isinstance(found, list) else [found]
    return found if all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in found) else []


def _overlap(text: str) -> int:
    """Length of the end of a text that begins a call."""
    return next((length for length in range(len(OPEN) - 1, 0, -1) if text.endswith(OPEN[:length])), 0)

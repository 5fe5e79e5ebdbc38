"""Tool calls in the text of a model: Hermes' format, which SmolLM2 and Qwen write, too."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable
from typing import Any

from foretoken.folders import parsed_json

OPEN, CLOSE = "<tool_call>", "</tool_call>"

HEAD, BETWEEN, TAIL = f'{OPEN}\n{{"name": ', ', "arguments": ', f"}}\n{CLOSE}"
"""Of a call that is forced, around its name and its arguments: as templates write calls of earlier answers."""


class CallReader:
    """Takes calls out of a text as it grows; what may yet become a call is held back.

    A call is ``<tool_call>`` with a JSON object, or a list of them, of a name and arguments. What is none stays text.

    Args:
      is_single: tell the first call alone, as vLLM does, and nothing of others.

    Attributes:
      num_calls: found so far.
    """

    def __init__(self, is_single: bool = False) -> None:
        self.num_calls = 0
        self._is_single = is_single
        self._held = ""

    @property
    def ends_with_calls(self) -> bool:
        """Whether a text that ends here, as the model wants, has ended for its calls."""
        return self.num_calls > 0

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
            calls += [self._numbered(call) for call in found if not (self._is_single and self.num_calls)]
            self._held = after
        if self.num_calls and not text.strip():
            text = ""  # line ends around calls
        return text, calls

    def _numbered(self, call: dict[str, Any]) -> dict[str, Any]:
        self.num_calls += 1
        return _begun(self.num_calls - 1, call["name"], json.dumps(call.get("arguments", {}), ensure_ascii=False))


def _calls(text: str) -> list[dict[str, Any]]:
    try:
        found = parsed_json(text)
    except ValueError:
        return []
    found = found if isinstance(found, list) else [found]
    return found if all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in found) else []


def _overlap(text: str) -> int:
    """Length of the end of a text that begins a call."""
    return next((length for length in range(len(OPEN) - 1, 0, -1) if text.endswith(OPEN[:length])), 0)


class ForcedReader:
    """Takes calls out of a text that is nothing else, as it grows: the name first, then pieces of the arguments.

    Args:
      is_named: whether the request names the tool; its calls are no reason to end, as in the OpenAI API.
    """

    def __init__(self, is_named: bool) -> None:
        self._is_named = is_named
        self._held = ""
        self._num_begun = 0
        self._object: _Object | None = None  # the arguments that are being read

    @property
    def ends_with_calls(self) -> bool:
        """Whether a text that ends here, as the model wants, has ended for its calls."""
        return not self._is_named and self._num_begun > 0 and self._object is None

    def read(self, piece: str, is_last: bool = False) -> tuple[str, list[dict[str, Any]]]:
        """No text, and what is new of calls."""
        self._held += piece
        calls: list[dict[str, Any]] = []
        while self._held:
            if self._object is None:
                if (found := _BEGIN.match(self._held)) is None:
                    break
                calls.append(_begun(self._num_begun, json.loads(found[1]), ""))
                self._num_begun, self._object = self._num_begun + 1, _Object()
                self._held = self._held[found.end() :]
            length = self._object.read(self._held)
            if length and not calls:
                calls.append({"index": self._num_begun - 1, "function": {"arguments": ""}})
            if length:
                calls[-1]["function"]["arguments"] += self._held[:length]
            self._held = self._held[length:]
            if not self._object.has_ended:
                break
            self._object = None
        return "", calls


_BEGIN = re.compile(
    rf'(?:{re.escape(TAIL)}\n)?{re.escape(HEAD)}("(?:[^"\\]|\\.)*"){re.escape(BETWEEN)}(?=\{{)', re.DOTALL
)
"""From the end of the arguments before, if any, to those that come next."""


class _Object:
    """A JSON object that comes in pieces."""

    def __init__(self) -> None:
        self.has_ended = False
        self._depth = 0
        self._in_text = self._is_escaped = False

    def read(self, text: str) -> int:
        """How many characters of a text belong to it."""
        for place, one in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_text:
                self._is_escaped, self._in_text = one == "\\", one != '"'
            elif one == '"':
                self._in_text = True
            elif one in "{}":
                self._depth += 1 if one == "{" else -1
                if not self._depth:
                    self.has_ended = True
                    return place + 1
        return len(text)


def joined(calls: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls as whole answers have them, from what streams tell of them."""
    found: list[dict[str, Any]] = []
    for call in calls:
        if "id" in call:
            found.append({name: value for name, value in call.items() if name != "index"})
        else:
            found[-1]["function"]["arguments"] += call["function"]["arguments"]
    return found


def _begun(index: int, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"index": index, "id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}

"""Tool calls in the output of a model, in Hermes format, which models such as SmolLM2 and Qwen use."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable
from typing import Any, TypeAlias

from foredraft.serve.strict_json import JsonEnd, is_object, is_unicode, own_texts, with_escaped_halves

OPEN, CLOSE = "<tool_call>", "</tool_call>"

HEAD, BETWEEN, TAIL = f'{OPEN}\n{{"name": ', ', "arguments": ', f"}}\n{CLOSE}"
"""Text around the name and arguments of a forced call, identical to what chat templates write for earlier calls."""

Part: TypeAlias = str | dict[str, Any]
"""Text, or a tool call in the form of a stream: complete, begun, or continued (without an id)."""

_BEGIN = re.compile(rf'{re.escape(HEAD[len(OPEN) :])}("(?:[^"\\]|\\.)*"){re.escape(BETWEEN)}(?=\{{)', re.DOTALL)
"""Pattern of a forced call from its opening tag to its arguments."""


class CallReader:
    """Incremental parser that separates tool calls from text. The result does not depend on how the output is split
    into pieces.

    A call is ``<tool_call>``, then a JSON object with a name and arguments or a list of such objects, then
    ``</tool_call>``. Any other content after a tag is text. White space between the start of the output, the calls and
    the end is dropped.

    Args:
      is_single: whether only the first call is returned, as in vLLM.
      is_forced: whether a grammar forces calls, so that the output has no text. The name of a call is then returned
        first, and its arguments as they arrive.
      is_named: whether the request names the tool; the finish reason is then "stop", as in the OpenAI API.

    Attributes:
      num_calls: number of calls that were found.
    """

    def __init__(self, *, is_single: bool = False, is_forced: bool = False, is_named: bool = False) -> None:
        self.num_calls = 0
        self._is_single, self._is_forced, self._is_named = is_single, is_forced, is_named
        self._text = ""  # output whose meaning is not certain yet
        self._place = 0  # position in `_text` of the next character to read
        self._json: JsonEnd | None = None  # parser of the current call
        self._inside = 0  # start of the current call, after its tag
        self._returned = 0  # end of the returned arguments of a forced call
        self._is_begun = self._is_in_arguments = False  # state of a forced call
        self._space, self._has_text = "", False  # white space and text since the last call
        self._parts: list[Part] = []

    @property
    def ends_with_calls(self) -> bool:
        """Whether the finish reason is a tool call, if the model ends the output here."""
        return self.num_calls > 0 and not self._is_named and not self._is_in_arguments

    def read(self, piece: str, is_last: bool = False) -> list[Part]:
        """Add a piece of output.

        Args:
          is_last: whether the output ends with this piece.

        Returns: the text and calls that are certain now, in order.
        """
        self._text += piece
        self._parts = []
        while self._read_call(is_last) if self._json else self._read_text(is_last):
            pass
        if is_last and not self.num_calls:
            self._tell_text(self._space)
        certain = self._inside if self._json else self._place
        self._text = self._text[certain:]
        self._inside, self._place, self._returned = (
            self._inside - certain,
            self._place - certain,
            self._returned - certain,
        )
        return self._parts

    def _read_text(self, is_last: bool) -> bool:
        """Read text up to the next opening tag.

        Returns: whether a tag was found.
        """
        begin, found = self._place, self._text.find(OPEN, self._place)
        if found < 0:
            self._place = len(self._text) - (0 if is_last else _overlap(self._text[begin:]))
            self._say(self._text[begin : self._place])
            return False
        self._say(self._text[begin:found])
        self._place = self._inside = found + len(OPEN)
        self._json = JsonEnd()
        return True

    def _read_call(self, is_last: bool) -> bool:
        """Read a call after its opening tag.

        Returns: whether reading continues with text, after the call or because the tag began none.
        """
        value = self._json
        assert value is not None
        if self._is_forced and not value.has_ended:
            self._read_forced(value)
        if not value.has_ended and not value.has_failed:
            self._place = value.read(self._text, self._place)
        if value.has_failed or (is_last and not value.has_ended):
            return self._read_as_text()
        if not value.has_ended:
            return False
        rest = self._text[self._place :].lstrip(" \t\n\r")
        is_closed = rest.startswith(CLOSE)
        if not is_closed and not CLOSE.startswith(rest):
            return self._read_as_text()
        if not is_closed and not is_last:
            return False
        if not self._is_forced:
            calls = _calls(self._text[self._inside : self._place])
            if not calls:
                return self._read_as_text()
            self._tell_calls(calls)
        self._place = len(self._text) - len(rest) + len(CLOSE if is_closed else rest)
        self._json, self._space, self._has_text, self._is_begun = None, "", False, False
        return True

    def _read_as_text(self) -> bool:
        """Treat the opening tag as text, and continue after it."""
        if self._is_forced:  # the output was cut off
            self._place = len(self._text)
            return False
        self._say(OPEN)
        self._json, self._place = None, self._inside
        return True

    def _tell_calls(self, calls: list[tuple[str, str]]) -> None:
        for name, arguments in calls:
            if not (self._is_single and self.num_calls):
                self._parts.append(_begun(self.num_calls, name, arguments))
            self.num_calls += 1

    def _read_forced(self, value: JsonEnd) -> None:
        """Add the new parts of a forced call to the result."""
        if not self._is_begun and (found := _BEGIN.match(self._text, self._inside)) is not None:
            value.read(self._text[: found.end()], self._place)
            self._place = self._returned = found.end()
            self._parts.append(_begun(self.num_calls, json.loads(found[1]), ""))
            self.num_calls += 1
            self._is_begun = self._is_in_arguments = True
        if not self._is_in_arguments:
            return
        self._place = value.read(self._text, self._place, depth=1)
        if arguments := self._text[self._returned : self._place]:
            self._return_arguments(arguments)
        self._returned, self._is_in_arguments = self._place, value.depth > 1

    def _return_arguments(self, arguments: str) -> None:
        """Add arguments of the current call to the result."""
        if not self._parts:
            self._parts.append({"index": self.num_calls - 1, "function": {"arguments": ""}})
        last = self._parts[-1]
        assert not isinstance(last, str)
        last["function"]["arguments"] += arguments

    def _say(self, text: str) -> None:
        """Add text to the result; leading white space is held back until other text follows."""
        self._space += text
        if self._has_text or (self._space and not self._space.isspace()):
            self._has_text = True
            self._tell_text(self._space)
            self._space = ""

    def _tell_text(self, text: str) -> None:
        if not text or self._is_forced:
            return
        if self._parts and isinstance(self._parts[-1], str):
            self._parts[-1] += text
        else:
            self._parts.append(text)


def _overlap(text: str) -> int:
    """Length of the longest suffix that may be the start of an opening tag."""
    return next((length for length in range(len(OPEN) - 1, 0, -1) if text.endswith(OPEN[:length])), 0)


def _calls(text: str) -> list[tuple[str, str]]:
    """Parse the content of a call tag into names and arguments; empty if it is not a valid call."""
    try:
        found = [(json.loads(call["name"]), _arguments(call.get("arguments", "{}"))) for call in own_texts(text)]
    except (ValueError, KeyError):
        return []
    return found if all(isinstance(name, str) and is_unicode(name) for name, _ in found) else []


def _arguments(own: str) -> str:
    """Arguments as the model wrote them; an object that the model wrote as a JSON string is decoded once."""
    if own == "null":
        return "{}"
    if own.startswith('"') and is_object(inner := json.loads(own)):
        return with_escaped_halves(inner)
    return own


def _begun(index: int, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"index": index, "id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def message_of(parts: Iterable[Part]) -> tuple[str, list[dict[str, Any]]]:
    """Combine the parts of a stream into the text and the calls of a whole message."""
    text: list[str] = []
    calls: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, str):
            text.append(part)
        elif "id" in part:
            calls.append({name: value for name, value in part.items() if name != "index"})
        else:
            calls[-1]["function"]["arguments"] += part["function"]["arguments"]
    return "".join(text), calls

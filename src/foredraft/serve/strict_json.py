"""Standard-conforming JSON: no NaN, no numbers that overflow to infinity, and access to values as they were written."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from foredraft.folders import parsed_json

_SPACE = re.compile(r"[ \t\n\r]*")
_HALF = re.compile("[\ud800-\udfff]")
_OUTSIDE = frozenset("0123456789+-.eEtrufalsn:, \t\n\r")
"""Characters that may occur in JSON outside of strings and brackets."""


def strict_json(text: str | bytes | bytearray) -> Any:
    """Parse JSON strictly, so that the result can be serialized as JSON again.

    Raises: ValueError for NaN, an infinite number, deep nesting, or text that is not JSON.
    """
    return parsed_json(text, parse_constant=_no_constant, parse_float=_finite)


def _finite(number: str) -> float:
    if math.isinf(value := float(number)):
        raise ValueError(f"the number {number[:20]} is too large for a float")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


_decoder = json.JSONDecoder(parse_constant=_no_constant, parse_int=str, parse_float=str)
"""Decoder that only validates. Numbers stay text, so that none overflows."""


def own_texts(text: str) -> list[dict[str, str]]:
    """Members of an object, or of each object in a list, with their values as they were written.

    Raises: ValueError for any other text, and for deep nesting.
    """
    try:
        value, end = _decoder.raw_decode(text, _after(text, 0))
        if _after(text, end) != len(text):
            raise ValueError("there is more text after the value")
        if isinstance(value, dict):
            return [_members(text, _after(text, 0))[0]]
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise ValueError("the text is neither an object nor a list of objects")
        found, place = [], _after(text, _after(text, 0) + 1)
        while text[place] != "]":
            members, place = _members(text, place)
            found.append(members)
            place = _next(text, place)
        return found
    except RecursionError:
        raise ValueError("the value is nested too deeply") from None


def _members(text: str, place: int) -> tuple[dict[str, str], int]:
    """Return the members of the valid object that begins at a position, and the position after it."""
    found, place = {}, _after(text, place + 1)
    while text[place] != "}":
        key, place = _decoder.raw_decode(text, place)
        begin = _after(text, _after(text, place) + 1)  # after the colon
        _, end = _decoder.raw_decode(text, begin)
        found[key] = text[begin:end]
        place = _next(text, end)
    return found, place + 1


def _after(text: str, place: int) -> int:
    """Position after white space."""
    found = _SPACE.match(text, place)
    assert found is not None
    return found.end()


def _next(text: str, place: int) -> int:
    """Position of the next member or item, or of the closing bracket."""
    place = _after(text, place)
    return _after(text, place + 1) if text[place] == "," else place


def is_object(text: str) -> bool:
    """Whether the text is a JSON object."""
    try:
        return isinstance(parsed_json(text, parse_constant=_no_constant, parse_int=str, parse_float=str), dict)
    except ValueError:
        return False


def is_unicode(text: str) -> bool:
    """Whether the text has no unpaired surrogate."""
    return _HALF.search(text) is None


def with_escaped_halves(text: str) -> str:
    """Write unpaired surrogates in JSON as escapes. The value stays the same."""
    return _HALF.sub(lambda half: f"\\u{ord(half[0]):04x}", text)


class JsonEnd:
    """Incremental scanner that finds the end of a JSON object or list.

    Attributes:
      depth: number of open brackets.
      has_failed: whether the text cannot be the start of a JSON object or list.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.has_failed = self._has_begun = False
        self._in_string = self._is_escaped = False

    @property
    def has_ended(self) -> bool:
        return self._has_begun and self.depth == 0

    def read(self, text: str, place: int, depth: int = 0) -> int:
        """Scan the text from a position.

        Args:
          depth: number of brackets that are still open where the scan stops.

        Returns: the position after the bracket that leaves ``depth`` brackets open, or the end of the text. After a
          failure the position is meaningless.
        """
        for at in range(place, len(text)):
            one = text[at]
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped, self._in_string = one == "\\", one != '"'
                self.has_failed = one < " "
            elif one in "{[":
                self._has_begun = True
                self.depth += 1
            elif one in "}]":
                self.depth -= 1
                if self.depth == depth:
                    return at + 1
            elif one == '"':
                self._in_string = True
            else:
                self.has_failed = one not in _OUTSIDE
            if self.has_failed or self.depth < 0 or not (self._has_begun or one in " \t\n\r"):
                self.has_failed = True
                return at
        return len(text)

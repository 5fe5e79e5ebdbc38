"""Calls in the text of a model: the same in whatever pieces it comes, with arguments as the model wrote them."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from foredraft.serve.calls import CallReader, Part, message_of

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "</tool"}}\n</tool_call>'
ADDED = [("add", '{"a": 1, "b": "</tool"}')]


def called(arguments: str, name: str = '"f"') -> str:
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'


TEXTS: dict[str, tuple[str, str, list[tuple[str, str]]]] = {
    "one": (CALL, "", ADDED),
    "with text": (f"Let me see. {CALL}", "Let me see. ", ADDED),
    "two": (f"{CALL}\n{CALL}", "", ADDED * 2),
    "text around": (f"I will call.\n{CALL}\nDone.", "I will call.\n\nDone.", ADDED),
    "space around": (f"\n {CALL}\n\n {CALL} \n", "", ADDED * 2),
    "space around text": (f"\n a \n{CALL}\n", "\n a \n", ADDED),
    "space alone": (" \n ", " \n ", []),
    "a list": (
        '<tool_call>[{"name": "f"}, {"name": "g", "arguments": {}}]</tool_call>',
        "",
        [("f", "{}"), ("g", "{}")],
    ),
    "an empty list": ("<tool_call>[]</tool_call>", "<tool_call>[]</tool_call>", []),
    "no end": ('<tool_call>{"name": "f"}', "", [("f", "{}")]),
    "half an end": ('<tool_call>{"name": "f"} </tool_c', "", [("f", "{}")]),
    "no JSON": ("<tool_call>add(1)</tool_call>", "<tool_call>add(1)</tool_call>", []),
    "cut off": ('a <tool_call>\n{"name": "f", "arg', 'a <tool_call>\n{"name": "f", "arg', []),
    "more behind it": ('<tool_call>{"name": "f"} b</tool_call>', '<tool_call>{"name": "f"} b</tool_call>', []),
    "no name": ('<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
    "nearly": ("a <tool_cal and <", "a <tool_cal and <", []),
    "none": ("Nothing to call.", "Nothing to call.", []),
    "a tag in an argument": (called('{"a": "</tool_call>"}'), "", [("f", '{"a": "</tool_call>"}')]),
    "tags in an argument": (called('{"a": "<tool_call>"}') + CALL, "", [("f", '{"a": "<tool_call>"}'), *ADDED]),
    "a call in an argument": (
        called('{"a": "<tool_call>{\\"name\\": 1}</tool_call>\\""}'),
        "",
        [("f", '{"a": "<tool_call>{\\"name\\": 1}</tool_call>\\""}')],
    ),
    "an open string": (f'<tool_call>{{"name": "f}}</tool_call> {CALL}', '<tool_call>{"name": "f}</tool_call> ', ADDED),
    "a tag twice": (f"<tool_call>{CALL}", "<tool_call>", ADDED),
    "large": (called('{"a": 1e999, "b": -1E+400}'), "", [("f", '{"a": 1e999, "b": -1E+400}')]),
    "digits": (called('{"a": 2.50, "b": 1' + "0" * 5000 + "}"), "", [("f", '{"a": 2.50, "b": 1' + "0" * 5000 + "}")]),
    "keys twice": (called('{"a":1 ,"a": 2}'), "", [("f", '{"a":1 ,"a": 2}')]),
    "half a pair": (called('{"a": "\\ud83d"}'), "", [("f", '{"a": "\\ud83d"}')]),
    "half a pair as a name": (called("{}", '"\\ud83d"'), called("{}", '"\\ud83d"'), []),
    "not a number": (called('{"a": NaN}'), called('{"a": NaN}'), []),
    "infinity": (called('{"a": -Infinity}'), called('{"a": -Infinity}'), []),
    "a line end in a string": (called('{"a": "\n"}'), called('{"a": "\n"}'), []),
    "wrong brackets": (called('{"a": [1}]'), called('{"a": [1}]'), []),
    "deep": (called("[" * 5000 + "]" * 5000), called("[" * 5000 + "]" * 5000), []),
    "written as a string": (called('"{\\"a\\": \\"\\\\n\\"}"'), "", [("f", '{"a": "\\n"}')]),
    "written as a string twice": (called(json.dumps(json.dumps("{}"))), "", [("f", json.dumps(json.dumps("{}")))]),
    "a string with half a pair": (called('"{\\"a\\": \\"\\ud83d\\"}"'), "", [("f", '{"a": "\\ud83d"}')]),
    "another string": (called('"NaN"'), "", [("f", '"NaN"')]),
    "null": (called("null"), "", [("f", "{}")]),
}


def read(text: str, cuts: list[int], **options: bool) -> tuple[str, list[tuple[str, str]]]:
    """Text and calls that pieces of a stream add up to."""
    reader = CallReader(**options)
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    parts: list[Part] = []
    for place, piece in enumerate(pieces):
        parts += reader.read(piece, is_last=place == len(pieces) - 1)
    begun = [part for part in parts if not isinstance(part, str) and "id" in part]
    assert [call["index"] for call in begun] == list(range(len(begun)))
    said, calls = message_of(parts)
    return said, [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


@pytest.mark.parametrize("name", TEXTS)
def test_calls_are_read_in_any_pieces(name: str) -> None:
    text, said, calls = TEXTS[name]
    for size in (1, 2, 7, 100_000):
        assert read(text, list(range(size, len(text), size))) == (said, calls)


def test_a_whole_answer_is_what_the_stream_adds_up_to() -> None:
    """Random texts of what matters to the reader, cut at random. Nothing but calls and space around them is lost."""
    draw = random.Random(3)
    words = [
        "<tool_call>",
        "</tool_call>",
        *'{}[]":, \n\\a1',
        '{"name": "f"}',
        '{"name": "f", "arguments": {"a": "',
        CALL,
    ]
    for _ in range(1000):
        text = "".join(draw.choices(words, k=draw.randrange(12)))
        cuts = sorted(draw.sample(range(len(text) + 1), k=min(len(text), draw.randrange(6))))
        for is_single in (False, True):
            assert read(text, cuts, is_single=is_single) == read(text, [], is_single=is_single)
        said, calls = read(text, [])
        assert calls or said == text


def test_the_cost_of_tags_that_begin_no_call_is_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Characters that are looked at again, each time from behind a tag."""
    from foredraft.serve import calls

    num_read = 0

    class Counting(calls.JsonEnd):
        def read(self, text: str, place: int, depth: int = 0) -> int:
            nonlocal num_read
            end = super().read(text, place, depth)
            num_read += end - place
            return end

    monkeypatch.setattr(calls, "JsonEnd", Counting)
    for unit in ('<tool_call>{"', '<tool_call>["a', '<tool_call>[[[["', "<tool_call>", '<tool_call>{"a": "'):
        num_read = 0
        assert read(unit * 2000, [])[1] == []
        assert num_read <= 4 * len(unit) * 2000


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_forced_calls_are_read_in_any_pieces(size: int) -> None:
    """The name first, then arguments as they come."""
    expected: list[tuple[str, Any]] = [
        ('a "}{" \\', {"x": '}"\\{', "y": {"z": ["}", {}]}, "t": "</tool_call>"}),
        ("b", {}),
    ]
    text = "\n".join(called(json.dumps(of), json.dumps(name)) for name, of in expected)
    reader = CallReader(is_forced=True)
    pieces = [text[place : place + size] for place in range(0, len(text), size)]
    told = [reader.read(piece) for piece in pieces]
    said, calls = message_of(part for parts in told for part in parts)
    assert said == ""
    assert [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls] == expected
    assert reader.ends_with_calls
    assert all(len({part["index"] for part in parts if not isinstance(part, str)}) == len(parts) for parts in told)
    assert size > 2 or sum(map(len, told)) > 10


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_a_forced_call_may_be_cut_anywhere(size: int) -> None:
    text = called('{"a": "}", "b": [1]}') + "\n" + called("{}")
    whole = read(text, [], is_forced=True)[1]
    for length in range(len(text)):
        said, calls = read(text[:length], list(range(size, length, size)), is_forced=True)
        assert said == ""
        assert all(name == "f" and full[1].startswith(of) for (name, of), full in zip(calls, whole, strict=False))

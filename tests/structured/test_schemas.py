"""JSON schemas: what they accept is what their masks allow, or less; what no mask holds is named."""

from __future__ import annotations

import json
import logging
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from foredraft import StructuredOutputs, zoo
from foredraft.structured.grammars import ONE_OF, UNFORCED, Grammars, check_integers, written
from foredraft.structured.schemas import MOST_OPTIONAL, MOST_SCHEMAS, prepared, unheld_keywords

llguidance = pytest.importorskip("llguidance", reason="the extra [structured] is not installed")

SUITE = Path(__file__).parent / "json_schema_suite" / "draft2020-12.json"


@cache
def by_bytes() -> Any:
    return llguidance.LLTokenizer("byte")


def matcher_of(schema: Any) -> tuple[Any, str]:
    """A matcher, or why there is none."""
    wanted = StructuredOutputs(json=json.dumps(schema))
    for splits_one_of in (False, True):
        try:
            grammar = f"{written(wanted, splits_one_of=splits_one_of)}\n{UNFORCED}"
        except ValueError as error:
            return None, str(error)
        matcher = llguidance.LLMatcher(by_bytes(), grammar, log_level=0)
        if ONE_OF not in matcher.get_error():
            break
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher, matcher.get_error()


def allows(matcher: Any, value: Any) -> bool:
    """In any of the usual ways to write a value."""
    for separators in ((",", ":"), (", ", ": ")):
        for is_ascii in (True, False):
            text = json.dumps(value, separators=separators, ensure_ascii=is_ascii).encode("utf-8", "surrogatepass")
            copied = matcher.deep_copy()
            if copied.try_consume_tokens([*text]) == len(text) and copied.is_accepting():
                return True
    return False


@cache
def suite() -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = json.loads(SUITE.read_text(encoding="utf-8"))
    return found


def test_of_the_public_cases_few_are_refused_and_none_is_too_wide() -> None:
    """Of 1,299 cases 703 were refused. Those that a mask cannot hold are named; `uniqueItems` is the only keyword."""
    total, refused, narrower, unheld, too_wide = 0, 0, 0, 0, []
    for name, groups in suite().items():
        for group in groups:
            schema, num_cases = group["schema"], len(group["valid"]) + len(group["invalid"])
            total += num_cases
            matcher, error = matcher_of(schema)
            if error:
                is_empty = any(word in error for word in ("Unsatisfiable", "NoExtension", "no text matches"))
                refused += len(group["valid"]) if is_empty else num_cases
                continue
            told = unheld_keywords(StructuredOutputs(json=json.dumps(schema)))
            narrower += sum(not allows(matcher, value) for value in group["valid"])
            wide = [value for value in group["invalid"] if allows(matcher, value)]
            if wide and told == ("uniqueItems",):
                unheld += len(wide)
            else:
                too_wide += [(name, schema, value) for value in wide]
    assert total == 1299
    assert too_wide == []
    assert refused <= 215
    assert narrower <= 30
    assert unheld <= 17


CASES: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "boolean": (True, [1, "a", {}], []),
    "whole floats": ({"type": "string", "maxLength": 2.0}, ["ab"], ["abc"]),
    "names by pattern": ({"propertyNames": {"pattern": "^a"}}, [{"ab": 1}, 3], [{"b": 1}]),
    "names by enum": (
        {"type": "object", "propertyNames": {"enum": ["x", "y"]}, "additionalProperties": {"type": "integer"}},
        [{"y": 1, "x": 2}],
        [{"z": 1}, {"x": "a"}],
    ),
    "names by length": ({"propertyNames": {"maxLength": 2}}, [{"ab": 1}], [{"abc": 1}]),
    "depends": ({"dependentRequired": {"a": ["b"]}}, [{"b": 1}, {"b": 1, "a": 2}, "x"], [{"a": 1}]),
    "depends on a schema": (
        {"dependentSchemas": {"a": {"properties": {"b": {"type": "integer"}}}}},
        [{"b": "x"}, {"b": 2, "a": 1}],
        [{"b": "x", "a": 1}, {"a": 1, "b": "x"}],
    ),
    "if with a constant": (
        {
            "type": "object",
            "properties": {"kind": {"type": "string"}, "size": {}},
            "required": ["kind", "size"],
            "if": {"properties": {"kind": {"const": "box"}}},
            "then": {"properties": {"size": {"type": "integer"}}},
            "else": {"properties": {"size": {"type": "string"}}},
        },
        [{"kind": "box", "size": 1}, {"kind": "bo", "size": "a"}, {"kind": "boxes", "size": "a"}],
        [{"kind": "box", "size": "a"}, {"kind": "bo", "size": 1}, {"kind": "cox", "size": 1}],
    ),
    "not a string": ({"not": {"type": "string"}}, [1, None], ["a"]),
    "not these": ({"not": {"enum": ["ab", 3, None, True]}}, ["a", "abc", 2, 3.5, False], ["ab", 3, None, True]),
    "not required": ({"type": "object", "not": {"required": ["a", "b"]}}, [{"a": 1}, {}], [{"a": 1, "b": 2}]),
    "not long": ({"not": {"minLength": 2}}, ["a"], ["ab", 1]),
    "not anything": ({"not": {"not": {"type": "integer"}}}, [1], ["a"]),
    "one of two ranges": ({"oneOf": [{"minimum": 3}, {"maximum": 5}]}, [2, 6], [4, "a"]),
    "contains": ({"type": "array", "contains": {"const": 5}}, [[5], [1, 5]], [[], [1, 2]]),
    "contains at most": (
        {"type": "array", "contains": {"type": "string"}, "maxContains": 1},
        [["a"], [1, "a", 2]],
        [[1], ["a", "b"], [1, "a", 2, "b"]],
    ),
    "unevaluated": (
        {"allOf": [{"properties": {"a": {"type": "integer"}}}], "unevaluatedProperties": False},
        [{"a": 1}, {}],
        [{"b": 1}, {"a": "x"}],
    ),
    "unevaluated with a choice": (
        {"anyOf": [{"properties": {"a": True}}, {"properties": {"b": True}}], "unevaluatedProperties": False},
        [],
        [{"c": 1}],
    ),
    "unevaluated items of old tuples": (
        {
            "$schema": "https://json-schema.org/draft/2019-09/schema",
            "items": [{"type": "string"}],
            "unevaluatedItems": False,
        },
        [],
        [["a", "b"]],
    ),
    "constants stay as they are": (
        {"enum": [{"uniqueItems": True}, {"not": 3}]},
        [{"uniqueItems": True}, {"not": 3}],
        [{}],
    ),
    "names of properties are no keywords": (
        {"type": "object", "properties": {"not": {"type": "integer"}, "if": {"type": "string"}}},
        [{"not": 1, "if": "a"}],
        [{"not": "a"}],
    ),
    "not what contains": ({"type": "array", "not": {"contains": {"const": 5}}}, [], [[5], [1, 2, 3, 4, 5]]),
}


@pytest.mark.parametrize("name", CASES)
def test_rewritten_schemas_accept_the_same(name: str) -> None:
    """Each of them alone; one that cannot be written is refused, which is never too wide."""
    schema, valid, invalid = CASES[name]
    matcher, error = matcher_of(schema)
    if not valid:
        assert error or not any(allows(matcher, value) for value in invalid)
        return
    assert not error
    assert [value for value in valid if not allows(matcher, value)] == []
    assert [value for value in invalid if allows(matcher, value)] == []


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, ("uniqueItems",)),
        ({"type": "string", "format": "password", "writeOnly": True}, ("format 'password'",)),
        ({"properties": {"at": {"type": "string", "format": "path"}}}, ("format 'path'",)),
        ({"type": "object", "propertyNames": {"format": "email"}}, ("propertyNames",)),
        ({"type": "array", "uniqueItems": True, "maxItems": 1}, ()),
        ({"type": "string", "uniqueItems": True}, ()),
        ({"type": "array", "uniqueItems": False}, ()),
        ({"type": "string", "format": "date-time"}, ()),
        ({"type": "object", "propertyNames": {"type": "string"}}, ()),
        ({"const": {"uniqueItems": True, "format": "path"}}, ()),
    ],
    ids=str,
)
def test_keywords_that_no_mask_holds_are_named(schema: dict[str, Any], named: tuple[str, ...]) -> None:
    """Schemas of pydantic for `set`, `SecretStr` and `Path` were refused."""
    assert unheld_keywords(StructuredOutputs(json=schema)) == named
    assert matcher_of(schema)[1] == ""


def test_they_are_told_when_a_schema_is_compiled(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = AutoTokenizer.from_pretrained(zoo.path("tiny", "target"))
    with caplog.at_level(logging.WARNING, logger="foredraft"):
        Grammars(tokenizer, len(tokenizer), [3]).compile(StructuredOutputs(json={"uniqueItems": True}))
    assert "no mask can enforce uniqueItems of the JSON schema" in caplog.text


def test_what_is_not_a_schema_is_told_by_llguidance() -> None:
    for schema in ({"required": 3}, {"dependentRequired": 3}, {"type": 3}, {"maxContains": "a", "contains": {}}):
        assert matcher_of(schema)[1]


def test_schemas_are_limited_in_size() -> None:
    """Optional properties beyond what llguidance takes compiled for 8 seconds, and failed at the first token."""
    properties = {f"a{place}": {"type": "integer"} for place in range(MOST_OPTIONAL + 1)}
    with pytest.raises(ValueError, match="500 optional properties follow each other"):
        prepared({"properties": properties})
    assert prepared({"properties": properties, "required": ["a250"]})[0]["properties"] == properties
    schema: dict[str, Any] = {"minimum": 1}
    for _ in range(8):
        schema = {"oneOf": [schema, {"maximum": 5}, {"minLength": 2}]}
    with pytest.raises(ValueError, match=f"more than {MOST_SCHEMAS} subschemas"):
        prepared(schema, splits_one_of=True)


def test_integers_that_end_the_process_are_refused_and_their_neighbours_are_not() -> None:
    for crashes in ("-9223372036854775808", "-9223372036854775296"):  # both are -2**63 as floating-point numbers
        with pytest.raises(ValueError, match=f"the integer {crashes} cannot be compiled; write it as {crashes}.0"):
            check_integers(f'{{"const": {crashes}}}')
    check_integers('{"enum": [-9223372036854774784, 9223372036854775808, -9223372036854775808.0, -922337203685477580]}')

"""What an output may have to match: JSON schemas at random, and grammars that mean harm."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema

NAMES = ["name", "age", "a long property name", "ünï", "größe 日本", "x", "is_open"]
PATTERNS = ["^[a-c]{2,4}$", "^(yes|no)$", "^[0-9]{3}-[0-9]{2}$", "^[äöü日本]{1,3}!$"]
LEAVES = ["enum", "const", "string", "pattern", "integer", "number", "boolean", "null", "reference"]
SHARED: dict[str, Any] = {
    "colour": {"enum": ["red", "dark blue", "grün", "赤い"]},
    "point": {
        "type": "object",
        "properties": {"x": {"type": "integer", "minimum": -9, "maximum": 9}, "y": {"$ref": "#/$defs/colour"}},
        "required": ["x", "y"],
        "additionalProperties": False,
    },
    "tree": {
        "type": "object",
        "properties": {
            "colour": {"$ref": "#/$defs/colour"},
            "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1},
        },
        "required": ["colour"],
        "additionalProperties": False,
    },
}
"""What schemas refer to; one refers to itself."""


def random_schema(draw: random.Random) -> dict[str, Any]:
    """An object of objects, lists, choices and values, at most four deep."""
    return {**_object(draw, 3), "$defs": SHARED}


def _object(draw: random.Random, depth: int) -> dict[str, Any]:
    names = draw.sample(NAMES, k=draw.randint(1, 4))
    inside = {name: _inside(draw, depth - 1) for name in names}
    required = names if draw.random() < 0.7 else names[:1]
    return {"type": "object", "properties": inside, "required": required, "additionalProperties": False}


def _inside(draw: random.Random, depth: int) -> dict[str, Any]:
    kind = draw.choice([*LEAVES, *["object", "array", "anyOf"] * 3 * (depth > 0)])
    if kind == "object":
        return _object(draw, depth)
    if kind == "array":
        return {"type": "array", "items": _inside(draw, depth - 1), "minItems": draw.randint(0, 2), "maxItems": 3}
    if kind == "anyOf":
        return {"anyOf": [_inside(draw, depth - 1) for _ in range(draw.randint(2, 3))]}
    if kind == "reference":
        return {"$ref": f"#/$defs/{draw.choice(list(SHARED))}"}
    if kind == "enum":
        return {"enum": draw.sample(["red", "dark blue", "ünï\n", 1, 2.5, None, True], k=draw.randint(1, 4))}
    if kind == "const":
        return {"const": draw.choice(['with "quotes"', -7, "日本"])}
    if kind == "string":
        return {"type": "string", "minLength": draw.randint(0, 2), "maxLength": draw.randint(2, 8)}
    if kind == "pattern":
        return {"type": "string", "pattern": draw.choice(PATTERNS)}
    if kind == "integer":
        least = draw.randint(-50, 50)
        return {"type": "integer", "minimum": least, "maximum": least + draw.randint(0, 200)}
    if kind == "number":
        least = draw.choice([-1.5, 0, 0.25])
        return {"type": "number", draw.choice(["minimum", "exclusiveMinimum"]): least, "maximum": least + 10}
    return {"type": kind}


def is_valid(text: str, schema: dict[str, Any]) -> bool:
    """Whether a text is JSON of a schema."""
    return bool(jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)))


def nested(depth: int) -> str:
    return '{"type":"object","properties":{"a":' * depth + '{"type":"string"}' + "}}" * depth


HOSTILE: dict[str, dict[str, Any]] = {
    "regex in brackets": {"regex": "(" * 50_000 + "a" + ")" * 50_000},
    "regex of counts": {"regex": "((a{1,100}){1,100}){1,100}"},
    "regex of a large count": {"regex": "a{0,10000000}"},
    "regex of exponential size": {"regex": "(a|b)*a(a|b){60}"},
    "regex of alternatives": {"regex": "|".join(f"w{i}x*y{i}" for i in range(12_000))},
    "grammar in brackets": {"grammar": "start: " + "(" * 50_000 + '"a"' + ")" * 50_000},
    "grammar that begins with itself": {"grammar": 'start: start start | "a" | '},
    "ambiguous grammar": {"grammar": 'start: s\ns: s s s | s s | "a"'},
    "grammar of nothing": {"grammar": "start: start"},
    "grammar in a circle": {"grammar": "start: a\na: b\nb: a"},
    "grammar of a large count": {"grammar": 'start: a{1,1000000}\na: "x" | "y"'},
    "grammar of counts": {"grammar": 'start: b{1000}\nb: c{1000}\nc: d{1000}\nd: "x" | "y"'},
    "deep schema": {"json": nested(4000)},
    "schema that is itself": {"json": {"$ref": "#"}},
    "schemas in a circle": {
        "json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    },
    "schema of many values": {"json": {"enum": [f"v{i}" * 2 for i in range(15_000)]}},
    "schema of patterns": {
        "json": {
            "anyOf": [
                {"type": "object", "properties": {f"k{j}": {"pattern": f"^(a|b)*{i}$"} for j in range(9)}}
                for i in range(200)
            ]
        }
    },
    "schema of all of": {
        "json": {"allOf": [{"properties": {f"p{i}": {"type": ["string", "integer"]}}} for i in range(300)]}
    },
    "schema of a long text": {"json": {"type": "string", "maxLength": 10**9}},
    "schema of many items": {
        "json": {"type": "array", "items": {"type": "array", "minItems": 1000}, "minItems": 100_000}
    },
    "choice of many": {"choice": [f"choice {i}" for i in range(10_000)]},
}

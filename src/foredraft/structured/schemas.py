"""JSON schemas for llguidance: keywords that it does not support are rewritten with keywords that it does."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from itertools import combinations, pairwise
from typing import Any

from foredraft.config.structured import StructuredOutputs

Schema = dict[str, Any] | bool

FORMATS = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]  # as in llguidance
)
TYPES = ("null", "boolean", "number", "string", "array", "object")
MOST_SCHEMAS = 20_000
"""Maximum number of subschemas of a schema, after rewriting."""
MOST_OPTIONAL = 500
"""Maximum number of consecutive optional properties of one object, a limit of llguidance."""
MOST_LETTERS = 2_000
"""Maximum number of characters of string constants for which the complement is written as one pattern."""
MOST_ONE_OF = 8
"""Maximum number of schemas of a `oneOf` that are rewritten so that each excludes the others."""
NUM_PLACES, MOST_CONTAINED = 4, 2
"""Number of first items of an array among which items that match `contains` must be, and the maximum number of them."""
_COUNTS = (
    "maxItems",
    "minItems",
    "maxLength",
    "minLength",
    "maxProperties",
    "minProperties",
    "minContains",
    "maxContains",
)
_OF_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = ("additionalProperties", "items", "propertyNames", "not", "if", "then", "else", "contains",
           "unevaluatedProperties", "unevaluatedItems", "additionalItems")  # fmt: skip
_NO_ASSERTION = frozenset(
    (
        *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly"),
        *("$comment", "$schema", "$id", "$anchor", "$defs", "definitions", "x-guidance"),
    )
)
_IN_PLACE = ("allOf", "anyOf", "oneOf", "if", "$ref", "$dynamicRef", "$recursiveRef", "dependentSchemas")


class Rewriter:
    """Rewrites one schema. Keywords that cannot be rewritten stay, and llguidance refuses them by name.

    Attributes:
      annotations: keywords that the mask does not enforce, in the order of the schema.
    """

    def __init__(self, root: Schema, *, splits_one_of: bool) -> None:
        self.annotations: dict[str, None] = {}
        self._num_schemas = 0
        self._root, self._splits_one_of = root, splits_one_of
        self._is_one = not _has_inner_id(root)  # then every dynamic reference has a single meaning

    def rewritten(self, schema: Schema) -> Schema:
        """Return an equivalent schema, except for annotations. Raises: ValueError if it grows too large."""
        if not isinstance(schema, dict):
            return schema
        self._num_schemas += 1
        if self._num_schemas > MOST_SCHEMAS:
            raise ValueError(f"it has more than {MOST_SCHEMAS} subschemas; make it smaller")
        found = dict(schema)
        for key in _COUNTS:
            if isinstance(found.get(key), float) and found[key].is_integer():
                found[key] = int(found[key])
        self._make_static(found)
        self._close(found)
        for key in _OF_NAME:
            if isinstance(found.get(key), dict):
                found[key] = {name: self.rewritten(one) for name, one in found[key].items()}
        for key in _LISTS:
            if isinstance(found.get(key), list):
                found[key] = [self.rewritten(one) for one in found[key]]
        for key in _SINGLE:
            if isinstance(found.get(key), dict):
                found[key] = self.rewritten(found[key])
            elif isinstance(found.get(key), list):  # items, in older drafts of JSON Schema
                found[key] = [self.rewritten(one) for one in found[key]]
        self._check_optional(found)
        self._annotate(found)
        self._name(found)
        for extra in (
            *self._dependent(found),
            *self._conditional(found),
            *self._excluded(found),
            *self._containing(found),
        ):
            found["allOf"] = [*found.get("allOf", ()), self.rewritten(extra)]
        return found

    def _make_static(self, schema: dict[str, Any]) -> None:
        """Replace dynamic references by plain ones, and remove limits of `contains` that have no effect."""
        if self._is_one:
            for dynamic, plain in (("$dynamicRef", "$ref"), ("$dynamicAnchor", "$anchor")):
                if dynamic in schema and plain not in schema:
                    schema[plain] = schema.pop(dynamic)
        if "contains" not in schema:
            schema.pop("minContains", None)
            schema.pop("maxContains", None)
        elif schema.get("minContains") == 0 and "maxContains" not in schema and "unevaluatedItems" not in schema:
            del schema["contains"], schema["minContains"]

    def _check_optional(self, schema: dict[str, Any]) -> None:
        required = set(schema.get("required", ()))
        run = 0
        for name in schema.get("properties", ()):
            run = 0 if name in required else run + 1
            if run > MOST_OPTIONAL:
                raise ValueError(
                    f"more than {MOST_OPTIONAL} optional properties follow each other in an object; make some required"
                )

    # -- annotations -----------------------------------------------------------------------------------------------

    def _annotate(self, schema: dict[str, Any]) -> None:
        """Remove keywords that a mask cannot enforce, and record them."""
        unique, longest = schema.pop("uniqueItems", None), schema.get("maxItems")
        if unique is True and "array" in _types(schema) and not (isinstance(longest, int) and longest <= 1):
            self.annotations["uniqueItems"] = None
        form = schema.get("format")
        if isinstance(form, str) and form not in FORMATS:
            del schema["format"]
            self.annotations[f"format {form!r}"] = None

    def _name(self, schema: dict[str, Any]) -> None:
        """Rewrite `propertyNames` as a pattern of all names, or record it as an annotation."""
        if "propertyNames" not in schema:
            return
        names = schema.pop("propertyNames")
        if names is True or (
            isinstance(names, dict)
            and not names.keys() - _NO_ASSERTION - {"type"}
            and _types(names) in (TYPES, ("string",))
        ):
            return
        fixed = [key for key in ("properties", "patternProperties") if schema.get(key)]
        pattern = _pattern_of(names)
        if pattern is None or fixed or any(key in schema for key in ("unevaluatedProperties", *_IN_PLACE)):
            self.annotations["propertyNames"] = None
            return
        schema["patternProperties"] = {pattern: schema.get("additionalProperties", True)}
        schema["additionalProperties"] = False

    # -- replacements for keywords that llguidance does not support ------------------------------------------------

    def _dependent(self, schema: dict[str, Any]) -> Iterable[Schema]:
        """Rewrite `dependentRequired` and `dependentSchemas`: a property is absent, or its condition holds."""
        required = schema.pop("dependentRequired", None) or {}
        for name, others in required.items():
            if others:
                yield {"anyOf": [_absent(name), {"required": [*others, name]}]}
        schemas = schema.pop("dependentSchemas", None) or {}
        for name, one in schemas.items():
            if one is not True and one != {}:
                yield {"anyOf": [_absent(name), {"allOf": [{"required": [name]}, one]}]}

    def _conditional(self, schema: dict[str, Any]) -> Iterable[Schema]:
        """Rewrite `if`, `then` and `else`: the condition and `then` hold, or its negation and `else` hold."""
        condition = schema.get("if")
        if condition is None or not ("then" in schema or "else" in schema):
            for key in ("if", "then", "else"):
                schema.pop(key, None)
            return
        otherwise = negated(condition)
        if otherwise is None:
            return
        then, other = schema.pop("then", True), schema.pop("else", True)
        del schema["if"]
        if then == other or condition is True or otherwise is False:
            yield then
        elif condition is False:
            yield other
        elif then is True:
            yield {"anyOf": [condition, {"allOf": [otherwise, other]}]}
        elif other is True:
            yield {"anyOf": [otherwise, {"allOf": [condition, then]}]}
        else:
            yield {"anyOf": [{"allOf": [condition, then]}, {"allOf": [otherwise, other]}]}

    def _excluded(self, schema: dict[str, Any]) -> Iterable[Schema]:
        """Rewrite `not`, and `oneOf` by the negations of its schemas."""
        if "not" in schema and (opposite := negated(schema["not"])) is not None:
            del schema["not"]
            if opposite is not True:
                yield opposite
        one_of = schema.get("oneOf")
        if self._splits_one_of and isinstance(one_of, list) and 1 < len(one_of) <= MOST_ONE_OF:
            opposites = [negated(one) for one in one_of]
            if None not in opposites:
                del schema["oneOf"]
                yield {
                    "anyOf": [
                        {"allOf": [one, *(each for at, each in enumerate(opposites) if at != place)]}
                        for place, one in enumerate(one_of)
                    ]
                }

    def _containing(self, schema: dict[str, Any]) -> Iterable[Schema]:
        """Rewrite `contains` so that one of the first items matches.

        The rewritten schema is stricter, because a mask cannot foresee the end of an array.
        """
        least, most = schema.get("minContains", 1), schema.get("maxContains")
        if "contains" not in schema or "unevaluatedItems" in schema or least not in range(MOST_CONTAINED + 1):
            return
        one = schema["contains"]
        other = True if most is None else negated(one)
        if other is None:
            return
        for key in ("contains", "minContains", "maxContains"):
            schema.pop(key, None)
        options: list[Schema] = [{"type": [kind for kind in TYPES if kind != "array"]}]
        for count in range(least, (least if most is None else min(most, MOST_CONTAINED)) + 1):
            for places in combinations(range(NUM_PLACES), count):
                end = places[-1] + 1 if places else 0
                items = [one if place in places else other for place in range(end)]
                options.append({"type": "array", "minItems": end, "prefixItems": items, "items": other})
        yield {"anyOf": options}

    def _close(self, schema: dict[str, Any]) -> None:
        """Rewrite `unevaluatedProperties` as `additionalProperties`, and `unevaluatedItems` as `items`, if that is
        equivalent."""
        for key, own, named in (
            ("unevaluatedProperties", "additionalProperties", ("properties", "patternProperties")),
            ("unevaluatedItems", "items", ("prefixItems",)),
        ):
            if key not in schema or isinstance(schema.get(own), list):
                continue
            if schema[key] is True or schema[key] == {} or own in schema:
                del schema[key]
            elif not any(part in schema for part in (*_IN_PLACE, "contains")):
                schema[own] = schema.pop(key)
            elif (merged := self._evaluated(schema, own, named)) is not None:
                unevaluated = schema.pop(key)
                if merged is not ALL:
                    for part, found in merged.items():
                        schema[part] = found
                    schema[own] = unevaluated

    def _evaluated(self, schema: dict[str, Any], own: str, named: tuple[str, ...]) -> Any:
        """Return the names in a schema and in the schemas that always apply with it, unconstrained; `ALL` for all
        names.

        None if the names depend on the text.
        """
        if any(part in schema for part in ("anyOf", "oneOf", "if", "dependentSchemas", "$dynamicRef", "contains")):
            return None
        found: dict[str, Any] = {}
        for part in named:
            if part in schema:
                found[part] = schema[part]
        below = [*schema.get("allOf", ())]
        if "$ref" in schema:
            below.append(self._resolved(schema["$ref"]))
        for one in below:
            if one is None:
                return None
            if not isinstance(one, dict):
                continue
            if isinstance(one.get(own), list):
                return None
            if own in one or own.replace("additional", "unevaluated") in one or f"unevaluated{own.title()}" in one:
                return ALL
            if any(part in one for part in (*_IN_PLACE, "contains", "$id")):
                return None
            for part in named:
                if part in one and part == "prefixItems":
                    longest = max(len(found.get(part, ())), len(one[part]))
                    found[part] = [*found.get(part, ()), *[True] * (longest - len(found.get(part, ())))]
                elif part in one:
                    found[part] = {
                        **found.get(part, {}),
                        **{name: True for name in one[part] if name not in found.get(part, {})},
                    }
        return found

    def _resolved(self, reference: Any) -> Schema | None:
        """Return the schema within the root to which a reference points; None if there is none."""
        if not self._is_one or not isinstance(reference, str) or not reference.startswith("#/"):
            return None
        at: Any = self._root
        for part in reference[2:].split("/"):
            if not isinstance(at, Mapping) or (part := part.replace("~1", "/").replace("~0", "~")) not in at:
                return None
            at = at[part]
        return at if isinstance(at, dict | bool) else None


ALL = object()
"""Marker for schemas that name all properties or items."""


def _has_inner_id(root: Schema) -> bool:
    """Return whether a part of a schema has its own `$id`."""
    waiting: list[Any] = [*root.values()] if isinstance(root, dict) else []
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            if isinstance(part.get("$id"), str):
                return True
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part
    return False


def _absent(name: str) -> Schema:
    return {"properties": {name: False}}


def _types(schema: Mapping[str, Any]) -> tuple[str, ...]:
    given = schema.get("type", TYPES)
    return (given,) if isinstance(given, str) else tuple(given)


def negated(schema: Schema) -> Schema | None:
    """Return the schema of all other values; None if it cannot be written."""
    if isinstance(schema, bool):
        return not schema
    parts: list[Schema] = []
    for key, value in schema.items():
        if key in _NO_ASSERTION:
            continue
        part = _negated_keyword(key, value, schema)
        if part is None:
            return None
        if part is not False:
            parts.append(part)
    if not parts:
        return False
    return parts[0] if len(parts) == 1 else {"anyOf": parts}


def _negated_keyword(key: str, value: Any, schema: Mapping[str, Any]) -> Schema | None:
    """Return the schema of the values that violate one keyword; None if it cannot be written."""
    bounds = {
        "minimum": ("number", "exclusiveMaximum", 0),
        "maximum": ("number", "exclusiveMinimum", 0),
        "exclusiveMinimum": ("number", "maximum", 0),
        "exclusiveMaximum": ("number", "minimum", 0),
        "minLength": ("string", "maxLength", -1),
        "maxLength": ("string", "minLength", 1),
        "minItems": ("array", "maxItems", -1),
        "maxItems": ("array", "minItems", 1),
        "minProperties": ("object", "maxProperties", -1),
        "maxProperties": ("object", "minProperties", 1),
    }
    if key == "type":
        given = {value} if isinstance(value, str) else set(value)
        if "integer" in given and "number" not in given:
            return None
        others = [one for one in TYPES if one not in given]
        return {"type": others} if others else False
    if key in bounds:
        kind, opposite, step = bounds[key]
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        if value + step < 0 and step:
            return False
        return {"type": kind, opposite: value + step}
    if key in ("const", "enum"):
        return _complement([value] if key == "const" else value)
    if key == "required":
        parts = [{"type": "object", **_absent(name)} for name in value]  # type: ignore[dict-item]
        return {"anyOf": parts} if parts else False
    if key == "properties":
        opposites = [(name, negated(one)) for name, one in value.items()]
        if any(one is None for _, one in opposites):
            return None
        parts = [
            {"type": "object", "required": [name], "properties": {name: one}}
            for name, one in opposites
            if one is not False
        ]
        return {"anyOf": parts} if parts else False
    if key in ("allOf", "anyOf"):
        each = [negated(one) for one in value]
        if None in each:
            return None
        return {"anyOf" if key == "allOf" else "allOf": each}
    if key == "not":
        inner: Schema = value
        return inner
    return None


def _complement(values: list[Any]) -> Schema | None:
    """Return the schema of all values except for some constants; None if it cannot be written."""
    types = [*TYPES]
    parts: list[Schema] = []
    numbers = sorted(value for value in values if isinstance(value, int | float) and not isinstance(value, bool))
    strings = [value for value in values if isinstance(value, str)]
    flags = {value for value in values if isinstance(value, bool)}
    if any(isinstance(value, list | dict) for value in values) or sum(map(len, strings)) > MOST_LETTERS:
        return None
    if None in values:
        types.remove("null")
    if flags:
        types.remove("boolean")
        parts += [{"const": flag} for flag in (False, True) if flag not in flags]
    if numbers:
        types.remove("number")
        edges = [None, *dict.fromkeys(numbers), None]
        for low, high in pairwise(edges):
            part: dict[str, Any] = {"type": "number"}
            if low is not None:
                part["exclusiveMinimum"] = low
            if high is not None:
                part["exclusiveMaximum"] = high
            parts.append(part)
    if strings:
        types.remove("string")
        parts.append({"type": "string", "pattern": f"^({_other_strings(strings)})$"})
    if types:
        parts.append({"type": types})
    return {"anyOf": parts} if parts else False


def _other_strings(strings: list[str]) -> str:
    """Return a regular expression of all strings except for some."""
    prefixes: dict[str, set[str]] = {"": set()}
    for text in strings:
        for length in range(len(text)):
            prefixes.setdefault(text[:length], set()).add(text[length])
            prefixes.setdefault(text[: length + 1], set())
    parts = []
    for prefix, following in prefixes.items():
        written = re.escape(prefix)
        if prefix not in strings:
            parts.append(written)
        others = "".join(f"\\x{{{ord(one):x}}}" for one in sorted(following))
        parts.append(f"{written}{f'[^{others}]' if others else ANY_CHARACTER}{ANY_CHARACTER}*")
    return "|".join(parts)


ANY_CHARACTER = r"[\s\S]"


def _pattern_of(names: Schema) -> str | None:
    """Return a regular expression of the names that a schema allows; None if no exact one exists."""
    if names is False:
        return "^[^\\s\\S]$"
    if not isinstance(names, dict):
        return None
    keys = {key for key in names if key not in _NO_ASSERTION} - {"type"}
    if names.get("type", "string") != "string":
        return None
    if keys == {"enum"} or keys == {"const"}:
        strings = [one for one in names.get("enum", [names.get("const")]) if isinstance(one, str)]
        return f"^({'|'.join(map(re.escape, strings))})$" if strings else None
    if keys == {"pattern"}:
        return str(names["pattern"])
    if keys and keys <= {"minLength", "maxLength"}:
        return f"^{ANY_CHARACTER}{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
    return None


def prepared(schema: Schema, *, splits_one_of: bool = False) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return a schema that llguidance accepts, and the keywords that no mask enforces.

    Args:
      splits_one_of: True to rewrite the schemas of a `oneOf` so that each excludes the others. llguidance recognises
        some exclusive schemas without it.

    Raises: ValueError for a schema that is too large, or that no value fulfils.
    """
    if schema is False:
        raise ValueError("no text matches it")
    plain = {} if isinstance(schema, bool) else schema
    rewriter = Rewriter(plain, splits_one_of=splits_one_of)
    try:
        found = rewriter.rewritten(plain)
    except (AttributeError, IndexError, KeyError, TypeError):  # not a valid schema; llguidance explains why
        return dict(plain), ()
    assert isinstance(found, dict)
    return found, tuple(rewriter.annotations)


def unheld_keywords(wanted: StructuredOutputs) -> tuple[str, ...]:
    """Return the keywords of the JSON schema that no mask enforces, so that the output may violate them."""
    if wanted.json is None:
        return ()
    try:
        schema = json.loads(str(wanted.json))
        return prepared(schema)[1] if isinstance(schema, dict) else ()
    except (ValueError, RecursionError):  # an invalid schema is refused when it is compiled
        return ()

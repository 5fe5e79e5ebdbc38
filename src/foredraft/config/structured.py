"""Constraints on the output: `StructuredOutputs`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from foredraft.config.keywords import own_keys, shown, strings
from foredraft.errors import ConfigError

KINDS = ("json", "regex", "choice", "grammar", "json_object")
"""Fields that define the constraint; exactly one of them is given."""

MAX_CHARACTERS = 1 << 18
"""Limit on characters of a constraint, counted as text."""


@dataclass(frozen=True, repr=False)
class StructuredOutputs:
    """Constraint on an output, with vLLM's names. Exactly one of the first five fields is given.

    Args:
      json: a JSON schema, as a mapping or as text.
      regex: a regular expression that the whole output matches.
      choice: texts, one of which is the output.
      grammar: a context-free grammar in Lark or EBNF (GBNF) notation.
      json_object: any JSON object.
      disable_any_whitespace: allow no spaces and line ends between parts of the JSON.
      whitespace_pattern: a regular expression for the whitespace between parts of the JSON. The default is one space,
        or a line end and at most 16 spaces or tabs.

    Raises: ConfigError if none or several of the first five are given, or if the constraint is too long.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ConfigError(
                f"structured_outputs got {', '.join(given) or 'nothing'}; give exactly one of {', '.join(KINDS)}"
            )
        object.__setattr__(self, "kind", given[0])
        if self.json is not None and not isinstance(self.json, str):
            object.__setattr__(self, "json", _as_text(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", strings("structured_outputs", "choice", self.choice))
            if not self.choice:
                raise ConfigError("structured_outputs.choice is empty; give at least one text")
        for name in ("json", "regex", "grammar", "whitespace_pattern"):
            if (value := getattr(self, name)) is not None and (not isinstance(value, str) or not value):
                raise ConfigError(f"structured_outputs.{name} is {value!r}; it must be non-empty text")
        for name in ("json_object", "disable_any_whitespace"):
            if (value := getattr(self, name)) is not None and not isinstance(value, bool):
                raise ConfigError(f"structured_outputs.{name} is {value!r}; it must be True or False")
        if self.num_characters > MAX_CHARACTERS:
            raise ConfigError(
                f"structured_outputs.{given[0]} has {self.num_characters} characters, more than the limit of "
                f"{MAX_CHARACTERS}; make it smaller"
            )

    def __repr__(self) -> str:
        given = {one.name: getattr(self, one.name) for one in fields(self) if getattr(self, one.name) != one.default}
        return f"StructuredOutputs({', '.join(f'{name}={_shortened(value)}' for name, value in given.items())})"

    kind = ""
    """The field in `KINDS` that is given."""

    @property
    def num_characters(self) -> int:
        """Number of characters of the constraint, counted as text."""
        return sum(map(len, (self.json or "", self.regex or "", self.grammar or "", *(self.choice or ()))))

    @classmethod
    def of(cls, given: Any) -> StructuredOutputs:
        """Build from a mapping such as a JSON object. An instance is returned unchanged."""
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"structured_outputs is {shown(given)}; give a mapping of its fields, such as {{'regex': ...}}"
            )
        return cls(**own_keys("structured_outputs", given, [one.name for one in fields(cls)]))


def _as_text(schema: Any) -> str:
    try:
        return json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"structured_outputs.json cannot be written as JSON ({error}); give a JSON schema") from None


def _shortened(value: Any) -> str:
    return shown(value, 60)

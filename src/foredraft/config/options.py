"""Options that describe and check themselves: a frozen dataclass, each of whose fields is an `option`."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

from foredraft.config.keywords import has_items, integer, real, spelling
from foredraft.errors import ConfigError
from foredraft.folders import check_place

OWNER = "SpeculativeConfig"
"""Whose keys these are, in messages."""


class Kind(Protocol):
    """The values that an option accepts."""

    def __call__(self, name: str, value: Any) -> Any:
        """The value in its normal form. Raises: ConfigError, naming the option."""

    def __str__(self) -> str:
        """For people: ``whole number, 1 or more``."""


@dataclass(frozen=True)
class whole:
    """A whole number within the limits."""

    low: int
    high: int | None = None

    def __call__(self, name: str, value: Any) -> int:
        return integer(OWNER, name, value, self.low, self.high)

    def __str__(self) -> str:
        return f"whole number, {self.low} or more" if self.high is None else f"whole number, {self.low} to {self.high}"


@dataclass(frozen=True)
class number:
    """A finite number within the limits; ``above`` excludes the lower one."""

    low: float
    high: float = math.inf
    above: bool = dataclasses.field(default=False, kw_only=True)

    def __call__(self, name: str, value: Any) -> float:
        return real(OWNER, name, value, self.low, self.high, above=self.above)

    def __str__(self) -> str:
        low = f"more than {self.low:g}" if self.above else f"{self.low:g} or more"
        return f"number, {low}" if math.isinf(self.high) else f"number, {self.low:g} to {self.high:g}"


@dataclass(frozen=True)
class flag:
    """True or False."""

    def __call__(self, name: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise ConfigError(f"{name} is {value!r}; it must be true or false")
        return value

    def __str__(self) -> str:
        return "true or false"


@dataclass(frozen=True)
class path:
    """A path: of a file that is written, or with ``is_read`` of what has to be there."""

    is_read: bool = False

    def __call__(self, name: str, value: Any) -> str:
        if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
            raise ConfigError(f"{name} is {value!r}; it must be a path")
        return str(os.fspath(value))

    def __str__(self) -> str:
        return "path"

    def check(self, name: str, value: str) -> None:
        """Raises: ConfigError for a path at which nothing can be read, or written."""
        if not self.is_read:
            check_place(value)
        elif not os.path.exists(os.path.expanduser(value)):
            raise ConfigError(f"{name} is {value!r}, where nothing is; check the path")


@dataclass(frozen=True)
class whole_numbers:
    """A list of different whole numbers, as an ascending tuple."""

    low: int = 0

    def __call__(self, name: str, value: Any) -> tuple[int, ...]:
        if not has_items(value):
            raise ConfigError(f"{name} is {value!r}; it must be a list of whole numbers")
        return tuple(sorted({integer(OWNER, name, item, self.low) for item in value}))

    def __str__(self) -> str:
        return "list of whole numbers"


@dataclass(frozen=True)
class one_of:
    """A name, or an alias of one: ``aliases`` holds what else may be given, and the name that it stands for."""

    names: tuple[str, ...]
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __call__(self, name: str, value: Any) -> str:
        given = spelling(value).lower() if isinstance(value, str) else None
        chosen = given if given in self.names else self.aliases.get(given or "")
        if chosen is None:
            raise ConfigError(f"{name} is {value!r}; choose one of {', '.join(self.names)}")
        return chosen

    def __str__(self) -> str:
        return ", ".join(self.names)


@dataclass(frozen=True)
class anything:
    """Any value that the code behind the option understands; ``title`` says what that is."""

    title: str

    def __call__(self, name: str, value: Any) -> Any:
        return value

    def __str__(self) -> str:
        return self.title


def option(kind: Kind, default: Any = None, help: str = "") -> Any:
    """A field of `Options`.

    Args:
      default: None where nothing is set unless it is given; ``help`` then says what happens.
      help: one line.
    """
    return dataclasses.field(default=default, metadata={"kind": kind, "help": help})


@dataclass(frozen=True)
class Key:
    """One option, as it is shown to people."""

    name: str
    kind: Kind
    default: Any
    help: str


@dataclass(frozen=True, kw_only=True)
class Options:
    """The keys of one way of drafting, each with a value, or None where nothing is set.

    Attributes:
      method: the name of that way.

    Raises: ConfigError for a value that its kind does not take, and for values that do not go together.
    """

    method: ClassVar[str]

    def __post_init__(self) -> None:
        for name, key in self.keys().items():
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, key.kind(name, value))
        self.check()

    def check(self) -> None:
        """Refuse values that do not go together."""

    def check_paths(self) -> None:
        """Raises: ConfigError for a path at which nothing can be read, or written, on this machine."""
        for name, key in self.keys().items():
            if isinstance(key.kind, path) and getattr(self, name) is not None:
                key.kind.check(name, getattr(self, name))

    @classmethod
    def keys(cls) -> dict[str, Key]:
        """Every option by its name."""
        return {
            item.name: Key(item.name, item.metadata["kind"], item.default, item.metadata["help"])
            for item in dataclasses.fields(cls)
        }

    @classmethod
    def defaults_beside(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Defaults that follow from what is given, where they differ from those of the fields."""
        return {}

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Options from the keys that were given."""
        return cls(**{**cls.defaults_beside(given), **given})

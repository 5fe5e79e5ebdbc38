"""Fields of a config that read their values: an `option` has a kind, a default and help. `Options` of a method."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Self

from foredraft.config.keywords import has_items, integer, real, spelling
from foredraft.errors import ConfigError
from foredraft.folders import check_place


@dataclass(frozen=True)
class Kind:
    """The values that a key takes.

    Args:
      text: description for people: ``whole number, 1 or more``.
      read: returns the normal form of a value, given the name of the config and that of the key.
        Raises: ConfigError, naming both.
      check: refuses values that are of no use on this machine, given the name of the key and a value in normal form.
        Raises: ConfigError.
    """

    text: str
    read: Callable[[str, str, Any], Any]
    check: Callable[[str, Any], object] | None = None


def whole(low: int, high: int | None = None, *, remedy: str = "") -> Kind:
    """A whole number within the limits; errors end with the remedy."""
    text = f"whole number, {low} or more" if high is None else f"whole number, {low} to {high}"
    return Kind(text, lambda owner, name, value: integer(owner, name, value, low, high, remedy))


def number(low: float, high: float = math.inf, *, above: bool = False, remedy: str = "") -> Kind:
    """A finite number within the limits; ``above`` excludes the lower one, and errors end with the remedy."""
    least = f"more than {low:g}" if above else f"{low:g} or more"
    text = f"number, {least}" if math.isinf(high) else f"number, {low:g} to {high:g}"
    return Kind(text, lambda owner, name, value: real(owner, name, value, low, high, above=above, remedy=remedy))


def flag() -> Kind:
    """True or False."""

    def read(owner: str, name: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise ConfigError(f"{owner}.{name} is {value!r}; it must be true or false")
        return value

    return Kind("true or false", read)


def path(is_read: bool = False) -> Kind:
    """A path: of a file that is written, or with ``is_read`` of one that has to exist."""

    def read(owner: str, name: str, value: Any) -> str:
        if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
            raise ConfigError(f"{owner}.{name} is {value!r}; it must be a path")
        return str(os.fspath(value))

    def check(name: str, value: str) -> None:
        if not is_read:
            check_place(value)
        elif not os.path.exists(os.path.expanduser(value)):
            raise ConfigError(f"{name} is {value!r}, where nothing is; check the path")

    return Kind("path", read, check)


def whole_numbers() -> Kind:
    """A list of different whole numbers, as an ascending tuple."""

    def read(owner: str, name: str, value: Any) -> tuple[int, ...]:
        if not has_items(value):
            raise ConfigError(f"{owner}.{name} is {value!r}; it must be a list of whole numbers")
        return tuple(sorted({integer(owner, name, item, 0) for item in value}))

    return Kind("list of whole numbers", read)


def one_of(names: tuple[str, ...], aliases: Mapping[str, str] | None = None) -> Kind:
    """A name, or an alias of one: ``aliases`` holds other words, and the name that each stands for."""
    known = {**(aliases or {}), **{name: name for name in names}}

    def read(owner: str, name: str, value: Any) -> str:
        chosen = known.get(spelling(value).lower()) if isinstance(value, str) else None
        if chosen is None:
            raise ConfigError(f"{owner}.{name} is {value!r}; choose one of {', '.join(names)}")
        return chosen

    return Kind(", ".join(names), read)


def anything(text: str) -> Kind:
    """Any value; the code behind the key reads it."""
    return Kind(text, lambda owner, name, value: value)


def option(kind: Kind, default: Any = None, help: str = "") -> Any:
    """A field of `Options`.

    Args:
      default: None where nothing is set unless it is given; ``help`` then says what happens.
      help: one line.
    """
    return dataclasses.field(default=default, metadata={"kind": kind, "help": help})


def read_fields(owner: str, config: Any) -> dict[str, Any]:
    """The values of the options of a config in normal form, without those that are None by default and stay so.

    Raises: ConfigError for a value that its kind does not take.
    """
    values: dict[str, Any] = {}
    for name, key in keys_of(config.__class__).items():
        value = getattr(config, name)
        if value is not None or key.default is not None:
            values[name] = key.kind.read(owner, name, value)
    return values


@dataclass(frozen=True)
class Key:
    """One option, as it is shown to people."""

    name: str
    kind: Kind
    default: Any
    help: str


@cache
def keys_of(config: type[Any]) -> dict[str, Key]:
    """Every option of a config by its name."""
    return {
        item.name: Key(item.name, item.metadata["kind"], item.default, item.metadata["help"])
        for item in dataclasses.fields(config)
        if "kind" in item.metadata
    }


@dataclass(frozen=True, kw_only=True)
class Options:
    """The keys of one way of drafting, each with a value, or None where nothing is set.

    Attributes:
      method: the name of that way.
      drafts_trees: whether its drafts are trees whatever its keys say.

    Raises: ConfigError for a value that its kind does not take, and for values that do not go together.
    """

    method: ClassVar[str]
    drafts_trees: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name, value in read_fields("SpeculativeConfig", self).items():
            object.__setattr__(self, name, value)
        self.check()

    def check(self) -> None:
        """Refuse values that do not go together."""

    def check_paths(self) -> None:
        """Raises: ConfigError for a path at which nothing can be read, or written, on this machine."""
        for name, value in self.given().items():
            if (check := self.keys()[name].kind.check) is not None:
                check(name, value)

    def given(self) -> dict[str, Any]:
        """Every option that has a value: a mapping from which `read` makes the same options."""
        return {name: value for name in self.keys() if (value := getattr(self, name)) is not None}

    @classmethod
    def keys(cls) -> dict[str, Key]:
        """Every option by its name."""
        config: Any = cls
        return keys_of(config)

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        """Options from the keys that were given; a method whose defaults depend on these overrides it."""
        return cls(**given)

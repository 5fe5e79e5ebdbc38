"""Config fields that validate their values: `option` defines one with kind, default and help; `Options` of a method."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Self

from foredraft.config.keywords import has_items, integer, key_of, real, spelling
from foredraft.errors import ConfigError
from foredraft.folders import check_place


@dataclass(frozen=True)
class Kind:
    """The type and range of a key's values.

    Args:
      text: description for users, such as ``whole number, 1 or more``.
      read: function that returns the normal form of a value, given the names of the config and the key and the value.
        Raises: ConfigError, which names the config and the key.
      check: function that refuses values that do not work on this machine, given the key's name and a value in normal
        form. Raises: ConfigError.
    """

    text: str
    read: Callable[[str, str, Any], Any]
    check: Callable[[str, Any], object] | None = None


def whole(low: int, high: int | None = None, *, remedy: str = "") -> Kind:
    """Kind of whole numbers within the limits. The remedy ends every error message."""
    text = f"whole number, {low} or more" if high is None else f"whole number, {low} to {high}"
    return Kind(text, lambda owner, name, value: integer(owner, name, value, low, high, remedy))


def number(low: float, high: float = math.inf, *, above: bool = False, remedy: str = "") -> Kind:
    """Kind of finite numbers within the limits. ``above`` excludes the lower limit; the remedy ends every message."""
    least = f"more than {low:g}" if above else f"{low:g} or more"
    text = f"number, {least}" if math.isinf(high) else f"number, {low:g} to {high:g}"
    return Kind(text, lambda owner, name, value: real(owner, name, value, low, high, above=above, remedy=remedy))


def flag() -> Kind:
    """Kind of truth values."""

    def read(owner: str, name: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise ConfigError(f"{key_of(owner, name)} is {value!r}; it must be true or false")
        return value

    return Kind("true or false", read)


def path(is_read: bool = False) -> Kind:
    """Kind of paths: the path of a file that is written or, with ``is_read``, of one that must exist."""

    def read(owner: str, name: str, value: Any) -> str:
        if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
            raise ConfigError(f"{key_of(owner, name)} is {value!r}; it must be a path")
        return str(os.fspath(value))

    def check(name: str, value: str) -> None:
        if not is_read:
            check_place(value)
        elif not os.path.exists(os.path.expanduser(value)):
            raise ConfigError(f"{name} is {value!r}, which does not exist; check the path")

    return Kind("path", read, check)


def whole_numbers() -> Kind:
    """Kind of lists of distinct whole numbers; the normal form is an ascending tuple."""

    def read(owner: str, name: str, value: Any) -> tuple[int, ...]:
        if not has_items(value):
            raise ConfigError(f"{key_of(owner, name)} is {value!r}; it must be a list of whole numbers")
        return tuple(sorted({integer(owner, name, item, 0) for item in value}))

    return Kind("list of whole numbers", read)


def one_of(names: tuple[str, ...], aliases: Mapping[str, str] | None = None) -> Kind:
    """Kind of names from a list. ``aliases`` maps other spellings to these names."""
    known = {**(aliases or {}), **{name: name for name in names}}

    def read(owner: str, name: str, value: Any) -> str:
        chosen = known.get(spelling(value).lower()) if isinstance(value, str) else None
        if chosen is None:
            raise ConfigError(f"{key_of(owner, name)} is {value!r}; choose one of {', '.join(names)}")
        return chosen

    return Kind(", ".join(names), read)


def anything(text: str) -> Kind:
    """Kind of any value; the code that uses the key checks it."""
    return Kind(text, lambda owner, name, value: value)


def option(kind: Kind, default: Any = None, help: str = "") -> Any:
    """Define a field of `Options`.

    Args:
      kind: type and range of the option's values.
      default: default value. None leaves the field unset; ``help`` then describes the effect.
      help: one line for users.
    """
    return dataclasses.field(default=default, metadata={"kind": kind, "help": help})


def read_fields(owner: str, config: Any) -> dict[str, Any]:
    """Return the options of a config in normal form. Options that are None by default and unchanged are left out.

    Raises: ConfigError for a value outside its kind.
    """
    values: dict[str, Any] = {}
    for name, key in keys_of(config.__class__).items():
        value = getattr(config, name)
        if value is not None or key.default is not None:
            values[name] = key.kind.read(owner, name, value)
    return values


@dataclass(frozen=True)
class Key:
    """Name, kind, default and help text of one option."""

    name: str
    kind: Kind
    default: Any
    help: str


@cache
def keys_of(config: type[Any]) -> dict[str, Key]:
    """Return every option of a config by its name."""
    return {
        item.name: Key(item.name, item.metadata["kind"], item.default, item.metadata["help"])
        for item in dataclasses.fields(config)
        if "kind" in item.metadata
    }


@dataclass(frozen=True, kw_only=True)
class Options:
    """The keys of one drafting method. A key without a value is None.

    Attributes:
      method: name of the method.
      drafts_trees: whether drafts are always trees, for any values of the keys.

    Raises: ConfigError for a value outside its kind, and for values that contradict each other.
    """

    method: ClassVar[str]
    drafts_trees: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name, value in read_fields("speculative_config", self).items():
            object.__setattr__(self, name, value)
        self.check()

    def check(self) -> None:
        """Refuse values that contradict each other."""

    def check_paths(self) -> None:
        """Raise ConfigError for a path that cannot be read or written on this machine."""
        for name, value in self.given().items():
            if (check := self.keys()[name].kind.check) is not None:
                check(name, value)

    def given(self) -> dict[str, Any]:
        """Return every option that has a value. The options can be made again from this mapping with `read`."""
        return {name: value for name in self.keys() if (value := getattr(self, name)) is not None}

    @classmethod
    def keys(cls) -> dict[str, Key]:
        """Return every option by its name."""
        config: Any = cls
        return keys_of(config)

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        """Make options from the given keys. A method overrides this if its defaults depend on other keys."""
        return cls(**given)

"""Checks of configuration keywords: aliases, suggestions for unknown names, and ranges of values."""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from difflib import SequenceMatcher, get_close_matches
from typing import Any, ParamSpec, TypeVar

from foredraft.config.other_systems import NOT_HERE, Alias, aliases, is_same
from foredraft.errors import ConfigError, PromptError

T = TypeVar("T")
P = ParamSpec("P")


NEAR = 0.6
"""Smallest similarity, 0 to 1, at which a name is suggested."""
MOST_LISTED, NUM_NEAREST = 12, 5
"""Limit on names that an error lists completely, and number of nearest names that it lists otherwise."""
PAGES = {"sampling_params": "docs/sampling.md", "speculative_config": "docs/speculative_config.md", "LLM": "help(LLM)"}
"""Places that list all keys, by the name of the config."""
NAMELESS = ("sampling_params", "speculative_config", "speculate")
"""Configs whose names do not appear in messages, because their keys are also options of commands and fields of
requests."""


def nearest(given: str, known: Iterable[str], most: int = 1, cutoff: float = NEAR) -> list[str]:
    """Return the known names most similar to a given one, ignoring case."""
    lowered = {name.lower(): name for name in known}
    return [lowered[name] for name in get_close_matches(given.lower(), lowered, n=most, cutoff=cutoff)]


def did_you_mean(given: str, known: Iterable[str], page: str = "", *, shown: Callable[[str], str] = repr) -> str:
    """Suggest a name for an unknown one: the nearest, both of two equally near ones, or a list of known names.

    Args:
      given: the unknown name.
      known: all known names.
      page: a place that lists all of them.
      shown: function that formats a suggested name.
    """
    names = list(known)
    if near := nearest(given, names, 2):
        alike = [name for name in near if _likeness(name, given) == _likeness(near[0], given)]
        return f"did you mean {' or '.join(map(shown, alike))}?"
    if len(names) <= MOST_LISTED:
        return f"known are {', '.join(names)}."
    listed = ", ".join(nearest(given, names, NUM_NEAREST, 0.0))
    return f"the nearest of {len(names)} known names are {listed}{f'; {page} lists all' if page else ''}."


def _likeness(name: str, given: str) -> float:
    return SequenceMatcher(None, name.lower(), given.lower()).ratio()


def key_of(owner: str, name: str) -> str:
    """Return the name of a key for messages.

    >>> key_of("sampling_params", "stop"), key_of("structured_outputs", "json"), key_of("a curve", "context")
    ('stop', 'structured_outputs.json', 'context of a curve')
    """
    return name if owner in NAMELESS else f"{name} of {owner}" if " " in owner else f"{owner}.{name}"


def unknown_key(owner: str, key: str, known: Iterable[str]) -> ConfigError:
    """Return the error for an unknown key, with a suggestion."""
    return ConfigError(f"{owner} takes no {key!r}; {did_you_mean(key, sorted(known), PAGES.get(owner, ''))}")


def _brief(value: Any) -> str:
    """Return the repr of a value as JSON has it, or the class name of any other value."""
    is_plain = isinstance(value, (bool, int, float, str, list, dict))
    return shown(value) if is_plain else type(value).__name__


def own_keys(
    owner: str, given: Mapping[str, Any], known: Iterable[str], spelled: Callable[[str], str] = str
) -> dict[str, Any]:
    """Return the given keys under their own names, together with the keys that aliases imply.

    A key of another system is left out if its value requests the behaviour that foredraft has anyway.

    Args:
      owner: name of the config in the tables of `foredraft.config.other_systems`.
      given: keys and values from the user.
      known: names of the config's own keys.
      spelled: function that returns the usual spelling of a name.

    Raises: ConfigError for an unknown key, for a key that foredraft does not support (with the reason), for a switch
      that is neither true nor false, and for two names of one key with different values.
    """
    names, other_names, not_here = frozenset(known), aliases(owner), NOT_HERE.get(owner, {})
    values: dict[str, Any] = {}
    given_as: dict[str, str] = {}
    implied: dict[str, Any] = {}
    for written, value in given.items():
        key = spelled(written)
        if key in not_here:
            if not not_here[key].is_harmless(value):
                raise ConfigError(f"{owner} cannot take {key}={_brief(value)}: {not_here[key].reason}")
            continue
        if key not in names and key not in other_names:
            raise unknown_key(owner, key, names | other_names.keys())
        alias = Alias(key) if key in names else other_names[key]
        if alias.words:
            if not isinstance(value, bool):
                raise ConfigError(f"{key_of(owner, key)} is {value!r}; it must be true or false")
            value = alias.words[value]
            if value is None:
                continue
        name = alias.key
        if name in values and not is_same(values[name], value):
            raise ConfigError(
                f"{owner} got {given_as[name]}={values[name]!r} and {written}={value!r}, two names of one key; give one"
            )
        given_as[name], values[name] = written, value
        implied |= alias.implies
    return {**implied, **values}


def takes_aliases(owner: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator for a method or a constructor: its keywords may be aliases, as in `own_keys`.

    The signature stays unchanged, for readers and type checkers.
    """

    def decorate(method: Callable[P, T]) -> Callable[P, T]:
        names = [name for name in inspect.signature(method).parameters if name != "self"]

        @functools.wraps(method)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            values = own_keys(owner, kwargs, names)
            twice = set(names[: len(args) - 1]) & values.keys()
            if twice:
                raise ConfigError(f"{owner} got {sorted(twice)} both by position and by name; give each once")
            return method(*args, **values)

        return call

    return decorate


def whole_number(value: Any) -> int:
    """Return a value of any integer type as an int.

    Raises: TypeError for other types and for truth values, which Python and torch would count as 0 and 1.
    """
    if isinstance(value, bool) or str(getattr(value, "dtype", "")) == "torch.bool":
        raise TypeError(f"{value!r} is not a whole number")
    return operator.index(value)


def ints_of(values: Iterable[Any]) -> list[int]:
    """Return the values as ints, each checked by `whole_number`. A list of plain ints is returned as it is.

    Raises: TypeError for a value that is not a whole number.
    """
    found = list(values)
    return found if {*map(type, found)} <= {int} else list(map(whole_number, found))


_MOST_SHOWN = 200
"""Limit on characters of a value that an error shows."""


def shown(value: Any, most: int = _MOST_SHOWN) -> str:
    """Return the repr of a value for an error, shortened if it is long."""
    text = repr(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def has_items(value: Any) -> bool:
    """Whether the value is a list, an iterator, an array or similar, without consuming an item.

    Text, bytes and mappings do not count.
    """
    if isinstance(value, (str, bytes, bytearray, Mapping)):
        return False
    try:
        iter(value)
    except TypeError:
        return False
    return True


def listed(owner: str, name: str, value: Any) -> tuple[Any, ...]:
    """Return the entries of a list or similar as a tuple; an empty tuple for None.

    Raises: ConfigError for a value without entries.
    """
    if value is None:
        return ()
    if not has_items(value):
        raise ConfigError(f"{key_of(owner, name)} is {shown(value)}; it must be a list")
    return tuple(value)


def integer(owner: str, name: str, value: Any, low: int, high: int | None = None, remedy: str = "") -> int:
    """Return the value as an int within the limits, or raise ConfigError."""
    try:
        number = whole_number(value)
    except TypeError:
        raise ConfigError(f"{key_of(owner, name)} is {shown(value)}; it must be a whole number{_and(remedy)}") from None
    if number < low or (high is not None and number > high):
        limit = f"{low} or more" if high is None else f"between {low} and {high}"
        raise ConfigError(f"{key_of(owner, name)} is {number}; it must be {limit}{_and(remedy)}")
    return number


def real(
    owner: str,
    name: str,
    value: Any,
    low: float,
    high: float = math.inf,
    *,
    above: bool = False,
    remedy: str = "",
) -> float:
    """Return the value as a finite float within the limits, or raise ConfigError; ``above`` excludes ``low``."""
    try:
        if isinstance(value, (bool, str)):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{key_of(owner, name)} is {shown(value)}; it must be a number{_and(remedy)}") from None
    if not math.isfinite(number) or number > high or number < low or (above and number == low):
        edge = "greater than" if above else "at least"
        limit = f"{edge} {low:g}" + ("" if math.isinf(high) else f" and at most {high:g}")
        raise ConfigError(f"{key_of(owner, name)} is {number}; it must be finite, {limit}{_and(remedy)}")
    return number


def _and(remedy: str) -> str:
    return f"; {remedy}" if remedy else ""


def strings(owner: str, name: str, value: str | Iterable[Any] | None) -> tuple[str, ...]:
    """Return one string or several as a tuple. Empty strings raise ConfigError."""
    given = (value,) if isinstance(value, str) else listed(owner, name, value)
    for string in given:
        if not isinstance(string, str) or not string:
            raise ConfigError(f"{key_of(owner, name)} contains {shown(string)}; every entry must be a non-empty string")
        try:
            check_unicode(string, key_of(owner, name))
        except PromptError as error:
            raise ConfigError(str(error)) from None
    return given


def check_unicode(text: str, name: str) -> None:
    """Raise PromptError for text with half a surrogate pair or undecodable bytes, which no tokenizer accepts."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PromptError(
            f"{name} is not valid Unicode: character {error.start} is {text[error.start]!r}, half of a surrogate pair "
            "or a byte that is not UTF-8; repair the text"
        ) from None


def spelling(name: str) -> str:
    """Return the Python spelling of an option: ``--spec-draft-n-max`` -> ``spec_draft_n_max``."""
    return name.lstrip("-").replace("-", "_")

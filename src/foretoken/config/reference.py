"""All keys of all methods, as people read them: for ``foretoken info --keys`` and docs/speculative_config.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foretoken.config.method import Method, methods
from foretoken.config.options import Key


@dataclass(frozen=True)
class KeyEntry:
    """One key, of all methods that have it.

    Args:
      name: of the key.
      values: what it takes.
      defaults: by method; None where nothing is set unless it is given.
      help: what it means.
    """

    name: str
    values: str
    defaults: Mapping[str, Any]
    help: str

    @property
    def default(self) -> str:
        """The default, or the most frequent one and those that differ: ``5; ngram 10``."""
        shown = {method: _shown(value) for method, value in self.defaults.items()}
        usual = max(shown.values(), key=list(shown.values()).count)
        others = [f"{method} {value or 'none'}" for method, value in shown.items() if value != usual]
        return "; ".join([usual or "none" if others else usual, *others])

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"key": self.name, "values": self.values, "defaults": dict(self.defaults), "meaning": self.help}


def key_entries(chosen: str | None = None) -> list[KeyEntry]:
    """Every key, those of most methods first; of one method, where one is chosen, its own first."""
    num_owners = Counter(name for method in methods().values() for name in method.keys)
    of: dict[tuple[str, str, str], dict[str, Any]] = {}
    for method in _methods(chosen):
        for key in method.keys.values():
            of.setdefault((key.name, str(key.kind), key.help), {})[method.name] = _default(method, key)
    entries = [KeyEntry(name, values, defaults, help) for (name, values, help), defaults in of.items()]
    return sorted(entries, key=lambda entry: num_owners[entry.name] * (-1 if chosen is None else 1))


def _methods(chosen: str | None) -> list[Method]:
    return list(methods().values()) if chosen is None else [methods()[chosen]]


def _default(method: Method, key: Key) -> Any:
    """A method that combines others has the length of its parts."""
    return None if method.combines and key.name == "num_speculative_tokens" else key.default


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)

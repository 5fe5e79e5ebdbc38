"""Write keys, and other names of methods, into the pages, from the options of the methods.

python docs/make_keys.py            # after a change of a method's options

A key stands on one page: on that of its methods, where one page has them all, else in docs/speculative_config.md.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

from foredraft.methods import KeyEntry, key_entries, methods
from foredraft.methods.lengths import LengthOptions

DOCS = Path(__file__).parent
SHARED = DOCS / "speculative_config.md"
BEGIN, END = "<!-- made by docs/make_keys.py", "<!-- end -->"
PART = re.compile(rf"({BEGIN}(?:, keys of ([^>]*))? -->\n).*?({END}\n)", re.DOTALL)
"""What is made of a page: other names of methods and shared keys, or the keys of the methods that are named."""
WIDTH = 120
LENGTH_KEYS = {field.name for field in fields(LengthOptions)} - {"length_policy"}
"""Keys that only some length policies read."""


def pages() -> dict[Path, str]:
    """Every page with a part that is made, as it should be."""
    texts = {path: path.read_text(encoding="utf-8") for path in (SHARED, *sorted((DOCS / "methods").glob("*.md")))}
    named = {path: found[2] for path, text in texts.items() if (found := PART.search(text)) is not None}
    owners = {path: set(names.split(", ")) for path, names in named.items() if names}
    keys: dict[Path, list[KeyEntry]] = {path: [] for path in named}
    for entry in key_entries():
        keys[_place(entry, owners)].append(entry)
    made = {path: _own(owners[path], keys[path]) if path in owners else _shared(keys[path]) for path in named}
    return {path: PART.sub(lambda found: found[1] + made[path] + found[3], texts[path]) for path in named}  # noqa: B023


def _place(entry: KeyEntry, owners: dict[Path, set[str]]) -> Path:
    """The page with the fewest methods among those that have all of a key's."""
    having = [path for path, names in owners.items() if entry.defaults.keys() <= names]
    return min(having, key=lambda path: len(owners[path]), default=SHARED)


def _shared(entries: Iterable[KeyEntry]) -> str:
    lines = []
    for method in methods().values():
        if method.aliases:
            lines += _wrapped(f"- `{method.name}`: {_quoted(method.aliases)}")
    groups: dict[tuple[str, ...], list[KeyEntry]] = {}
    for entry in entries:
        groups.setdefault(tuple(entry.defaults), []).append(entry)
    about = "Keys that several methods share, first by method, then one by one:"
    lines += ["", about, "", *_keys_by_method(groups)]
    for names, its_entries in groups.items():
        lines += ["", *_wrapped(f"**{_quoted(names)}**"), "", *_items(its_entries)]
    return "\n".join(lines) + "\n"


def _keys_by_method(groups: dict[tuple[str, ...], list[KeyEntry]]) -> list[str]:
    """Table of the shared keys of each method. Methods with the same keys share a line."""
    names_of: dict[tuple[str, ...], list[str]] = {}
    for method in methods():
        entries = [entry for names, its_entries in groups.items() if method in names for entry in its_entries]
        keys = dict.fromkeys(entry.name for entry in entries if entry.name not in LENGTH_KEYS)
        policies = ["[keys of length policies](length_policies.md)"] * any(e.name in LENGTH_KEYS for e in entries)
        if keys:
            names_of.setdefault((_quoted(keys), *policies), []).append(method)
    rows = [f"| {_quoted(names)} | {', '.join(keys)} |" for keys, names in names_of.items()]
    return ["| methods | shared keys |", "|---|---|", *rows]


def _own(names: set[str], entries: Iterable[KeyEntry]) -> str:
    first = "Own keys ([shared ones](../speculative_config.md)):"
    return "\n".join([first, "", *_items(entries, len(names))]) + "\n"


def _items(entries: Iterable[KeyEntry], num_methods: int = 1) -> list[str]:
    lines = []
    for entry in entries:
        of = f"{_quoted(entry.defaults)}; " if len(entry.defaults) < num_methods else ""
        default = f"; default {entry.default}" if entry.default else ""
        notes = f"{of}{default[2:]}" if entry.values == "true or false" else f"{of}{entry.values}{default}"
        lines += _wrapped(f"- `{entry.name}`: {entry.help} ({notes})")
    return lines


def _wrapped(line: str) -> list[str]:
    indent = "  " if line.startswith("- ") else ""
    return textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_on_hyphens=False)


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")

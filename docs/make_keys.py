"""Write methods and keys into docs/speculative_config.md, from the options of the methods.

python docs/make_keys.py            # after a change of a method's options
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from pathlib import Path

from foretoken.config.method import methods
from foretoken.config.reference import KeyEntry, key_entries

PAGE = Path(__file__).with_name("speculative_config.md")
BEGIN, END = "<!-- made by docs/make_keys.py -->\n", "<!-- end -->\n"
WIDTH = 120


def reference() -> str:
    """The methods, and all keys in groups of one set of methods."""
    lines = []
    for method in methods().values():
        others = f" Also {_quoted(method.aliases)}." if method.aliases else ""
        lines += _wrapped(f"- `{method.name}` drafts {method.summary}.{others}")
    groups: dict[tuple[str, ...], list[KeyEntry]] = {}
    for entry in key_entries():
        groups.setdefault(tuple(entry.defaults), []).append(entry)
    for names, entries in groups.items():
        lines += ["", *_wrapped(f"**{_owners(names)}**"), ""]
        for entry in entries:
            default = f"; default {entry.default}" if entry.default else ""
            lines += _wrapped(f"- `{entry.name}`: {entry.help} ({entry.values}{default})")
    return "\n".join(lines) + "\n"


def _owners(names: tuple[str, ...]) -> str:
    drafting = [name for name in methods() if name != "none"]
    others = [name for name in drafting if name not in names]
    if not others:
        return "All methods"
    return _quoted(names) if len(others) > len(names) else f"All but {_quoted(others)}"


def _wrapped(line: str) -> list[str]:
    indent = "  " if line.startswith("- ") else ""
    return textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_on_hyphens=False)


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def page(text: str) -> str:
    """The page with the reference of today."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + reference() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

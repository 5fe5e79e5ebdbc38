"""Write the table of keys into docs/speculative_config.md, from the options of the methods.

python docs/make_keys.py            # after a change of a method's options
"""

from __future__ import annotations

from pathlib import Path

from foretoken.config.method import methods
from foretoken.config.reference import key_entries

PAGE = Path(__file__).with_name("speculative_config.md")
BEGIN, END = "<!-- made by docs/make_keys.py -->\n", "<!-- end -->\n"


def tables() -> str:
    """The methods, and all keys."""
    lines = ["| method | drafts | other names |", "|---|---|---|"]
    for method in methods().values():
        lines.append(f"| `{method.name}` | {method.summary} | {_quoted(list(method.aliases))} |")
    lines += ["", "| key | methods | takes | default | meaning |", "|---|---|---|---|---|"]
    drafting = [name for name in methods() if name != "none"]
    for entry in key_entries():
        names = list(entry.defaults)
        others = [name for name in drafting if name not in names]
        owners = _quoted(names) if len(others) > len(names) else f"all but {_quoted(others)}" if others else "all"
        lines.append(f"| `{entry.name}` | {owners} | {entry.values} | {entry.default} | {entry.help} |")
    return "\n".join(lines) + "\n"


def _quoted(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def page(text: str) -> str:
    """The page with new tables in the place of the old ones."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + tables() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

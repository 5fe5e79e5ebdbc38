"""Pages that need nothing else: the token view, its style and its script, put into a page of its own."""

from __future__ import annotations

from importlib.resources import files

TOKENS = {"/* tokens.css */": "tokens.css", "// tokens.js": "tokens.js"}
"""Where a page says that it takes them, and the files of this room."""


def page(room: str, name: str) -> str:
    """A page of the package's ``room``, the token view inside it wherever it asks for it."""
    text = files(room).joinpath(name).read_text(encoding="utf-8")
    for place, part in TOKENS.items():
        text = text.replace(place, files("foretoken.views").joinpath(part).read_text(encoding="utf-8"))
    return text

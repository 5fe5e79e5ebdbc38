"""Models in GGUF files, as models of `transformers`."""

from __future__ import annotations

from importlib.util import find_spec

NEEDED = ("gguf",)
"""Packages that reading weights needs, in addition to foredraft's own dependencies."""


def missing_packages() -> list[str]:
    """Return the packages in `NEEDED` that are not installed."""
    return [name for name in NEEDED if find_spec(name) is None]

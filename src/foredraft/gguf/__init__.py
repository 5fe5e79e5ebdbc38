"""Models in GGUF files: read, dequantised and given to `transformers`, the same on every version of it."""

from __future__ import annotations

from importlib.util import find_spec

NEEDED = ("gguf", "accelerate")
"""Packages that reading weights needs besides foredraft's own dependencies."""


def missing_packages() -> list[str]:
    """The packages of `NEEDED` that are not installed."""
    return [name for name in NEEDED if find_spec(name) is None]

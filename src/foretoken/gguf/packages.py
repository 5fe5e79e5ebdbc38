"""The packages that reading the weights of a GGUF file needs besides foretoken's own dependencies."""

from __future__ import annotations

from importlib.util import find_spec

NEEDED = ("gguf", "accelerate")
INSTALL = 'python -m pip install "foretoken[gguf]"'


def missing_packages() -> list[str]:
    """The packages of `NEEDED` that are not installed."""
    return [name for name in NEEDED if find_spec(name) is None]

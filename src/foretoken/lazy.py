"""Modules that are imported when something of them is first used, so that reading options costs no torch."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class Lazy:
    """Stands for a module. Type checkers import the real one; see its users."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, item: str) -> Any:
        return getattr(import_module(self._name), item)

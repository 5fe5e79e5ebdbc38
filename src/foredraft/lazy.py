"""Modules that are imported when something of them is first used, so that reading options costs no torch."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any


class Lazy:
    """Stands for a module. Type checkers import the real one; see its users."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._module: ModuleType | None = None

    def __getattr__(self, item: str) -> Any:
        if self._module is None:
            self._module = import_module(self._name)
        return getattr(self._module, item)

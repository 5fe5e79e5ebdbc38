"""The plain functions of the original description, as thin wrappers around the engine. See docs/classic.md.

`install` gives them the module names of the original listings, for programs that import them as they are written there.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from foredraft.classic.trace import DraftedToken, Step, Trace, last_trace
from foredraft.errors import ConfigError

__all__ = ["DraftedToken", "Step", "Trace", "install", "last_trace"]

PACKAGES = ("ngram_assisted", "sampling", "utils")
"""Names of top-level packages in the listings; each is one of this package."""


def install() -> None:
    """Let ``ngram_assisted``, ``sampling`` and ``utils`` be imported: they are those of `foredraft.classic`.

    Call it before the imports; it holds for this process, and a second call changes nothing.

    Raises: ConfigError where one of the names is that of another module, which would be hidden; nothing is installed.
    """
    packages = {name: import_module(f"foredraft.classic.{name}") for name in PACKAGES}
    for name, package in packages.items():
        _check_free(name, package)
    for name, package in packages.items():
        sys.modules.update({name: package, **{f"{name}.{part}": module for part, module in _modules(package)}})


def _check_free(name: str, package: ModuleType) -> None:
    there = sys.modules.get(name)
    if there is package:
        return
    found = find_spec(name) if there is None else there.__spec__
    if found is not None or there is not None:
        place = "another module" if found is None else found.origin or "a folder"
        raise ConfigError(
            f"{name} is {place} here, which foredraft.classic.install() would hide; import foredraft.classic.{name} "
            "instead, or rename the other"
        )


def _modules(package: ModuleType) -> Iterator[tuple[str, ModuleType]]:
    for found in pkgutil.iter_modules(package.__path__):
        yield found.name, import_module(f"{package.__name__}.{found.name}")

"""The plain functions of the original description, as thin wrappers over parts of the engine. See docs/classic.md.

`install` makes the functions importable under the module names of the original listings.
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
"""Names of the top-level packages in the listings, which are subpackages of this one."""


def install() -> None:
    """Make ``ngram_assisted``, ``sampling`` and ``utils`` importable as the packages of `foredraft.classic`.

    Call ``install`` before these imports. ``install`` affects the whole process, and a second call changes nothing.

    Raises: ConfigError if one of the names belongs to another module, which would be hidden. If an error is raised,
      nothing is installed.
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
            f"the name {name} belongs to {place}, which foredraft.classic.install() would hide; import "
            f"foredraft.classic.{name} instead, or rename the other module"
        )


def _modules(package: ModuleType) -> Iterator[tuple[str, ModuleType]]:
    for found in pkgutil.iter_modules(package.__path__):
        yield found.name, import_module(f"{package.__name__}.{found.name}")

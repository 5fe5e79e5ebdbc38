"""Optional dependencies: the command that installs the packages of an extra."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, requires

from packaging.requirements import Requirement

DISTRIBUTION = "foredraft"


@cache
def install_command(extra: str) -> str:
    """Return the command that installs the packages of an extra, each by its own name.

    The command never names foredraft itself, because a package index may not have it. The packages are read from the
    metadata of the installed distribution, the only place that lists extras.

    Args:
      extra: name of an extra in pyproject.toml, such as ``serve``.
    """
    try:
        found = sorted(set(_packages(extra)))
    except PackageNotFoundError:  # run from a source folder
        found = []
    if not found:
        return f"python -m pip install '.[{extra}]' in a checkout of foredraft"
    return f"python -m pip install {shlex.join(found)}"


def _packages(extra: str) -> Iterator[str]:
    for line in requires(DISTRIBUTION) or ():
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None or marker.evaluate({"extra": ""}) or not marker.evaluate({"extra": extra}):
            continue
        if requirement.name == DISTRIBUTION:
            for other in sorted(requirement.extras):
                yield from _packages(other)
        else:
            requirement.marker = None
            yield str(requirement)

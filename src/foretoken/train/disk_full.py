"""What a training says where the disk is full."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from foretoken.errors import CheckpointError
from foretoken.folders import is_no_room


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Raises: CheckpointError where something inside of it could not be written for want of room."""
    try:
        yield
    except Exception as error:
        if not is_no_room(error):
            raise
        raise CheckpointError(
            f"{folder} cannot be written: there is no room left; make some and run the same command again, which goes "
            "on from what was kept"
        ) from error

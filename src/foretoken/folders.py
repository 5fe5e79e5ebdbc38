"""Where foretoken keeps what it makes once and uses again: converted models, compiled kernels."""

from __future__ import annotations

import errno
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

CACHE_VARIABLE = "FORETOKEN_CACHE"


def cache_folder(*parts: str) -> Path:
    """A folder inside the cache: ``$FORETOKEN_CACHE``, else ``$XDG_CACHE_HOME/foretoken``, else ``~/.cache/foretoken``.

    The folder need not exist.
    """
    chosen, standard = os.environ.get(CACHE_VARIABLE), os.environ.get("XDG_CACHE_HOME")
    if chosen:
        root = Path(os.path.expanduser(chosen))
    elif standard and os.path.isabs(standard):  # a relative one is to be ignored, says the standard
        root = Path(standard) / "foretoken"
    else:
        root = Path(os.path.expanduser("~/.cache/foretoken"))
    return root.joinpath(*parts)


def temporary_folder(*parts: str) -> Path:
    """A folder of this user among the temporary files, for a cache that cannot be written. It need not exist."""
    user = str(os.getuid()) if hasattr(os, "getuid") else "user"
    return Path(tempfile.gettempdir(), f"foretoken-{user}", *parts)


def is_private(folder: Path) -> bool:
    """Whether a folder is there and nobody but this user can have put anything into it."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    is_ours = not hasattr(os, "getuid") or found.st_uid == os.getuid()
    return stat.S_ISDIR(found.st_mode) and is_ours and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def make_private(folder: Path) -> None:
    """Make a folder for this user alone.

    Raises: OSError, also where somebody else has made it.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    if not is_private(folder):
        raise PermissionError(errno.EPERM, "others can write to it", str(folder))


def keep_json(file: Path, content: object) -> None:
    """Write a file that other processes see whole or not at all; its folder is made where there is none.

    Raises: OSError.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=file.parent, suffix=".part", delete=False) as part:
        json.dump(content, part, indent=1)
    os.replace(part.name, file)


@contextmanager
def locked(file: Path, longest_wait_seconds: float) -> Iterator[bool]:
    """Keep other processes that ask for the same lock out.

    Yields: False where that cannot be had (a file system without locks, a process that holds it too long); the
      caller must then expect another process inside.
    """
    lock = FileLock(file)
    try:
        lock.acquire(timeout=longest_wait_seconds)
    except (Timeout, OSError, NotImplementedError):
        yield False
        return
    try:
        yield True
    finally:
        lock.release()

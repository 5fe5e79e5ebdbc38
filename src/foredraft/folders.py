"""Folders for files that are made once and used again: converted models, compiled kernels."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from threading import get_ident
from typing import Any

from filelock import FileLock, Timeout

from foredraft.errors import ConfigError

if sys.platform != "win32":
    import fcntl
    import pwd

CACHE_VARIABLE = "FOREDRAFT_CACHE"

_NO_ROOM = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


def cache_folder(*parts: str) -> Path:
    """Return a folder inside the cache, which need not exist.

    The cache is ``$FOREDRAFT_CACHE``, else ``$XDG_CACHE_HOME/foredraft``, else ``~/.cache/foredraft``.
    """
    chosen, standard = os.environ.get(CACHE_VARIABLE), os.environ.get("XDG_CACHE_HOME")
    if chosen:
        root = _home() / chosen[2:] if f"{chosen}/".startswith("~/") else Path(os.path.expanduser(chosen))
    elif standard and os.path.isabs(standard):  # the XDG standard says to ignore relative paths
        root = Path(standard) / "foredraft"
    else:
        root = _home() / ".cache" / "foredraft"
    return root.joinpath(*parts)


def _home() -> Path:
    """Return the user's home folder. An empty ``$HOME`` counts as unset. Without any home, the path does not exist."""
    named = os.environ.get("HOME") or ""
    if named or sys.platform == "win32":
        return Path(os.path.expanduser("~"))
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:  # a user id without an account, as in containers
        return Path("/nonexistent")


def temporary_folder(*parts: str) -> Path:
    """Return this user's folder among the temporary files, for use if the cache is not writable. The folder need not
    exist."""
    user = str(os.getuid()) if hasattr(os, "getuid") else "user"
    return Path(tempfile.gettempdir(), f"foredraft-{user}", *parts)


def is_private(folder: Path) -> bool:
    """Return whether a folder exists and only this user can have written to it."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    is_ours = not hasattr(os, "getuid") or found.st_uid == os.getuid()
    return stat.S_ISDIR(found.st_mode) and is_ours and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def make_private(folder: Path) -> None:
    """Create a folder for this user alone.

    Raises: OSError, also if the folder belongs to somebody else.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    if not is_private(folder):
        raise PermissionError(errno.EPERM, "others can write to it", str(folder))


def check_place(file: str | os.PathLike[str]) -> Path:
    """Return the path of a file that can be written. An existing file is not changed.

    Raises: ConfigError.
    """
    path = Path(file).expanduser()
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"{file} cannot be written: it needs to be a file in a folder that exists")
    place = path if path.exists() and not path.is_file() else path.parent  # files are replaced, devices written to
    if not os.access(place, os.W_OK):
        raise ConfigError(f"{file} cannot be written: you have no write permission for {place}; choose another place")
    return path


def check_new_folder(folder: str | os.PathLike[str]) -> Path:
    """Return the path of a folder that is empty or does not exist yet.

    Raises: ConfigError for a folder that is not empty, for a file, and if the folder cannot be created.
    """
    path = Path(folder).expanduser()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"{path} already exists and is not empty; name a new folder")
    check_folder(path)
    return path


def check_folder(path: Path) -> None:
    """Raise ConfigError for a folder that can neither be written nor be created."""
    place = next(one for one in (path, *path.absolute().parents) if one.exists())
    if not place.is_dir() or not os.access(place, os.W_OK):
        why = f"you have no write permission for {place}" if place.is_dir() else f"{place} is a file"
        raise ConfigError(f"{path} cannot be created: {why}; choose another place")


def not_ours(path: str | os.PathLike[str], name: str, remedy: str) -> str:
    """Return the message about a file whose format line does not belong to foredraft's files of one kind.

    Args:
      name: kind of file, such as ``profile``.
      remedy: the command or option that makes such a file.
    """
    return f"{os.fspath(path)} is not a foredraft {name} file; create one with {remedy}"


def parsed_json(text: str | bytes | bytearray, **options: Any) -> Any:
    """Parse JSON from an untrusted source.

    Args:
      options: options of `json.loads`.

    Raises: ValueError for text that is not JSON, is nested more deeply than Python can read, or has numbers that are
    too long.
    """
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_own_json(path: Path, form: str, name: str, remedy: str) -> dict[str, Any]:
    """Read a JSON file of foredraft.

    Args:
      form: format line of the file.
      name, remedy: see `not_ours`.

    Raises: ConfigError for a file that cannot be read, is not JSON, or has another format.
    """
    try:
        content = parsed_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{name} {path} cannot be read: {error.strerror}; create it with {remedy}") from None
    except ValueError as error:
        raise ConfigError(f"{name} {path} is not valid JSON: {error}; create it with {remedy}") from None
    if not isinstance(content, dict) or content.get("format") != form:
        raise ConfigError(not_ours(path, name, remedy))
    return content


def keep_json(file: Path, content: object) -> None:
    """Write JSON by `write_atomically`. The file's folder is created if it does not exist."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(content, indent=1) + "\n")


def write_atomically(file: Path, text: str) -> None:
    """Write a file atomically: other processes see the old file or the complete new one.

    A device such as /dev/stdout is written to directly.

    Raises: OSError, after which an existing file is unchanged.
    """
    file = Path(os.path.realpath(file))
    if file.exists() and not file.is_file():
        file.write_text(text, encoding="utf-8")
        return
    part = part_of(file)
    with replacing(file, part):
        part.write_text(text, encoding="utf-8")


def write_text(file: str | os.PathLike[str], text: str) -> None:
    """Write a file that a user named, by `write_atomically`.

    Raises: ConfigError if the file cannot be written.
    """
    try:
        write_atomically(Path(file).expanduser(), text)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}; check the directory") from None


def part_of(file: Path) -> Path:
    """Return the path of the temporary file of this thread that will replace a file."""
    return file.with_name(f".{file.name}.{os.getpid()}-{get_ident()}.part")


def sha256_of(file: Path) -> str:
    """Return the SHA-256 of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def known_sha256(file: Path) -> str:
    """Return the SHA-256 of a file, cached while the file does not change, since a model takes tenths of a second."""
    found = file.stat()
    return _sha256_of_version(file, (found.st_size, found.st_mtime_ns, found.st_ino))


@lru_cache(maxsize=64)
def _sha256_of_version(file: Path, version: tuple[int, ...]) -> str:
    return sha256_of(file)


@contextmanager
def replacing(file: Path, part: Path) -> Iterator[None]:
    """Context manager after which ``part`` replaces ``file``.

    After an error, ``file`` is unchanged and ``part`` is deleted.
    """
    try:
        yield
        os.replace(part, file)
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise


@contextmanager
def filling(folder: Path, last: str) -> Iterator[Path]:
    """Context manager that yields a temporary folder. The files of that folder move into ``folder`` unless there is an
    error.

    Args:
      folder: a new or empty folder; it is created.
      last: name of the file that is moved last. Readers ignore the folder without this file. If the process is killed
        before the end, this file is missing.
    """
    was_there = folder.is_dir()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix=".part-", dir=folder) as part:
            yield Path(part)
            for file in sorted(Path(part).iterdir(), key=lambda file: file.name == last):
                os.replace(file, folder / file.name)
    except BaseException:
        if not was_there:
            with suppress(OSError):
                folder.rmdir()
        raise


def append_lines(file: Path, lines: str) -> None:
    """Append whole lines to a file.

    If the last line was cut off by a kill or a full disk, the new lines start after it.

    Raises: OSError, after which a part of the lines may have been written.
    """
    with file.open("ab+") as opened:
        if opened.tell() > 0:
            opened.seek(-1, os.SEEK_END)
            lines = lines if opened.read(1) == b"\n" else "\n" + lines
        opened.write(lines.encode())


def json_lines(file: Path) -> Iterator[Any]:
    """Yield the records of a file written by `append_lines`; nothing if there is no file.

    Lines that were cut off by a kill or a full disk are skipped.
    """
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        with suppress(ValueError):
            yield json.loads(line)


def is_no_room(error: BaseException | None) -> bool:
    """Return whether an error means that the disk is full, or that a limit on the file or the user's quota was reached.

    safetensors reports a full disk only in its message. torch raises another error in addition to that of the file.
    """
    if error is None:
        return False
    if isinstance(error, OSError):
        return error.errno in _NO_ROOM
    is_told = any(f"(os error {number})" in str(error) for number in _NO_ROOM)
    return is_told or is_no_room(error.__context__)


@contextmanager
def only_writer(file: Path) -> Iterator[None]:
    """Context manager that locks a file against other writers that use this function.

    The file is created if it does not exist.

    On file systems or platforms without such locks, nothing is locked.

    Raises: ConfigError if another process has the lock; OSError.
    """
    with file.open("ab") as opened:
        if sys.platform != "win32":
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"another process is writing {file}; wait until it has finished, or name another place"
                ) from None
            except OSError:
                pass
        yield


@contextmanager
def only_user(folder: Path, lock: str) -> Iterator[None]:
    """Context manager that creates a folder and locks it against other users of this function.

    A folder that contains nothing at the end is deleted: what failed before its first result leaves nothing.

    Args:
      lock: name of the lock file inside the folder. It is deleted with the folder.

    Raises: ConfigError if another process has the lock; OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / lock
    with only_writer(file):
        try:
            yield
        finally:
            if list(folder.iterdir()) == [file]:
                with suppress(OSError):
                    file.unlink()
                    folder.rmdir()


@contextmanager
def locked(file: Path, longest_wait_seconds: float) -> Iterator[bool]:
    """Context manager that waits for a lock between processes.

    Yields: False if the lock is not available (a file system without locks, a process that keeps it too long). The
      caller must then assume that another process is inside.
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

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
    """A folder inside the cache: ``$FOREDRAFT_CACHE``, else ``$XDG_CACHE_HOME/foredraft``, else ``~/.cache/foredraft``.

    The folder need not exist.
    """
    chosen, standard = os.environ.get(CACHE_VARIABLE), os.environ.get("XDG_CACHE_HOME")
    if chosen:
        root = _home() / chosen[2:] if f"{chosen}/".startswith("~/") else Path(os.path.expanduser(chosen))
    elif standard and os.path.isabs(standard):  # a relative one is to be ignored, says the standard
        root = Path(standard) / "foredraft"
    else:
        root = _home() / ".cache" / "foredraft"
    return root.joinpath(*parts)


def _home() -> Path:
    """The user's home; an empty ``$HOME`` is as none, and who has no home anywhere gets a folder that is not there."""
    named = os.environ.get("HOME") or ""
    if named or sys.platform == "win32":
        return Path(os.path.expanduser("~"))
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:  # a number without a name, as in containers
        return Path("/nonexistent")


def temporary_folder(*parts: str) -> Path:
    """A folder of this user among the temporary files, for a cache that cannot be written. It need not exist."""
    user = str(os.getuid()) if hasattr(os, "getuid") else "user"
    return Path(tempfile.gettempdir(), f"foredraft-{user}", *parts)


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


def check_place(file: str | os.PathLike[str]) -> Path:
    """The path of a file that can be written; what is there stays as it is.

    Raises: ConfigError.
    """
    path = Path(file).expanduser()
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"{file} cannot be written: it needs to be a file in a folder that exists")
    place = path if path.exists() and not path.is_file() else path.parent  # files are replaced, devices are not
    if not os.access(place, os.W_OK):
        raise ConfigError(f"{file} cannot be written: {place} is not yours to write to; choose another place")
    return path


def check_new_folder(folder: str | os.PathLike[str]) -> Path:
    """The path of a folder that is to be made, or is empty.

    Raises: ConfigError for one that holds something, for a file, and where none can be made.
    """
    path = Path(folder).expanduser()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"{path} is there already and holds something; name a new folder")
    place = next(one for one in (path, *path.absolute().parents) if one.exists())
    if not place.is_dir() or not os.access(place, os.W_OK):
        why = "is not yours to write to" if place.is_dir() else "is a file"
        raise ConfigError(f"{path} cannot be written: {place} {why}; choose another place")
    return path


def not_ours(path: str | os.PathLike[str], name: str, remedy: str) -> str:
    """Message about a file whose format line is not that of foredraft's files of one kind.

    Args:
      name: kind of file, such as ``profile``.
      remedy: the command or option that makes one.
    """
    return f"{os.fspath(path)} is not a foredraft {name} file; make it anew with {remedy}"


def parsed_json(text: str | bytes | bytearray, **options: Any) -> Any:
    """A text as JSON, which may be anybody's.

    Args:
      options: of `json.loads`.

    Raises: ValueError for one that is none, is nested more deeply than Python reads, or has longer numbers.
    """
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_own_json(path: Path, form: str, name: str, remedy: str) -> dict[str, Any]:
    """Content of a JSON file of foredraft.

    Args:
      form: its format line.
      name, remedy: see `not_ours`.

    Raises: ConfigError for a file that cannot be read, is not JSON, or is of another format.
    """
    try:
        content = parsed_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{name} {path} cannot be read: {error.strerror}; make it with {remedy}") from None
    except ValueError as error:
        raise ConfigError(f"{name} {path} is not valid JSON: {error}; make it with {remedy}") from None
    if not isinstance(content, dict) or content.get("format") != form:
        raise ConfigError(not_ours(path, name, remedy))
    return content


def keep_json(file: Path, content: object) -> None:
    """`keep_text` of JSON; the file's folder is made where there is none."""
    file.parent.mkdir(parents=True, exist_ok=True)
    keep_text(file, json.dumps(content, indent=1) + "\n")


def keep_text(file: Path, text: str) -> None:
    """Write a file that others see whole or not at all.

    What is no file, /dev/stdout for instance, is written to as it is.

    Raises: OSError, after which a file is what it was before.
    """
    file = Path(os.path.realpath(file))
    if file.exists() and not file.is_file():
        file.write_text(text, encoding="utf-8")
        return
    part = part_of(file)
    with replacing(file, part):
        part.write_text(text, encoding="utf-8")


def write_text(file: str | os.PathLike[str], text: str) -> None:
    """`keep_text` of a file that a user named.

    Raises: ConfigError where the file cannot be written.
    """
    try:
        keep_text(Path(file).expanduser(), text)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}; check the directory") from None


def part_of(file: Path) -> Path:
    """Temporary file that this thread writes before it takes the place of a file."""
    return file.with_name(f".{file.name}.{os.getpid()}-{get_ident()}.part")


def sha256_of(file: Path) -> str:
    """SHA-256 of the bytes of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def known_sha256(file: Path) -> str:
    """`sha256_of` a file that is read once while it does not change: for a model it takes tenths of a second."""
    found = file.stat()
    return _sha256_of_version(file, (found.st_size, found.st_mtime_ns, found.st_ino))


@lru_cache(maxsize=64)
def _sha256_of_version(file: Path, version: tuple[int, ...]) -> str:
    return sha256_of(file)


@contextmanager
def replacing(file: Path, part: Path) -> Iterator[None]:
    """Let what is written to ``part`` inside take the place of a file; after an error only the file is left."""
    try:
        yield
        os.replace(part, file)
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise


@contextmanager
def filling(folder: Path, last: str) -> Iterator[Path]:
    """Let files that are written into another folder inside come into this one, all of them or, after an error, none.

    Args:
      folder: that is made, or is empty.
      last: name of the file without which nobody reads the others: after a kill it is not there.
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
    """Add whole lines to a file; where the last one was cut off by a kill or a full disk, they begin after it.

    Raises: OSError, after which a part of them may be there.
    """
    with file.open("ab+") as opened:
        if opened.tell() > 0:
            opened.seek(-1, os.SEEK_END)
            lines = lines if opened.read(1) == b"\n" else "\n" + lines
        opened.write(lines.encode())


def json_lines(file: Path) -> Iterator[Any]:
    """Records of a file that `append_lines` has written to; none where there is no file.

    Lines that a kill or a full disk cut off are left out.
    """
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        with suppress(ValueError):
            yield json.loads(line)


def is_no_room(error: BaseException | None) -> bool:
    """Whether something could not be written since the disk is full, or the file or the user's share may not grow.

    safetensors say so in words alone, and torch raises an error of its own beside that of the file.
    """
    if error is None:
        return False
    if isinstance(error, OSError):
        return error.errno in _NO_ROOM
    is_told = any(f"(os error {number})" in str(error) for number in _NO_ROOM)
    return is_told or is_no_room(error.__context__)


@contextmanager
def only_writer(file: Path) -> Iterator[None]:
    """Keep other processes from writing a file by this function, which is made where it is not there.

    Where a file system or a platform has no such locks, nobody is kept out.

    Raises: ConfigError where another process is inside; OSError.
    """
    with file.open("ab") as opened:
        if sys.platform != "win32":
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"another process is writing {file} at this moment; wait for its end, or name another place"
                ) from None
            except OSError:
                pass
        yield


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

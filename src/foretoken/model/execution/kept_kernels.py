"""The folder where inductor keeps kernels: for one kind of machine, and whole.

Inductor compiles for exactly the CPU that it runs on, and takes any file that it finds under the name that it expects.
On another CPU, as beside a shared home folder, such a kernel ends the process; so does one that a crash or a full disk
has cut short.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from foretoken.folders import keep_json, locked, sha256_of
from foretoken.machine import cpu_digest
from foretoken.native.build import cpp_compiler

logger = logging.getLogger("foretoken")

LISTING = "files.json"
LONGEST_WAIT = 300.0
"""Seconds until another process that compiles is waited for no more."""


def folder_name() -> str:
    """Names what kernels are compiled for and by: CPU, torch, Python and compiler; and how torch is held to less."""
    capability = torch.backends.cpu.get_cpu_capability().lower()
    made_by = cpu_digest(), torch.__version__, sys.implementation.cache_tag, platform.machine(), cpp_compiler()
    return f"{capability}-{hashlib.sha256(repr(made_by).encode()).hexdigest()[:12]}"


@contextmanager
def whole(folder: Path) -> Iterator[Path]:
    """Load and compile inside: the folder has the files that were left in it and no others, else none.

    One process at a time is inside. One that cannot get in, or may not write there, has a copy that goes away again.

    Raises: OSError where the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_name(f".{folder.name}.lock"), LONGEST_WAIT) as is_alone:
        if not is_alone:
            logger.debug("%s is used by another process, or cannot be locked: kernels are not kept", folder)
            with tempfile.TemporaryDirectory(prefix="foretoken-") as own:
                if _sums(folder) == _listed(folder):
                    shutil.copytree(folder, own, dirs_exist_ok=True)
                yield Path(own)
            return
        sums = _sums(folder)
        if sums != _listed(folder):
            if sums:
                logger.debug("kernels in %s are not those that were compiled: they are compiled again", folder)
            _empty(folder)
            sums = {}
        try:
            yield folder
        except BaseException:
            for name in _sums(folder).keys() - sums.keys():  # which may be cut short
                (folder / name).unlink()
            raise
        found = _sums(folder)
        if found != sums:
            with suppress(OSError):  # then they are compiled again
                keep_json(folder / LISTING, found)


def _sums(folder: Path) -> dict[str, str]:
    """SHA-256 of every file, by its path inside the folder."""
    files = (file for file in folder.rglob("*") if file.is_file() and file.name != LISTING)
    return {file.relative_to(folder).as_posix(): sha256_of(file) for file in sorted(files)}


def _listed(folder: Path) -> dict[str, str]:
    try:
        found = json.loads((folder / LISTING).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _empty(folder: Path) -> None:
    for found in folder.iterdir():
        if found.is_dir() and not found.is_symlink():
            shutil.rmtree(found)
        else:
            found.unlink()

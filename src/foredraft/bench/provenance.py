"""The conditions under which a result was measured: machine, versions, commit, command."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from foredraft.machine import cpu_fact, cpu_name
from foredraft.model.execution.packing import cpu_has_bfloat16

_PACKAGES = ("foredraft", "torch", "transformers", "numpy")
_INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")


def provenance() -> dict[str, Any]:
    """Return the conditions as plain data for a results file."""
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": commit(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "cpu": cpu_name(),
        "cpu_instructions": _instructions(),
        "cpu_multiplies_bfloat16": cpu_has_bfloat16(),
        "num_cpus": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "memory_bytes": _memory(),
        "load_average": _load(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def conditions() -> dict[str, Any]:
    """Return the conditions that a search reports."""
    found = provenance()
    return {key: found[key] for key in ("time", "commit", "versions", "cpu", "num_threads")}


def commit() -> str | None:
    """Return the commit of the checkout that contains this package, with "+" if tracked files of the package differ."""
    folder = Path(__file__).parents[1]
    head = _git(folder, "rev-parse", "--short=12", "HEAD")
    if head is None:
        return None
    return head + ("+" if _git(folder, "status", "--porcelain", "--", str(folder)) else "")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _instructions() -> list[str]:
    flags = set((cpu_fact("flags") or cpu_fact("Features") or "").split())
    return [name for name in _INSTRUCTIONS if name in flags]


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _load() -> tuple[float, ...] | None:
    return os.getloadavg() if hasattr(os, "getloadavg") else None

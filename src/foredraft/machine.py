"""What the processor and the system say of themselves."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

SPINS = 1000
"""How often a thread of OpenMP that waits looks again before it sleeps: for some 25 to 50 microseconds. By default it
does so for milliseconds, which is the time that the thread it waits for would have needed."""


@cache
def cpu_fact(key: str) -> str | None:
    """A line of ``/proc/cpuinfo``, of the first core; None where the system has none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), None)


def cpu_name() -> str:
    """The name the processor gives itself."""
    return cpu_fact("model name") or platform.processor() or platform.machine()


@cache
def cpu_digest() -> str:
    """Names the kind of processor: what it calls itself, and what it can do."""
    keys = ("vendor_id", "cpu family", "model\t", "model name", "stepping", "flags", "Features")
    facts = [cpu_fact(key) for key in keys]
    return hashlib.sha256(repr((platform.machine(), platform.processor(), facts)).encode()).hexdigest()[:12]


def available_memory_bytes() -> int | None:
    """Memory that the system can still allocate without swapping; None where it does not say (Linux does)."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    kilobytes = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(kilobytes[0]) * 1024 if kilobytes else None


def return_free_memory() -> None:
    """Give the system back what was freed, where the C library (glibc) would keep it for what is allocated next."""
    if sys.platform == "linux":
        with suppress(AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)


def wait_briefly() -> None:
    """Let threads of OpenMP wait briefly and then sleep, unless something else was chosen.

    That is said by an environment variable, which OpenMP reads when torch is imported: afterwards nothing changes.
    """
    is_chosen = os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}
    if not is_chosen and "torch" not in sys.modules:
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)


def num_cpus() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Processors whose time the cgroup of this process may use, the least of all cgroups above it; None for all.

    Args:
      root: of the file system.
    """
    quotas = [quota for folder in _cgroups(root) for quota in (_quota(folder),) if quota is not None]
    return min(quotas, default=None)


def _cgroups(root: Path) -> list[Path]:
    """Folders of the cgroups of this process that share out processors, up to where they are mounted."""
    try:
        own = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
        mounts = (root / "proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    paths = {controllers: path for _, controllers, path in (line.split(":", 2) for line in own)}
    folders = []
    for mount in mounts:
        front, _, back = mount.partition(" - ")
        shown, place = front.split()[3:5]
        kind, _, options = back.split()[:3]
        wanted = "" if kind == "cgroup2" else "cpu"  # the second version names none
        path = next((path for names, path in paths.items() if wanted in names.split(",")), None)
        if kind not in ("cgroup", "cgroup2") or path is None or (wanted and wanted not in options.split(",")):
            continue
        top = root / place.lstrip("/")
        inside = os.path.relpath(path, shown)
        folder = top if inside.startswith("..") else top / inside  # of another namespace: only its top is seen
        folders += [folder, *(above for above in folder.parents if above.is_relative_to(top))]
    return folders


def _quota(folder: Path) -> float | None:
    """Processors that one cgroup may use."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
    except (OSError, ValueError):
        return None
    return None if quota in ("max", "-1") or int(period) <= 0 else int(quota) / int(period)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Collect no cyclic garbage inside: while a model is built there is hardly any, and looking for it takes time.

    Every object of all libraries is looked at, for tenths of a second.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

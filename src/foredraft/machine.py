"""Facts about the processor and the operating system."""

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
"""Number of times that a waiting OpenMP thread checks again before it sleeps. The checks take some 25 to 50
microseconds. By default a waiting thread spins for milliseconds, and takes that time from the thread for which it
waits.
"""


@cache
def cpu_fact(key: str) -> str | None:
    """Return the value of a line of ``/proc/cpuinfo`` for the first core; None if there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), None)


def cpu_name() -> str:
    """Return the name of the processor."""
    return cpu_fact("model name") or platform.processor() or platform.machine()


@cache
def cpu_digest() -> str:
    """Return a digest of the processor's model and features."""
    keys = ("vendor_id", "cpu family", "model\t", "model name", "stepping", "flags", "Features")
    facts = [cpu_fact(key) for key in keys]
    return hashlib.sha256(repr((platform.machine(), platform.processor(), facts)).encode()).hexdigest()[:12]


def available_memory_bytes() -> int | None:
    """Memory that can still be allocated without swapping; None if the system does not report it (Linux does)."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    kilobytes = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(kilobytes[0]) * 1024 if kilobytes else None


def return_free_memory() -> None:
    """Return freed memory to the system, which glibc would otherwise keep for later allocations."""
    if sys.platform == "linux":
        with suppress(AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)


def wait_briefly() -> None:
    """Let OpenMP threads spin only briefly before they sleep, unless the user has configured something else.

    OpenMP reads the environment variable when torch is imported, so a later call has no effect.
    """
    is_chosen = os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}
    if not is_chosen and "torch" not in sys.modules:
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)


def num_cpus() -> int:
    """Number of processors on which this process may run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Number of processors that the cgroup of this process and its parents allow; None for no limit.

    Args:
      root: root of the file system.
    """
    quotas = [quota for folder in _cgroups(root) for quota in (_quota(folder),) if quota is not None]
    return min(quotas, default=None)


def _cgroups(root: Path) -> list[Path]:
    """Return the folders of this process's cgroups for processor time, and of their parents up to the mount point."""
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
        wanted = "" if kind == "cgroup2" else "cpu"  # version 2 lists no controllers
        path = next((path for names, path in paths.items() if wanted in names.split(",")), None)
        if kind not in ("cgroup", "cgroup2") or path is None or (wanted and wanted not in options.split(",")):
            continue
        top = root / place.lstrip("/")
        inside = os.path.relpath(path, shown)
        folder = top if inside.startswith("..") else top / inside  # in another namespace only the top is visible
        folders += [folder, *(above for above in folder.parents if above.is_relative_to(top))]
    return folders


def _quota(folder: Path) -> float | None:
    """Number of processors that one cgroup may use; None for no limit."""
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
    """Context manager that pauses the collection of cyclic garbage while a model is built.

    Hardly any such garbage is made inside the context, and a collection takes tenths of a second because it visits all
    objects.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

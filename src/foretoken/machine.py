"""What the processor and the system say of themselves."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path


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


def available_memory_bytes() -> int | None:
    """Memory that the system can still allocate without swapping; None where it does not say (Linux does)."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    kilobytes = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(kilobytes[0]) * 1024 if kilobytes else None

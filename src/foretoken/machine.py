"""What the processor says of itself."""

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

"""How many threads models run on."""

from __future__ import annotations

import os

import torch

from foretoken.machine import cpu_quota, num_cpus

CHOSEN_BY = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def keep_to_quota(quota: float | None = None) -> None:
    """Let torch run no more threads than the cgroup's quota has processors, unless the user has chosen a number.

    Torch counts processors, not what the process may use of them: beyond that, threads wait for each other's turns.

    Args:
      quota: in processors; by default that of this process.
    """
    most = _most(cpu_quota() if quota is None else quota)
    is_chosen = any(name in os.environ for name in CHOSEN_BY) or torch.get_num_threads() not in _defaults()
    if most is not None and not is_chosen and torch.get_num_threads() > most:
        torch.set_num_threads(most)


def threads_note(quota: float | None = None) -> str:
    """The number of threads, where the quota sets it; empty elsewhere."""
    most = _most(cpu_quota() if quota is None else quota)
    if most is None or most >= min(_defaults()) or torch.get_num_threads() != most:
        return ""
    return f"{most} thread{'s' * (most > 1)} (the cgroup's quota, of {num_cpus()} processors)"


def _most(quota: float | None) -> int | None:
    return None if quota is None else max(1, int(quota + 0.5))


def _defaults() -> tuple[int, int]:
    """Numbers of threads that torch takes by itself: of processors, or of cores with two each."""
    cpus = num_cpus()
    return cpus, max(1, cpus // 2)

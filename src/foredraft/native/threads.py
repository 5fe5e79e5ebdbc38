"""Number of threads that models run on: at most a cgroup's quota, and fewer while other programs use the processors."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter, thread_time

import torch

from foredraft import forking
from foredraft.machine import cpu_quota, num_cpus

logger = logging.getLogger("foredraft")

WAITED = 3.0
"""Ratio of elapsed time to processor time from which a step has waited for other programs."""
CALM = 1.5
"""Ratio below which more threads are tried."""
WINDOW = 16  # steps whose median ratio counts
FEW_STEPS = 64  # steps on fewer threads before more are tried
MOST_STEPS = 2048  # most steps between trials, after several have failed
CHOSEN_BY = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


class Helpers:
    """Controller of the number of kernel threads. It reduces the number while steps wait for busy processors.

    A step usually takes as long as its thread computes. A step that takes many times that has waited for a processor,
    or for another thread without one. With fewer threads there is less to wait for, and other programs get more
    processors. The same holds for all models of a process, which therefore share one controller.

    A log line appears only if speeds are affected for long: when a trial of more threads makes steps wait again, or
    when they wait even on fewer threads. A short burst of other load is not logged.

    Args:
      limit: function that sets the number of threads.
      clock: function that returns elapsed seconds.
      processor_clock: function that returns the processor seconds of this thread.

    Exactness: results do not depend on the number of threads.
    """

    def __init__(
        self,
        limit: Callable[[int], object],
        clock: Callable[[], float] = perf_counter,
        processor_clock: Callable[[], float] = thread_time,
    ) -> None:
        self.limit = limit
        self._clock = clock
        self._processor_clock = processor_clock
        self._lock = forking.lock()
        self._all = self._threads = 0
        self._ratios: deque[float] = deque(maxlen=WINDOW)
        self._num_steps = 0  # steps since the number of threads changed
        self._patience = FEW_STEPS
        self._is_trial = False  # whether this is a trial of more threads
        self._is_told = False
        self._waited = 1.0  # ratio at which the number of threads was last reduced
        self._num_fewer = 0  # steps on fewer threads

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Context manager around a step, which measures it."""
        start, computed = self._clock(), self._processor_clock()
        yield
        computed, seconds = self._processor_clock() - computed, self._clock() - start
        with self._lock:
            self._learn(seconds / max(computed, 1e-6), torch.get_num_threads())

    @property
    def num_threads(self) -> int:
        """Number of threads at present; 0 before the first step."""
        return self._threads

    def _learn(self, ratio: float, threads: int) -> None:
        if threads != self._all:  # the first step, or torch.set_num_threads was called
            self._all = threads
            self._patience = FEW_STEPS
            self._run_on(threads)
            self._is_trial = self._is_told = False
            self._num_fewer = 0
        self._num_steps += 1
        self._num_fewer += self._threads < self._all
        self._ratios.append(ratio)
        if len(self._ratios) < WINDOW:
            return
        usual = sorted(self._ratios)[WINDOW // 2]
        if usual >= WAITED and self._threads > 1:
            was_trial, self._is_trial = self._is_trial, False
            self._patience = min(2 * self._patience, MOST_STEPS) if was_trial else FEW_STEPS
            self._waited = usual
            self._run_on(self._threads // 2)
            if was_trial:
                self._tell()
        elif self._num_steps >= self._patience and usual < CALM:
            self._is_trial = self._threads < self._all
            if self._is_trial:
                self._run_on(min(2 * self._threads, self._all))
            else:
                self._num_fewer = 0
                if self._is_told:
                    self._is_told = False
                    logger.info("kernels run on %d threads again", self._all)
        elif self._num_steps >= self._patience and self._threads < self._all:
            self._tell()

    def _tell(self) -> None:
        if not self._is_told:
            self._is_told = True
            logger.info(
                "other programs have kept the processors busy for %d steps, which took %.1f times their own computing "
                "time, so speeds measured meanwhile are too low; kernels run on %d of %d threads until the load drops",
                self._num_fewer,
                self._waited,
                self._threads,
                self._all,
            )

    def _run_on(self, threads: int) -> None:
        self._threads = threads
        self._num_steps = 0
        self._ratios.clear()
        self.limit(threads)


def keep_to_quota(quota: float | None = None) -> None:
    """Limit torch's threads to the processors in the cgroup's quota, unless the user has chosen a number of threads.

    Torch counts processors, not the share of them that the process may use. Threads beyond it wait for each other.

    Args:
      quota: number of processors; by default the quota of this process.
    """
    most = _most(cpu_quota() if quota is None else quota)
    is_chosen = any(name in os.environ for name in CHOSEN_BY) or torch.get_num_threads() not in _defaults()
    if most is not None and not is_chosen and torch.get_num_threads() > most:
        torch.set_num_threads(most)


def threads_note(quota: float | None = None) -> str:
    """Describe the number of threads if the quota determines it; empty otherwise."""
    most = _most(cpu_quota() if quota is None else quota)
    if most is None or most >= min(_defaults()) or torch.get_num_threads() != most:
        return ""
    return f"{most} thread{'s' * (most > 1)} (the cgroup's quota, of {num_cpus()} processors)"


def _most(quota: float | None) -> int | None:
    return None if quota is None else max(1, int(quota + 0.5))


def _defaults() -> tuple[int, int]:
    """Return torch's default numbers of threads: one per processor, or one per core with two processors."""
    cpus = num_cpus()
    return cpus, max(1, cpus // 2)

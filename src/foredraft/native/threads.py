"""How many threads models run on: no more than a cgroup's quota, and fewer while others keep processors busy."""

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
"""How many times the processor time of its thread a step takes that waited for others."""
CALM = 1.5
"""The same of steps after which more threads are tried."""
WINDOW = 16  # steps that are looked at
FEW_STEPS = 64  # on fewer threads, before more are tried
MOST_STEPS = 2048  # that come between trials which have failed one after another
CHOSEN_BY = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


class Helpers:
    """Watches steps, and lets fewer threads work while these wait for processors that others use.

    A step usually takes as long as its thread computes. One that takes many times that waited: for a processor, or for
    a thread that had none. Threads that are not there need not be waited for, and leave room to others. The same holds
    for all models of a process, so there is one of these in it.

    It is said only where speeds are affected: not of a burst, after which all threads work again, but where a trial of
    more threads makes steps wait once more, or where they wait even on fewer.

    Args:
      limit: told how many threads may work; results do not depend on it.
      clock, processor_clock: seconds, and those that this thread has computed.

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
        self._num_steps = 0  # since the number of threads changed
        self._patience = FEW_STEPS
        self._is_trial = False  # whether more threads are tried than did well before
        self._is_told = False
        self._waited = 1.0  # the ratio at which there were too many threads
        self._num_fewer = 0  # steps since then

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Run a step within it."""
        start, computed = self._clock(), self._processor_clock()
        yield
        computed, seconds = self._processor_clock() - computed, self._clock() - start
        with self._lock:
            self._learn(seconds / max(computed, 1e-6), torch.get_num_threads())

    @property
    def num_threads(self) -> int:
        """How many may work at present; 0 before the first step."""
        return self._threads

    def _learn(self, ratio: float, threads: int) -> None:
        if threads != self._all:  # the first step, or someone has asked for another number
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
                "other programs have used the processors for %d steps: these took %.1f times as long as they compute, "
                "so speeds measured meanwhile are too low; kernels run on %d of %d threads until that ends",
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

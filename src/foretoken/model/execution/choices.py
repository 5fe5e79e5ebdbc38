"""Which of two kernels is the faster one at some shape: measured once per machine, and kept on disk."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from time import perf_counter
from typing import TypeAlias

import torch

from foretoken.folders import cache_folder, keep_json
from foretoken.machine import cpu_name
from foretoken.model.execution.native import Library, NativeMatrix, fits, instruction_set, library, source_digest

logger = logging.getLogger("foretoken")

MIN_ELEMENTS = 2**17
"""Smaller matrices are not worth a measurement."""
ROWS_TIMED = ((1, 0.5), (5, 0.25), (16, 0.25))
"""Numbers of rows of steps at which products are timed, and the weight of each."""
ROWS_OF_PROMPTS = 256
MOST_FOR_PROMPTS, MOST_FOR_TALL = 1.5, 2.0
"""Of the time that the other kernel takes at that many rows; ours is not taken where it takes longer. Tall matrices,
with `TALL` times as many outputs as inputs, embed outputs: they are given no prompts, and so many rows only in large
batches of trees."""
TALL = 16
MOST_FOR_STEPS = 0.97
BYTES_TIMED = 2**24
"""Copies of a matrix are timed in turns, so that none is in the cache of a core when it comes to it."""
NUM_ROUNDS = 6

Run: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
Pack: TypeAlias = Callable[[torch.Tensor], Run]
"""Packs a weight (out, in), and gives the function (M, in) -> (M, out) over what it has packed."""

_lock = threading.RLock()


def faster(inputs: int, outputs: int, dtype: torch.dtype, other: Pack) -> Library | None:
    """The library's kernels, where they multiply by a matrix of this shape faster than another does here.

    A measurement takes some hundredths of a second. It is kept in the cache folder for the processor, the number of
    threads and the versions, so that every later process decides the same.

    Args:
      dtype: of the weight.
      other: the kernel to compare with.
    """
    kernels = library()
    if kernels is None or inputs * outputs < MIN_ELEMENTS or not fits(inputs, dtype, kernels):
        return None
    name = f"{inputs}x{outputs} {str(dtype).removeprefix('torch.')}"
    return kernels if decided(name, lambda: _is_faster(inputs, outputs, dtype, kernels, other)) else None


def decided(name: str, measure: Callable[[], bool]) -> bool:
    """What was measured under this name, at the number of threads, when it was first asked for on this machine."""
    with _lock:
        choices = _Choices.of(cache_folder("native"), torch.get_num_threads())
        if name not in choices.known:
            choices.add(name, measure())
        return choices.known[name]


class _Choices:
    """What was decided before."""

    def __init__(self, file: Path) -> None:
        self._file = file
        try:
            read = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            read = {}
        self.known: dict[str, bool] = read if isinstance(read, dict) else {}

    @classmethod
    @cache
    def of(cls, folder: Path, num_threads: int) -> _Choices:
        """Those of this machine at a number of threads."""
        facts = repr((source_digest(), cpu_name(), instruction_set(), num_threads, torch.__version__))
        return cls(folder / f"choices-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.json")

    def add(self, name: str, choice: bool) -> None:
        """Keep one; a folder that cannot be written costs the next process the time of a measurement."""
        self.known[name] = choice
        with suppress(OSError):
            keep_json(self._file, self.known)


def _is_faster(inputs: int, outputs: int, dtype: torch.dtype, kernels: Library, other: Pack) -> bool:
    copies = max(1, min(8, BYTES_TIMED // (inputs * outputs * dtype.itemsize)))
    weight = torch.empty(outputs, inputs).uniform_(-1, 1, generator=torch.Generator().manual_seed(0)).to(dtype)
    ours = [NativeMatrix(weight, None, kernels) for _ in range(copies)]
    theirs = [other(weight) for _ in range(copies)]

    def ratio(num_rows: int) -> float:
        x = torch.ones(num_rows, inputs, dtype=ours[0].compute_dtype)
        mine, its = _times(ours, theirs, x)
        return mine / its

    of_steps = sum(share * ratio(num_rows) for num_rows, share in ROWS_TIMED)
    of_prompts = ratio(ROWS_OF_PROMPTS)
    logger.debug(
        "product %d -> %d in %s: %.2f of the time of oneDNN in steps, %.2f in prompts",
        inputs,
        outputs,
        dtype,
        of_steps,
        of_prompts,
    )
    most_for_prompts = MOST_FOR_TALL if outputs >= TALL * inputs else MOST_FOR_PROMPTS
    return of_steps <= MOST_FOR_STEPS and of_prompts <= most_for_prompts


def _times(ours: Sequence[Run], theirs: Sequence[Run], x: torch.Tensor) -> tuple[float, float]:
    """Those of products, all copies once."""
    return times([partial(run, x) for run in ours], [partial(run, x) for run in theirs])


def times(ours: Sequence[Callable[[], object]], theirs: Sequence[Callable[[], object]]) -> tuple[float, float]:
    """The least seconds of both, all calls once, interleaved."""
    least = [float("inf"), float("inf")]
    for _ in range(NUM_ROUNDS):
        for index, calls in enumerate((ours, theirs)):
            start = perf_counter()
            for call in calls:
                call()
            least[index] = min(least[index], perf_counter() - start)
    return least[0], least[1]

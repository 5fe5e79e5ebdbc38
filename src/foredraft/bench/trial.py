"""Trials: arms decode the same prompts in interleaved turns; outputs, speeds and their confidence intervals."""

from __future__ import annotations

import gc
import math
import os
import random
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from foredraft.bench.workload import BenchPrompt
from foredraft.config.sampling import SamplingParams
from foredraft.engine.stats import RowStats, StepTrace
from foredraft.machine import collector_paused

T = TypeVar("T")

_NUM_RESAMPLES = 2000
_WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters that all arms share."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def label(self) -> str:
        if self.is_greedy:
            return "greedy"
        return f"T={self.temperature:g}" + (f" top-p={self.top_p:g}" if self.top_p < 1 else "")

    def params(self, max_new_tokens: int) -> SamplingParams:
        """Return the same settings as the engine's parameters."""
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            max_tokens=max_new_tokens,
            ignore_eos=self.ignore_eos,
        )


@dataclass(frozen=True)
class Run:
    """The result of one arm on one prompt, or on a group of prompts decoded as rows of a batch.

    Decoding is everything after the first emission. Only decoding is compared, so the cost of prefill is left out. The
    tokens of the first emission do not count as decoded.

    Args:
      token_ids: tokens of the output. For a group, the tokens of all rows, one row after another.
      num_first: number of tokens in the first emission, or of tokens emitted before all rows of a group were prefilled.
      first_seconds: seconds from the request to the first emission, including the prefill of target and drafter.
      decode_seconds: seconds from the first emission to the end.
      stats: counters of the engine; None for other arms.
      step_seconds: seconds between emissions; their sum is ``decode_seconds``.
      trace: steps of the engine, one by one.
      rows: outputs of the rows of a group; empty for one row.
    """

    token_ids: tuple[int, ...]
    num_first: int
    first_seconds: float
    decode_seconds: float
    stats: RowStats | None = None
    step_seconds: tuple[float, ...] = ()
    trace: tuple[StepTrace, ...] = ()
    rows: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, token_ids: Sequence[int], started: float, emissions: Sequence[tuple[float, int]], **more: Any) -> Run:
        """Return a run from its emissions. Each emission has a time and a number of tokens."""
        times = [moment for moment, _ in emissions]
        steps = tuple(later - earlier for earlier, later in pairwise(times))
        first, last = times[0], times[-1]
        return cls(tuple(token_ids), emissions[0][1], first - started, last - first, step_seconds=steps, **more)

    @property
    def texts(self) -> tuple[tuple[int, ...], ...]:
        """Outputs of all rows."""
        return self.rows or (self.token_ids,)

    @property
    def num_decoded(self) -> int:
        return len(self.token_ids) - self.num_first

    @property
    def seconds_per_token(self) -> float:
        """Seconds per decoded token; NaN if all tokens came with the first emission."""
        return self.decode_seconds / self.num_decoded if self.num_decoded > 0 else float("nan")


class Arm(ABC):
    """A way to generate, such as a method with its settings."""

    name: str

    @abstractmethod
    def run(self, prompt_ids: Sequence[Any], max_new_tokens: int, sampling: Sampling) -> Run:
        """Continue one prompt, or a group of prompts if the arm decodes batches; see `rows_of`."""


def rows_of(prompt_ids: Sequence[Any]) -> list[Sequence[int]]:
    """Return the prompts of a group: (1, 2) is one row, and ((1, 2), (3,)) are two rows."""
    is_group = len(prompt_ids) > 0 and not isinstance(prompt_ids[0], int)
    return list(prompt_ids) if is_group else [prompt_ids]


def in_groups(prompts: Sequence[BenchPrompt], size: int) -> list[BenchPrompt]:
    """Return groups of ``size`` prompts, each as one prompt. The last group is filled up with prompts from the
    start."""
    ids = [prompt.token_ids for prompt in prompts]
    return [
        BenchPrompt(f"group {number}", "group", tuple(ids[(start + row) % len(ids)] for row in range(size)))
        for number, start in enumerate(range(0, len(ids), size))
    ]


@dataclass
class Trial:
    """All runs of every arm over one set of prompts: ``runs[arm][prompt]`` in the order of execution."""

    prompts: list[BenchPrompt]
    sampling: Sampling
    max_new_tokens: int
    runs: dict[str, list[list[Run]]] = field(default_factory=dict)
    other_cpu_share: float = 0.0

    def first(self, count: int) -> Trial:
        """Return the trial restricted to a number of first prompts."""
        runs = {arm: found[:count] for arm, found in self.runs.items()}
        return Trial(self.prompts[:count], self.sampling, self.max_new_tokens, runs, self.other_cpu_share)

    def outputs(self, arm: str) -> list[tuple[int, ...]]:
        """Return the output of an arm's first run of every prompt."""
        return [runs[0].token_ids for runs in self.runs[arm]]

    def stats(self, arm: str) -> RowStats:
        """Return the engine's counters over all prompts and runs."""
        return RowStats.pooled(run.stats for runs in self.runs[arm] for run in runs if run.stats is not None)

    def seconds_per_token(self, arm: str) -> list[float]:
        """Return seconds per decoded token of every prompt, as medians over runs; NaN if nothing was left to decode."""
        return [statistics.median(run.seconds_per_token for run in runs) for runs in self.runs[arm]]

    def tokens_per_second(self, arm: str) -> float:
        """Return decoded tokens per second over all prompts and runs."""
        runs = [run for runs in self.runs[arm] for run in runs]
        seconds = sum(run.decode_seconds for run in runs)
        return sum(run.num_decoded for run in runs) / seconds if seconds > 0 else float("nan")

    def is_repeatable(self, arm: str) -> bool:
        """Return whether all runs of an arm gave the same tokens for every prompt."""
        return all(len({run.token_ids for run in runs}) == 1 for runs in self.runs[arm])


@dataclass(frozen=True)
class Comparison:
    """Speed of one arm relative to another: the median of the prompts' ratios, and its spread.

    Args:
      low, high: 95 % interval of the median, by bootstrap over prompts.
      worst, best: smallest and largest ratio of a prompt.
    """

    arm: str
    base: str
    ratio: float
    low: float
    high: float
    worst: float
    best: float
    num_prompts: int

    def __str__(self) -> str:
        """Return the ratio and its interval for tables. For one prompt, return the ratio alone; for none, a dash."""
        if self.num_prompts == 0:
            return "-"
        return f"{self.ratio:.2f}" + (f" ({self.low:.2f}-{self.high:.2f})" if self.num_prompts > 1 else "")


def interleave(
    arms: Sequence[Arm],
    prompts: Sequence[BenchPrompt],
    sampling: Sampling,
    max_new_tokens: int,
    repeats: int = 1,
    on_prompt: Callable[[Trial], None] = lambda _: None,
    own_cpu_seconds: Callable[[], float] = time.process_time,
) -> Trial:
    """Run every prompt through every arm, forwards and backwards (A B B A), ``repeats`` times.

    A short warm-up of every arm comes first. Garbage is collected between the runs and never during one.

    Args:
      on_prompt: function that is called after every prompt with the finished part of the trial, for progress and
        partial results.
      own_cpu_seconds: function that returns the processor seconds of the measured process, to separate the load of
        others.
    """
    trial = Trial(list(prompts), sampling, max_new_tokens, {arm.name: [[] for _ in prompts] for arm in arms})
    for arm in arms:
        arm.run(prompts[0].token_ids, min(max_new_tokens, _WARM_UP_TOKENS), sampling)
    other_share = _other_load(own_cpu_seconds)
    for place, prompt in enumerate(prompts):
        for arm in [*arms, *reversed(arms)] * repeats:
            with no_garbage_collection():
                trial.runs[arm.name][place].append(arm.run(prompt.token_ids, max_new_tokens, sampling))
        trial.other_cpu_share = other_share()
        on_prompt(trial.first(place + 1))
    return trial


def compare(trial: Trial, arm: str, base: str) -> Comparison:
    """Return the ratio of two arms of a trial. Prompts for which either arm had nothing to decode are left out."""
    ratios = [ratio for ratio in prompt_ratios(trial, arm, base) if ratio is not None]
    if not ratios:
        nan = float("nan")
        return Comparison(arm, base, nan, nan, nan, nan, nan, 0)
    low, high = bootstrap(ratios, statistics.median)
    return Comparison(arm, base, statistics.median(ratios), low, high, min(ratios), max(ratios), len(ratios))


def prompt_ratios(trial: Trial, arm: str, base: str) -> list[float | None]:
    """Return the speed of one arm relative to another for every prompt; None if either had nothing to decode."""
    pairs = zip(trial.seconds_per_token(base), trial.seconds_per_token(arm), strict=True)
    return [None if math.isnan(slow / fast) else slow / fast for slow, fast in pairs]


def bootstrap(
    values: Sequence[T], figure: Callable[[Sequence[T]], float], num_resamples: int = _NUM_RESAMPLES
) -> tuple[float, float]:
    """Return the 95 % percentile interval of a figure over values, such as one per prompt, resampled with replacement.

    Randomness: an own generator with a fixed seed.
    """
    generator = random.Random(0)
    found = sorted(figure(generator.choices(values, k=len(values))) for _ in range(num_resamples))
    tail = round(0.025 * num_resamples)
    return found[tail], found[-1 - tail]


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect young garbage first (a full collection takes as long as a run), and none inside the context."""
    gc.collect(1)
    with collector_paused():
        yield


def _other_load(own_cpu_seconds: Callable[[], float]) -> Callable[[], float]:
    """Return a function for the share of the processors that other processes have used since this call; 0 without
    /proc/stat."""
    started, before = time.perf_counter(), _cpu_seconds()
    own = own_cpu_seconds()

    def share() -> float:
        total = _cpu_seconds()
        if total is None or before is None:
            return 0.0
        others = total - before - (own_cpu_seconds() - own)
        return max(0.0, others) / ((time.perf_counter() - started) * (os.cpu_count() or 1))

    return share


def _cpu_seconds() -> float | None:
    """Return the processor seconds that the machine has used; None without /proc/stat."""
    try:
        first = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    except OSError:
        return None
    user, nice, system, _idle, _wait, irq, softirq, steal = map(int, first)
    ticks = user + nice + system + irq + softirq + steal
    return ticks / os.sysconf("SC_CLK_TCK")

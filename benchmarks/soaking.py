"""Drives engines with requests of every kind, lets everything go wrong, and checks what comes out; see `soak.py`."""

from __future__ import annotations

import ctypes
import gc
import random
import resource
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from foretoken import SamplingParams
from foretoken.config.engine import EngineConfig
from foretoken.drafters.none import EmptyDrafter
from foretoken.engine.drafter import Drafter
from foretoken.engine.engine import Engine
from foretoken.engine.governing import AnyGovernor
from foretoken.engine.sequence import Sequence
from foretoken.model.cache.prefixes import PrefixStore
from foretoken.model.cache.ragged import KVCache
from foretoken.model.lm import CausalLM
from foretoken.testing import check_cache_lengths
from foretoken.tree import DraftTree

FIRST_ID = 1 << 40
"""Where ids of rows begin: no other number is as large, so that those which drafters keep can be found."""
VERBS = ("recall", "read", "start", "fork", "propose", "observe", "keep", "forget")


class Fault(Exception):
    """Raised on purpose."""


def with_faults(drafter: Drafter, rng: random.Random, rate: float, found: Counter[str]) -> Drafter:
    """The drafter, whose calls fail before or after their work, at random, and whose drafts are nonsense at times."""

    def failing(verb: str, sound: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            chance = rng.random() / rate if rate else 2.0
            if chance < 0.5 and verb != "forget":  # a row that is not forgotten is rightly left behind
                found[verb] += 1
                raise Fault(f"before {verb}")
            result = sound(*args)
            if chance < 1.0:
                found[verb] += 1
                if verb == "propose" and chance < 0.75:
                    return nonsense(rng, args[0], result)
                raise Fault(f"after {verb}")
            return result

        return call

    for verb in VERBS:
        setattr(drafter, verb, failing(verb, getattr(drafter, verb)))
    return drafter


def nonsense(rng: random.Random, rows: list[Sequence], trees: list[DraftTree]) -> Any:
    """What a drafter must not propose."""
    pending = rows[0].pending
    return rng.choice(
        [
            None,
            trees[1:],
            [DraftTree.root(pending + 1), *trees[1:]],
            [DraftTree.chain(pending, (1 << 30,)), *trees[1:]],
            [None, *trees[1:]],
        ]
    )


@dataclass(frozen=True)
class World:
    """What is soaked.

    Args:
      engines: a title and a drafter for each, with its governor if it has one.
      request: makes a prompt and its parameters.
      is_exact: whether texts must equal those of requests that run alone.
    """

    target: CausalLM
    engines: dict[str, tuple[Drafter, AnyGovernor | None]]
    request: Callable[[random.Random], tuple[list[int], SamplingParams]]
    config: EngineConfig
    alone: EngineConfig
    eos: tuple[int, ...] = ()
    tokenizer: Any = None
    is_exact: bool = True


@dataclass
class Asked:
    """A request, its rows, and whether anything has ended it before its time."""

    prompt: list[int]
    params: SamplingParams
    rows: list[Sequence]
    is_cut_off: bool = False


@dataclass
class Soak:
    """Drives the engines of a world, and checks what comes out."""

    world: World
    rng: random.Random
    fault_rate: float = 0.01
    abort_rate: float = 0.01
    interrupt_rate: float = 0.002
    check_rate: float = 1.0
    counts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    memory: list[dict[str, float]] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prefixes = PrefixStore(4)
        self.open: dict[str, list[Asked]] = {}
        self.engines: dict[str, Engine] = {}
        for title, (drafter, governor) in self.world.engines.items():
            with_faults(drafter, self.rng, self.fault_rate, self.faults)
            engine = self._engine(drafter, self.world.config, prefixes=self.prefixes, governor=governor)
            engine._ids = iter(range(FIRST_ID, 2 * FIRST_ID))  # type: ignore[assignment]
            self.engines[title], self.open[title] = engine, []
        self._alone = self._engine(EmptyDrafter(), self.world.alone)

    def _engine(self, drafter: Drafter, config: EngineConfig, **others: Any) -> Engine:
        world = self.world
        return Engine(world.target, drafter, config, eos_token_ids=world.eos, tokenizer=world.tokenizer, **others)

    def run(self, is_enough: Callable[[int], bool], *, drain_every: int) -> None:
        """Requests until there are enough of them; all engines are emptied after every so many."""
        titles = list(self.engines)
        while not is_enough(self.counts["requests"]):
            target = self.counts["requests"] + drain_every
            while self.counts["requests"] < target and not is_enough(self.counts["requests"]):
                busy = self.rng.choice(titles)
                for _ in range(self.rng.choice([1, 1, 4, 8])):
                    self._arrive(busy)
                for _ in range(self.rng.randint(0, 24)):
                    self._step(self.rng.choice([busy, self.rng.choice(titles)]))
            for title, engine in self.engines.items():
                while engine.has_unfinished:
                    self._step(title)
            self._look_around()

    def _arrive(self, title: str) -> None:
        prompt, params = self.world.request(self.rng)
        rows = self.engines[title].add_request(prompt, params, str(self.counts["requests"]))
        self.open[title].append(Asked(prompt, params, rows))
        self.counts["requests"] += 1

    def _step(self, title: str) -> None:
        engine = self.engines[title]
        is_cut_off = self.rng.random() < self.interrupt_rate
        running = {row.id for row in engine.running_rows}
        try:
            if is_cut_off:
                with cut_off(engine.target, self.rng):
                    engine.step()
            else:
                engine.step()
        except KeyboardInterrupt:
            self.counts["interrupts"] += 1
            for asked in self.open[title]:
                asked.is_cut_off |= any(row.finish_reason == "abort" for row in asked.rows)
        check_cache_lengths(engine)
        self.counts["steps"] += 1
        self._note_peaks(engine, running)
        if self.open[title] and self.rng.random() < self.abort_rate:
            asked = self.rng.choice(self.open[title])
            asked.is_cut_off = True
            self.counts["aborts"] += bool(engine.abort(asked.rows[0].request_id))
        for asked in list(self.open[title]):
            if all(row.is_finished for row in asked.rows):
                self.open[title].remove(asked)
                self._check(title, asked)

    def _note_peaks(self, engine: Engine, running: set[int]) -> None:
        self.counts["most_cache_bytes"] = max(self.counts["most_cache_bytes"], engine.cache.num_bytes)
        self.counts["most_rows"] = max(self.counts["most_rows"], len(running))

    def _check(self, title: str, asked: Asked) -> None:
        """The rows of a request that has ended against those of the same request alone."""
        self.counts["texts"] += len(asked.rows)
        for row in asked.rows:
            self.counts[f"ended by {row.finish_reason}"] += 1
            self.counts["tokens"] += row.num_output_tokens
            self.counts["accepted"] += row.stats.num_accepted_draft_tokens
            self.counts["preemptions"] += row.stats.num_preemptions
            self.counts["cached_tokens"] += row.num_cached_tokens
            self.counts["texts with a failed drafter"] += bool(row.stats.drafter_error)
        if self.rng.random() >= self.check_rate:
            return
        expected = self._alone.add_request(asked.prompt, asked.params)
        while self._alone.has_unfinished:
            self._alone.step()
        for row, plain in zip(asked.rows, expected, strict=True):
            self.counts["compared"] += 1
            if not is_same(row, plain, asked):
                self.differing.append(f"{title}: {asked.prompt} {asked.params} sample {row.index}: {told(row, plain)}")
                if self.world.is_exact:
                    raise AssertionError(self.differing[-1])

    def _look_around(self) -> None:
        """All engines are empty: nothing of their rows may be left."""
        for title, engine in self.engines.items():
            left = leftovers(engine.drafter, beside=(self.world.target, engine.cache))
            if left or engine.cache.num_rows or engine.num_running:
                raise AssertionError(f"{title} is empty, and of its rows there is left: {left or engine.cache.lengths}")
        self.memory.append({"requests": self.counts["requests"], **memory()})
        if not self.world.is_exact:
            print(self.memory[-1], dict(self.counts), f"{len(self.differing)} differ", file=sys.stderr, flush=True)


def is_same(row: Sequence, plain: Sequence, asked: Asked) -> bool:
    if asked.is_cut_off and row.finish_reason == "abort":
        return row.output_ids == plain.output_ids[: row.num_output_tokens]
    ends = (row.finish_reason, row.stop_reason) == (plain.finish_reason, plain.stop_reason)
    return ends and row.output_ids == plain.output_ids


def told(row: Sequence, plain: Sequence) -> str:
    return (
        f"{row.output_ids} ({row.finish_reason}: {row.stop_reason}), alone {plain.output_ids} "
        f"({plain.finish_reason}: {plain.stop_reason})"
    )


class cut_off:
    """Ctrl-C during one of the next forwards of a target, before or after its work."""

    def __init__(self, target: CausalLM, rng: random.Random) -> None:
        self._target = target
        self._is_before = rng.random() < 0.5

    def __enter__(self) -> None:
        sound, is_before = self._target.forward_with, self._is_before

        def broken(*args: Any, **others: Any) -> Any:
            if is_before:
                raise KeyboardInterrupt
            sound(*args, **others)
            raise KeyboardInterrupt

        self._target.forward_with = broken  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        del self._target.forward_with


def leftovers(drafter: Drafter, beside: Iterable[object]) -> list[str]:
    """What is reachable from a drafter and belongs to rows: ids, rows, filled slots of caches."""
    skipped = (types.ModuleType, type, types.FunctionType, types.BuiltinFunctionType, nn.Module, torch.Tensor, CausalLM)
    found, seen = [], {id(each) for each in beside}
    todo: list[tuple[Any, str]] = [(drafter, drafter.name)]
    while todo:
        each, place = todo.pop()
        if id(each) in seen or isinstance(each, skipped):
            continue
        seen.add(id(each))
        if isinstance(each, Sequence) or (type(each) is int and FIRST_ID <= each < 2 * FIRST_ID):
            found.append(f"{place}: {repr(each)[:80]}")
            continue
        if isinstance(each, KVCache) and each.num_rows:
            found.append(f"{place}: {type(each).__name__} of lengths {each.lengths}")
        todo += [(other, f"{place} < {type(other).__name__}") for other in gc.get_referents(each)]
    return found


def memory() -> dict[str, float]:
    """Megabytes of the process, and how many tensors and other objects live, after a collection of garbage."""
    gc.collect()
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)  # what the allocator only keeps does not count
    objects = gc.get_objects()
    pages = int(Path("/proc/self/statm").read_text().split()[1]) if sys.platform == "linux" else 0
    return {
        "megabytes": round(pages * resource.getpagesize() / 1e6, 1),
        "peak_megabytes": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3, 1),
        "tensors": sum(issubclass(type(each), torch.Tensor) for each in objects),
        "objects": len(objects),
    }


def growth(memories: list[dict[str, float]]) -> dict[str, float]:
    """How much more there was at the end than after a quarter of the time."""
    first, last = memories[len(memories) // 4], memories[-1]
    return {name: round(last[name] - first[name], 1) for name in last}

"""Send requests of every kind for a long time: each output must equal that of its request alone, and no memory leaks.

    python benchmarks/soak.py --requests 2000
    python benchmarks/soak.py --model zoo:smollm2 --minutes 60 --max-kv-bytes 64MB --dtype float32

Requests of mixed lengths and parameters arrive at random at engines of all methods. The engines share one target and
one store of prefixes, and their memory limit is too small. Some requests are aborted, some have a processor or a
tokenizer that raises an exception, some steps are interrupted by Ctrl-C, and drafters raise exceptions in any of their
calls or draft nonsense. Without a model the target is a toy in float64, and every output must equal that of its request
run alone, with plain decoding. With a model, outputs that differ are reported and counted, since rounding may differ.
Memory is measured whenever all engines are empty. `kill -TERM` ends a run after the requests that have started.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import logging
import random
import resource
import signal
import sys
import tempfile
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from time import perf_counter, process_time, sleep
from typing import Any

import torch
from torch import nn

from foredraft import LLM, SamplingParams
from foredraft.config.engine import EngineConfig
from foredraft.config.speculative import SpeculativeConfig
from foredraft.drafters import make_drafter
from foredraft.drafters.context import DrafterContext
from foredraft.drafters.none import EmptyDrafter
from foredraft.engine.cost_model import CostModel
from foredraft.engine.drafter import Drafter, DrafterFacts, PromptChunk
from foredraft.engine.engine import Engine
from foredraft.engine.governor import Governor
from foredraft.engine.memory import bytes_per_token
from foredraft.engine.row import Row, RowState
from foredraft.heads.checkpoint import write_checkpoint
from foredraft.heads.eagle import EagleHead, EagleShape, default_streams
from foredraft.heads.eagle_layouts import write_eagle
from foredraft.heads.layers import LayerShape
from foredraft.heads.medusa_hydra import HeadsShape, HydraHeads, MedusaHeads
from foredraft.heads.medusa_hydra_layouts import write_hydra, write_medusa
from foredraft.model.cache.prefixes import PrefixStore
from foredraft.model.cache.ragged import KVCache
from foredraft.model.lm import CausalLM
from foredraft.retrieval.build import from_tokens
from foredraft.testing import check_cache_lengths, perturbed, toy_model
from foredraft.tree import DraftTree

FIRST_ID = 1 << 40
"""Where ids of rows begin: no other number is as large, so that those which drafters keep can be found."""
VERBS, OF_STATES = ("start", "propose", "observe"), ("copied", "cut", "ended")
"""What is called of drafters, and of what they know of rows."""


class Fault(Exception):
    """Raised on purpose."""


def with_faults(drafter: Drafter, rng: random.Random, rate: float, found: Counter[str]) -> Drafter:
    """The drafter, whose calls fail before or after their work, at random, and whose drafts are nonsense at times.

    So do calls of what it knows of rows.
    """

    def failing(verb: str, sound: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **others: Any) -> Any:
            chance = rng.random() / rate if rate else 2.0
            if chance < 0.5:
                found[verb] += 1
                raise Fault(f"before {verb}")
            result = sound(*args, **others)
            if chance < 1.0:
                found[verb] += 1
                if verb == "propose" and chance < 0.75:
                    return nonsense(rng, args[0], result)
                raise Fault(f"after {verb}")
            return result

        return call

    def starting(rows: Sequence[Row], chunks: Sequence[PromptChunk]) -> None:
        start(rows, chunks)
        for row in rows:
            for state in row.state.values():
                make_fail(state)

    def cutting(cut: Callable[[int], Any], num_tokens: int) -> Any:
        kept = cut(num_tokens)
        if kept is not None:
            make_fail(kept[0])
        return kept

    def make_fail(state: object) -> None:
        if isinstance(state, RowState) and "cut" not in vars(state):
            sound = {verb: getattr(state, verb) for verb in OF_STATES}
            sound["cut"] = partial(cutting, sound["cut"])
            vars(state).update({verb: failing(verb, call) for verb, call in sound.items()})

    start = drafter.start
    for verb in VERBS:
        setattr(drafter, verb, failing(verb, starting if verb == "start" else getattr(drafter, verb)))
    return drafter


def nonsense(rng: random.Random, rows: list[Row], trees: list[DraftTree]) -> Any:
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
    engines: dict[str, tuple[Drafter, Governor | None]]
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
    rows: list[Row]
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
    bursts: tuple[int, ...] = (1, 1, 4, 8)
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
            engine._admission = replace(engine._admission, ids=iter(range(FIRST_ID, 2 * FIRST_ID)))
            self.engines[title], self.open[title] = engine, []
        self._alone = self._engine(EmptyDrafter(), self.world.alone)

    def _engine(self, drafter: Drafter, config: EngineConfig, **others: Any) -> Engine:
        world = self.world
        return Engine(world.target, drafter, config, eos_token_ids=world.eos, tokenizer=world.tokenizer, **others)

    def run(self, is_enough: Callable[[int], bool], *, drain_every: int) -> None:
        """Requests until there are enough of them; all engines are emptied after every so many."""
        titles = list(self.engines)
        turns = cycle(self.rng.sample(titles, len(titles)))
        while not is_enough(self.counts["requests"]):
            target = self.counts["requests"] + drain_every
            while self.counts["requests"] < target and not is_enough(self.counts["requests"]):
                busy = next(turns)
                for _ in range(self.rng.choice(self.bursts)):
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
            if row.state:
                raise AssertionError(f"{title}: of a row that has ended there is left: {row.state}")
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


def is_same(row: Row, plain: Row, asked: Asked) -> bool:
    if asked.is_cut_off and row.finish_reason == "abort":
        return row.output_ids == plain.output_ids[: row.num_output_tokens]
    ends = (row.finish_reason, row.stop_reason) == (plain.finish_reason, plain.stop_reason)
    return ends and row.output_ids == plain.output_ids


def told(row: Row, plain: Row) -> str:
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
        if isinstance(each, Row) or (type(each) is int and FIRST_ID <= each < 2 * FIRST_ID):
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


# -- what is soaked ----------------------------------------------------------------------------------------------------


VOCAB_SIZE = 64
EOS = (9, 33)
SPARSE: dict[str, Any] = {"kv_sinks": 2, "kv_refresh": 8, "num_speculative_tokens": 3}
METHODS: dict[str, dict[str, Any]] = {
    "none": {},
    "ngram": {"prompt_lookup_min": 1},
    "nasd": {"shared": True},
    "suffix": {},
    "rest": {},
    "token_recycling": {},
    "jacobi": {},
    "lookahead": {},
    "draft_model": {"num_draft_branches": 2, "num_speculative_tokens": 3},
    "layer_skip": {"exit_layer": 1},
    "quantized_self": {},
    "sparse_kv": {"kv_budget": 24, **SPARSE},
    "sparse_kv/snapkv": {"kv_budget": 24, "kv_selector": "snapkv", "kv_window": 8, **SPARSE},
    "medusa": {},
    "hydra": {},
    "eagle": {},
    "eagle2": {},
    "eagle3": {},
    "auto": {"drafters": ["ngram", "suffix", "draft_model"]},
    "first": {"drafters": ["ngram", "draft_model"]},
    "union": {"drafters": ["token_recycling", "draft_model"]},
    "union/self": {"drafters": ["ngram", {"method": "sparse_kv", "kv_budget": 24, **SPARSE}]},
}
"""Methods and their keys; what follows a slash is only a title."""
GOVERNED = ("ngram", "draft_model", "auto", "eagle3", "sparse_kv")


class Letters:
    """A tokenizer: token i is a letter or a digit, and token 63 cannot be read."""

    LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 "

    def decode(self, token_ids: list[int], **_: Any) -> str:
        if VOCAB_SIZE - 1 in token_ids:
            raise Fault("token 63 cannot be read")
        return "".join(self.LETTERS[token] for token in token_ids)


def head_of(target: CausalLM, method: str, folder: Path) -> str:
    """A head with random weights, in a folder."""
    config = target.shadow.config
    size = config.hidden_size
    torch.manual_seed(0)
    if method == "medusa":
        write_checkpoint(folder, *write_medusa(MedusaHeads(HeadsShape(size, VOCAB_SIZE, 3))))
    elif method == "hydra":
        write_checkpoint(folder, *write_hydra(HydraHeads(HeadsShape(size, VOCAB_SIZE, 3))))
    else:
        layer, depth = LayerShape(size, 2 * size, 4, 2, size // 4), config.num_hidden_layers
        streams = default_streams(depth) if method == "eagle3" else (depth,)
        shape = EagleShape(3 if method == "eagle3" else 1, layer, size, streams, depth)
        write_checkpoint(folder, *write_eagle(EagleHead(shape)))
    return str(folder)


def toy_world(rng: random.Random, folder: Path, methods: tuple[str, ...] = tuple(METHODS)) -> World:
    """A toy in float64, each method in an engine of its own, memory for about three of its longest rows."""
    target = CausalLM(toy_model(VOCAB_SIZE), execution="eager")
    draft = CausalLM(perturbed(toy_model(VOCAB_SIZE), 0.08, seed=2), execution="eager")
    from_tokens([[rng.randrange(VOCAB_SIZE) for _ in range(40)]], folder / "texts", vocab_size=VOCAB_SIZE)
    engines: dict[str, tuple[Drafter, Governor | None]] = {}
    for title in methods:
        keys, method = dict(METHODS[title]), title.split("/")[0]
        if method in ("medusa", "hydra", "eagle", "eagle2", "eagle3"):
            keys["model"] = head_of(target, method, folder / method)
        if method == "rest":
            keys["datastore"] = str(folder / "texts")
        drafter = make_drafter(SpeculativeConfig(method, **keys), DrafterContext(target, draft))
        engines[title] = drafter, governor(drafter) if title in GOVERNED else None
    limits: dict[str, Any] = {"max_model_len": 192, "prefill_chunk_size": 24, "contains_faults": True}
    plan = EngineConfig(max_num_seqs=6, max_kv_bytes=5 * 128 * bytes_per_token(target), **limits)
    alone = EngineConfig(max_num_seqs=1, **limits)
    return World(target, engines, Texts(rng), plan, alone, EOS, Letters())


def governor(drafter: Drafter) -> Governor:
    """A governor that finds more than a few nodes too dear, so that drafts are cut."""
    return MoodyGovernor(CostModel({1: 0.001, 8: 0.0012, 64: 0.004, 512: 0.032}), drafter.facts)


class MoodyGovernor(Governor):
    """Takes the drafter from rows and gives it back at random, where measured time decides otherwise.

    Args:
      leaves, returns: chances that a call of `attends` changes its answer.
    """

    def __init__(
        self, costs: CostModel, facts: DrafterFacts, seed: int = 0, leaves: float = 0.01, returns: float = 0.2
    ) -> None:
        super().__init__(costs, facts)
        self._rng = random.Random(seed)
        self._rates = {True: leaves, False: returns}
        self._is_attending = True

    def attends(self, num_rows: int) -> bool:
        self._is_attending ^= self._rng.random() < self._rates[self._is_attending]
        return self._is_attending


class Texts:
    """Makes prompts, which begin alike at times, and parameters of every kind."""

    def __init__(self, rng: random.Random) -> None:
        self._known = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 60))] for _ in range(6)]

    def __call__(self, rng: random.Random) -> tuple[list[int], SamplingParams]:
        pattern = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 6))]
        tail = (pattern * 30)[: rng.choice([1, 2, 5, 11, 30, 60, 100])]
        begun = rng.choice(self._known) if rng.random() < 0.5 else []
        prompt = [*begun[: rng.randint(0, len(begun))], *tail]
        return prompt, toy_params(rng, prompt)


def toy_params(rng: random.Random, prompt: list[int]) -> SamplingParams:
    """A mixture of everything; most parameters are off most of the time."""

    def sometimes(value: Any, off: Any, share: float = 0.2) -> Any:
        return value if rng.random() < share else off

    is_long = rng.random() < 0.25
    failing_at = len(prompt) + rng.randint(0, 20)

    def broken(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] >= failing_at:
            raise Fault("a processor has failed")
        return scores

    return SamplingParams(
        n=rng.choice([1, 1, 1, 1, 2, 3]),
        max_tokens=None if is_long else rng.choice([1, 2, 4, 8, 16, 32, 32]),
        temperature=rng.choice([0.0, 0.0, 0.5, 1.0, 1.5]),
        top_p=sometimes(0.8, 1.0),
        top_k=sometimes(12, 0),
        min_p=sometimes(0.05, 0.0),
        typical_p=sometimes(0.9, 1.0),
        presence_penalty=sometimes(0.7, 0.0),
        frequency_penalty=sometimes(0.4, 0.0),
        repetition_penalty=sometimes(1.3, 1.0),
        no_repeat_ngram_size=sometimes(2, 0),
        min_tokens=sometimes(1, 0),
        stop=() if is_long else sometimes(["ab", "Q", "7z"], ()),
        stop_token_ids=() if is_long else sometimes((3, 40), ()),
        bad_words_ids=sometimes([[5, 6], [11]], ()),
        ignore_eos=is_long or rng.random() < 0.5,
        logit_bias=sometimes({rng.randrange(VOCAB_SIZE): rng.uniform(-3, 3)}, None),
        logprobs=sometimes(2, None),
        logits_processors=sometimes([broken], (), 0.08),
        seed=rng.randrange(1 << 40),
    )


def model_world(name: str, methods: tuple[str, ...], size: str, folder: Path, **options: Any) -> World:
    """A model under a plan of this many bytes for each of its methods; prompts are pieces of files in a folder."""
    llm = LLM(name, **options)
    assert llm.tokenizer is not None
    texts = [llm.tokenizer(path.read_text(encoding="utf-8"))["input_ids"] for path in sorted(folder.glob("*.md"))]
    engines = {}
    for method in methods:
        drafting = llm.with_speculative_config(method).drafting
        drafter = drafting.new_drafter()
        engines[method] = drafter, drafting.governor(llm.target, drafter)
    plan = EngineConfig(max_num_seqs=8, max_model_len=2048, max_kv_bytes=size, contains_faults=True)
    alone = EngineConfig(max_num_seqs=1, max_model_len=2048, contains_faults=True)

    def request(rng: random.Random) -> tuple[list[int], SamplingParams]:
        text = rng.choice(texts)
        start, length = rng.randrange(max(1, len(text) - 64)), rng.choice([8, 32, 64, 200, 500, 1000])
        start = 0 if rng.random() < 0.3 else start  # prompts that begin alike
        prompt = text[start : start + length]
        temperature = rng.choice([0.0, 0.0, 0.7, 1.0])
        limits = {"max_tokens": rng.choice([8, 16, 32, 64, 128]), "seed": rng.randrange(1 << 40)}
        penalty = 1.1 if rng.random() < 0.2 else 1.0
        return prompt, SamplingParams(temperature=temperature, repetition_penalty=penalty, top_p=0.95, **limits)

    return World(llm.target, engines, request, plan, alone, tuple(llm._eos_token_ids), llm.tokenizer, is_exact=False)


# -- the command -------------------------------------------------------------------------------------------------------


class RunningTime:
    """Seconds in which this process could run: those after SIGSTOP and before SIGCONT are left out."""

    def __init__(self) -> None:
        self.seconds = 0.0
        threading.Thread(target=self._count, daemon=True).start()

    def _count(self) -> None:
        last = perf_counter()
        while True:
            sleep(0.5)
            now = perf_counter()
            self.seconds += now - last if now - last < 5 else 0.5
            last = now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument(
        "--minutes", type=float, help="duration instead of --requests; time while stopped does not count"
    )
    parser.add_argument("--model", help="a real model; without one, a toy in float64")
    parser.add_argument("--dtype", default="auto", help="dtype of the model")
    parser.add_argument(
        "--methods", nargs="+", help="toy: all by default; model: none, ngram, token_recycling, sparse_kv"
    )
    parser.add_argument("--max-kv-bytes", default="64MB", help="model: memory limit of each method's engine")
    parser.add_argument("--texts", type=Path, default=Path(__file__).parents[1] / "docs", help="folder of .md files")
    parser.add_argument("--fault-rate", type=float, default=0.01, help="share of a drafter's calls that fail")
    parser.add_argument("--check-rate", type=float, help="share of requests that also run alone; model: 0.1 by default")
    parser.add_argument("--drain-every", type=int, help="requests between two measurements of memory; toy 50, model 10")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.getLogger("foredraft").setLevel(logging.ERROR)  # faults are told by the hundred
    torch.set_num_threads(1)
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        if options.model is None:
            world = toy_world(rng, Path(folder), tuple(options.methods or METHODS))
        else:
            world = model_world(
                options.model,
                tuple(options.methods or ("none", "ngram", "token_recycling", "sparse_kv")),
                options.max_kv_bytes,
                options.texts,
                dtype=options.dtype,
            )
        check_rate = options.check_rate if options.check_rate is not None else 1.0 if world.is_exact else 0.1
        soak = Soak(world, rng, fault_rate=options.fault_rate, check_rate=check_rate)
        clock, ended = RunningTime(), []
        signal.signal(signal.SIGTERM, lambda *_: ended.append(True))

        def is_enough(num_requests: int) -> bool:
            if options.minutes is not None:
                return bool(ended) or clock.seconds > 60 * options.minutes
            return bool(ended) or num_requests >= options.requests

        soak.run(is_enough, drain_every=options.drain_every or (50 if world.is_exact else 10))
    shown = {
        "seconds": round(clock.seconds, 1),
        "plan_bytes": world.config.max_kv_bytes,
        "counts": dict(soak.counts),
        "faults": dict(soak.faults),
        "num_differing": len(soak.differing),
        "memory": soak.memory[:: max(1, len(soak.memory) // 10)],
        "growth_since_a_quarter": growth(soak.memory),
        "cpu_seconds": round(process_time(), 1),
    }
    print(json.dumps(shown, indent=1))
    print(*soak.differing, sep="\n", file=sys.stderr)


if __name__ == "__main__":
    main()

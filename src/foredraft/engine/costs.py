"""Measurement of the time of forward passes, and the cache of these measurements on disk."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from statistics import median
from time import gmtime, perf_counter, process_time, strftime
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
import transformers

import foredraft
from foredraft.engine.cost_model import FEW, CostCurve, read_seconds
from foredraft.engine.memory import bytes_per_token
from foredraft.folders import cache_folder, keep_json
from foredraft.machine import cpu_digest, cpu_name
from foredraft.model.cache.ragged import KVCache
from foredraft.model.lm import CausalLM, Nodes

logger = logging.getLogger("foredraft")

NUM_NODES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 24, 32, 48, 64)
"""Numbers of nodes that are timed: close together in the range of usual drafts, and on both sides of tile boundaries.
"""

CONTEXT = 256
"""Number of tokens before the nodes, about a question and half an answer. The cost of a longer context is measured with
eight times as many.
"""

MOST_BYTES = 2**28
"""Upper limit of keys and values for the long context, in bytes: 256 MB, a machine's spare memory. A shorter context is
used if it is exceeded.
"""

BUSY = 0.1
"""Limit beyond which a machine counts as busy: the share of processor time that a process lacked, or the median
deviation of ratios from their median. Twice the spread of steps on an idle machine.
"""


# -- timing ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Forward:
    """A forward pass over some nodes after the committed tokens of cache rows.

    Args:
      width: number of nodes per row, a chain.
      num_rows: number of rows, from the first row of the cache.
    """

    model: CausalLM
    cache: KVCache
    width: int = 1
    num_rows: int = 1

    def __call__(self) -> torch.Tensor:
        return self.model.forward(
            Nodes.from_chains([[1 % self.model.vocab_size] * self.width] * self.num_rows), self.cache
        )


def seconds_of(call: Callable[..., Any], device: torch.device, *args: Any, **kwargs: Any) -> float:
    """Return the seconds of a call, including the work that it has started on its device."""
    _wait(device)
    start = perf_counter()
    call(*args, **kwargs)
    _wait(device)
    return perf_counter() - start


@torch.inference_mode()
def forward_times(forwards: Sequence[Forward], repeats: int, *, warm_ups: int = 1) -> list[list[float]]:
    """Time every forward pass ``repeats`` times, interleaved, after rounds of warm-up; returns seconds."""
    times: list[list[float]] = [[] for _ in forwards]
    for number in range(warm_ups + repeats):
        for forward, taken in zip(forwards, times, strict=True):
            seconds = seconds_of(forward, forward.model.device)
            if number >= warm_ups:
                taken.append(seconds)
    return times


def median_times(forwards: Sequence[Forward], repeats: int) -> list[float]:
    """The median of `forward_times` for every forward."""
    return [median(taken) for taken in forward_times(forwards, repeats)]


def forward_curve(
    target: CausalLM,
    counts: Sequence[int],
    context: int,
    repeats: int,
    *,
    num_rows: int = 1,
    of: Callable[[list[float]], float] = median,
) -> CostCurve:
    """Time forward passes over chains of the given numbers of nodes, interleaved.

    Args:
      context: number of tokens before the nodes; reduced if the model's context is too short.
      of: function that reduces the times of one forward pass to one value.
    """
    cache, length = filled_cache(target, context, max(counts), num_rows)
    times = forward_times([Forward(target, cache, count, num_rows) for count in counts], repeats)
    return CostCurve(dict(zip(counts, map(of, times), strict=True)), length, num_rows=num_rows)


@torch.inference_mode()
def filled_cache(model: CausalLM, context: int, room: int, num_rows: int = 1) -> tuple[KVCache, int]:
    """Return a cache in which every row has ``context`` tokens, and this number.

    The context length is reduced if it exceeds the model's.

    Args:
      room: number of tokens that must fit after them.
    """
    if model.context_length is not None:
        context = max(1, min(context, model.context_length - room))
    cache = model.new_cache(num_rows, capacity=context + room)
    text = [token % model.vocab_size for token in range(context)]
    for row in range(num_rows):
        model.forward(Nodes.from_chains([text]), cache, first_row=row, keep=slice(0, 0))
        cache.commit([range(context)], row)
    return cache, context


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -- on disk -----------------------------------------------------------------------------------------------------------


@dataclass
class StepCosts:
    """Times of the parts of a step of a model, measured on this machine and stored on it.

    Args:
      curves: repeated measurements of verification. The spread of the measurements shows the uncertainty.
      host_seconds: seconds of a step besides drafting and verifying; plain steps have them, too.
      drafting: seconds of drafting by number of levels, for one row, by the title of the drafting mode.
      measured: time of the newest measurement.
      is_steady: True if the machine was not visibly busy with anything else.
    """

    curves: tuple[CostCurve, ...] = ()
    host_seconds: float = 0.0
    drafting: dict[str, dict[int, float]] = field(default_factory=dict)
    measured: str = ""
    is_steady: bool = False

    def is_settled(self, num_curves: int) -> bool:
        """Return whether ``num_curves`` curves need no further measurement.

        On a busy machine, `FEW` times as many measurements are required.
        """
        return len(self.curves) >= num_curves * (1 if self.is_steady else FEW)

    def add(self, curve: CostCurve, is_steady: bool) -> None:
        """Add one measurement. Measurements of an idle machine replace those of a busy one."""
        if is_steady == self.is_steady:
            self.curves += (curve,)
        elif is_steady:
            self.curves, self.is_steady = (curve,), True
        self.measured = strftime("%Y-%m-%dT%H:%M:%SZ", gmtime())

    def rising(self) -> tuple[CostCurve, ...]:
        """Return the curves without disturbances of the machine; see `CostCurve.rising`."""
        return tuple(curve.rising() for curve in self.curves)

    def mean(self) -> CostCurve:
        """Return the mean of the curves."""
        return CostCurve.mean(self.rising())

    def draft_seconds(self, title: str, levels: int) -> float:
        """Seconds of drafting a number of levels, interpolated and extrapolated; 0 if the mode was never measured."""
        known = self.drafting.get(title)
        return max(0.0, CostCurve(known).at(max(levels, min(known)))) if levels and known else 0.0

    def keep(self, facts: Mapping[str, Any]) -> None:
        """Store the costs for later processes on this machine with this model.

        If the file cannot be written, they measure again.
        """
        content = json.loads(json.dumps({"facts": facts, **asdict(self)}))  # as it will be read: keys become strings
        try:
            keep_json(_file_of(facts), {**content, "digest": digest_of(content)})
        except OSError as error:
            logger.debug("costs are not stored in %s: %s", _file_of(facts), error)

    @classmethod
    def kept(cls, facts: Mapping[str, Any]) -> Self | None:
        """Load the costs stored by an earlier process; None if there are none, or if the file is damaged."""
        try:
            read = json.loads(_file_of(facts).read_text(encoding="utf-8"))
            if read.pop("digest") != digest_of(read):
                return None
            return cls(
                tuple(map(CostCurve.read, read["curves"])),
                float(read["host_seconds"]),
                {str(title): read_seconds(known) for title, known in read["drafting"].items()},
                str(read["measured"]),
                bool(read["is_steady"]),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            return None


def prices_of(
    target: CausalLM,
    num_curves: int = 1,
    *,
    is_fresh: bool = False,
    say: Callable[[str, int, int], None] = lambda *_: None,
) -> StepCosts:
    """Return the step costs of a target on this machine: stored ones, else measured now (two seconds per curve).

    Measured costs are valid for the same shapes, dtype, execution, number of threads and versions. Measurements of a
    busy machine are repeated by the next few processes.

    Args:
      num_curves: number of curves needed.
      is_fresh: True to ignore stored costs and measure again.
      say: function that is called with a description, the number of finished measurements, and their total number.
    """
    facts = facts_of(target)
    found = (None if is_fresh else StepCosts.kept(facts)) or StepCosts()
    if found.is_settled(num_curves):
        return found
    missing = num_curves - len(found.curves) if found.is_steady else num_curves
    for place in range(missing):
        say("timing forward passes", place, missing)
        found.add(*measure_curve(target))
        found.keep(facts)
    return found


_known: WeakKeyDictionary[CausalLM, tuple[Any, CostCurve]] = WeakKeyDictionary()


def cost_curve(target: CausalLM) -> CostCurve:
    """Return the seconds of a forward pass by its number of nodes, after 256 tokens, and per token of context."""
    facts = facts_of(target)
    known = _known.get(target)
    if known is None or known[0] != facts:
        known = _known[target] = facts, CostCurve.mean(prices_of(target).curves)
    return known[1]


def forget_curve(facts: Mapping[str, Any]) -> None:
    """Drop a stored curve that steps have shown to be wrong. The curve is measured again when it is needed next."""
    for target in [target for target, known in _known.items() if known[0] == facts]:
        del _known[target]
    with suppress(OSError):
        _file_of(facts).unlink(missing_ok=True)


@torch.inference_mode()
def measure_curve(target: CausalLM, seconds: float = 2.0) -> tuple[CostCurve, bool]:
    """Time forward passes of several sizes, each together with a single-node pass. Time one more after a long context.

    The result uses the medians of the ratios within these pairs. Both passes of a pair are timed close together, so
    they run at the same speed of the machine.

    Args:
      seconds: approximate time limit; every pair is timed at least once after a warm-up.

    Returns: the curve, and whether the machine seemed otherwise idle.
    """
    counts = [count for count in NUM_NODES if target.context_length is None or count < target.context_length]
    cache, context = filled_cache(target, CONTEXT, max(counts))
    single = Forward(target, cache, 1)
    forwards = {count: Forward(target, cache, count) for count in counts[1:]}
    warm_up = {count: seconds_of(forward, target.device) for count, forward in {1: single, **forwards}.items()}
    if FEW * (sum(warm_up.values()) + len(counts) * min(warm_up.values(), default=0.0)) > seconds:
        forwards = {count: forward for count, forward in forwards.items() if count in (1, 4, 16, 64)}
    long_context = _long_context(target)
    long = Forward(target, _lengthened(target, cache, long_context), 1)
    seconds_of(long, target.device)
    pairs = [one for forward in (*forwards.values(), long) for one in (single, forward)]
    start, worked = perf_counter(), process_time()
    times = forward_times(pairs, 1, warm_ups=0)
    more = min(2 * FEW + 1, int(seconds / (perf_counter() - start))) - 1
    if more > 0:
        times = [[*first, *later] for first, later in zip(times, forward_times(pairs, more, warm_ups=0), strict=True)]
    has_worked = process_time() - worked >= (1.0 - BUSY) * (perf_counter() - start)
    plain = median([taken for one in times[::2] for taken in one])
    pairs_of_times = zip(times[::2], times[1::2], strict=True)
    ratios = [[other / one for one, other in zip(*pair, strict=True)] for pair in pairs_of_times]
    *of_counts, of_long = map(median, ratios)
    per_token = plain * max(of_long - 1.0, 0.0) / (long_context - context) if long_context > context else 0.0
    curve = {1: plain} | {count: plain * ratio for count, ratio in zip(forwards, of_counts, strict=True)}
    return CostCurve(curve, context, per_token), has_worked and max(map(_spread, ratios)) <= BUSY


def _spread(values: Sequence[float]) -> float:
    """Return the median deviation from the median, relative to it."""
    middle = median(values)
    return median(abs(value - middle) for value in values) / middle


def _long_context(target: CausalLM) -> int:
    """Number of tokens of the long context: at most eight times `CONTEXT`, within memory and the model's context."""
    count = max(CONTEXT, min(8 * CONTEXT, MOST_BYTES // bytes_per_token(target)))
    return count if target.context_length is None else max(1, min(count, target.context_length - 1))


def _lengthened(target: CausalLM, cache: KVCache, context: int) -> KVCache:
    """Return a cache row of ``context`` tokens, made by repeating the columns of another row.

    Reading a long prompt would take seconds.
    """
    length = cache.lengths[0]
    states = cache.export(0, length)
    num_times = -(-context // length)
    repeated = [
        None if pair is None else (pair[0].repeat(1, num_times, 1), pair[1].repeat(1, num_times, 1)) for pair in states
    ]
    longer = target.new_cache(1, capacity=context + 1)
    longer.load(0, tuple(repeated), context)
    return longer


def facts_of(target: CausalLM) -> dict[str, Any]:
    """Everything on which the time of a forward pass depends, except for the current load of the machine."""
    model = target.shadow
    shapes = sorted({(tuple(parameter.shape), str(parameter.dtype)) for parameter in model.parameters()})
    return {
        "model": type(model).__name__,
        "layers": getattr(model.config.get_text_config(), "num_hidden_layers", 0),
        "shapes": digest_of(shapes),
        "dtype": str(target.dtype),
        "execution": target.execution.kind,
        "device": _device(str(target.device)),
        "threads": torch.get_num_threads(),
        "versions": _versions(),
        **({} if target.quantization is None else {"packed_bytes": target.execution.packed_bytes}),
        **({} if target.kv_dtype is None else {"kv_dtype": str(target.kv_dtype)}),
        **({} if target.activations is None else {"activations": target.activations}),
    }


@cache
def _device(name: str) -> str:
    if name.startswith("cuda"):
        return torch.cuda.get_device_name(name)
    isa = f"{os.environ.get('ONEDNN_MAX_CPU_ISA', '')}/{torch.backends.cpu.get_cpu_capability()}"
    return f"{cpu_name()} ({cpu_digest()}) {isa}"


@cache
def _versions() -> list[str]:
    return [foredraft.__version__, torch.__version__, transformers.__version__]


def digest_of(value: Any) -> str:
    """Short digest of a value that JSON can hold."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:24]


def _file_of(facts: Mapping[str, Any]) -> Path:
    """Path of the stored measurements for these facts."""
    return cache_folder("costs", f"{digest_of(facts)}.json")

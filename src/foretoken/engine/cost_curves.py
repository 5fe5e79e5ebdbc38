"""Seconds of a forward by its number of nodes: measured once per model and machine, and kept on disk."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from foretoken.engine.costs import Forward, filled_cache, forward_times, seconds_of
from foretoken.engine.memory import bytes_per_token
from foretoken.engine.step_costs import CostCurve
from foretoken.folders import cache_folder, keep_json
from foretoken.machine import cpu_name

if TYPE_CHECKING:
    from foretoken.model.cache.ragged import KVCache
    from foretoken.model.lm import CausalLM

logger = logging.getLogger("foretoken")

NUM_NODES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 17, 24, 32, 48, 64)
FEW_NODES = (1, 4, 16, 64)
"""Numbers of nodes that are timed, and those of models so slow that there is no time for more."""

CONTEXT = 256
LONG_CONTEXT = 2048
"""Tokens before the nodes: of the curve, and of one node more that shows what a longer context costs."""

MOST_BYTES = 2**28
"""Of keys and values for that, beyond which a shorter context has to do."""

SECONDS = 2.0
"""How long a measurement is to take."""

MOST_ROUNDS = 7

_known: WeakKeyDictionary[CausalLM, tuple[Any, CostCurve]] = WeakKeyDictionary()


def cost_curve(target: CausalLM) -> CostCurve:
    """Seconds of a forward of the target by its number of nodes, after 256 tokens, and per token of context.

    It is read from the cache folder where this model has been measured on this machine before, in the same dtype,
    execution, number of threads and versions; else it is measured, in about two seconds, and kept there.
    """
    facts = facts_of(target)
    known = _known.get(target)
    if known is not None and known[0] == facts:
        return known[1]
    file = cache_folder("costs", f"{_digest(facts)}.json")
    curve = _read(file)
    if curve is None:
        curve = measure_curve(target)
        _write(file, {"facts": facts, **vars(curve)})
    _known[target] = facts, curve
    return curve


@torch.inference_mode()
def measure_curve(target: CausalLM, seconds: float = SECONDS) -> CostCurve:
    """Time forwards of several numbers of nodes, interleaved, and one node after a long text; the least time of each.

    Args:
      seconds: how long this may take, about; every number is timed at least once after a warm-up.
    """
    counts = [count for count in NUM_NODES if _has_room(target, count)]
    cache, context = filled_cache(target, CONTEXT, max(counts))
    first = Forward(target, cache, 1)
    first()
    single = seconds_of(first, target.device)
    if 2 * single * len(counts) > seconds:
        counts = [count for count in counts if count in FEW_NODES]
    long_context = _long_context(target)
    longer = _lengthened(target, cache, long_context)
    forwards = [*(Forward(target, cache, count) for count in counts), Forward(target, longer, 1)]
    start = perf_counter()
    times = forward_times(forwards, 1)  # with a warm-up round
    taken = (perf_counter() - start) / 2
    rounds = min(MOST_ROUNDS, int((seconds - 2 * taken) / taken) - 1) if taken > 0.0 else MOST_ROUNDS
    if rounds > 0:
        times = [one + more for one, more in zip(times, forward_times(forwards, rounds), strict=True)]
    *least, long_seconds = map(min, times)
    more = max(long_seconds - least[0], 0.0)
    per_token = more / (long_context - context) if long_context > context else 0.0
    return CostCurve(dict(zip(counts, least, strict=True)), context, per_token)


def _long_context(target: CausalLM) -> int:
    """As many tokens as there is room for, `LONG_CONTEXT` at most."""
    count = max(CONTEXT, min(LONG_CONTEXT, MOST_BYTES // bytes_per_token(target)))
    return count if target.context_length is None else max(1, min(count, target.context_length - 1))


def _lengthened(target: CausalLM, cache: KVCache, context: int) -> KVCache:
    """A row of so many tokens, the columns of another one again and again: reading a long text would take seconds."""
    length = cache.lengths[0]
    states = cache.export(0, length)
    num_times = -(-context // length)
    repeated = [
        None if pair is None else (pair[0].repeat(1, num_times, 1), pair[1].repeat(1, num_times, 1)) for pair in states
    ]
    longer = target.new_cache(1, capacity=context + 1)
    longer.load(0, tuple(repeated), context)
    return longer


def _has_room(target: CausalLM, count: int) -> bool:
    context = target.context_length
    return context is None or count < context


def facts_of(target: CausalLM) -> dict[str, Any]:
    """Everything that the time of a forward depends on, but how busy the machine is."""
    model = target.shadow
    shapes = sorted({(tuple(parameter.shape), str(parameter.dtype)) for parameter in model.parameters()})
    return {
        "model": type(model).__name__,
        "layers": getattr(model.config.get_text_config(), "num_hidden_layers", 0),
        "shapes": _digest(shapes),
        "dtype": str(target.dtype),
        "execution": target.execution.kind,
        "device": _device(str(target.device)),
        "threads": torch.get_num_threads(),
        "versions": _versions(),
    }


@cache
def _device(name: str) -> str:
    if name.startswith("cuda"):
        return torch.cuda.get_device_name(name)
    isa = f"{os.environ.get('ONEDNN_MAX_CPU_ISA', '')}/{torch.backends.cpu.get_cpu_capability()}"
    return f"{cpu_name()} {isa}"


@cache
def _versions() -> list[str]:
    return [version(name) for name in ("foretoken", "torch", "transformers")]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:24]


def _read(file: Path) -> CostCurve | None:
    """What was measured before; None where nothing was, or what was cannot be read."""
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
        seconds = {int(count): float(taken) for count, taken in read["seconds"].items()}
        curve = CostCurve(seconds, int(read["context"]), float(read["per_token"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    is_sound = 1 in seconds and all(taken > 0.0 for taken in seconds.values()) and curve.per_token >= 0.0
    return curve if is_sound else None


def _write(file: Path, content: Mapping[str, Any]) -> None:
    """Keep a measurement; a folder that cannot be written only means that it is made again."""
    try:
        keep_json(file, content)
    except OSError as error:
        logger.debug("costs are not kept in %s: %s", file, error)

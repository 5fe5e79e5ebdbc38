"""Costs of forwards: the one place that times them."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch

from foretoken.model.cache.ragged import KVCache
from foretoken.model.lm import CausalLM, Nodes


@dataclass(frozen=True, eq=False)
class Forward:
    """A forward over some nodes after the committed tokens of cache rows.

    Args:
      width: number of nodes per row, a chain.
      num_rows: the first ones of the cache.
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
    """Seconds that a call takes, until the work it has started on its device is done."""
    _wait(device)
    start = perf_counter()
    call(*args, **kwargs)
    _wait(device)
    return perf_counter() - start


@torch.inference_mode()
def forward_times(forwards: Seq[Forward], repeats: int, *, warm_ups: int = 1) -> list[list[float]]:
    """Seconds of every forward, ``repeats`` times each: interleaved, after rounds of warm-up."""
    times: list[list[float]] = [[] for _ in forwards]
    for number in range(warm_ups + repeats):
        for forward, taken in zip(forwards, times, strict=True):
            seconds = seconds_of(forward, forward.model.device)
            if number >= warm_ups:
                taken.append(seconds)
    return times


def median_times(forwards: Seq[Forward], repeats: int) -> list[float]:
    """The median of `forward_times` for every forward."""
    return [median(taken) for taken in forward_times(forwards, repeats)]


@torch.inference_mode()
def filled_cache(model: CausalLM, context: int, room: int, num_rows: int = 1) -> tuple[KVCache, int]:
    """A cache whose rows each hold ``context`` tokens, fewer where the model has no room for more, and how many.

    Args:
      room: tokens that must fit after them.
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

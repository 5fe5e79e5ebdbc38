"""Which layers of a model are packed, which of them together, and what that takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from foretoken.engine.packing import packed_dtype

Group = tuple[nn.Module, ...]
"""Layers that are packed as one product."""

MIN_ELEMENTS = 2**18  # below, the 25 us that a call into oneDNN costs more than F.linear exceed what it saves


def available_memory_bytes() -> int | None:
    """What the system can still give out without swapping; None where it does not say (Linux does)."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    kilobytes = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(kilobytes[0]) * 1024 if kilobytes else None


def packing_bytes(layers: Iterable[nn.Module], release_originals: bool) -> int:
    """Memory that packing these layers takes at its height, over what is held now."""
    total = 0
    for layer in layers:
        weight: torch.Tensor = layer.weight  # type: ignore[assignment]
        dtype = packed_dtype(weight.dtype)
        if dtype is not None:
            kept = 0 if release_originals else weight.dtype.itemsize
            total += weight.numel() * (dtype.itemsize - weight.dtype.itemsize + kept)
    return total


def packable(model: nn.Module, min_elements: int = MIN_ELEMENTS, *, together: bool = True) -> list[Group]:
    """Layers whose weight can be packed and whose forward is their class's own.

    Args:
      min_elements: smaller products stay as they are.
      together: find the linears that have the same input, by one forward over two tokens; else each is alone.
    """
    layers = [layer for layer in model.modules() if _is_packable(layer)]
    linears = [layer for layer in layers if type(layer) is nn.Linear]
    groups = siblings(linears, partial(_run_once, model)) if together and linears else []
    grouped = {layer for group in groups for layer in group}
    groups += [(layer,) for layer in layers if layer not in grouped]
    return [group for group in groups if sum(map(_num_elements, group)) >= min_elements]


def _is_packable(layer: nn.Module) -> bool:
    if type(layer) not in (nn.Linear, Conv1D) or "forward" in vars(layer):
        return False
    weight: torch.Tensor = layer.weight  # type: ignore[assignment]
    return weight.device.type == "cpu" and packed_dtype(weight.dtype) is not None


def _num_elements(layer: nn.Module) -> int:
    weight: torch.Tensor = layer.weight  # type: ignore[assignment]
    return weight.numel()


def _run_once(model: nn.Module) -> None:
    model(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False)


def siblings(layers: Iterable[nn.Module], run: Callable[[], object]) -> list[Group]:
    """Groups of two or more linears that are given the same tensor, in the order in which they are called.

    Args:
      layers: linears of one device.
      run: makes one forward in which they are called; a layer that it calls twice, or whose input somebody writes to
        before the next one reads it, is in no group.
    """
    calls: dict[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def note(layer: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if args:
            calls.setdefault(layer, []).append((args[0], args[0].clone()))

    handles = [layer.register_forward_pre_hook(note) for layer in layers]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    groups: list[list[nn.Module]] = []
    for layer, inputs in calls.items():
        if len(inputs) == 1:
            if groups and _are_siblings(groups[-1][-1], layer, calls):
                groups[-1].append(layer)
            else:
                groups.append([layer])
    return [tuple(group) for group in groups if len(group) > 1]


def _are_siblings(
    first: nn.Module, second: nn.Module, calls: dict[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]]
) -> bool:
    (one, its_values), (other, other_values) = calls[first][0], calls[second][0]
    have_biases = (first.bias is None) == (second.bias is None)
    return one is other and torch.equal(its_values, other_values) and have_biases

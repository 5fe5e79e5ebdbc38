"""The calls of several layers in a row, laid out once and made step after step."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from foretoken.model.execution.memory import arena, scratch_address
from foretoken.model.execution.packing import PackedProduct
from foretoken.model.execution.programs import ARENA, OUT, SCRATCH, Part, Plan, Program

if TYPE_CHECKING:
    from foretoken.model.execution.native import Library
    from foretoken.model.execution.regions import CompiledLayer
    from foretoken.model.execution.replay import Situation

STATES = SCRATCH + 1
"""The place of hidden states in the pointers of a layer; its other inputs come behind them."""


class ChainCalls:
    """Pointers of layers, of which a step changes a few: hidden states, other inputs, outputs.

    Made by `of`. They hold as long as nothing that they point to has moved, which `still_hold` tells.
    """

    def __init__(
        self,
        layers: Sequence[CompiledLayer],
        programs: Sequence[Program],
        pointers: Sequence[Any],
        plans: Sequence[Plan | None],
        kinds: Sequence[str | None],
        position: int,
        place: Any,
    ) -> None:
        self._layers = layers
        self._programs = programs
        self._pointers = pointers
        self._kinds = list(kinds)
        self._position = position
        self._place = place
        self._num_packed = PackedProduct.num_packed
        self._tensors = [tensor for layer in layers for tensor in layer.tensors]
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        self._num_bytes = max(program.num_bytes for program in programs)
        self._room = self._scratch = 0
        self._others: list[int] = []
        first_of = {id(plan): number for number, plan in reversed(list(enumerate(plans)))}
        self._first = [first_of[id(plan)] for plan in plans]  # the first layer with the same plan
        self._parts = (Part * len(layers))()
        for part, program, array in zip(self._parts, programs, pointers, strict=True):
            part.steps, part.num_steps = program.address, program.num_steps
            part.pointers = ctypes.addressof(array)

    @classmethod
    def of(
        cls,
        layers: Sequence[CompiledLayer],
        programs: Sequence[Program],
        situation: Situation | None,
        kinds: Sequence[str | None],
        position: int,
    ) -> ChainCalls | None:
        """Those of these layers, or of the first of them; None where fewer than two can run in a row.

        Args:
          programs: their calls over the nodes of this forward.
          situation: of the first layer; None without attention.
          kinds: of attention of every layer.
          position: of the first layer in its chain.
        """
        pointers, plans = [], list[Plan | None]()
        threads = torch.get_num_threads()
        for layer, program, kind in zip(layers, programs, kinds, strict=True):
            own = layer.situated(situation, kind)
            prepared = layer.replay.prepared(program, own, 0, [0] * (1 + len(layer.needed)), threads)
            if prepared is None:
                break
            numbers, plan = prepared
            pointers.append((ctypes.c_void_p * len(numbers))(*numbers))
            plans.append(plan)
        count = len(pointers)
        if count < 2:
            return None
        place = _place(situation)
        return cls(layers[:count], programs[:count], pointers, plans, kinds[:count], position, place)

    def still_hold(self, situation: Situation | None, kinds: Sequence[str | None]) -> bool:
        """Whether cache, weights and kinds of attention are where, and what, they were."""
        return (
            self._num_packed == PackedProduct.num_packed
            and self._place == _place(situation)
            and self._kinds == kinds[self._position : self._position + len(self._kinds)]
            and self._addresses == [tensor.data_ptr() for tensor in self._tensors]
        )

    def run(self, kernels: Library, inputs: Sequence[torch.Tensor], situation: Situation | None) -> torch.Tensor | None:
        """What all layers return, (layers, 1, S, H); None where attention is not for the library's own kernels.

        Args:
          inputs: of the first layer, contiguous; the others are given the same, but for the hidden states.
        """
        threads, scratch = torch.get_num_threads(), 0
        plans: dict[int, Plan | None] = {}
        for number, first in enumerate(self._first):
            if first not in plans:
                layer = self._layers[first]
                own = layer.situated(situation, self._kinds[first])
                plan = plans[first] = None if own is None else layer.replay.plan(self._programs[first], own, threads)
                if plan is None and own is not None:
                    return None
                scratch = max(scratch, 0 if plan is None else plan.scratch)
            plan = plans[first]
            self._parts[number].rows = None if plan is None else plan.address
        shape, dtype = self._programs[0].shape, self._programs[0].dtype
        with torch.inference_mode(False):  # so that it has a version
            outputs = torch.empty(len(self._pointers), *shape, dtype=dtype)
        self._put_memory(arena.address(self._num_bytes), scratch_address(scratch))
        others = [tensor.data_ptr() for tensor in inputs[1:]]
        has_moved, self._others = others != self._others, others
        states, place, size = inputs[0].data_ptr(), outputs.data_ptr(), shape.numel() * dtype.itemsize
        for pointers in self._pointers:
            pointers[OUT], pointers[STATES] = place, states
            if has_moved:
                for number, other in enumerate(others, STATES + 1):
                    pointers[number] = other
            states, place = place, place + size
        kernels.replay(ctypes.addressof(self._parts), len(self._pointers), threads)
        return outputs

    def _put_memory(self, room: int, scratch: int) -> None:
        if (room, scratch) != (self._room, self._scratch):
            self._room, self._scratch = room, scratch
            for pointers in self._pointers:
                pointers[ARENA], pointers[SCRATCH] = room, scratch


def _place(situation: Situation | None) -> Any:
    """What changes when keys and values are written elsewhere."""
    return None if situation is None else (situation.cache.memory, situation.cache.window.first_row)

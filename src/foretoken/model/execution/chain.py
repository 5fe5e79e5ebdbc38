"""Layers that run ahead: as soon as the first one is called, all that follow it.

Where a layer is given the very tensor that the one before it has returned, and otherwise the same as that one, nothing
needs to come between the two. Then all such layers run in one call when the first of them does, and each hands out what
it has computed as soon as the model calls it. Which these are is seen in the forward before. What a layer is given in
the end is compared with what it was run with, so that a model that does something else is followed, one call later.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from foretoken.model.execution.chain_calls import ChainCalls
from foretoken.model.execution.programs import Program
from foretoken.model.execution.replay import Situation

if TYPE_CHECKING:
    from foretoken.model.execution.regions import CompiledLayer


MOST_KNOWN = 128
"""Numbers of nodes, and of layers, for which calls are kept."""


class ChainedLayer:
    """The forward of one layer of a chain."""

    def __init__(self, chain: Chain, position: int) -> None:
        self._chain = chain
        self._position = position

    @property
    def compiled(self) -> CompiledLayer:
        return self._chain.layers[self._position]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the layer returns."""
        return self._chain.run(self._position, args, kwargs)


class Ahead:
    """What layers have returned before they were called.

    Args:
      position: of the first one that was not called yet.
      outputs: (layers, 1, S, H), of it and those behind it.
      given: what it is given, if all goes as expected: hidden states, and other inputs.
      version: of ``outputs``, which changes when somebody writes into them.
    """

    __slots__ = ("first", "given", "kinds", "outputs", "position", "situation", "version")

    def __init__(
        self,
        position: int,
        outputs: torch.Tensor,
        given: Sequence[torch.Tensor],
        situation: Situation | None,
        kinds: Sequence[str | None],
    ) -> None:
        self.first = self.position = position
        self.outputs = outputs
        self.given = list(given)
        self.situation = situation
        self.kinds = kinds
        self.version = outputs._version

    def take(self, position: int, inputs: Sequence[torch.Tensor], situation: Situation | None) -> torch.Tensor | None:
        """The result of a layer; None if it was run with something else than it is given now."""
        is_expected = (
            position == self.position
            and self.outputs._version == self.version
            and _are_same(inputs, self.given)
            and _are_alike(situation, self.situation)
            and (situation is None or situation.kind == self.kinds[position])
        )
        if not is_expected:
            return None
        states = self.outputs[position - self.first]
        self.given[0] = states
        self.position += 1
        return states

    @property
    def is_over(self) -> bool:
        """Whether all were called."""
        return self.position - self.first == len(self.outputs)


class _Running(threading.local):
    """Where one thread is in a forward, and what it has laid out for calls."""

    def __init__(self) -> None:
        self.ahead: Ahead | None = None
        self.last: tuple[int, list[torch.Tensor], Situation | None] | None = None
        self.calls: dict[tuple[int, int, int], ChainCalls] = {}


class Chain:
    """The compiled layers of one model, in the order of its modules.

    Exactness: the bits of the layers by themselves.
    """

    def __init__(self, layers: Sequence[CompiledLayer]) -> None:
        self.layers = layers
        self._follows = [False] * len(layers)
        self._kinds: list[str | None] = [None] * len(layers)
        self._running = _Running()

    def run(self, position: int, args: Any, kwargs: Any) -> Any:
        """What the layer at this position returns."""
        layer, running = self.layers[position], self._running
        inputs, situation = layer.inputs(args, kwargs), layer.situation(args, kwargs)
        ahead = running.ahead
        states = None if ahead is None else ahead.take(position, inputs, situation)
        if states is None:
            running.ahead = None
            self._follows[position] = ahead is None and self._is_next(running.last, position, inputs, situation)
            self._kinds[position] = None if situation is None else situation.kind
            ahead = self._run_ahead(position, inputs, situation)
            if ahead is None:
                states = layer.run(inputs, situation)
            else:
                states = ahead.take(position, inputs, situation)
                assert states is not None
                running.ahead = ahead
        elif ahead is not None and ahead.is_over:
            running.ahead = None
        is_last = position + 1 == len(self.layers)  # the cache is not to be kept alive until the next forward
        running.last = None if is_last else (position, [states, *inputs[1:]], situation)
        return layer.returned(states)

    @staticmethod
    def _is_next(
        last: tuple[int, list[torch.Tensor], Situation | None] | None,
        position: int,
        inputs: Sequence[torch.Tensor],
        situation: Situation | None,
    ) -> bool:
        """Whether a layer is called as the one before it could have foreseen."""
        if last is None or last[0] != position - 1:
            return False
        return _are_same(inputs, last[1]) and _are_alike(situation, last[2])

    def _run_ahead(self, position: int, inputs: Sequence[torch.Tensor], situation: Situation | None) -> Ahead | None:
        """Run a layer and those that follow it; None where there are none, or their calls cannot be made in a row."""
        last = position + 1
        while last < len(self.layers) and self._follows[last]:
            last += 1
        num_nodes, layer = inputs[0].shape[1], self.layers[position]
        if last - position < 2 or self.program(position, num_nodes) is None:
            return None
        if not all(tensor.is_contiguous() for tensor in inputs):
            return None
        known, key = self._running.calls, (position, last, num_nodes)
        calls = known.get(key)
        if calls is None or not calls.still_hold(situation, self._kinds):
            calls = self._calls(position, last, num_nodes, situation)
            if calls is None:
                return None
            if len(known) >= MOST_KNOWN:
                known.clear()
            known[key] = calls
        kernels = layer.replay.kernels
        assert kernels is not None
        outputs = calls.run(kernels, inputs, situation)
        return None if outputs is None else Ahead(position, outputs, inputs, situation, list(self._kinds))

    def _calls(self, position: int, last: int, num_nodes: int, situation: Situation | None) -> ChainCalls | None:
        """Those of some layers, as far as these can run in a row; None for fewer than two."""
        layers, programs = [], list[Program]()
        for number in range(position, last):
            program = self.program(number, num_nodes)
            if program is None or (
                programs and (program.shape, program.dtype) != (programs[0].shape, programs[0].dtype)
            ):
                break
            layers.append(self.layers[number])
            programs.append(program)
        if len(layers) < 2:
            return None
        return ChainCalls.of(layers, programs, situation, self._kinds[position : position + len(layers)], position)

    def program(self, position: int, num_nodes: int) -> Program | None:
        """The calls of a layer over so many nodes, if they are recorded and can be made without Python."""
        layer = self.layers[position]
        if not layer.replay.is_possible:
            return None
        program = layer.replay.program(num_nodes)
        return program if program is not None and program.is_native else None


def _are_same(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return len(tensors) == len(others) and all(map(operator.is_, tensors, others))


def _are_alike(situation: Situation | None, other: Situation | None) -> bool:
    """Whether two layers are called in the same forward."""
    if situation is None or other is None:
        return situation is other
    return situation.cache is other.cache and situation.flat is other.flat

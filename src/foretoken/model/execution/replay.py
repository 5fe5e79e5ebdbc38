"""Compiled layers without their graphs: what these call is recorded once per number of nodes, and replayed.

A step of decoding runs every layer over a few nodes. Between the dozen calls that do the work of a layer Python sets up
memory and finds arguments, which takes a third of the time of a step on a fast machine. Here one function in C++ makes
these calls, with the same arguments, so that results have the same bits. What differs from step to step is worked out
once per forward, for all layers: where keys and values are written, and what attends to them.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from foretoken.model.cache.storage import RaggedLayer
from foretoken.model.execution.attention import is_plain, is_seen
from foretoken.model.execution.memory import arena, scratch_address
from foretoken.model.execution.native import library
from foretoken.model.execution.packing import PackedProduct
from foretoken.model.execution.programs import Plan, Program
from foretoken.model.execution.recording import ATTENTION, Call, NotReplayableError, Recording, native_matrix

if TYPE_CHECKING:
    from foretoken.model.cache.ragged import KVCache
    from foretoken.model.execution.inductor import Segment, Source
    from foretoken.model.execution.operators import Runner
    from foretoken.model.execution.tracing import LayerGraph
    from foretoken.model.nodes import FlatNodes

logger = logging.getLogger("foretoken")

MOST_NODES = 256
"""Beyond, what Python takes is little beside the work."""

_lock = threading.RLock()


@dataclass(slots=True)
class Situation:
    """What a layer is called with beside its tensors.

    Args:
      cache: that it writes into, and its own place in it.
      flat: the nodes.
      mask: that it is given.
      kind: of attention, which the mask stands for; None for a mask of unknown kind.
    """

    cache: KVCache
    index: int
    flat: FlatNodes
    mask: torch.Tensor | None
    kind: str | None


class Replay:
    """Makes the calls of one layer without its graphs.

    Args:
      graph: of the layer; what is recorded is shared by all layers that have it.
      runners: of its products.
      tensors: that its graphs take beside products and inputs.
      inputs: numbers of its inputs that graphs need, hidden states first.
      attention: the other arguments of its attention; None without attention.

    Exactness: the bits of the graphs: the same functions are called with the same arguments.
    """

    def __init__(
        self,
        graph: LayerGraph,
        runners: Sequence[Runner],
        tensors: Sequence[torch.Tensor],
        inputs: Sequence[int],
        attention: dict[str, Any] | None,
    ) -> None:
        self._graph = graph
        self._runners = runners
        self._tensors = tensors
        self._names: list[Source] = [("input", key) for key in inputs]
        self._names += [("tensor", index) for index in range(len(tensors))]
        self._names += [("product", index) for index in range(len(runners))]
        self._known: tuple[int, list[int | None]] = (-1, [])
        self.scaling = None if attention is None else attention.get("scaling")
        self.kernels = library() if attention is None or is_plain({"dropout": 0.0, **attention}) else None

    def __call__(
        self, inputs: Sequence[torch.Tensor], situation: Situation | None, attend: Callable[..., torch.Tensor]
    ) -> torch.Tensor | None:
        """The hidden states (1, S, H) that the layer returns, or None where its calls cannot be replayed.

        Args:
          inputs: that the graphs need, contiguous.
          situation: None without attention.
          attend: runs attention over the situation, query, key and value, for a recording.
        """
        if not self.is_possible:
            return None
        num_nodes = inputs[0].shape[1]
        program = self.program(num_nodes)
        if program is not None:
            return self._run(program, inputs, situation)
        if num_nodes > MOST_NODES or num_nodes in self._graph.programs:
            return None
        with _lock:
            return self._record(num_nodes, inputs, situation, attend)

    @property
    def is_possible(self) -> bool:
        """Whether anything can be replayed now."""
        return self.kernels is not None and not is_seen()

    def program(self, num_nodes: int) -> Program | None:
        """The calls over so many nodes; None where they are not recorded, or cannot be."""
        return self._graph.programs.get(num_nodes)

    def _run(
        self, program: Program, inputs: Sequence[torch.Tensor], situation: Situation | None
    ) -> torch.Tensor | None:
        threads = torch.get_num_threads()
        out = torch.empty(program.shape, dtype=program.dtype)
        addresses = out.data_ptr(), *[tensor.data_ptr() for tensor in inputs]
        prepared = self.prepared(program, situation, arena.address(program.num_bytes), addresses, threads)
        if prepared is None:
            return None
        numbers, plan = prepared
        pointers, products = (ctypes.c_void_p * len(numbers))(*numbers), [runner.run for runner in self._runners]
        program.run(self.kernels, pointers, plan, products, threads)  # type: ignore[arg-type]
        return out

    def prepared(
        self, program: Program, situation: Situation | None, room: int, addresses: Sequence[int], threads: int
    ) -> tuple[list[int | None], Plan | None] | None:
        """The pointers of a replay, and what layers have in common; None where the calls cannot be made.

        Args:
          room: address of working memory.
          addresses: of the output and the inputs.
        """
        keys = values = scratch = 0
        plan = None
        if situation is not None:
            layers = situation.cache.layers
            layer: Any = layers[situation.index] if situation.index < len(layers) else None
            if type(layer) is not RaggedLayer or not layer.is_initialized:
                return None
            plan = self.plan(program, situation, threads)
            if plan is None:
                return None
            first, scratch = situation.cache.window.first_row, scratch_address(plan.scratch)
            keys = layer.keys.data_ptr() + first * layer.keys.stride(0) * layer.keys.itemsize
            values = layer.values.data_ptr() + first * layer.values.stride(0) * layer.values.itemsize
        out, *inputs = addresses
        numbers = self.pointers(program, (room, out, keys, values, scratch), inputs)
        return None if numbers is None else (numbers, plan)

    def pointers(self, program: Program, places: Sequence[int], inputs: Sequence[int]) -> list[int | None] | None:
        """Those of a replay; None where other than the library's own kernels run a product now.

        Args:
          places: working memory, output, keys, values and scratch.
        """
        matrices = self._matrix_addresses()
        if any(matrices[number] is None for number in program.native):
            return None
        tensors = [tensor.data_ptr() for tensor in self._tensors]
        return [*places, *inputs, *tensors, *matrices]

    def _matrix_addresses(self) -> list[int | None]:
        """Those of the matrices by which products run now; weights may have been packed again since."""
        num_packed, addresses = self._known
        if num_packed != PackedProduct.num_packed:
            num_packed = PackedProduct.num_packed
            matrices = [native_matrix(runner.run) for runner in self._runners]
            addresses = [None if matrix is None else matrix.address for matrix in matrices]
            self._known = num_packed, addresses
        return addresses

    def plan(self, program: Program, situation: Situation, threads: int) -> Plan | None:
        """What all layers of a forward that are like this one have in common; None where that cannot be replayed."""
        query, flat, layer = program.query, situation.flat, situation.cache.layers[situation.index]
        assert query is not None
        kind = situation.kind
        layout = query.shape, query.stride(), layer.keys.stride(), layer.values.stride(), layer.keys.dtype
        key = kind, layout, self.scaling, threads
        if key not in flat.plans:
            flat.plans[key] = None
            if kind is not None and _is_few(flat):
                window = situation.cache.window
                keys, values = layer.keys[window.first_row :], layer.values[window.first_row :]
                with suppress(NotReplayableError):
                    flat.plans[key] = Plan(query, keys, values, flat, kind, window, self.scaling, threads)
        plan: Plan | None = flat.plans[key]
        return plan

    def _record(
        self,
        num_nodes: int,
        inputs: Sequence[torch.Tensor],
        situation: Situation | None,
        attend: Callable[..., torch.Tensor],
    ) -> torch.Tensor | None:
        """Run the layer as its graphs do, write down what they call, and see whether that gives the same."""
        if situation is not None and not _is_few(situation.flat):
            return None
        self._graph.programs[num_nodes] = None
        tensors = zip(self._names, (*inputs, *self._tensors), strict=False)
        given = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors}
        recording = Recording(given, {runner.number: index for index, runner in enumerate(self._runners)})
        try:
            states, query = self._watch(recording, num_nodes, situation, attend)
            program = Program(recording, self._names, states, query)
        except NotReplayableError as error:
            logger.debug("layers run their graphs over %d nodes: %s", num_nodes, error)
            return None
        again = self._run(program, inputs, situation)
        if again is None or not torch.equal(again.view(torch.uint8), states.view(torch.uint8)):
            logger.debug("layers run their graphs over %d nodes: their calls alone give something else", num_nodes)
            return None
        self._graph.programs[num_nodes] = program
        return again

    def _watch(
        self,
        recording: Recording,
        num_nodes: int,
        situation: Situation | None,
        attend: Callable[..., torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hidden states and query of a recorded run."""
        values: Sequence[torch.Tensor] = ()
        query = attended = None

        def filled(segment: Segment) -> list[Any]:
            def value(source: Source) -> Any:
                kind, key = source
                known = {"nodes": num_nodes, "attended": attended}
                if kind == "product":
                    return self._runners[key].number
                if kind == "value":
                    return values[key - 3]
                return known[kind] if kind in known else recording.given[source]

            return list(map(value, segment.sources))

        before, after = self._graph.before, self._graph.after
        if before is not None:
            query, key, value, *values = recording.run(before.run, filled(before))
            result = attend(situation, query, key, value)
            attended = recording.empty(*result.shape, dtype=result.dtype)
            attended.copy_(result)
            recording.calls.append(_attention_call(recording, query, key, value, attended))
        (states,) = recording.run(after.run, filled(after))
        return states, query


def _attention_call(
    recording: Recording, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attended: torch.Tensor
) -> Call:
    """Query (1, H_q, S, D), key and value (1, H_kv, S, D) -> attended (1, S, H_q, D_v)."""
    if {query.dtype, key.dtype, value.dtype} != {attended.dtype} or key.stride(3) != 1 or value.stride(3) != 1:
        raise NotReplayableError("keys and values are not laid out as the cache is")
    places = [recording.address(tensor) for tensor in (query, key, value, attended)]
    strides = key.stride(2), key.stride(1), value.stride(2), value.stride(1)
    numbers = *strides, key.shape[1], key.shape[3], value.shape[3], key.itemsize
    return Call(ATTENTION, (*places, *((None, number) for number in numbers)))


def _is_few(flat: FlatNodes) -> bool:
    return all(group.few is not None and group.few.is_few for group in flat.groups)

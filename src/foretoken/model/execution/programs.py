"""Calls of a compiled layer that are made in a row, without Python between them.

A step of decoding runs every layer over a few nodes. Between the dozen calls that do the work of a layer (see
`recording`) Python sets up memory and finds arguments, which takes a third of the time of a step on a fast machine.
Here one function in C++ makes these calls, with the same arguments, so that results have the same bits. What differs
from step to step is worked out once per forward, for all layers: where keys and values are written, and what attends
to them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from foretoken.model.execution.memory import LINE
from foretoken.model.execution.native import Library
from foretoken.model.execution.recording import (
    MOST_OPERANDS,
    PRODUCT,
    Address,
    Call,
    Foreign,
    NotReplayableError,
    Recording,
)

if TYPE_CHECKING:
    from foretoken.model.cache.storage import Window
    from foretoken.model.nodes import FlatNodes

ARENA, OUT, KEYS, VALUES, SCRATCH = range(5)
"""The first places in the pointers of a replay; the memory that a recording was given comes behind them."""


class _Operand(ctypes.Structure):
    _fields_ = (("base", ctypes.c_int64), ("offset", ctypes.c_int64))


class _Step(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int64), ("kernel", ctypes.c_void_p), ("operands", _Operand * MOST_OPERANDS))


class _Group(ctypes.Structure):
    _fields_ = (
        ("call", ctypes.c_void_p),
        ("mask", ctypes.c_void_p),
        ("first_node", ctypes.c_int64),
        ("first_row", ctypes.c_int64),
    )


class _Rows(ctypes.Structure):
    _fields_ = (
        ("nodes", ctypes.c_int64),
        ("rows", ctypes.c_void_p),
        ("columns", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("key_row", "key_head", "value_row", "value_head", "num_groups")),
        ("groups", ctypes.c_void_p),
    )


class Part(ctypes.Structure):
    """Steps that are made in a row, and the addresses of their pointers and rows."""

    _fields_ = (
        ("steps", ctypes.c_void_p),
        ("num_steps", ctypes.c_int64),
        ("pointers", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
    )


class Plan:
    """What the layers of one forward have in common: where they write keys and values, and what attends to them.

    Args:
      query: (1, H_q, S, D); its layout counts.
      keys, values: of the rows in work, (R, H_kv, T, D) and (R, H_kv, T, D_v); their layout counts.
      kind: of attention, which chooses the masks.

    Raises: NotReplayableError where groups of rows are not for the library's own kernels.
    """

    def __init__(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        flat: FlatNodes,
        kind: str,
        window: Window,
        scaling: float | None,
        threads: int,
    ) -> None:
        self.scratch = 0
        groups = (_Group * len(flat.groups))()
        self._kept: list[Any] = [groups]
        for place, group in zip(groups, flat.groups, strict=True):
            mask = group.masks[kind]
            known = None if group.few is None else group.few.call(query, keys, values, mask, scaling, threads)
            if known is None:
                raise NotReplayableError("attention does not run by the library's own kernels")
            call, scratch = known
            self._kept += [call, mask]
            self.scratch = max(self.scratch, scratch)
            place.call, place.mask = ctypes.addressof(call), None if mask is None else mask.data_ptr()
            place.first_node, place.first_row = group.nodes.start, group.rows.start
        places = window.places()
        self._kept += places
        rows, columns = (tensor.data_ptr() for tensor in places)
        key_strides, value_strides = keys.stride()[:2], values.stride()[:2]
        self._rows = _Rows(
            query.shape[2], rows, columns, *key_strides, *value_strides, len(groups), ctypes.addressof(groups)
        )
        self.address = ctypes.addressof(self._rows)


class Program:
    """The calls of a layer over a number of nodes.

    Args:
      names: of the memory that was given to the recording, in the order of the pointers.
      output: hidden states (1, S, H), as the recorded calls have written them.
      query: (1, H_q, S, D), as they have computed it; None without attention.

    Attributes:
      address, num_steps: of its steps, as C++ takes them.
      is_native: whether no product runs in Python.
      native: numbers of the products that the library's own kernels run.

    Raises: NotReplayableError where the output is not memory of its own.
    """

    def __init__(
        self, recording: Recording, names: Sequence[Any], output: torch.Tensor, query: torch.Tensor | None
    ) -> None:
        result, offset = recording.address(output)
        if not isinstance(result, int) or offset or not output.is_contiguous():
            raise NotReplayableError("what a graph returns does not lie by itself")
        if recording.buffers[result].untyped_storage().nbytes() != output.nbytes:
            raise NotReplayableError("what a graph returns is part of something else")
        self.shape, self.dtype, self.query = output.shape, output.dtype, query
        self._bases: dict[Any, tuple[int, int]] = {name: (place, 0) for place, name in enumerate(names, SCRATCH + 1)}
        self._bases[result] = OUT, 0
        self.num_bytes = self._lay_out(recording, result)
        self._steps = (_Step * len(recording.calls))()
        for step, call in zip(self._steps, recording.calls, strict=True):
            step.kind, step.kernel = call.kind, call.kernel
            for place, address in enumerate(call.operands):
                step.operands[place] = _Operand(*self._resolved(address))
        self.address, self.num_steps = ctypes.addressof(self._steps), len(self._steps)
        self._parts = list(self._divided(recording.calls))
        native = [call for call in recording.calls if call.kind == PRODUCT and call.foreign is None]
        self.is_native = all(foreign is None for _, _, foreign in self._parts)
        self.native = tuple(call.operands[0][0][1] for call in native)

    def _resolved(self, address: Address) -> tuple[int, int]:
        name, offset = address
        if name is None:
            return -1, offset
        base, first = self._bases[name]
        return base, first + offset

    def _lay_out(self, recording: Recording, result: int) -> int:
        """Find a place in working memory for every buffer, beside all that are needed at the same time."""
        spans: dict[int, range] = {}
        for number, call in enumerate(recording.calls):
            for name, _ in call.operands:
                if isinstance(name, int):
                    spans[name] = range(spans.get(name, range(number, 0)).start, number + 1)
        placed: list[tuple[int, int, range]] = []
        for name, span in sorted(spans.items(), key=lambda item: item[1].start):
            if name == result:
                continue
            size = -(-recording.buffers[name].untyped_storage().nbytes() // LINE) * LINE
            first = 0
            for start, end, other in sorted(placed, key=lambda place: place[0]):
                is_beside = other.start < span.stop and span.start < other.stop
                if is_beside and start < first + size and first < end:
                    first = end
            placed.append((first, first + size, span))
            self._bases[name] = ARENA, first
        return max((end for _, end, _ in placed), default=0)

    @staticmethod
    def _divided(calls: Sequence[Call]) -> Iterator[tuple[int, int, Foreign | None]]:
        """Calls that C++ makes in a row, by first and number, and those of foreign products by themselves."""
        first = 0
        for number, call in enumerate(calls):
            if call.foreign is not None:
                if number > first:
                    yield first, number - first, None
                yield number, 1, call.foreign
                first = number + 1
        if len(calls) > first:
            yield first, len(calls) - first, None

    def run(self, library: Library, pointers: Any, plan: Plan | None, products: Sequence[Any], threads: int) -> None:
        """Make the calls.

        Args:
          pointers: array of addresses: of working memory, output, keys, values and scratch, and of what `names` stand
            for.
          products: of the layer, for those that Python runs.
        """
        rows, place = None if plan is None else plan.address, ctypes.addressof(pointers)
        for first, count, foreign in self._parts:
            if foreign is None:
                part = Part(self.address + first * ctypes.sizeof(_Step), count, place, rows)
                library.replay(ctypes.addressof(part), 1, threads)
                continue
            operands = self._steps[first].operands
            x, out = _address(operands[1], pointers), _address(operands[3], pointers)
            result = products[foreign.number](_tensor(x, foreign.shape, foreign.dtype))
            _tensor(out, foreign.out_shape, foreign.dtype).copy_(result)


def _address(operand: _Operand, pointers: Any) -> int:
    first: int = pointers[operand.base] if operand.base >= 0 else 0
    return first + int(operand.offset)


def _tensor(address: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """What lies there, as a tensor; valid as long as the memory is."""
    memory = (ctypes.c_char * (shape.numel() * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(shape)

"""Lowering of a traced graph to a native program: operations on the numbers of a node, products, and attention.

A graph of torch operators is a layer, or the part before or after the layers. Every tensor in it has at most one
dimension that counts nodes. The other dimensions are the numbers of one node, which lie side by side in memory.
Operators that only move numbers (views, slices, transpositions) cost nothing. ``program.h`` describes the input of the
kernels.

Exactness: operators are computed in float32 without rounding in between. Hidden states, keys and values, and inputs
and outputs of products are rounded to the dtype of the model.
"""

from __future__ import annotations

import base64
import ctypes
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import fx

from foredraft.model.execution.operators import attention, grouped_product, product
from foredraft.native import abi
from foredraft.native.library import KINDS

aten = torch.ops.aten

Source: TypeAlias = tuple[str, Any]
"""Source of a graph input: ("nodes", None), ("product", index), ("tensor", index) or ("input", index)."""

NODES_HINT = 9973
"""Number of nodes used while a model is traced. No other dimension has this size, so a use of the number as a constant
is detected.
"""

LINE = 64
"""Alignment in bytes. Memory of all nodes begins at a multiple of it, for any number of nodes."""


class NotTraceableError(Exception):
    """Raised if a model does something that no program can express."""


@dataclass(frozen=True)
class Heads:
    """Sizes of an attention: number of key heads, query heads per key head, and sizes of a key and of a value."""

    heads: int
    group: int
    size: int
    value_size: int


class Program:
    """The steps of a graph.

    Attributes:
      inputs: numbers of the inputs that it reads, in the order of their places.
      given: sources of the other data that steps read: weights, matrices, and the constants of the graph.
      heads: sizes of its attention; None without attention.
      output_sizes: number of elements per node of each output.
      in_tuple: length of the tuple that the layer returns; None for a single tensor.
      is_stored: whether a file contains the program; see `stored_programs`.
    """

    def __init__(
        self,
        bases: Sequence[abi.Base],
        operations: Sequence[abi.Operation],
        steps: Sequence[abi.Step],
        scratch: int,
        memory: int,
        inputs: Sequence[int],
        given: Sequence[Source],
        constants: torch.Tensor,
        heads: Heads | None,
        output_sizes: Sequence[int],
    ) -> None:
        self.inputs = tuple(inputs)
        self.given = tuple(given)
        self.constants = constants
        self.heads = heads
        self.output_sizes = tuple(output_sizes)
        self.in_tuple: int | None = None
        self.is_stored = False
        self._kept = (
            (abi.Base * len(bases))(*bases),
            (abi.Operation * len(operations))(*operations),
            (abi.Step * len(steps))(*steps),
        )
        self._fields = abi.Program(
            *[ctypes.addressof(each) for each in self._kept], len(bases), len(steps), scratch, memory
        )
        self.address = ctypes.addressof(self._fields)

    def as_dict(self) -> dict[str, Any]:
        """Content for a file; see `from_dict`."""
        arrays = [base64.b64encode(bytes(each)).decode() for each in self._kept]
        return {
            "arrays": arrays,
            "scratch": self._fields.scratch,
            "memory": self._fields.memory,
            "inputs": self.inputs,
            "given": self.given,
            "constants": base64.b64encode(self.constants.numpy().tobytes()).decode(),
            "heads": None if self.heads is None else astuple(self.heads),
            "output_sizes": self.output_sizes,
            "in_tuple": self.in_tuple,
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Program:
        """Make the program that `as_dict` has written."""
        kinds = abi.Base, abi.Operation, abi.Step
        arrays: list[Any] = []
        for kind, text in zip(kinds, content["arrays"], strict=True):
            data = base64.b64decode(text)
            arrays.append((kind * (len(data) // ctypes.sizeof(kind))).from_buffer_copy(data))
        bases, operations, steps = arrays
        program = cls(
            bases,
            operations,
            steps,
            content["scratch"],
            content["memory"],
            content["inputs"],
            [(kind, key) for kind, key in content["given"]],
            torch.frombuffer(bytearray(base64.b64decode(content["constants"])), dtype=torch.float32),
            None if content["heads"] is None else Heads(*content["heads"]),
            content["output_sizes"],
        )
        program.in_tuple, program.is_stored = content["in_tuple"], True
        return program


@dataclass(frozen=True)
class View:
    """Numbers of each node, or the same numbers for all nodes.

    Args:
      base: index of the memory that contains them.
      offset, shape, strides: layout in elements, without the dimension of nodes.
      node_dim: place of the dimension of nodes; None without one.
      value: value of a constant that is not in memory yet; None otherwise.
    """

    base: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    node_dim: int | None
    value: float | None = None

    @property
    def is_contiguous(self) -> bool:
        return all(
            size == 1 or stride == wanted
            for size, stride, wanted in zip(self.shape, self.strides, _strides(self.shape), strict=True)
        )

    def dims(self) -> list[tuple[int, int]]:
        """Return sizes and strides, with size 1 in the dimension of nodes."""
        dims = list(zip(self.shape, self.strides, strict=True))
        if self.node_dim is not None:
            dims.insert(self.node_dim, (1, 0))
        return dims

    def over(self, dims: Sequence[tuple[int, int]], node_dim: int | None, offset: int = 0) -> View:
        """Return the same numbers with other dimensions, including that of the nodes."""
        kept = [each for place, each in enumerate(dims) if place != node_dim]
        shape, strides = tuple(size for size, _ in kept), tuple(stride for _, stride in kept)
        return replace(self, offset=self.offset + offset, shape=shape, strides=strides, node_dim=node_dim)


class Lowering:
    """Lowers a graph to a program.

    Args:
      graph: graph whose placeholders have sources, and whose tensors have at most one dimension of nodes.
      source_of: source of every placeholder.
      outputs: nodes that the program returns.
      dtypes: dtype of every product, by its index.
      leaves: further nodes that are inputs, with their input numbers.

    Raises: NotTraceableError for anything that no program can express.
    """

    def __init__(
        self,
        graph: fx.Graph,
        source_of: Mapping[fx.Node, Source],
        outputs: Sequence[fx.Node],
        dtypes: Sequence[torch.dtype],
        leaves: Mapping[fx.Node, int] | None = None,
    ) -> None:
        self._graph = graph
        self._source_of = source_of
        self._outputs = outputs
        self._dtypes = dtypes
        self._leaves = leaves or {}
        self._bases: list[abi.Base] = []
        self._spans: dict[int, list[int]] = {}  # first and last step that needs the memory, by base
        self._operations: list[abi.Operation] = []
        self._steps: list[abi.Step] = []
        self._inputs = [0]  # the first place is for hidden states
        self._given: list[Source] = [("constants", None)]
        self._constants: list[float] = []
        self._views: dict[fx.Node, Any] = {}
        self._loaded: dict[View, View] = {}  # float32 copies in this run of operations
        self._scratch = self._most_scratch = 0
        self._first = 0  # first operation of this run
        self._heads: Heads | None = None
        self._scratch_base = self._base(abi.SCRATCH, 0, torch.float32, 0)
        self._constant_base = self._base(abi.GIVEN, 0, torch.float32, 0)

    def program(self) -> Program:
        """Lower the graph."""
        needed = {*self._outputs}.union(*(ancestors(node, self._leaves) for node in self._outputs))
        body = [node for node in self._graph.nodes if node in needed]
        self._run_of, run = {}, 0
        for node in body:
            self._run_of[node] = run
            run += node.target in _STEPS
        self._last_run = self._lasting(body)
        self._homes = {node: number for number, node in enumerate(self._outputs)}
        for node in body:
            self._lower(node)
        for number, node in enumerate(self._outputs):
            self._return(number, node)
        self._close_run()
        memory = self._lay_out()
        return Program(
            self._bases,
            self._operations,
            self._steps,
            self._most_scratch,
            memory,
            self._inputs,
            self._given,
            torch.tensor(self._constants or [0.0], dtype=torch.float32),
            self._heads,
            [math.prod(self._views[node].shape) for node in self._outputs],
        )

    # ---- what is needed, and for how long ---------------------------------------------------------------------------

    def _lasting(self, body: Sequence[fx.Node]) -> dict[fx.Node, int]:
        """Return for each node the last run of operations that reads its result, directly or through a view."""
        last: dict[fx.Node, int] = {}
        for node in reversed(body):
            users = [user for user in node.users if user in self._run_of]
            end = max((self._run_of[user] for user in users), default=self._run_of[node])
            moved = max((last[user] for user in users if only_moves(user)), default=end)
            last[node] = max(end, moved, len(self._run_of) if node in self._outputs else 0)
        return last

    # ---- memory -----------------------------------------------------------------------------------------------------

    def _base(self, role: int, place: int, dtype: torch.dtype, num_numbers: int) -> int:
        if dtype not in KINDS:
            raise NotTraceableError(f"the model computes in {dtype}")
        self._bases.append(abi.Base(role, place, KINDS[dtype], num_numbers * dtype.itemsize))
        return len(self._bases) - 1

    def _memory(self, dtype: torch.dtype, num_numbers: int) -> int:
        base = self._base(abi.MEMORY, 0, dtype, num_numbers)
        self._spans[base] = [len(self._steps), len(self._steps)]
        return base

    def _dtype(self, base: int) -> torch.dtype:
        return next(dtype for dtype, kind in KINDS.items() if kind == self._bases[base].kind)

    def _touch(self, base: int) -> None:
        if base in self._spans:
            self._spans[base][1] = len(self._steps)

    def _new(self, node: fx.Node | None, shape: tuple[int, ...], node_dim: int | None) -> View:
        """Return memory for the result of a node: its final place if the result has that format, scratch otherwise."""
        size = math.prod(shape)
        base, offset = self._scratch_base, self._scratch
        if node is not None and (home := self._home(node, size)) is not None:
            base, offset = home, 0
        else:
            self._scratch += -(-size // 16) * 16
            self._most_scratch = max(self._most_scratch, self._scratch)
        return View(base, offset, shape, _strides(shape), node_dim)

    def _home(self, node: fx.Node, size: int) -> int | None:
        if node in self._homes and node.meta["val"].dtype == torch.float32 and node.op == "call_function":
            return self._base(abi.OUTPUT, self._homes[node], torch.float32, size)
        return self._memory(torch.float32, size) if self._home_is_wanted(node) else None

    def _home_is_wanted(self, node: fx.Node) -> bool:
        """Return whether other steps read the result of a node."""
        is_given = any(user.target in _STEPS for user in node.users)
        return is_given or self._last_run[node] > self._run_of[node]

    def _lay_out(self) -> int:
        """Assign memory so that values needed at the same time do not overlap; return its size per node in bytes."""
        placed: list[tuple[int, int, list[int]]] = []
        for base, span in sorted(self._spans.items(), key=lambda item: item[1]):
            size = -(-self._bases[base].bytes // LINE) * LINE
            first = 0
            for start, end, other in sorted(placed, key=lambda place: place[0]):
                is_beside = other[0] <= span[1] and span[0] <= other[1]
                if is_beside and start < first + size and first < end:
                    first = end
            placed.append((first, first + size, span))
            self._bases[base].place = first
        return max((end for _, end, _ in placed), default=0)

    # ---- operations -------------------------------------------------------------------------------------------------

    def _close_run(self) -> None:
        if len(self._operations) > self._first:
            self._steps.append(abi.Step(abi.OPERATIONS, self._first, len(self._operations) - self._first))
        self._first = len(self._operations)
        self._scratch = 0
        self._loaded.clear()

    def _emit(self, code: str, out: View, first: View, second: View | None = None) -> View:
        """Emit an operation that computes ``out``; operands broadcast to its shape."""
        operands = [self._read(each) if code != "copy" else each for each in (first, second or first)]
        shape = out.shape
        strides = [out.strides, *(_broadcast(each, shape) for each in operands)]
        dims = _merged(shape, strides)
        bases = (out, *operands)
        for each in bases:
            self._touch(each.base)
        for offsets, inner in _unrolled(dims):
            op = abi.Operation(abi.CODES[code])
            op.sizes[:] = [size for size, _ in inner]
            for number, (place, view) in enumerate(zip((op.out, op.first, op.second), bases, strict=True)):
                place.base, place.offset = view.base, view.offset + offsets[number]
                place.strides[:] = [steps[number] for _, steps in inner]
            self._operations.append(op)
        return out

    def _read(self, view: View) -> View:
        """Return a view in float32, which operations need."""
        if view.value is not None:
            return self._constant(view)
        if self._dtype(view.base) == torch.float32:
            return view
        if view not in self._loaded:
            self._loaded[view] = self._emit("copy", self._new(None, view.shape, view.node_dim), view)
        return self._loaded[view]

    def _constant(self, view: View) -> View:
        assert view.value is not None
        value = float(view.value)
        if value not in self._constants:
            self._constants.append(value)
        return View(self._constant_base, self._constants.index(value), view.shape, view.strides, view.node_dim)

    def _contiguous(self, view: View, node: fx.Node | None = None) -> View:
        if view.is_contiguous and view.value is None:
            return view
        return self._emit("copy", self._new(node, view.shape, view.node_dim), self._from(view))

    def _from(self, view: View) -> View:
        """Return a view as operand of a copy."""
        return self._constant(view) if view.value is not None else view

    def _stored(self, view: View, dtype: torch.dtype) -> int:
        """Return a base that contains exactly these numbers of all nodes, side by side."""
        size = math.prod(view.shape)
        is_there = (
            view.value is None
            and view.is_contiguous
            and view.offset == 0
            and self._bases[view.base].role in (abi.MEMORY, abi.INPUT, abi.OUTPUT)
            and self._bases[view.base].bytes == size * dtype.itemsize
            and self._dtype(view.base) == dtype
        )
        if is_there:
            return view.base
        out = View(self._memory(dtype, size), 0, view.shape, _strides(view.shape), view.node_dim)
        self._emit("copy", out, self._from(view))
        return out.base

    def _return(self, number: int, node: fx.Node) -> None:
        view = self._views[node]
        if view.node_dim is None:
            raise NotTraceableError("an output is the same for all nodes")
        if self._bases[view.base].role == abi.OUTPUT and self._bases[view.base].place == number:
            return
        base = self._base(abi.OUTPUT, number, node.meta["val"].dtype, math.prod(view.shape))
        self._emit("copy", View(base, 0, view.shape, _strides(view.shape), view.node_dim), self._from(view))

    # ---- nodes of the graph -----------------------------------------------------------------------------------------

    def _lower(self, node: fx.Node) -> None:
        if node in self._leaves:
            self._views[node] = self._input(node, self._leaves[node])
        elif node.op == "placeholder":
            self._place(node)
        elif node.op == "call_function" and node.target in _LOWERED:
            self._views[node] = _LOWERED[node.target](self, node)
            if str(node.target).endswith(("_.Tensor", "_.Scalar")):  # in place
                self._views[node.args[0]] = self._views[node]  # type: ignore[index]
        else:
            raise NotTraceableError(f"the model calls {node.target}, for which there is no kernel")

    def _place(self, node: fx.Node) -> None:
        if node not in self._source_of:
            raise NotTraceableError("a layer computes with tokens, positions, or results of other layers")
        kind, key = self._source_of[node]
        if kind == "nodes":
            return
        if kind == "product":
            self._views[node] = key
        elif kind == "input":
            self._views[node] = self._input(node, key)
        else:
            val = node.meta["val"]
            if not val.is_contiguous():
                raise NotTraceableError("the model has a tensor that is not contiguous")
            base = self._base(abi.GIVEN, self._give((kind, key)), val.dtype, 0)
            shape = tuple(map(int, val.shape))
            self._views[node] = View(base, 0, shape, _strides(shape), None)

    def _input(self, node: fx.Node, number: int) -> View:
        shape, node_dim = dims_of(node)
        if node_dim is None:
            raise NotTraceableError("a layer has an input without a dimension of nodes")
        if number not in self._inputs:
            self._inputs.append(number)
        base = self._base(abi.INPUT, self._inputs.index(number), node.meta["val"].dtype, math.prod(shape))
        return View(base, 0, shape, _strides(shape), node_dim)

    def _give(self, source: Source) -> int:
        if source not in self._given:
            self._given.append(source)
        return self._given.index(source)

    def _view(self, value: Any) -> View:
        if isinstance(value, fx.Node):
            found = self._views[value]
            if not isinstance(found, View):
                raise NotTraceableError("the model computes with the number of nodes")
            return found
        if isinstance(value, (int, float)):
            return View(self._constant_base, 0, (), (), None, float(value))
        raise NotTraceableError(
            f"the model computes with an argument that is neither a tensor nor a number: {value!r:.80}"
        )

    def _apply(self, code: str, node: fx.Node | None, *operands: View) -> View:
        """Lower an elementwise operator."""
        shape, node_dim = _together(operands)
        aligned = [_aligned(each, len(shape) + (node_dim is not None), node_dim) for each in operands]
        return self._emit(code, self._new(node, shape, node_dim), *aligned)

    def _elementwise(self, node: fx.Node, code: str) -> View:
        return self._apply(code, node, *(self._view(value) for value in node.args))

    def _with_alpha(self, node: fx.Node, code: str) -> View:
        first, second = (self._view(value) for value in node.args[:2])
        alpha = node.kwargs.get("alpha", node.args[2] if len(node.args) > 2 else 1)
        if alpha != 1:
            second = self._apply("mul", None, second, self._view(alpha))
        return self._apply(code, node, first, second)

    def _power(self, node: fx.Node) -> View:
        x, power = self._view(node.args[0]), _args(node)[1]
        if power == 2:
            return self._apply("mul", node, x, x)
        if power == 3:
            return self._apply("mul", node, self._apply("mul", None, x, x), x)
        codes = {0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}
        if power not in codes:
            raise NotTraceableError(f"the model computes the power {power}, for which there is no kernel")
        return self._apply(codes[power], node, x)

    def _gelu(self, node: fx.Node) -> View:
        is_tanh = node.kwargs.get("approximate", node.args[1] if len(node.args) > 1 else "none") == "tanh"
        return self._apply("gelu_tanh" if is_tanh else "gelu", node, self._view(node.args[0]))

    def _clamp(self, node: fx.Node) -> View:
        low, high = (*node.args[1:], None, None)[:2]
        found = self._view(node.args[0])
        for code, limit in (("maximum", node.kwargs.get("min", low)), ("minimum", node.kwargs.get("max", high))):
            if limit is not None:
                found = self._apply(code, None, found, self._view(limit))
        return self._apply("copy", node, found)

    def _sum(self, x: View, dims: Sequence[int], code: str = "sum") -> View:
        """Sum over some dimensions, which remain with size 1, or reduce them by another operation."""
        rank = len(x.shape) + 1
        places = {dim % rank for dim in dims}
        if x.node_dim is None or x.node_dim in places:
            raise NotTraceableError("the model sums over nodes")
        summed = {place - (place > x.node_dim) for place in places}
        kept = [place for place in range(len(x.shape)) if place not in summed]
        order = [*kept, *sorted(summed)]
        moved = replace(
            x, shape=tuple(x.shape[i] for i in order), strides=tuple(x.strides[i] for i in order), node_dim=0
        )
        moved = self._read(self._contiguous(moved))
        count = math.prod(x.shape[place] for place in summed)
        outer = tuple(x.shape[place] for place in kept)
        rows = math.prod(outer)
        out = self._new(None, (rows, 1), 0)
        self._emit_over(code, (rows, count), (out, (1, 0)), (moved, (count, 1)))
        shape = tuple(1 if place in summed else size for place, size in enumerate(x.shape))
        return replace(out, shape=shape, strides=_strides(shape), node_dim=x.node_dim)

    def _emit_over(self, code: str, sizes: tuple[int, int], *operands: tuple[View, tuple[int, int]]) -> None:
        """Emit an operation over the last of two dimensions.

        Args:
          sizes: rows, and numbers of a row.
          operands: result, first operand, and second operand if there is one, each with strides of both dimensions.
        """
        op = abi.Operation(abi.CODES[code])
        op.sizes[:] = (1, *sizes)
        given = operands if len(operands) > 2 else (*operands, operands[1])
        for place, (view, steps) in zip((op.out, op.first, op.second), given, strict=True):
            place.base, place.offset, place.strides[:] = view.base, view.offset, (0, *steps)
            self._touch(view.base)
        self._operations.append(op)

    def _softmax(self, node: fx.Node) -> View:
        x, dim, *_ = _args(node)
        x = self._view(x)
        powers = self._apply("exp", None, self._apply("sub", None, x, self._sum(x, [dim], "peak")))
        return self._apply("div", node, powers, self._sum(powers, [dim]))

    def _top(self, node: fx.Node) -> tuple[View, View]:
        """Lower the largest numbers of the last dimension and their places, which are numbers in float32."""
        given: list[Any] = [*_args(node)]
        given += (-1, True, True)[len(given) - 2 :]
        x, count, dim, is_largest = self._read(self._contiguous(self._view(given[0]))), *given[1:4]
        size, rows = x.shape[-1], math.prod(x.shape[:-1])
        if x.node_dim is None or x.node_dim == len(x.shape) or dim % (len(x.shape) + 1) != len(x.shape):
            raise NotTraceableError("the model selects the largest numbers of several nodes")
        if not is_largest:
            raise NotTraceableError("the model selects the smallest numbers")
        order = self._new(None, x.shape, x.node_dim)
        self._emit_over("order", (rows, size), (order, (size, 1)), (x, (size, 1)))
        first = self._cut(order, len(x.shape), 0, count)
        values, places = (self._new(node, first.shape, x.node_dim) for _ in range(2))
        self._emit_over("gather", (rows, count), (values, (count, 1)), (order, (size, 1)), (x, (size, 1)))
        return values, self._emit("copy", places, first)

    def _gathered(self, node: fx.Node) -> View:
        """Lower the selection of numbers of the last dimension by their places."""
        source, dim, places = _args(node)[:3]
        values, chosen = (self._read(self._contiguous(self._view(each))) for each in (source, places))
        rank = len(values.shape)
        if values.node_dim in (None, rank) or dim % (rank + 1) != rank or chosen.shape[:-1] != values.shape[:-1]:
            raise NotTraceableError("the model selects numbers of other nodes")
        (count, size), rows = (chosen.shape[-1], values.shape[-1]), math.prod(values.shape[:-1])
        out = self._new(node, chosen.shape, values.node_dim)
        self._emit_over("gather", (rows, count), (out, (count, 1)), (chosen, (count, 1)), (values, (size, 1)))
        return out

    def _mean(self, x: View, dims: Sequence[int]) -> View:
        rank = len(x.shape) + 1
        places = [dim % rank for dim in dims]
        count = math.prod(x.dims()[place][0] for place in places)
        return self._apply("div", None, self._sum(x, dims), self._view(count))

    def _reduced(self, node: fx.Node, reduce: Callable[[View, Sequence[int]], View]) -> View:
        x = self._view(node.args[0])
        dims: Any = node.args[1] if len(node.args) > 1 else None
        if dims is None:
            raise NotTraceableError("the model sums over nodes")
        found = reduce(x, dims)
        shape, node_dim = dims_of(node)
        kept = replace(found, shape=shape, strides=_strides(shape), node_dim=node_dim)
        return self._apply("copy", node, kept) if self._home_is_wanted(node) else kept

    def _layer_norm(self, node: fx.Node) -> View:
        """Lower torch's layer norm; weight and bias are optional."""
        x, size, weight, bias, epsilon = (*node.args, None, None)[:5]
        return self._normed(node, self._view(x), len(size), weight, bias, epsilon, is_centred=True)  # type: ignore[arg-type]

    def _rms_norm(self, node: fx.Node) -> View:
        x, size, weight, epsilon = (*node.args, None, None)[:4]
        if epsilon is None:
            epsilon = torch.finfo(node.args[0].meta["val"].dtype).eps  # type: ignore[union-attr]
        return self._normed(node, self._view(x), len(size), weight, None, epsilon, is_centred=False)  # type: ignore[arg-type]

    def _normed(
        self, node: fx.Node, x: View, num_dims: int, weight: Any, bias: Any, epsilon: Any, *, is_centred: bool
    ) -> View:
        dims = [-1 - dim for dim in range(num_dims)]
        if is_centred:
            x = self._apply("sub", None, x, self._mean(x, dims))
        square = self._mean(self._apply("mul", None, x, x), dims)
        scale = self._apply("rsqrt", None, self._apply("add", None, square, self._view(epsilon)))
        factors = [("mul", scale)]
        factors += [("mul", self._view(weight))] if weight is not None else []
        factors += [("add", self._view(bias))] if bias is not None else []
        for number, (code, factor) in enumerate(factors, 1):
            is_last = number == len(factors)
            x = self._apply(code, self._result(node) if is_last else None, x, factor)
        return x

    def _result(self, node: fx.Node) -> fx.Node:
        """Return the node of an operator's result; of several results, the first one."""
        users = [user for user in node.users if user.target is operator.getitem and user.args[1] == 0]
        return users[0] if users else node

    # ---- what moves numbers -----------------------------------------------------------------------------------------

    def _same(self, node: fx.Node) -> View:
        return self._view(node.args[0])

    def _item(self, node: fx.Node) -> View:
        found, index = self._views[node.args[0]], node.args[1]  # type: ignore[index]
        if isinstance(found, View):  # the result of a norm
            if index != 0:
                raise NotTraceableError("the model uses the statistics of a norm")
            return found
        return found[index]  # type: ignore[no-any-return]

    def _reshape(self, node: fx.Node) -> View:
        x = self._view(node.args[0])
        shape, node_dim = dims_of(node)
        before = math.prod(x.shape[: x.node_dim]) if x.node_dim is not None else 1
        if (x.node_dim is None) != (node_dim is None) or math.prod(shape[:node_dim] if node_dim else ()) != before:
            raise NotTraceableError("the model mixes the dimension of nodes with others")
        strides = _reshaped(x.shape, x.strides, shape)
        if strides is None:
            x = self._contiguous(x, node)
            strides = _strides(shape)
        return replace(x, shape=shape, strides=strides, node_dim=node_dim)

    def _permute(self, node: fx.Node, order: Callable[[int, fx.Node], list[int]]) -> View:
        x = self._view(node.args[0])
        dims = x.dims()
        places = order(len(dims), node)
        node_dim = None if x.node_dim is None else places.index(x.node_dim)
        return x.over([dims[place] for place in places], node_dim)

    def _unsqueeze(self, node: fx.Node) -> View:
        return self._opened(self._view(node.args[0]), _args(node)[1])

    def _opened(self, x: View, dim: int) -> View:
        """Return a view with a new dimension of size 1 before ``dim``."""
        dims = x.dims()
        place = dim % (len(dims) + 1)
        dims.insert(place, (1, 0))
        return x.over(dims, None if x.node_dim is None else x.node_dim + (place <= x.node_dim))

    def _expand(self, node: fx.Node) -> View:
        x = self._view(node.args[0])
        shape, node_dim = dims_of(node)
        if x.node_dim is None and node_dim is not None:
            raise NotTraceableError("the model repeats a tensor for every node")
        rank = len(shape) + (node_dim is not None)
        aligned = _aligned(x, rank, node_dim)
        return replace(aligned, shape=shape, strides=_broadcast(aligned, shape))

    def _slice(self, node: fx.Node) -> View:
        x, dim, start, stop, step = (*node.args, *(None,) * 4)[:5]
        return self._cut(self._view(x), dim or 0, start or 0, stop, step or 1)  # type: ignore[arg-type]

    def _cut(self, x: View, dim: int, start: int, stop: Any, step: int = 1) -> View:
        dims = x.dims()
        place = dim % len(dims)
        if place == x.node_dim:
            if start != 0 or (isinstance(stop, int) and stop < 2**31):
                raise NotTraceableError("the model drops nodes")
            return x
        size, stride = dims[place]
        first, last, step = slice(start, stop, step).indices(size)
        dims[place] = len(range(first, last, step)), stride * step
        return x.over(dims, x.node_dim, first * stride)

    def _select(self, node: fx.Node) -> View:
        return self._pick(self._view(node.args[0]), *_args(node)[1:3])

    def _pick(self, x: View, dim: int, index: int) -> View:
        dims = x.dims()
        place = dim % len(dims)
        if place == x.node_dim:
            raise NotTraceableError("the model selects a single node")
        size, stride = dims.pop(place)
        node_dim = None if x.node_dim is None else x.node_dim - (place < x.node_dim)
        return x.over(dims, node_dim, index % size * stride)

    def _split(self, node: fx.Node) -> list[View]:
        x, sizes = self._view(node.args[0]), node.args[1]
        dim: Any = node.kwargs.get("dim", node.args[2] if len(node.args) > 2 else 0)
        size = x.dims()[dim % len(x.dims())][0]
        if isinstance(sizes, int):
            sizes = [min(sizes, size - first) for first in range(0, size, sizes)]
        ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]  # type: ignore[index, arg-type]
        return [self._cut(x, dim, end - length, end) for end, length in zip(ends, sizes, strict=True)]  # type: ignore[arg-type]

    def _unbind(self, node: fx.Node) -> list[View]:
        x = self._view(node.args[0])
        dim: Any = node.args[1] if len(node.args) > 1 else 0
        return [self._pick(x, dim, index) for index in range(x.dims()[dim % len(x.dims())][0])]

    def _cat(self, node: fx.Node) -> View:
        parts: Any = node.args[0]
        dim: Any = node.args[1] if len(node.args) > 1 else 0
        return self._joined(node, [self._view(part) for part in parts], dim)

    def _stack(self, node: fx.Node) -> View:
        args = _args(node)
        parts, dim = [self._view(part) for part in args[0]], args[1] if len(args) > 1 else 0
        return self._joined(node, [self._opened(part, dim) for part in parts], dim)

    def _joined(self, node: fx.Node, parts: Sequence[View], dim: int) -> View:
        shape, node_dim = dims_of(node)
        out = self._new(node, shape, node_dim)
        place, first = dim % (len(shape) + (node_dim is not None)), 0
        if place == node_dim or node_dim is None or any(part.node_dim != node_dim for part in parts):
            raise NotTraceableError("the model concatenates nodes")
        for part in parts:
            size = part.dims()[place][0]
            if size:
                self._emit("copy", self._cut(out, place, first, first + size), self._from(part))
            first += size
        return out

    def _filled(self, node: fx.Node, value: float) -> View:
        shape, node_dim = dims_of(node)
        return View(self._constant_base, 0, shape, (0,) * len(shape), node_dim, value)

    # ---- products and attention -------------------------------------------------------------------------------------

    def _product(self, node: fx.Node) -> View:
        x, number, size = node.args
        index: Any = self._views[number]  # type: ignore[index]
        dtype = self._dtypes[index]
        stored = self._stored(self._view(x), dtype)
        self._close_run()
        self._touch(stored)
        shape, node_dim = dims_of(node)
        step = abi.Step(abi.PRODUCT)
        is_output = node in self._homes and node.meta["val"].dtype == dtype
        out = self._base(abi.OUTPUT, self._homes[node], dtype, size) if is_output else self._memory(dtype, size)  # type: ignore[arg-type]
        step.matrix, step.input, step.output = self._give(("product", index)), stored, out
        self._steps.append(step)
        return View(step.output, 0, shape, _strides(shape), node_dim)

    def _grouped_product(self, node: fx.Node) -> View:
        x, chosen, number, num_experts, size = _args(node)
        index: Any = self._views[number]
        dtype, inputs, choices = self._dtypes[index], self._view(x), self._view(chosen)
        if inputs.node_dim != 0 or choices.node_dim != 0:
            raise NotTraceableError("the inputs of experts are not a list of nodes")
        stored, places = self._stored(inputs, dtype), self._stored(choices, torch.float32)
        self._close_run()
        self._touch(stored)
        self._touch(places)
        shape, node_dim = dims_of(node)
        step = abi.Step(abi.GROUPED_PRODUCT)
        step.matrix, step.input, step.chosen = self._give(("product", index)), stored, places
        step.num_chosen, step.num_experts = math.prod(choices.shape), num_experts
        step.has_own_inputs = len(inputs.shape) > len(choices.shape)
        step.output = self._memory(dtype, step.num_chosen * size)
        self._steps.append(step)
        return View(step.output, 0, shape, _strides(shape), node_dim)

    def _attention(self, node: fx.Node) -> View:
        if self._heads is not None:
            raise NotTraceableError("a layer calls attention more than once")
        views = [self._view(value) for value in node.args]
        dtype = node.meta["val"].dtype
        for view in views:
            if view.node_dim != 2 or view.shape[0] != 1:
                raise NotTraceableError("the inputs of attention are not heads of a list of nodes")
        (_, num_heads, size), (_, num_keys, _), (_, _, value_size) = (view.shape for view in views)
        self._heads = Heads(num_keys, num_heads // num_keys, size, value_size)
        query, key, value = (self._stored(view, dtype) for view in views)
        self._close_run()
        for base in (query, key, value):
            self._touch(base)
        shape, node_dim = dims_of(node)
        step = abi.Step(abi.ATTENTION)
        step.query, step.key, step.value, step.attended = query, key, value, self._memory(dtype, math.prod(shape))
        self._steps.append(step)
        return View(step.attended, 0, shape, _strides(shape), node_dim)


def dims_of(node: fx.Node) -> tuple[tuple[int, ...], int | None]:
    """Return the shape of a node's value without the dimension of nodes, and the place of that dimension or None.

    Raises: NotTraceableError for more than one dimension of nodes.
    """
    val = node.meta["val"]
    if isinstance(val, (tuple, list)):
        val = val[0]
    places = [place for place, size in enumerate(val.shape) if not isinstance(size, int) or size == NODES_HINT]
    if len(places) > 1 or any(not _counts_nodes(val.shape[place]) for place in places):
        raise NotTraceableError(f"a tensor has shape {tuple(val.shape)}, where more than one dimension counts nodes")
    return tuple(int(size) for place, size in enumerate(val.shape) if place not in places), next(iter(places), None)


def _counts_nodes(size: Any) -> bool:
    return isinstance(size, int) or size.node.expr.is_symbol or size.node.expr == NODES_HINT


def _args(node: fx.Node) -> Any:
    """Arguments of an operator, whose types are given by its schema."""
    return node.args


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))


def _together(views: Sequence[View]) -> tuple[tuple[int, ...], int | None]:
    """Return the shape that views broadcast to, and the place of its dimension of nodes, counted from the left."""
    rank = max(len(view.dims()) for view in views)
    places = {rank - len(view.dims()) + view.node_dim for view in views if view.node_dim is not None}
    if len(places) > 1:
        raise NotTraceableError("the model computes a tensor of shape nodes by nodes")
    node_dim = next(iter(places), None)
    sizes = [1] * rank
    for view in views:
        for place, (size, _) in enumerate(view.dims(), rank - len(view.dims())):
            sizes[place] = size if size != 1 else sizes[place]
    if node_dim is not None and sizes.pop(node_dim) != 1:
        raise NotTraceableError("the model computes a tensor of shape nodes by nodes")
    return tuple(sizes), node_dim


def _aligned(view: View, rank: int, node_dim: int | None) -> View:
    """Return a view with ``rank`` dimensions, including that of the nodes."""
    dims = [(1, 0)] * (rank - len(view.dims())) + view.dims()
    return view.over(dims, node_dim)


def _broadcast(view: View, shape: Sequence[int]) -> tuple[int, ...]:
    sizes = (1,) * (len(shape) - len(view.shape)) + view.shape
    strides = (0,) * (len(shape) - len(view.shape)) + view.strides
    return tuple(0 if size == 1 else stride for size, stride in zip(sizes, strides, strict=True))


def _merged(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> list[tuple[int, list[int]]]:
    """Merge dimensions as far as all operands allow; return sizes and the strides of each operand."""
    merged: list[tuple[int, list[int]]] = []
    for place, size in enumerate(shape):
        steps = [each[place] for each in strides]
        if size == 1:
            continue
        if merged and merged[-1][1] == [step * size for step in steps]:
            merged[-1] = merged[-1][0] * size, steps
        else:
            merged.append((size, steps))
    return merged


def _unrolled(dims: list[tuple[int, list[int]]]) -> list[tuple[list[int], list[tuple[int, list[int]]]]]:
    """Split dimensions into loops over three: offsets of each operand, and the inner dimensions."""
    if len(dims) <= 3:
        return [([0, 0, 0], [(1, [0, 0, 0])] * (3 - len(dims)) + dims)]
    size, steps = dims[0]
    return [
        ([number * step + offset for step, offset in zip(steps, offsets, strict=True)], inner)
        for number in range(size)
        for offsets, inner in _unrolled(dims[1:])
    ]


def _reshaped(shape: Sequence[int], strides: Sequence[int], wanted: Sequence[int]) -> tuple[int, ...] | None:
    """Return the strides of another shape over the same numbers in the same order; None if a view cannot express it."""
    old = [(size, stride) for size, stride in zip(shape, strides, strict=True) if size != 1]
    found: list[int] = []
    place, left, stride = len(old), 1, 1
    for size in reversed(wanted):
        if size == 1:
            found.append(0)
            continue
        if left == 1:
            place -= 1
            left, stride = old[place]
            while place > 0 and left % size and old[place - 1][1] == stride * left:  # one piece of memory
                place -= 1
                left *= old[place][0]
        while left % size or (left < size and place > 0):
            if place == 0 or old[place - 1][1] != stride * left:
                return None
            place -= 1
            left *= old[place][0]
        found.append(stride)
        left, stride = left // size, stride * size
    return tuple(reversed(found))


def ancestors(node: fx.Node, ends: Collection[fx.Node] = ()) -> set[fx.Node]:
    """Return all nodes that a node is computed from, without those that lie before ``ends``."""
    found, waiting = set[fx.Node](), [] if node in ends else [node]
    while waiting:
        for parent in waiting.pop().all_input_nodes:
            if parent not in found:
                found.add(parent)
                if parent not in ends:
                    waiting.append(parent)
    return found


def only_moves(node: fx.Node) -> bool:
    """Return whether a node returns its input numbers in another view."""
    return node.target in _MOVING


def _order_of(rank: int, node: fx.Node) -> list[int]:
    return [dim % rank for dim in _args(node)[1]]


def _swapped(rank: int, node: fx.Node) -> list[int]:
    places = list(range(rank))
    first, second = (dim % rank for dim in _args(node)[1:3])
    places[first], places[second] = places[second], places[first]
    return places


def _zeros(lowering: Lowering, node: fx.Node) -> View:
    return lowering._filled(node, 0.0)


_STEPS = product.default, grouped_product.default, attention.default
"""Operators that are steps of their own."""
_UNARY = {
    getattr(aten, name).default: name
    for name in ("neg", "abs", "relu", "exp", "sqrt", "rsqrt", "reciprocal", "sigmoid", "silu", "tanh")
}
_BINARY = {
    getattr(getattr(aten, name), kind): name.rstrip("_")
    for name in ("mul", "mul_", "div", "div_", "maximum", "minimum")
    for kind in ("Tensor", "Scalar", "default")
    if hasattr(getattr(aten, name), kind)
}
_SUMMING = {
    getattr(getattr(aten, name), kind): name.rstrip("_")
    for name in ("add", "add_", "sub", "sub_")
    for kind in ("Tensor", "Scalar")
}
_IDENTITIES = (
    *(aten.clone.default, aten.alias.default, aten.detach.default, aten._to_copy.default, aten.contiguous.default),
    *(aten.to.dtype, aten.lift_fresh_copy.default, aten.dropout.default),
)
_MOVING: dict[Any, Callable[[Lowering, fx.Node], Any]] = {
    **dict.fromkeys(_IDENTITIES, Lowering._same),
    **dict.fromkeys(
        (
            *(aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints),
            *(aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default, aten.unflatten.int),
        ),
        Lowering._reshape,
    ),
    aten.transpose.int: partial(Lowering._permute, order=_swapped),
    aten.permute.default: partial(Lowering._permute, order=_order_of),
    aten.unsqueeze.default: Lowering._unsqueeze,
    aten.expand.default: Lowering._expand,
    aten.slice.Tensor: Lowering._slice,
    aten.select.int: Lowering._select,
    aten.split.Tensor: Lowering._split,
    aten.split_with_sizes.default: Lowering._split,
    aten.unbind.int: Lowering._unbind,
    operator.getitem: Lowering._item,
}
"""Operators that return their input numbers in another view."""

_LOWERED: dict[Any, Callable[[Lowering, fx.Node], Any]] = {
    **_MOVING,
    **{target: partial(Lowering._elementwise, code=code) for target, code in (*_UNARY.items(), *_BINARY.items())},
    **{target: partial(Lowering._with_alpha, code=code) for target, code in _SUMMING.items()},
    aten.pow.Tensor_Scalar: Lowering._power,
    aten.gelu.default: Lowering._gelu,
    aten.clamp.default: Lowering._clamp,
    aten.mean.dim: lambda lowering, node: lowering._reduced(node, lowering._mean),
    aten.sum.dim_IntList: lambda lowering, node: lowering._reduced(node, lowering._sum),
    aten.native_layer_norm.default: Lowering._layer_norm,
    aten.cat.default: Lowering._cat,
    aten.stack.default: Lowering._stack,
    aten.zeros_like.default: _zeros,
    aten._softmax.default: Lowering._softmax,
    aten.topk.default: Lowering._top,
    aten.gather.default: Lowering._gathered,
    product.default: Lowering._product,
    grouped_product.default: Lowering._grouped_product,
    attention.default: Lowering._attention,
}
if hasattr(aten, "_fused_rms_norm"):
    _LOWERED[aten._fused_rms_norm.default] = Lowering._rms_norm

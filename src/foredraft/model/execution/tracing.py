"""Decoder layers traced as graphs of torch operators.

A layer is traced once, with its weights, the products of its linear layers and its number of nodes as inputs. All
layers of one build, and every number of nodes, rows and columns, therefore share a graph. Attention and products
remain calls.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx, nn

from foredraft.model.execution.attention import is_plain, seen_by
from foredraft.model.execution.builds import (
    layout_of,
    left_out,
    multiplies_in,
    native_matrix,
    plain_attributes,
    what_changed,
)
from foredraft.model.execution.calls import LayerCall, Recording, put, value_at
from foredraft.model.execution.experts import PackedRouter
from foredraft.model.execution.forwards import Rowwise, linears, replaced, replacement
from foredraft.model.execution.lowering import NODES_HINT, Lowering, NotTraceableError, Program, Source
from foredraft.model.execution.operators import attention, grouped_product, product
from foredraft.model.execution.packing import PackedExperts, PackedLinear, PackedStack, weighted_experts
from foredraft.model.execution.stored_programs import stored
from foredraft.model.sublayers import LeftOut

one_trace_at_a_time = threading.RLock()
"""Lock for tracing and compiling, during which torch replaces some of its functions for all threads."""


class Tracer:
    """Traces one layer.

    Args:
      layer: layer of a shadow; its modules are restored afterwards.
      call: recorded call of the layer.
    """

    def __init__(self, layer: nn.Module, call: LayerCall) -> None:
        self._layer = layer
        self._call = call
        every = linears(layer)
        self._linears = [linear for linear in every if not isinstance(replacement(linear), LeftOut)]
        self.runners: list[Callable[[torch.Tensor], torch.Tensor]] = []
        self.in_tuple: int | None = None  # length of the tuple that the traced layer returned
        self._shared: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.sizes: list[int] = []
        self.parts: dict[nn.Module, tuple[int, int, int]] = {}  # product, first and end column of the layer's part
        self._find_products()
        self._experts = [each for each in layer.modules() if isinstance(replacement(each), PackedExperts)]
        self._routers = [each for each in layer.modules() if isinstance(replacement(each), PackedRouter)]
        self._first_of: dict[int, int] = {}  # first product of a stack or router, by id
        for module in (*self._experts, *self._routers):
            self._add_own_products(replacement(module))
        held = {
            id(parameter)
            for module in (*every, *self._experts, *self._routers)
            for parameter in module.parameters(recurse=False)
        }
        self.tensors = [
            (module, name)
            for module in layer.modules()
            for name, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None and id(tensor) not in held
        ]

    def _find_products(self) -> None:
        numbers: dict[int, int] = {}
        for linear in self._linears:
            forward = replacement(linear) or type(linear).forward.__get__(linear)
            run: Any = forward.product if isinstance(forward, PackedLinear) else forward
            if id(run) not in numbers or not isinstance(forward, PackedLinear):
                numbers[id(run)] = len(self.runners)
                self.runners.append(run)
                self.sizes.append(run.out_features if isinstance(forward, PackedLinear) else _out_features(linear))
            first, size = 0, _out_features(linear)
            if isinstance(forward, PackedLinear):
                first = sum(run.sizes[: forward.index])
            self.parts[linear] = numbers[id(run)], first, first + size

    def _add_own_products(self, forward: PackedExperts | PackedRouter) -> None:
        """Number the products of experts or of a router."""
        stacks = [forward.gate_up, forward.down] if isinstance(forward, PackedExperts) else [forward]
        for stack in stacks:
            products = stack.products if isinstance(stack, PackedStack) else [stack.product]
            self._first_of[id(stack)] = len(self.runners)
            self.runners += products
            self.sizes += [product.out_features for product in products]

    def trace(
        self, decompositions: Any = None, num_nodes: int = NODES_HINT
    ) -> tuple[fx.Graph, dict[fx.Node, Source], Any]:
        """Return the whole layer as one graph, the sources of its inputs, and torch's fake mode with their shapes.

        Args:
          decompositions: table of operators to replace by simpler ones, with their replacements; None for none.
          num_nodes: number of nodes to optimise for; the graph accepts any number.
        Raises: NotTraceableError, and any error of the model's code while it is traced.
        """
        self._shared = {}
        options = {"num_nodes": num_nodes, "decompositions": decompositions}
        module, sources, mode = traced(self._run, self.tensors, len(self.runners), self._fake_inputs, **options)
        self._shared = {}
        graph = module.graph
        graph.eliminate_dead_code()
        if any(node.op == "get_attr" for node in graph.nodes):
            raise NotTraceableError("a layer contains constants, or changes its attention mask")
        sources += [("input", index) for index in range(len(self._call.inputs))]
        given = [node for node in graph.nodes if node.op == "placeholder"]
        return graph, dict(zip(given, sources, strict=True)), mode

    def program(self) -> Program:
        """Return the layer as a native program.

        Raises: NotTraceableError if that is not possible.
        """
        graph, source_of, _ = self.trace()
        (output,) = next(iter(reversed(graph.nodes))).all_input_nodes
        program = Lowering(graph, source_of, [output], list(map(multiplies_in, self.runners))).program()
        program.in_tuple = self.in_tuple
        return program

    def _fake_inputs(self, mode: Any, nodes: Any) -> list[torch.Tensor]:
        """Return fake tensors for the inputs of the layer."""
        found = []
        for place, dim in zip(self._call.inputs, self._call.node_dims, strict=True):
            tensor = value_at(self._call.args, self._call.kwargs, place)
            if dim is None:
                found.append(mode.from_tensor(tensor.clone(), static_shapes=True))
                continue
            sizes = [nodes if each == dim else size for each, size in enumerate(tensor.shape)]
            with mode:
                found.append(torch.empty(sizes, dtype=tensor.dtype))
        return found

    def _run(self, nodes: Any, numbers: Any, tensors: Any, inputs: Any) -> torch.Tensor:
        """Run the layer over fake tensors."""
        call = self._call
        args, kwargs = list(call.args), dict(call.kwargs)
        for place, tensor in zip(call.inputs, inputs, strict=True):
            put(args, kwargs, place, tensor)
        mask = None if call.mask is None else value_at(args, kwargs, (call.mask, None))
        written: list[torch.Tensor] = []  # keys and values that attention has not read yet

        def update(keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> Any:
            written[:] = keys, values
            return keys, values

        put(args, kwargs, (call.cache, None), SimpleNamespace(update=update))

        def attend(_: Any, query: Any, key: Any, value: Any, given: Any, **__: Any) -> torch.Tensor:
            if not written or key is not written[0] or value is not written[1] or given is not mask:
                raise NotTraceableError("its attention changes the keys, values or masks of the cache")
            written.clear()
            return attention(query, key, value)  # type: ignore[no-any-return]

        forwards: dict[nn.Module, Callable[..., Any]] = {
            linear: self._stand_in(linear, numbers) for linear in self._linears
        }
        forwards |= {each: self._experts_stand_in(replacement(each), numbers) for each in self._experts}
        forwards |= {each: self._router_stand_in(each, numbers) for each in self._routers}
        by_rows = [(each, replacement(each)) for each in self._layer.modules()]
        forwards |= {each: forward.inner for each, forward in by_rows if isinstance(forward, Rowwise)}
        with seen_by(attend), replaced(forwards), held(self.tensors, tensors):
            forward = left_out(self._layer) or type(self._layer).forward.__get__(self._layer)
            output = forward(*args, **kwargs)
        self.in_tuple = len(output) if isinstance(output, tuple) else None
        states, *others = output if isinstance(output, tuple) else (output,)
        if any(other is not None for other in others):
            raise NotTraceableError("a layer returns more than its hidden states")
        return states  # type: ignore[no-any-return]

    def _stand_in(self, linear: nn.Module, numbers: Sequence[Any]) -> Callable[[torch.Tensor], torch.Tensor]:
        index, first, last = self.parts[linear]
        size = self.sizes[index]

        def forward(x: torch.Tensor) -> torch.Tensor:
            known = self._shared.get(index)
            if known is None or known[0] is not x:
                known = self._shared[index] = x, product(x, numbers[index], size)
            return known[1] if last - first == size else known[1][..., first:last]

        return forward

    def _experts_stand_in(self, experts: PackedExperts, numbers: Sequence[Any]) -> Callable[..., torch.Tensor]:
        """Return a replacement forward of experts, which is traced with its products as calls."""

        def grouped(stack: PackedStack) -> Callable[[torch.Tensor, torch.Tensor], list[torch.Tensor]]:
            first = self._first_of[id(stack)]
            sizes = [each.out_features for each in stack.stacks]
            return lambda x, chosen: [
                grouped_product(x, chosen, numbers[first + place], stack.num_experts, size)
                for place, size in enumerate(sizes)
            ]

        return partial(weighted_experts, experts.activation.inner, grouped(experts.gate_up), grouped(experts.down))

    def _router_stand_in(self, router: nn.Module, numbers: Sequence[Any]) -> Callable[..., Any]:
        """Return a replacement forward of a router, which is traced with its product as a call."""
        number = self._first_of[id(replacement(router))]
        size, number = self.sizes[number], numbers[number]
        return partial(PackedRouter.run_with, lambda x: product(x, number, size), router)


def build_of(layer: nn.Module, tracer: Tracer) -> Any:
    """Return a key that layers with the same graph share: classes, plain attributes, shapes, and shared inputs of
    linears.

    The index of a layer is not part of it. Configs are compared by their contents. Products are compared by their dtype
    too, because a recorded call has buffers of that dtype.
    """
    parts: list[Any] = [
        tuple(
            (size, type(run).__name__, getattr(native_matrix(run), "compute_dtype", None))
            for size, run in zip(tracer.sizes, tracer.runners, strict=True)
        )
    ]
    parts.append(tuple(tracer.parts.values()))
    for path, module in layer.named_modules():
        parts.append((path, type(module), plain_attributes(module)))
    return tuple(parts)


def traced(
    run: Callable[[Any, Any, Any, Any], Any],
    places: Sequence[Place],
    num_products: int,
    others: Callable[[Any, Any], Sequence[torch.Tensor]],
    *,
    num_nodes: int = NODES_HINT,
    decompositions: Any = None,
) -> tuple[fx.GraphModule, list[Source], Any]:
    """Trace a function as a graph of torch operators, over fake tensors.

    Args:
      run: function of the number of nodes, the numbers of products, the tensors in the places, and other tensors.
      places: tensors of the model that become inputs.
      num_products: number of products.
      others: function that makes the other tensors from torch's fake mode and the number of nodes.
      num_nodes, decompositions: arguments of `Tracer.trace`.
    Returns: the graph, the sources of its inputs except the other tensors, which come last, and torch's fake mode.
    """
    from torch._dynamo.source import ConstantSource
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental import _config as fx_config
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    with (
        torch.inference_mode(False),
        torch.no_grad(),
        fx_config.patch(backed_size_oblivious=True),  # type: ignore[attr-defined]  # no special case for one node
    ):
        shapes = ShapeEnv()
        mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)

        def number(place: int) -> Any:
            """Return a symbolic integer that is an input of the graph."""
            source, hint = ConstantSource(f"foredraft_{place}"), num_nodes + place
            symbol = shapes.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
            return shapes.create_symintnode(symbol, hint=hint)

        nodes, *numbers = map(number, range(1 + num_products))
        tensors = [mode.from_tensor(getattr(*place).detach(), static_shapes=True) for place in places]
        inputs = others(mode, nodes)
        with mode, one_trace_at_a_time, _unsaid():
            graph = make_fx(lambda *given: run(*given), decompositions)(nodes, numbers, tensors, inputs)
    sources: list[Source] = [("nodes", None), *(("product", index) for index in range(num_products))]
    return graph, [*sources, *(("tensor", index) for index in range(len(places)))], mode


@contextmanager
def _unsaid() -> Iterator[None]:
    """Suppress torch's log of errors while tracing. They are raised anyway, and modules then run instead."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addFilter(_nothing)
    try:
        yield
    finally:
        logger.removeFilter(_nothing)


def _nothing(record: logging.LogRecord) -> bool:
    return False


def part_of(nodes: Iterable[fx.Node], given: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> fx.Graph:
    """Copy nodes of a graph into a new graph whose inputs are the given nodes; it returns a tuple."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in given:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    return graph


def _out_features(linear: nn.Module) -> int:
    weight: torch.Tensor = linear.weight  # type: ignore[assignment]
    return int(weight.shape[0] if isinstance(linear, nn.Linear) else weight.shape[1])


@contextmanager
def held(places: Sequence[tuple[nn.Module, str]], tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Replace the tensors in these places inside the block."""
    holders = [module._parameters if name in module._parameters else module._buffers for module, name in places]
    before = [holder[name] for holder, (_, name) in zip(holders, places, strict=True)]
    for holder, (_, name), tensor in zip(holders, places, tensors, strict=True):
        holder[name] = tensor  # type: ignore[assignment]
    try:
        yield
    finally:
        for holder, (_, name), old in zip(holders, places, before, strict=True):
            holder[name] = old  # type: ignore[assignment]


Place = tuple[nn.Module, str]
"""A tensor of a model: the module that owns it, and its name in the module."""


@dataclass(frozen=True)
class LayerProgram:
    """A decoder layer as a program.

    Args:
      key: structure of the layer; layers of the same structure share the program.
      program: program that all layers of the same build share.
      tensors, runners: its weights and its products, by number.
      module: layer of a shadow.
      call: recorded call of the layer.
      cache_index: index of its keys and values in the cache; None without attention.
      scaling: factor of the attention scores; None for 1/sqrt(D).
    """

    key: Any
    program: Program
    tensors: Sequence[Place]
    runners: Sequence[Any]
    module: nn.Module
    call: LayerCall
    cache_index: int | None
    scaling: float | None


def layer_program(recording: Recording, layer: nn.Module, index: int) -> LayerProgram:
    """Return a layer, or a changed copy of it, as a program.

    Args:
      recording: recording of the calls of all layers.
    Raises: NotTraceableError if that is not possible, and any error of the model's code.
    """
    if reason := what_changed(layer):
        raise NotTraceableError(reason)
    call, attention = recording.calls[index], recording.attention[index]
    if attention is not None and not is_plain({"dropout": 0.0, **attention[1]}):
        raise NotTraceableError("its attention is more than masked sums (a soft cap, sinks or a bias)")
    tracer = Tracer(layer, call)
    key = build_of(layer, tracer), layout_of(call)
    program = _programs.get(key)
    if program is None:
        program = _programs[key] = stored(("layer", key), Program.from_dict) or tracer.program()
    attends = program.heads is not None
    if attends and attention is None:
        raise NotTraceableError("a layer's attention did not run while the layer's call was recorded")
    cache_index = recording.cache_index[index] if attends else None
    scaling = attention[1].get("scaling") if attention is not None and attends else None
    return LayerProgram(key, program, tracer.tensors, tracer.runners, layer, call, cache_index, scaling)


_programs: dict[Any, Program] = {}
"""Programs of layers, by their build."""

"""Decoder layers that run compiled: two graphs around their attention, shared by all layers of one build.

Between the two a layer writes its keys and values into the cache and runs attention as an uncompiled layer does, so
that drafts of any shape, ragged rows, features and forwards at shapes that keep bits need nothing of their own.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from foretoken.folders import cache_folder
from foretoken.model.cache.ragged import KVCache
from foretoken.model.execution.attention import PLAIN_ARGUMENTS, SPECIAL_ARGUMENTS, grouped_sdpa, seen_by
from foretoken.model.execution.linears import RowLimit, replacement
from foretoken.model.execution.packing import PackedLinear
from foretoken.model.execution.tracing import (
    LayerCall,
    LayerGraph,
    NotTraceableError,
    Runner,
    Segment,
    Source,
    Tracer,
    value_at,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger("foretoken")

NUM_NODES = (11, 13)
"""Nodes of the forwards in which calls of layers are seen; what has these sizes counts nodes."""

TOLERANCE = 16.0
"""How far what a compiled layer adds may differ from what it adds uncompiled, in roundings of the dtype."""

MIN_WEIGHTS = 2**25
"""Smaller models are not compiled unless that is asked for: the first compilation on a machine takes ten seconds or more,
and every later one two."""

COMPILERS = ("g++", "clang++", "c++")

_graphs: dict[Any, LayerGraph] = {}
"""Graphs of this process, by the build of the layer."""


def worth_compiling(linear_layers: Iterable[nn.Module]) -> bool:
    """Whether a model with these linear layers is to be compiled by itself."""
    weights: list[torch.Tensor] = [layer.weight for layer in linear_layers]  # type: ignore[misc]
    compilers = [os.environ["CXX"]] if "CXX" in os.environ else COMPILERS
    return sum(weight.numel() for weight in weights) >= MIN_WEIGHTS and any(map(shutil.which, compilers))


class CompiledLayer:
    """The forward of one decoder layer, compiled.

    Args:
      layer: of a shadow.
      call: how it is called.
      attention: the module, and the other arguments, with which it runs attention; None if it has none.
      index: of its keys and values in the cache.
      tracer: of a layer of this build.
      limit: how many rows products take in one call.
    """

    def __init__(
        self,
        layer: nn.Module,
        call: LayerCall,
        attention: tuple[nn.Module, dict[str, Any]] | None,
        index: int | None,
        tracer: Tracer,
        graph: LayerGraph,
        limit: RowLimit,
    ) -> None:
        self.call = call
        self.attention = attention
        self.index = index
        self._limit = limit
        self._runners = [Runner(run) for run in tracer.runners]
        self._tensors = [getattr(module, name) for module, name in tracer.tensors]
        self._in_tuple = graph.in_tuple
        self._before = None if graph.before is None else _Bound(graph.before, self)
        self._after = _Bound(graph.after, self)
        self.kept_alive = layer

    def fixed(self, source: Source) -> Any:
        """An input that is the same in every call; None for others."""
        kind, key = source
        if kind == "product":
            return self._runners[key].number
        return self._tensors[key] if kind == "tensor" else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The hidden states of the next layer, as the layer returns them."""
        inputs = [value_at(args, kwargs, place) for place in self.call.inputs]
        num_nodes = inputs[0].shape[1]
        limits = self._limit.num_rows
        attended, values = None, ()
        if self._before is not None:
            query, key, value, *values = self._before(num_nodes, inputs, None, (), limits)
            attended = self._attend(args, kwargs, query, key, value)
        (states,) = self._after(num_nodes, inputs, attended, values, limits)
        return states if self._in_tuple is None else (states, *(None,) * (self._in_tuple - 1))

    def _attend(
        self, args: Any, kwargs: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        cache = value_at(args, kwargs, (self.call.cache, None))
        mask = None if self.call.mask is None else value_at(args, kwargs, (self.call.mask, None))
        keys, values = cache.layers[self.index].update(key, value)
        module, others = self.attention  # type: ignore[misc]
        output, _ = grouped_sdpa(module, query, keys, values, mask, flat_nodes=kwargs["flat_nodes"], **others)
        return output


class _Bound:
    """A segment with the inputs that belong to one layer."""

    def __init__(self, segment: Segment, layer: CompiledLayer) -> None:
        self._run = segment.run
        self._template = [layer.fixed(source) for source in segment.sources]
        self._nodes_in, self._nodes_out = segment.nodes_in, segment.nodes_out
        places = list(enumerate(segment.sources))
        self._inputs = [(place, key) for place, (kind, key) in places if kind == "input"]
        self._values = [(place, key - 3) for place, (kind, key) in places if kind == "value"]
        self._attended = [place for place, (kind, _) in places if kind == "attended"]
        self._sizes = [place for place, (kind, _) in places if kind == "nodes"]

    def __call__(
        self,
        num_nodes: int,
        inputs: Sequence[Any],
        attended: torch.Tensor | None,
        values: Sequence[torch.Tensor],
        limits: tuple[int, int] | None,
    ) -> Sequence[torch.Tensor]:
        filled = self._template.copy()
        for place, key in self._inputs:
            filled[place] = inputs[key]
        for place, key in self._values:
            filled[place] = values[key]
        for place in self._attended:
            filled[place] = attended
        if limits is None or limits[0] <= num_nodes <= limits[1]:
            for place in self._sizes:
                filled[place] = num_nodes
            return self._run(filled)
        return self._in_calls(filled, num_nodes, limits)

    def _in_calls(self, filled: list[Any], num_nodes: int, limits: tuple[int, int]) -> list[torch.Tensor]:
        """In several calls where there are too many rows, padded where there are too few."""
        fewest, most = limits
        num_calls = max(1, -(-num_nodes // most))
        bounds = [num_nodes * number // num_calls for number in range(num_calls + 1)]
        parts = []
        for first, last in zip(bounds, bounds[1:], strict=False):
            size = max(last - first, fewest)
            part = [
                value if dim is None else _rows(value, dim, first, last, size)
                for value, dim in zip(filled, self._nodes_in, strict=True)
            ]
            for place in self._sizes:
                part[place] = size
            parts.append(self._run(part))
        if num_calls == 1:
            return [
                value if dim is None else value.narrow(dim, 0, num_nodes)
                for value, dim in zip(parts[0], self._nodes_out, strict=True)
            ]
        return [
            each[0] if dim is None else torch.cat(each, dim)
            for dim, *each in zip(self._nodes_out, *parts, strict=True)
        ]


def _rows(tensor: torch.Tensor, dim: int, first: int, last: int, size: int) -> torch.Tensor:
    """Nodes ``first`` to ``last - 1``, and zeros up to ``size``; laid out as if they were all there is."""
    rows = tensor.narrow(dim, first, last - first)
    if size > last - first:
        shape = list(rows.shape)
        shape[dim] = size - (last - first)
        rows = torch.cat([rows, rows.new_zeros(shape)], dim)
    return rows.contiguous()


class Regions:
    """The compiled layers of a model.

    Args:
      cache_dir: where kernels are kept between processes; inductor/ in the cache folder by default.
      progress: called with one line before and after graphs are compiled.
    """

    def __init__(self, cache_dir: Path | str | None, progress: Callable[[str], None] | None, limit: RowLimit) -> None:
        self.cache_dir = Path(cache_dir).expanduser() if cache_dir else cache_folder("inductor")
        self.limit = limit
        self.layers: list[CompiledLayer | None] = []
        self.reason = ""
        self.compile_seconds = 0.0
        self.num_graphs = 0
        self._progress = progress

    @property
    def num_compiled(self) -> int:
        """How many layers run compiled."""
        return sum(layer is not None for layer in self.layers)

    _one_at_a_time = threading.RLock()  # inductor is told by the environment where to keep kernels

    def build(self, name: str, layers: Sequence[nn.Module], forward: Callable[[int], object]) -> None:
        """Compile the layers of a model, those that can be; the others stay as they are.

        Args:
          name: of the model, for messages.
          forward: runs this many nodes through the model, as it is going to run.
        """
        start = time.perf_counter()
        try:
            first, second = (_Calls.seen(layers, lambda size=size: forward(size)) for size in NUM_NODES)  # type: ignore[misc]
            calls = [_call_of(*each) for each in zip(first.of_layers, second.of_layers, strict=True)]
        except Exception as error:
            self._fall_back(name, error)
            return
        self._announce(f"compiling the layers of {name}; ten to twenty seconds when it is first seen, then two")
        self.layers = [None] * len(layers)
        for index, (layer, call) in enumerate(zip(layers, calls, strict=True)):
            try:
                with self._one_at_a_time:
                    compiled = self._compile(layer, call, first.attention[index], first.cache_index[index])
                _check(layer, compiled, second, index)
            except Exception as error:  # of inductor, a C++ compiler, a full disk, the code of a model
                self._fall_back(name, error)
                break
            self.layers[index] = compiled
        self.attach(layers)
        self.compile_seconds = time.perf_counter() - start
        if self.num_compiled:
            self._announce(
                f"compiled {self.num_compiled} of {len(layers)} layers of {name} in {self.compile_seconds:.1f} s "
                f"({self.num_graphs} builds; kernels kept in {self.cache_dir})"
            )

    def attach(self, layers: Sequence[nn.Module]) -> None:
        """Let layers run compiled whose modules are those that were compiled, in this shadow or a copy of it."""
        for layer, compiled in zip(layers, self.layers, strict=False):
            if compiled is not None and "forward" not in vars(layer) and _same_code(layer, compiled.kept_alive):
                layer.forward = compiled

    def _compile(
        self, layer: nn.Module, call: LayerCall, attention: tuple[nn.Module, dict[str, Any]] | None, index: int | None
    ) -> CompiledLayer:
        if reason := _changed(layer):
            raise NotTraceableError(reason)
        tracer = Tracer(layer, call)
        key = (_build_of(layer, tracer), _layout_of(call), torch.get_num_threads(), str(self.cache_dir))
        graph = _graphs.get(key)
        if graph is None:
            graph = _graphs[key] = tracer.compile(self.cache_dir, torch.get_num_threads())
            self.num_graphs += 1
        return CompiledLayer(layer, call, attention, index, tracer, graph, self.limit)

    def _fall_back(self, name: str, error: Exception) -> None:
        text = str(error).strip().splitlines() or [""]
        self.reason = f"{type(error).__name__}: {text[0][:200]}"
        logger.warning("%s does not run compiled from here on (%s); its layers run packed.", name, self.reason)

    def _announce(self, line: str) -> None:
        logger.info("%s", line)
        if self._progress is not None:
            self._progress(line)


def detach(layers: Sequence[nn.Module]) -> None:
    """Let layers run uncompiled."""
    for layer in layers:
        if isinstance(vars(layer).get("forward"), CompiledLayer):
            del vars(layer)["forward"]


# -- how a model calls its layers -------------------------------------------------------------------------------------


class _Calls:
    """Arguments and results of every layer in one forward."""

    def __init__(self, num_layers: int) -> None:
        self.of_layers: list[tuple[tuple[Any, ...], dict[str, Any]]] = [((), {})] * num_layers
        self.outputs: list[Any] = [None] * num_layers
        self.attention: list[tuple[nn.Module, dict[str, Any]] | None] = [None] * num_layers
        self.cache_index: list[int | None] = [None] * num_layers
        self._running = 0

    @classmethod
    def seen(cls, layers: Sequence[nn.Module], forward: Callable[[], object]) -> _Calls:
        calls = cls(len(layers))
        handles = []
        for number, layer in enumerate(layers):
            handles.append(layer.register_forward_pre_hook(calls._enter(number), with_kwargs=True))
            handles.append(layer.register_forward_hook(calls._leave(number)))
        try:
            with seen_by(calls._see_attention):
                forward()
        finally:
            for handle in handles:
                handle.remove()
        if not all(args or kwargs for args, kwargs in calls.of_layers):
            raise NotTraceableError("some layers were not called")
        return calls

    def _enter(self, number: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._running = number
            self.of_layers[number] = args, dict(kwargs)

        return hook

    def _leave(self, number: int) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            self.outputs[number] = output

        return hook

    def _see_attention(self, module: nn.Module, query: Any, key: Any, value: Any, mask: Any, **others: Any) -> None:
        number = self._running
        if self.attention[number] is not None:
            raise NotTraceableError("it has more than one attention")
        used = {name: other for name, other in others.items() if name in (*PLAIN_ARGUMENTS, *SPECIAL_ARGUMENTS)}
        held = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        computed = [name for name, other in used.items() if isinstance(other, torch.Tensor) and id(other) not in held]
        if computed:
            raise NotTraceableError(f"its attention takes {', '.join(computed)}, computed in every forward")
        self.attention[number] = module, used
        args, kwargs = self.of_layers[number]
        cache = value_at(args, kwargs, (_place_of(args, kwargs, KVCache), None))
        address = key.data_ptr()
        owners = [index for index, layer in enumerate(cache.layers) if layer.is_initialized and layer.keys.data_ptr() == address]
        if len(owners) != 1:
            raise NotTraceableError("its attention does not read the cache")
        self.cache_index[number] = owners[0]


def _place_of(args: Sequence[Any], kwargs: dict[str, Any], kind: type) -> Any:
    """Index or name of the argument of this type."""
    for key, value in (*enumerate(args), *kwargs.items()):
        if isinstance(value, kind):
            return key
    raise NotTraceableError(f"it is given no {kind.__name__}")


def _call_of(first: tuple[Any, dict[str, Any]], second: tuple[Any, dict[str, Any]]) -> LayerCall:
    """The common form of calls over different numbers of nodes."""
    args, kwargs = first
    cache = _place_of(args, kwargs, KVCache)
    if kwargs.get("flat_nodes") is None:
        raise NotTraceableError("it is not told of lists of nodes")
    mask, inputs, dims = None, [], []
    for key, value in (*enumerate(args), *kwargs.items()):
        if isinstance(value, torch.Tensor) and value.dim() == 4 and value.shape[-2] == NUM_NODES[0]:
            mask = key
            continue
        several = isinstance(value, (tuple, list))
        for index, tensor in enumerate(value) if several else [(None, value)]:
            if isinstance(tensor, torch.Tensor):
                place = key, index
                inputs.append(place)
                dims.append(_nodes_dim(tensor, value_at(*second, place)))
    if not inputs or inputs[0][0] not in (0, "hidden_states") or dims[0] != 1:
        raise NotTraceableError("its first argument is not the hidden states of a list of nodes")
    return LayerCall(args, kwargs, tuple(inputs), tuple(dims), mask, cache)


def _nodes_dim(tensor: torch.Tensor, other: torch.Tensor) -> int | None:
    """The dimension in which two inputs differ."""
    dims = [dim for dim, (size, wider) in enumerate(zip(tensor.shape, other.shape, strict=True)) if size != wider]
    if len(dims) > 1 or any((tensor.shape[dim], other.shape[dim]) != NUM_NODES for dim in dims):
        raise NotTraceableError("it is given tables of nodes by nodes")
    return dims[0] if dims else None


# -- which layers share graphs ----------------------------------------------------------------------------------------


def _build_of(layer: nn.Module, tracer: Tracer) -> Any:
    """What layers with the same graph have in common: classes, plain attributes, shapes, and which linears share what.

    A layer's own number makes no difference. Configs count by what they say.
    """
    parts: list[Any] = [tuple((size, type(run).__name__) for size, run in zip(tracer.sizes, tracer.runners, strict=True))]
    parts.append(tuple(tracer.parts.values()))
    for path, module in layer.named_modules():
        parts.append((path, type(module)))
        for name, value in vars(module).items():
            if name in ("layer_idx", "training") or name.startswith("_"):
                continue
            parts.append((name, _plain(value)))
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            parts.append((name, None if tensor is None else (tuple(tensor.shape), tensor.dtype)))
    return tuple(parts)


def _plain(value: Any) -> Any:
    if isinstance(value, (bool, int, float, str, bytes, type(None), torch.dtype)):
        return value
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    if hasattr(value, "to_json_string"):
        return value.to_json_string()
    if isinstance(value, PackedLinear):
        return "packed"
    return getattr(value, "__qualname__", None) or type(value).__qualname__, id(getattr(value, "__code__", None))


def _layout_of(call: LayerCall) -> Any:
    """Places, types and dtypes of what a layer is given."""
    tensors = [value_at(call.args, call.kwargs, place) for place in call.inputs]
    shapes = [tuple(None if dim == at else size for at, size in enumerate(t.shape)) for t, dim in zip(tensors, call.node_dims, strict=True)]
    others = [(key, value) for key, value in call.kwargs.items() if isinstance(value, (bool, int, float, str, type(None)))]
    return call.inputs, call.node_dims, call.mask, call.cache, tuple(shapes), tuple(t.dtype for t in tensors), tuple(others)


def _changed(layer: nn.Module) -> str:
    """Why a layer does not run its class's own code; empty if it does."""
    if "forward" in vars(layer):
        return "its forward was replaced"
    for module in layer.modules():
        if module is not layer and (module._forward_hooks or module._forward_pre_hooks):
            return f"{type(module).__name__} in it has hooks"
    return ""


def _same_code(layer: nn.Module, other: nn.Module) -> bool:
    """Whether the modules of a copied layer run what those of the layer run."""
    if layer is other:
        return True
    pairs = zip(layer.modules(), other.modules(), strict=True)
    return all(_code(mine) is _code(theirs) for mine, theirs in pairs)


def _code(module: nn.Module) -> object:
    forward = vars(module).get("forward")
    if isinstance(forward, CompiledLayer):
        return None
    return replacement(module) if forward is not None else None


@torch.inference_mode()
def _check(layer: nn.Module, compiled: CompiledLayer, calls: _Calls, number: int) -> None:
    """Raises: NotTraceableError where a layer computes something else compiled than it has computed uncompiled."""
    args, kwargs = calls.of_layers[number]
    want, got = calls.outputs[number], compiled(*args, **kwargs)
    want, got = (output[0] if isinstance(output, tuple) else output for output in (want, got))
    epsilon = max(torch.finfo(want.dtype).eps, torch.finfo(torch.float32).eps)
    given = args[0] if args else kwargs["hidden_states"]
    size, change = float(want.double().norm()), float((want.double() - given.double()).norm())
    error = float((got.double() - want.double()).norm())
    if not error <= epsilon * (2 * size + TOLERANCE * change):  # the sum is rounded by its own size
        raise NotTraceableError(f"it differs from itself uncompiled (relative error {error / max(change, 1e-30):.2g})")

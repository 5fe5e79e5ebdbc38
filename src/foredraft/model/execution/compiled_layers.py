"""Compiled decoder layers: two graphs around the attention of a layer, shared by all layers of one build.

Prompts use them, and so do drafts with more nodes than the native program supports. Between the two graphs, a layer
writes its keys and values into the cache and runs attention as an uncompiled layer does.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from foredraft.errors import UnsupportedModelError, error_in_words
from foredraft.folders import CACHE_VARIABLE, cache_folder
from foredraft.forking import is_forked
from foredraft.model.execution.attention import grouped_sdpa
from foredraft.model.execution.builds import check, layout_of, same_code, what_changed
from foredraft.model.execution.calls import LayerCall, Recording, value_at
from foredraft.model.execution.forwards import StandIn, replace_forward, replacement
from foredraft.model.execution.inductor import Segment, compile_segment, folder_name, whole
from foredraft.model.execution.lowering import NotTraceableError, Source, ancestors
from foredraft.model.execution.operators import Runner, attention
from foredraft.model.execution.packing import PackedExperts
from foredraft.model.execution.tracing import Tracer, build_of
from foredraft.native.build import cpp_compiler

logger = logging.getLogger("foredraft")

MIN_WEIGHTS = 2**25
"""Minimum number of weights for compilation by default. The first compilation on a machine takes ten seconds or more,
and every later one two.
"""

USUAL_NODES = 16
"""Number of nodes for which inductor optimises its kernels."""

_graphs: dict[Any, LayerGraph] = {}
"""Compiled graphs of this process, by the build of the layer."""


def worth_compiling(linear_layers: Iterable[nn.Module]) -> bool:
    """Return whether a model with these linear layers is worth compiling by default."""
    weights: list[torch.Tensor] = [layer.weight for layer in linear_layers]  # type: ignore[misc]
    return sum(weight.numel() for weight in weights) >= MIN_WEIGHTS and cpp_compiler() is not None


@dataclass(frozen=True)
class LayerGraph:
    """A compiled layer.

    Args:
      before: graph that returns query, key and value (1, heads, S, D), and other inputs of ``after``; None without
        attention.
      after: graph that returns the hidden states (1, S, H).
      in_tuple: length of the tuple that the layer returns; None for a single tensor.
      num_threads: number of threads that it was compiled for.
    """

    before: Segment | None
    after: Segment
    in_tuple: int | None
    num_threads: int

    @classmethod
    def of(cls, tracer: Tracer, directory: Path, num_threads: int) -> LayerGraph:
        """Trace a layer and compile it.

        Args:
          directory: folder that keeps kernels between processes.
        Raises: the errors of `Tracer.trace` and of inductor, for instance without a C++ compiler.
        """
        from torch._inductor.decomposition import select_decomp_table

        graph, source_of, mode = tracer.trace(select_decomp_table(), USUAL_NODES)
        calls = [node for node in graph.nodes if node.target is attention.default]
        if len(calls) > 1:
            raise NotTraceableError("a layer calls attention more than once")
        body = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
        (output,) = next(iter(reversed(graph.nodes))).all_input_nodes
        compiled = partial(compile_segment, mode, directory, num_threads)
        if not calls:
            return cls(None, compiled(body, [output], source_of), tracer.in_tuple, num_threads)
        call = calls[0]
        earlier = ancestors(call)
        first = [node for node in body if node in earlier]
        second = [node for node in body if node not in earlier and node is not call]
        crossing = [node for node in first if any(user in second for user in node.users)]
        before = compiled(first, [*call.args, *crossing], source_of)
        source_of[call] = ("attended", None)
        source_of.update({node: ("value", 3 + index) for index, node in enumerate(crossing)})
        return cls(before, compiled(second, [output], source_of), tracer.in_tuple, num_threads)


def bound(segment: Segment, fixed: Callable[[Source], Any]) -> Callable[[Mapping[Source, Any]], Sequence[torch.Tensor]]:
    """Return a function from the other inputs of a segment to its outputs, with the inputs of one layer filled in.

    Args:
      fixed: function that returns an input that is the same in every call, or None for other inputs.
    """
    places = [(fixed(source), source) for source in segment.sources]
    return lambda known: segment.run([known[source] if value is None else value for value, source in places])


class CompiledLayer(StandIn):
    """Compiled replacement forward of one decoder layer.

    Args:
      layer: layer of a shadow.
      call: recorded call of the layer.
      attention: attention module and its other arguments; None without attention.
      index: index of the layer's keys and values in the cache.
      tracer: tracer of this layer.
      graph: compiled graphs of a layer of the same build.
    """

    def __init__(
        self,
        layer: nn.Module,
        call: LayerCall,
        attention: tuple[nn.Module, dict[str, Any]] | None,
        index: int | None,
        tracer: Tracer,
        graph: LayerGraph,
    ) -> None:
        self.layer = layer
        self._call = call
        self._attention = attention
        self._index = index
        self._runners = [Runner(run) for run in tracer.runners]
        self._tensors = [getattr(module, name) for module, name in tracer.tensors]
        self._in_tuple = graph.in_tuple
        self._num_threads = graph.num_threads
        self._before = None if graph.before is None else bound(graph.before, self._fixed)
        self._after = bound(graph.after, self._fixed)
        segments = [graph.after] if graph.before is None else [graph.before, graph.after]
        self._needed = sorted({key for segment in segments for kind, key in segment.sources if kind == "input"} | {0})

    def _fixed(self, source: Source) -> Any:
        """Return an input that is the same in every call; None for others."""
        kind, key = source
        if kind == "product":
            return self._runners[key].number
        return self._tensors[key] if kind == "tensor" else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the hidden states (1, S, H) for the next layer, in the form that the layer returns.

        Raises: UnsupportedModelError in a forked process, which lacks the threads that the layer was compiled for.
        """
        if self._num_threads > 1 and is_forked():
            raise UnsupportedModelError(
                f"the model's layers are compiled for {self._num_threads} threads, which this process lost when it was "
                "forked; load the model in this process, load it with execution='packed', or start processes by spawn"
            )
        inputs = {key: value_at(args, kwargs, self._call.inputs[key]).contiguous() for key in self._needed}
        known: dict[Source, Any] = {("input", key): tensor for key, tensor in inputs.items()}
        known["nodes", None] = inputs[0].shape[1]
        if self._before is not None:
            query, key, value, *values = self._before(known)
            known["attended", None] = self._attend(args, kwargs, query, key, value)
            known |= {("value", 3 + number): each for number, each in enumerate(values)}
        (states,) = self._after(known)
        return states if self._in_tuple is None else (states, *(None,) * (self._in_tuple - 1))

    def _attend(
        self, args: Any, kwargs: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        cache = value_at(args, kwargs, (self._call.cache, None))
        mask = None if self._call.mask is None else value_at(args, kwargs, (self._call.mask, None))
        keys, values = cache.layers[self._index].update(key, value)
        module, others = self._attention  # type: ignore[misc]
        output, _ = grouped_sdpa(module, query, keys, values, mask, flat_nodes=kwargs["flat_nodes"], **others)
        return output


class CompiledLayers:
    """The compiled layers of a model.

    Args:
      cache_dir: folder that keeps kernels between processes; inductor/ in the cache folder by default.
      progress: function that receives one line before a build is compiled that is new on this machine.
    """

    def __init__(self, cache_dir: Path | str | None, progress: Callable[[str], None] | None) -> None:
        self.cache_dir = (Path(cache_dir).expanduser() if cache_dir else cache_folder("inductor")) / folder_name()
        self.layers: list[CompiledLayer | None] = []
        self.reason = ""
        self.compile_seconds = 0.0
        self._progress = progress

    @property
    def num_compiled(self) -> int:
        """Number of layers that run compiled."""
        return sum(layer is not None for layer in self.layers)

    _one_at_a_time = threading.RLock()  # inductor reads its cache folder from an environment variable

    def build(self, name: str, layers: Sequence[nn.Module], recording: Recording) -> None:
        """Compile the layers of a model that can be compiled; the others stay as they are.

        Args:
          name: name of the model, for messages.
          recording: recording of their calls, including tensors.
        """
        start = time.perf_counter()
        self.layers = [None] * len(layers)
        for index, layer in enumerate(layers):
            try:
                with self._one_at_a_time:
                    compiled = self._compile(layer, recording, index)
                args, kwargs = recording.of_layers[index]
                want, got = recording.outputs[index], compiled(*args, **kwargs)
                want, got = (output[0] if isinstance(output, tuple) else output for output in (want, got))
                check(want, args[0] if args else kwargs["hidden_states"], got, layer.modules())
            except Exception as error:  # from inductor, the C++ compiler, a full disk, or the model's code
                self.fall_back(name, error)
                if not isinstance(error, NotTraceableError):
                    break
            else:
                self.layers[index] = compiled
        self.attach(layers)
        self.compile_seconds = time.perf_counter() - start
        logger.debug(
            "compiled %d of %d layers of %s in %.1f s (kernels in %s)",
            self.num_compiled,
            len(layers),
            name,
            self.compile_seconds,
            self.cache_dir,
        )

    def attach(self, layers: Sequence[nn.Module]) -> None:
        """Make layers run compiled if their modules are those that were compiled, in this shadow or a copy of it."""
        for layer, compiled in zip(layers, self.layers, strict=False):
            if compiled is not None and replacement(layer) is None and same_code(layer, compiled.layer):
                replace_forward(layer, compiled)

    def _compile(self, layer: nn.Module, recording: Recording, index: int) -> CompiledLayer:
        if reason := what_changed(layer):
            raise NotTraceableError(reason)
        if any(isinstance(replacement(module), PackedExperts) for module in layer.modules()):
            raise NotTraceableError("its experts are not compiled")
        call, attention = recording.calls[index], recording.attention[index]
        tracer = Tracer(layer, call)
        key = (build_of(layer, tracer), layout_of(call), torch.get_num_threads(), str(self.cache_dir))
        graph = _graphs.get(key)
        if graph is None:
            with whole(self.cache_dir) as folder:
                mark = folder / f"layer-{_digest(key)}"
                if not mark.exists():
                    self._announce("compiling a decoder layer for this machine, once; this takes about ten seconds")
                graph = _graphs[key] = LayerGraph.of(tracer, folder, torch.get_num_threads())
                mark.touch()
        return CompiledLayer(layer, call.emptied(), attention, recording.cache_index[index], tracer, graph)

    def fall_back(self, name: str, error: Exception) -> None:
        """Log a warning with the reason why layers run packed and not compiled."""
        said = self.reason
        self.reason = error_in_words(error, 200)
        if isinstance(error, OSError):
            self.reason += f"; kernels are kept in {self.cache_dir}, and {CACHE_VARIABLE} names another folder"
        if self.reason != said:
            logger.warning("Layers of %s run packed and not compiled (%s).", name, self.reason)

    def _announce(self, line: str) -> None:
        logger.info("%s", line)
        if self._progress is not None:
            self._progress(line)


def _digest(key: Any) -> str:
    """Return a short name for a build."""
    return hashlib.sha256(repr(key).encode()).hexdigest()[:16]


def detach(layers: Sequence[nn.Module]) -> None:
    """Make layers run uncompiled."""
    for layer in layers:
        if isinstance(replacement(layer), CompiledLayer):
            replace_forward(layer, None)

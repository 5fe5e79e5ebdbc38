"""Decoder layers that run compiled: two graphs around their attention, shared by all layers of one build.

Between the two a layer writes its keys and values into the cache and runs attention as an uncompiled layer does, so
that drafts of any shape, ragged rows, features and forwards at shapes that keep bits need nothing of their own.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from foretoken.compiling import cpp_compiler
from foretoken.folders import CACHE_VARIABLE, cache_folder
from foretoken.model.execution.attention import grouped_sdpa
from foretoken.model.execution.builds import build_of, check, layout_of, same_code, what_changed
from foretoken.model.execution.calls import NUM_NODES, Calls, LayerCall, call_of, value_at
from foretoken.model.execution.chain import Chain, ChainedLayer
from foretoken.model.execution.inductor import NotTraceableError, Source
from foretoken.model.execution.kept_kernels import folder_name, whole
from foretoken.model.execution.operators import Runner
from foretoken.model.execution.replay import Replay, Situation
from foretoken.model.execution.segments import BoundSegment
from foretoken.model.execution.tracing import LayerGraph, Tracer

if TYPE_CHECKING:
    from foretoken.model.nodes import FlatNodes

logger = logging.getLogger("foretoken")

MIN_WEIGHTS = 2**25
"""Smaller models are not compiled unless that is asked for: the first compilation on a machine takes ten seconds or
more, and every later one two."""

_graphs: dict[Any, LayerGraph] = {}
"""Graphs of this process, by the build of the layer."""


def worth_compiling(linear_layers: Iterable[nn.Module]) -> bool:
    """Whether a model with these linear layers is to be compiled by itself."""
    weights: list[torch.Tensor] = [layer.weight for layer in linear_layers]  # type: ignore[misc]
    return sum(weight.numel() for weight in weights) >= MIN_WEIGHTS and cpp_compiler() is not None


class CompiledLayer:
    """The forward of one decoder layer, compiled.

    Args:
      layer: of a shadow.
      call: how it is called.
      attention: the module, and the other arguments, with which it runs attention; None if it has none.
      index: of its keys and values in the cache.
      tracer: of a layer of this build.
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
        self.call = replace(call, args=(), kwargs={})  # its places alone: what was in them is let go
        self.attention = attention
        self.index = index
        self._runners = [Runner(run) for run in tracer.runners]
        self.tensors = [getattr(module, name) for module, name in tracer.tensors]
        self._in_tuple = graph.in_tuple
        self._before = None if graph.before is None else BoundSegment(graph.before, self.fixed)
        self._after = BoundSegment(graph.after, self.fixed)
        segments = [graph.after] if graph.before is None else [graph.before, graph.after]
        needed = {key for segment in segments for kind, key in segment.sources if kind == "input"}
        self.needed = [(key, *call.inputs[key]) for key in sorted(needed | {0})]
        others = None if graph.before is None or attention is None else attention[1]
        self.replay = Replay(graph, self._runners, self.tensors, [key for key, _, _ in self.needed], others)
        self.kept_alive = layer

    def fixed(self, source: Source) -> Any:
        """An input that is the same in every call; None for others."""
        kind, key = source
        if kind == "product":
            return self._runners[key].number
        return self.tensors[key] if kind == "tensor" else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The hidden states of the next layer, as the layer returns them."""
        return self.returned(self.run(self.inputs(args, kwargs), self.situation(args, kwargs)))

    def inputs(self, args: Any, kwargs: Any) -> list[torch.Tensor]:
        """Those that its graphs need, hidden states first."""
        return [
            (args[name] if isinstance(name, int) else kwargs[name])
            if index is None
            else (args[name] if isinstance(name, int) else kwargs[name])[index]
            for _, name, index in self.needed
        ]

    def returned(self, states: torch.Tensor) -> Any:
        """Hidden states as the layer returns them."""
        return states if self._in_tuple is None else (states, *(None,) * (self._in_tuple - 1))

    def run(self, inputs: Sequence[torch.Tensor], situation: Situation | None) -> torch.Tensor:
        """Hidden states (1, S, H) of the next layer."""
        inputs = [tensor if tensor.is_contiguous() else tensor.contiguous() for tensor in inputs]  # as graphs expect
        num_nodes = inputs[0].shape[1]
        states = self.replay(inputs, situation, self._attend)
        if states is None:
            attended: torch.Tensor | None = None
            values: Sequence[torch.Tensor] = ()
            given = {key: tensor for (key, _, _), tensor in zip(self.needed, inputs, strict=True)}
            if self._before is not None and situation is not None:
                query, key, value, *values = self._before(num_nodes, given, None, ())
                attended = self._attend(situation, query, key, value)
            (states,) = self._after(num_nodes, given, attended, values)
        return states

    def situation(self, args: Any, kwargs: Any) -> Situation | None:
        """What it is called with beside its tensors; None without attention."""
        if self._before is None:
            return None
        cache = value_at(args, kwargs, (self.call.cache, None))
        mask = None if self.call.mask is None else value_at(args, kwargs, (self.call.mask, None))
        flat: FlatNodes = kwargs["flat_nodes"]
        return Situation(cache, self.index, flat, mask, flat.kinds.get(id(mask)))  # type: ignore[arg-type]

    def situated(self, other: Situation | None, kind: str | None) -> Situation | None:
        """Its own situation in a forward in which another layer has that one.

        Args:
          kind: of its own attention.
        """
        if self._before is None or other is None:
            return None
        return Situation(other.cache, self.index, other.flat, None, kind)  # type: ignore[arg-type]

    def _attend(
        self, situation: Situation, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        keys, values = situation.cache.layers[situation.index].update(key, value)
        module, others = self.attention  # type: ignore[misc]
        output, _ = grouped_sdpa(module, query, keys, values, situation.mask, flat_nodes=situation.flat, **others)
        return output


class Regions:
    """The compiled layers of a model.

    Args:
      cache_dir: where kernels are kept between processes; inductor/ in the cache folder by default.
      progress: called with one line before a build is compiled that this machine has not seen.
    """

    def __init__(self, cache_dir: Path | str | None, progress: Callable[[str], None] | None) -> None:
        self.cache_dir = (Path(cache_dir).expanduser() if cache_dir else cache_folder("inductor")) / folder_name()
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

    def build(
        self,
        name: str,
        layers: Sequence[nn.Module],
        forward: Callable[[int], object],
        *,
        has_own_attention: bool = False,
    ) -> Chain | None:
        """Compile the layers of a model, those that can be; the others stay as they are.

        Args:
          name: of the model, for messages.
          forward: runs this many nodes through the model, as it is going to run.
          has_own_attention: attention is not run by `grouped_sdpa`.
        Returns: the chain of the layers, if it has all of them.
        """
        start = time.perf_counter()
        try:
            if has_own_attention:
                raise NotTraceableError("it has an attention of its own")
            first, second = (Calls.seen(layers, lambda size=size: forward(size)) for size in NUM_NODES)  # type: ignore[misc]
            calls = [call_of(*each) for each in zip(first.of_layers, second.of_layers, strict=True)]
        except Exception as error:
            self._fall_back(name, error)
            return None
        self.layers = [None] * len(layers)
        for index, (layer, call) in enumerate(zip(layers, calls, strict=True)):
            try:
                with self._one_at_a_time:
                    compiled = self._compile(layer, call, first.attention[index], first.cache_index[index])
                check(layer, compiled, second, index)
            except Exception as error:  # of inductor, a C++ compiler, a full disk, the code of a model
                self._fall_back(name, error)
                if not isinstance(error, NotTraceableError):
                    break
            else:
                self.layers[index] = compiled
        chain = self.attach(layers)
        self.compile_seconds = time.perf_counter() - start
        logger.debug(
            "compiled %d of %d layers of %s in %.1f s (kernels in %s)",
            self.num_compiled,
            len(layers),
            name,
            self.compile_seconds,
            self.cache_dir,
        )
        return chain

    def attach(self, layers: Sequence[nn.Module]) -> Chain | None:
        """Let layers run compiled whose modules are those that were compiled, in this shadow or a copy of it.

        Returns: their chain, if it has all layers.
        """
        found = [
            (layer, compiled)
            for layer, compiled in zip(layers, self.layers, strict=False)
            if compiled is not None and "forward" not in vars(layer) and same_code(layer, compiled.kept_alive)
        ]
        chain = Chain([compiled for _, compiled in found])
        for position, (layer, _) in enumerate(found):
            layer.forward = ChainedLayer(chain, position)
        return chain if len(found) == len(layers) else None

    def _compile(
        self, layer: nn.Module, call: LayerCall, attention: tuple[nn.Module, dict[str, Any]] | None, index: int | None
    ) -> CompiledLayer:
        if reason := what_changed(layer):
            raise NotTraceableError(reason)
        tracer = Tracer(layer, call)
        key = (build_of(layer, tracer), layout_of(call), torch.get_num_threads(), str(self.cache_dir))
        graph = _graphs.get(key)
        if graph is None:
            with whole(self.cache_dir) as folder:
                mark = folder / f"layer-{_digest(key)}"
                if not mark.exists():
                    self._announce(f"compiling {type(layer).__name__} for this machine; some ten seconds, this once")
                graph = _graphs[key] = tracer.compile(folder, torch.get_num_threads())
                mark.touch()
            self.num_graphs += 1
        return CompiledLayer(layer, call, attention, index, tracer, graph)

    def _fall_back(self, name: str, error: Exception) -> None:
        first, *_ = str(error).strip().splitlines() or [""]
        said = self.reason
        self.reason = first if isinstance(error, NotTraceableError) else f"{type(error).__name__}: {first[:200]}"
        if isinstance(error, OSError):
            self.reason += f"; kernels are kept in {self.cache_dir}, and {CACHE_VARIABLE} names another folder"
        if self.reason != said:
            logger.warning("Layers of %s run packed and not compiled (%s).", name, self.reason)

    def _announce(self, line: str) -> None:
        logger.info("%s", line)
        if self._progress is not None:
            self._progress(line)


def _digest(key: Any) -> str:
    """Names a build."""
    return hashlib.sha256(repr(key).encode()).hexdigest()[:16]


def detach(layers: Sequence[nn.Module]) -> None:
    """Let layers run uncompiled."""
    for layer in layers:
        if isinstance(vars(layer).get("forward"), ChainedLayer):
            del vars(layer)["forward"]

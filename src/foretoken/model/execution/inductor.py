"""Parts of a traced graph as kernels that inductor writes, compiles and keeps on disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import fx

Source: TypeAlias = tuple[str, Any]
"""Where a graph finds an input: ("nodes", None), ("product", index), ("tensor", index), ("input", index), and
after attention ("attended", None) and ("value", index) of what was computed before it."""


class NotTraceableError(Exception):
    """A layer does something that no graph holds."""


@dataclass(frozen=True)
class Segment:
    """A compiled graph, where it finds its inputs, and which dimensions of its inputs and outputs are nodes.

    Args:
      run: takes a list of inputs, returns a sequence of tensors.
      sources: of the inputs.
      nodes_in: for every input the dimension that counts nodes, or None.
      nodes_out: the same for the outputs.
    """

    run: Callable[[list[Any]], Sequence[torch.Tensor]]
    sources: tuple[Source, ...]
    nodes_in: tuple[int | None, ...]
    nodes_out: tuple[int | None, ...]


class Inductor:
    """Compiles parts of a traced graph."""

    def __init__(self, mode: Any, directory: Path, num_threads: int) -> None:
        self._mode = mode
        self._directory = directory
        self._num_threads = num_threads

    def __call__(self, nodes: Iterable[fx.Node], outputs: Sequence[Any], source_of: dict[fx.Node, Source]) -> Segment:
        """These nodes as a graph of their own, over those of the given sources that they need."""
        from torch._guards import TracingContext, tracing
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx_inner

        nodes = list(nodes)
        needed = {node for each in nodes for node in each.all_input_nodes} | {*outputs}
        given = [node for node in source_of if node in needed]
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in given:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = dict(node.meta)
        for node in nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[node] for node in outputs))
        examples = [node.meta["val"] for node in given]
        options = {
            "size_asserts": False,
            "compile_threads": 1,
            "fx_graph_cache": True,
            "cpp.threads": self._num_threads,
        }
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            config.patch(options),
            tracing(TracingContext(self._mode)),
            _inductor_cache(self._directory),
        ):
            compiled: Any = compile_fx_inner(fx.GraphModule({}, graph), examples)
        return Segment(
            getattr(compiled, "current_callable", None) or compiled,  # without what profilers are told of each call
            tuple(source_of[node] for node in given),
            tuple(map(_node_dim, examples)),
            tuple(_node_dim(node.meta["val"]) for node in outputs),
        )


def _node_dim(example: Any) -> int | None:
    """The dimension of a fake tensor that is not fixed."""
    if not isinstance(example, torch.Tensor):
        return None
    open_dims = [dim for dim, size in enumerate(example.shape) if not isinstance(size, int)]
    if len(open_dims) > 1:
        raise NotTraceableError("it computes a table of nodes by nodes")
    return open_dims[0] if open_dims else None


@contextmanager
def _inductor_cache(directory: Path) -> Iterator[None]:
    """Let inductor keep its kernels in ``directory``. It reads the place from the environment only."""
    name = "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.get(name)
    directory.mkdir(parents=True, exist_ok=True)
    os.environ[name] = str(directory)
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before

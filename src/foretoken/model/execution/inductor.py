"""Parts of a traced graph as kernels that inductor writes, compiles and keeps on disk."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import fx

from foretoken.model.execution.lowering import NotTraceableError, Source
from foretoken.model.execution.tracing import one_trace_at_a_time, part_of
from foretoken.native.build import cpp_compiler


@dataclass(frozen=True)
class Segment:
    """A compiled graph, and where it finds its inputs.

    Args:
      run: takes a list of inputs, returns a sequence of tensors.
      sources: of the inputs; behind an attention ("attended", None), too, and ("value", index) of what was computed
        before it.
    """

    run: Callable[[list[Any]], Sequence[torch.Tensor]]
    sources: tuple[Source, ...]


def compile_segment(
    mode: Any,
    directory: Path,
    num_threads: int,
    nodes: Iterable[fx.Node],
    outputs: Sequence[Any],
    source_of: dict[fx.Node, Source],
) -> Segment:
    """Compile these nodes as a graph of their own, over those of the given sources that they need."""
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner

    nodes = list(nodes)
    needed = {node for each in nodes for node in each.all_input_nodes} | {*outputs}
    given = [node for node in source_of if node in needed]
    graph = part_of(nodes, given, outputs)
    examples = [node.meta["val"] for node in given]
    for example in (*examples, *(node.meta["val"] for node in outputs)):
        _check_dims(example)
    options = {
        "size_asserts": False,
        "compile_threads": 1,
        "fx_graph_cache": True,
        "cpp.threads": num_threads,
    }
    with (
        one_trace_at_a_time,
        torch.inference_mode(False),
        torch.no_grad(),
        _inductor_cache(directory),
        config.patch({**options, "cpp.vec_isa_ok": _instructions_run(directory)}),
        tracing(TracingContext(mode)),
    ):
        compiled: Any = compile_fx_inner(fx.GraphModule({}, graph), examples)
    return Segment(
        getattr(compiled, "current_callable", None) or compiled,  # without what profilers are told of each call
        tuple(source_of[node] for node in given),
    )


@cache
def _instructions_run(directory: Path) -> bool | None:
    """True where inductor need not try again whether kernels of this CPU's instruction sets compile and load.

    It tries each of them in every process, by starting a Python of its own; that they all did is kept beside its
    kernels. None lets it try.
    """
    try:
        from torch._inductor.cpu_vec_isa import supported_vec_isa_list, x86_isa_checker
    except ImportError:  # of another release of torch
        return None
    flags = sorted(x86_isa_checker())
    named = repr((torch.__version__, cpp_compiler(), platform.machine(), flags)).encode()
    stamp = directory / f"instructions-{hashlib.sha256(named).hexdigest()[:16]}"
    if not stamp.exists():
        candidates = [isa for isa in supported_vec_isa_list if {*str(isa).split()} <= {*flags}]
        if not candidates or not all(candidates):
            return None
        with suppress(OSError):
            stamp.touch()
    return True


def _check_dims(example: Any) -> None:
    """Raises: NotTraceableError for a fake tensor with more than one dimension that counts nodes."""
    if isinstance(example, torch.Tensor) and sum(not isinstance(size, int) for size in example.shape) > 1:
        raise NotTraceableError("it computes a table of nodes by nodes")


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

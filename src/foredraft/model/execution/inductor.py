"""Parts of a traced graph as kernels that inductor writes and compiles, and the folder where it keeps them: for one
kind of machine, and whole.

Inductor compiles for exactly the CPU that it runs on, and takes any file that it finds under the name that it expects.
On another CPU, as beside a shared home folder, such a kernel ends the process; so does one that a crash or a full disk
has cut short.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import fx

from foredraft.folders import keep_json, locked, sha256_of
from foredraft.machine import cpu_digest
from foredraft.model.execution.lowering import NotTraceableError, Source
from foredraft.model.execution.tracing import one_trace_at_a_time, part_of
from foredraft.native.build import cpp_compiler

logger = logging.getLogger("foredraft")

LISTING = "files.json"
LONGEST_WAIT = 300.0
"""Seconds until another process that compiles is waited for no more."""


def folder_name() -> str:
    """Names what kernels are compiled for and by: CPU, torch, Python and compiler; and how torch is held to less."""
    capability = torch.backends.cpu.get_cpu_capability().lower()
    made_by = cpu_digest(), torch.__version__, sys.implementation.cache_tag, platform.machine(), cpp_compiler()
    return f"{capability}-{hashlib.sha256(repr(made_by).encode()).hexdigest()[:12]}"


@contextmanager
def whole(folder: Path) -> Iterator[Path]:
    """Load and compile inside: the folder has the files that were left in it and no others, else none.

    One process at a time is inside. One that cannot get in, or may not write there, has a copy that goes away again.

    Raises: OSError where the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_name(f".{folder.name}.lock"), LONGEST_WAIT) as is_alone:
        if not is_alone:
            logger.debug("%s is used by another process, or cannot be locked: kernels are not kept", folder)
            with tempfile.TemporaryDirectory(prefix="foredraft-") as own:
                if _sums(folder) == _listed(folder):
                    shutil.copytree(folder, own, dirs_exist_ok=True)
                yield Path(own)
            return
        sums = _sums(folder)
        if sums != _listed(folder):
            if sums:
                logger.debug("kernels in %s are not those that were compiled: they are compiled again", folder)
            _empty(folder)
            sums = {}
        try:
            yield folder
        except BaseException:
            for name in _sums(folder).keys() - sums.keys():  # which may be cut short
                (folder / name).unlink()
            raise
        found = _sums(folder)
        if found != sums:
            with suppress(OSError):  # then they are compiled again
                keep_json(folder / LISTING, found)


def _sums(folder: Path) -> dict[str, str]:
    """SHA-256 of every file, by its path inside the folder."""
    files = (file for file in folder.rglob("*") if file.is_file() and file.name != LISTING)
    return {file.relative_to(folder).as_posix(): sha256_of(file) for file in sorted(files)}


def _listed(folder: Path) -> dict[str, str]:
    try:
        found = json.loads((folder / LISTING).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _empty(folder: Path) -> None:
    for found in folder.iterdir():
        if found.is_dir() and not found.is_symlink():
            shutil.rmtree(found)
        else:
            found.unlink()


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

"""Compilation of graph parts by torch's inductor, and a safe folder for its kernels.

Inductor compiles for exactly the CPU that it runs on, and loads any file with the name that it expects. Such a kernel
ends the process on another CPU, for instance with a shared home folder, and so does a file that a crash or a full disk
has truncated. The folder is therefore specific to the kind of machine, and its files are checked.
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
"""Maximum time in seconds to wait for another process that compiles."""


def folder_name() -> str:
    """Return a folder name for kernels: CPU, torch, Python, compiler, and the instruction sets that torch may use."""
    capability = torch.backends.cpu.get_cpu_capability().lower()
    made_by = cpu_digest(), torch.__version__, sys.implementation.cache_tag, platform.machine(), cpp_compiler()
    return f"{capability}-{hashlib.sha256(repr(made_by).encode()).hexdigest()[:12]}"


@contextmanager
def whole(folder: Path) -> Iterator[Path]:
    """Return a context for loading and compiling kernels in a folder that contains exactly the files that were left
    there.

    If the files differ, the folder is emptied first. One process at a time may be inside. A process that cannot get the
    lock, or may not write to the folder, uses a temporary copy.

    Raises: OSError if the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_name(f".{folder.name}.lock"), LONGEST_WAIT) as is_alone:
        if not is_alone:
            logger.debug("%s is used by another process or cannot be locked, so new kernels are not kept", folder)
            with tempfile.TemporaryDirectory(prefix="foredraft-") as own:
                if _sums(folder) == _listed(folder):
                    shutil.copytree(folder, own, dirs_exist_ok=True)
                yield Path(own)
            return
        sums = _sums(folder)
        if sums != _listed(folder):
            if sums:
                logger.debug("kernels in %s have changed since they were compiled, so they are compiled again", folder)
            _empty(folder)
            sums = {}
        try:
            yield folder
        except BaseException:
            for name in _sums(folder).keys() - sums.keys():  # new files may be truncated
                (folder / name).unlink()
            raise
        found = _sums(folder)
        if found != sums:
            with suppress(OSError):  # without the list, kernels are compiled again next time
                keep_json(folder / LISTING, found)


def _sums(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file, by its path inside the folder."""
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
    """A compiled graph and the sources of its inputs.

    Args:
      run: function from a list of inputs to a sequence of tensors.
      sources: sources of the inputs. After attention, ("attended", None) is its output, and ("value", index) a value
        that was computed before it.
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
    """Compile these nodes as a separate graph; its inputs are the given sources that they need."""
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
        getattr(compiled, "current_callable", None) or compiled,  # skips profiler hooks in each call
        tuple(source_of[node] for node in given),
    )


@cache
def _instructions_run(directory: Path) -> bool | None:
    """Return True if inductor need not test again whether kernels for this CPU's instruction sets compile and load.

    Inductor tests each of them in every process, by starting another Python. A successful test is recorded beside its
    kernels. None means that inductor must test.
    """
    try:
        from torch._inductor.cpu_vec_isa import supported_vec_isa_list, x86_isa_checker
    except ImportError:  # other releases of torch lack these names
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
    """Check that a fake tensor has at most one dimension that counts nodes.

    Raises: NotTraceableError for more than one.
    """
    if isinstance(example, torch.Tensor) and sum(not isinstance(size, int) for size in example.shape) > 1:
        raise NotTraceableError("a layer computes a tensor of shape nodes by nodes")


@contextmanager
def _inductor_cache(directory: Path) -> Iterator[None]:
    """Make inductor keep its kernels in ``directory``. Inductor reads the folder only from the environment."""
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

"""Location of the kernels' library: the wheel, the cache folder, or a compiler whose result is cached."""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import get_ident

import torch

from foredraft.folders import CACHE_VARIABLE, cache_folder, replacing, write_atomically
from foredraft.native.compiler import FOLDER, compile_library, cpp_compiler, file_digest, library_digest, options_of

__all__ = ["WHEEL", "compiled", "cpp_compiler", "instruction_set", "precompiled", "why_not_precompiled"]

logger = logging.getLogger("foredraft")

WHEEL = FOLDER / "precompiled"
"""Folder of a platform wheel with libraries and ``libraries.json``, which lists their sources and compiler."""


def instruction_set() -> str | None:
    """Return the widest instruction set of this CPU for which kernels are written; None if there is none.

    The limits that ``ATEN_CPU_CAPABILITY`` and ``ONEDNN_MAX_CPU_ISA`` set for torch and oneDNN apply here as well.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    most = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    if most in ("SSE41", "AVX") or not capability.startswith(("AVX2", "AVX512")):
        return None
    if capability == "AVX2" or most.startswith("AVX2"):
        return "AVX2"
    is_limited = most.startswith(("AVX512", "AVX10"))
    if torch.cpu._is_amx_tile_supported() and (not is_limited or "AMX" in most):
        return "AMX"
    allows_bfloat16 = not is_limited or any(name in most for name in ("BF16", "FP16", "AMX", "AVX10"))
    return "AVX512_BF16" if allows_bfloat16 and torch.cpu._is_avx512_bf16_supported() else "AVX512"


def precompiled(instruction: str) -> Path | None:
    """Return the wheel's library for a key of `OPTIONS`; None if there is no usable one."""
    return None if why_not_precompiled(instruction) else WHEEL / f"{instruction.lower()}.so"


@cache
def why_not_precompiled(instruction: str) -> str:
    """Return the reason why the wheel's library cannot be used; empty if it can.

    It must be complete and built from exactly the sources and options of this package. Otherwise a kernel could get
    arguments that it does not support, or compute other bits than a kernel compiled on this machine.
    """
    try:
        made = json.loads((WHEEL / "libraries.json").read_text(encoding="utf-8"))["libraries"][instruction]
        if made["made_from"] != library_digest(instruction):
            return "the package's kernels were changed since its wheel was built"
        if made["sha256"] != file_digest(WHEEL / f"{instruction.lower()}.so"):
            return f"{instruction.lower()}.so of the wheel is damaged; install it again"
    except FileNotFoundError:
        return "this installation has none"
    except (OSError, ValueError, LookupError, TypeError) as error:
        return f"libraries of the wheel cannot be read ({error}); install it again"
    return ""


@contextmanager
def compiled(title: str, instruction: str, sources: Sequence[Path], headers: Sequence[Path] = ()) -> Iterator[Path]:
    """Yield the shared library of some sources, from the cache folder or compiled now.

    If the library cannot be stored in the cache, a warning is logged once, and the library is deleted on exit. Load it
    inside the context.

    Args:
      title: beginning of the file's name.
      instruction: a key of `OPTIONS`.
      sources, headers: files that the library is compiled from.

    Raises: the errors of `compile_library`.
    """
    digest = library_digest(instruction, (*sources, *headers))
    kept = cache_folder("native", f"{title}-{instruction.lower()}-{digest}.so")
    if _is_whole(kept):
        yield kept
        return
    with tempfile.TemporaryDirectory(prefix="foredraft-") as folder:
        made = compile_library(Path(folder), sources, options_of(instruction))
        try:
            _keep(made, kept)
        except OSError as error:
            _tell_not_kept(kept.parent, error.strerror or str(error))
        yield made


def _keep(made: Path, file: Path) -> None:
    """Copy a library into the cache, readable for every user who may read new files there.

    Raises: OSError, after which no incomplete file is left.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.{os.getpid()}-{get_ident()}.part")
    with replacing(file, part):
        shutil.copyfile(made, part)
        write_atomically(_sum_of(file), file_digest(made))


@cache
def _tell_not_kept(folder: Path, reason: str) -> None:
    logger.warning(
        "compiled kernels cannot be kept in %s (%s), so every process compiles them again, in about 20 s; set %s to a "
        "folder that can be written",
        folder,
        reason,
        CACHE_VARIABLE,
    )


def _sum_of(file: Path) -> Path:
    """Return the path of a library's digest."""
    return file.with_suffix(".sha256")


def _is_whole(file: Path) -> bool:
    try:
        return _sum_of(file).read_text() == file_digest(file)
    except (OSError, ValueError):
        return False

"""C++ of the library's own, compiled once per machine and instruction set, and kept in the cache folder."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from foretoken.folders import cache_folder, replacing

COMPILERS = ("g++", "clang++", "c++")

AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c")
OPTIONS = {
    "AMX": (*AVX512, "-mavx512bf16", "-mavx512vnni", "-mamx-tile", "-mamx-bf16"),
    "AVX512_BF16": (*AVX512, "-mavx512bf16", "-mavx512vnni"),
    "AVX512": AVX512,
    "AVX2": ("-mavx2", "-mfma", "-mf16c"),
}
"""What compilers are told, by instruction set, the widest first."""


def instruction_set() -> str | None:
    """The widest instruction set of this CPU that a kernel is written for.

    ``ATEN_CPU_CAPABILITY`` and ``ONEDNN_MAX_CPU_ISA``, by which torch and oneDNN are held to less, hold here, too.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    most = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    if capability == "AVX2" or (most.startswith("AVX2") and capability.startswith("AVX512")):
        return "AVX2"
    if not capability.startswith("AVX512"):
        return None
    is_limited = most.startswith("AVX512")
    if torch.cpu._is_amx_tile_supported() and (not is_limited or "AMX" in most):
        return "AMX"
    has_bfloat16 = torch.cpu._is_avx512_bf16_supported() and (not is_limited or "BF16" in most or "AMX" in most)
    return "AVX512_BF16" if has_bfloat16 else "AVX512"


def digest_of(files: Iterable[Path]) -> str:
    """Names the contents of source files."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def compiled(title: str, instruction: str, sources: Sequence[Path], headers: Sequence[Path] = ()) -> Path:
    """The shared library of some sources; made where it is not there yet.

    Args:
      title: begins the name of the file.
      instruction: a key of `OPTIONS`, which the sources see as ``FORETOKEN_`` and its name.

    Raises: OSError, FileNotFoundError where there is no compiler, subprocess.SubprocessError where it fails.
    """
    options = ["-std=c++17", "-O3", "-w", "-fPIC", "-shared", "-fopenmp", *OPTIONS[instruction]]
    digest = hashlib.sha256((digest_of((*sources, *headers)) + repr(options)).encode()).hexdigest()[:16]
    name = f"{title}-{instruction.lower()}-{digest}.so"
    file = cache_folder("native", name)
    if _is_whole(file):
        return file
    compiler = cpp_compiler()
    if compiler is None:
        raise FileNotFoundError("no C++ compiler is found")
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
    folder = file.parent if os.access(file.parent, os.W_OK) else Path(tempfile.mkdtemp(prefix="foretoken-"))
    handle, made = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(handle)
    with replacing(folder / name, Path(made)):
        define = f"-DFORETOKEN_{instruction}"
        command = [*compiler.split(), *options, define, *map(str, sources), "-o", made]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
        _sum_of(folder / name).write_text(_digest(Path(made)))
    return folder / name


def cpp_compiler() -> str | None:
    """The command of a C++ compiler, ``CXX`` first; None where none is found."""
    chosen = os.environ.get("CXX")
    if chosen:
        return chosen if shutil.which(chosen.split()[0]) else None
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def first_line(error: Exception) -> str:
    """What a compiler, or the system, says first."""
    said = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
    return next(iter((said or str(error)).strip().splitlines()), type(error).__name__)[:200]


def _sum_of(file: Path) -> Path:
    """Where the digest of a library is kept: a process that loads a file which ends too early is killed."""
    return file.with_suffix(".sha256")


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _is_whole(file: Path) -> bool:
    try:
        return _sum_of(file).read_text() == _digest(file)
    except (OSError, ValueError):
        return False

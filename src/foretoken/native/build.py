"""C++ of the library's own, compiled once per machine and instruction set, and kept in the cache folder."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import get_ident

import torch

from foretoken.folders import CACHE_VARIABLE, cache_folder, keep_text, replacing
from foretoken.machine import num_cpus

logger = logging.getLogger("foretoken")

COMPILERS = ("g++", "clang++", "c++")
COMPILER_SECONDS = 1800  # it takes twenty, but ten times as long beside other programs; without kernels all is slower

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
    if most in ("SSE41", "AVX") or not capability.startswith(("AVX2", "AVX512")):
        return None
    if capability == "AVX2" or most.startswith("AVX2"):
        return "AVX2"
    is_limited = most.startswith(("AVX512", "AVX10"))
    if torch.cpu._is_amx_tile_supported() and (not is_limited or "AMX" in most):
        return "AMX"
    allows_bfloat16 = not is_limited or any(name in most for name in ("BF16", "FP16", "AMX", "AVX10"))
    return "AVX512_BF16" if allows_bfloat16 and torch.cpu._is_avx512_bf16_supported() else "AVX512"


def digest_of(files: Iterable[Path]) -> str:
    """Names the contents of source files."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


@contextmanager
def compiled(title: str, instruction: str, sources: Sequence[Path], headers: Sequence[Path] = ()) -> Iterator[Path]:
    """The shared library of some sources, to be loaded inside: that of the cache folder, made where it is not whole.

    Where it cannot be kept, which is said once, it goes away again.

    Args:
      title: begins the name of the file.
      instruction: a key of `OPTIONS`, which the sources see as ``FORETOKEN_`` and its name.

    Raises: OSError, FileNotFoundError where there is no compiler, subprocess.SubprocessError where it fails.
    """
    options = ["-std=c++17", "-O3", "-w", "-fPIC", "-shared", "-fopenmp", *OPTIONS[instruction]]
    digest = hashlib.sha256((digest_of((*sources, *headers)) + repr(options)).encode()).hexdigest()[:16]
    kept = cache_folder("native", f"{title}-{instruction.lower()}-{digest}.so")
    if _is_whole(kept):
        yield kept
        return
    with tempfile.TemporaryDirectory(prefix="foretoken-") as folder:
        made = _compile(Path(folder), sources, [*options, f"-DFORETOKEN_{instruction}"])
        try:
            _keep(made, kept)
        except OSError as error:
            _tell_not_kept(kept.parent, error.strerror or str(error))
        yield made


def _compile(folder: Path, sources: Sequence[Path], options: Sequence[str]) -> Path:
    """A library inside of an empty folder."""
    compiler = cpp_compiler()
    if compiler is None:
        raise FileNotFoundError("no C++ compiler is found")
    command, made = [*compiler, *options], folder / "made.so"
    files = [folder / f"{source.stem}.o" for source in sources]
    with ThreadPoolExecutor(num_cpus()) as pool:  # each source is a compiler's work of seconds
        list(pool.map(lambda source, file: _run([*command, "-c", str(source), "-o", str(file)]), sources, files))
    _run([*command, *map(str, files), "-o", str(made)])
    if not made.exists():
        raise FileNotFoundError(f"{' '.join(compiler)} is no C++ compiler: it made nothing; set CXX to one")
    return made


def _keep(made: Path, file: Path) -> None:
    """Copy a library into the cache, for every user who may read new files there.

    Raises: OSError, after which nothing half-written is left.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.{os.getpid()}-{get_ident()}.part")
    with replacing(file, part):
        shutil.copyfile(made, part)
        keep_text(_sum_of(file), _digest(made))


@cache
def _tell_not_kept(folder: Path, reason: str) -> None:
    logger.warning(
        "compiled kernels cannot be kept in %s (%s), so every process compiles them again, in some 20 s; set %s to a "
        "folder that can be written",
        folder,
        reason,
        CACHE_VARIABLE,
    )


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILER_SECONDS)


def cpp_compiler() -> list[str] | None:
    """The command of a C++ compiler, ``CXX`` first; None where none is found."""
    chosen = os.environ.get("CXX", "").split()
    if chosen:
        return chosen if shutil.which(chosen[0]) else None
    found = next(filter(None, map(shutil.which, COMPILERS)), None)
    return None if found is None else [found]


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

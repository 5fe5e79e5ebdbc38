"""What turns the C++ of the library's own into a shared library: compilers, what they are told, and names of contents.

The standard library is all it needs: the build of a wheel (``hatch_build.py``) runs it where torch is not installed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from foredraft.machine import num_cpus

COMPILERS = ("g++", "clang++", "c++")
COMPILER_SECONDS = 1800  # it takes twenty, but ten times as long beside other programs; without kernels all is slower

COMMON = ("-std=c++17", "-O3", "-ffp-contract=off", "-w", "-fPIC")
"""Sums are fused with products where the sources say so and nowhere else, so every compiler makes the same bits."""
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c")
OPTIONS = {
    "AMX": (*AVX512, "-mavx512bf16", "-mavx512vnni", "-mamx-tile", "-mamx-bf16"),
    "AVX512_BF16": (*AVX512, "-mavx512bf16", "-mavx512vnni"),
    "AVX512": AVX512,
    "AVX2": ("-mavx2", "-mfma", "-mf16c"),
}
"""What compilers are told, by instruction set, the widest first."""

FOLDER = Path(__file__).parent
SOURCES, HEADERS = (tuple(sorted(FOLDER.glob(kind))) for kind in ("*.cpp", "*.h"))
"""Of the kernels."""


def options_of(instruction: str) -> list[str]:
    """Compiler flags for a key of `OPTIONS`, which sources see as ``FOREDRAFT_`` and its name."""
    return [*COMMON, *OPTIONS[instruction], f"-DFOREDRAFT_{instruction}"]


def digest_of(files: Iterable[Path]) -> str:
    """Names the contents of source files."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def library_digest(instruction: str, files: Iterable[Path] = (*SOURCES, *HEADERS)) -> str:
    """Names what a library is made from: sources, headers (abi.h among them, which abi.py describes), and options."""
    return hashlib.sha256((digest_of(files) + repr(options_of(instruction))).encode()).hexdigest()[:16]


def file_digest(file: Path) -> str:
    """Names the contents of a library: a process that loads a file which ends too early is killed."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def compile_library(
    folder: Path,
    sources: Sequence[Path],
    options: Sequence[str],
    compiler: Sequence[str] | None = None,
    linked: Sequence[str] = (),
) -> Path:
    """A shared library inside of an empty folder.

    Args:
      compiler: its command; by default that of `cpp_compiler`.
      linked: what it is told when it links.

    Raises: OSError, FileNotFoundError where there is no compiler, subprocess.SubprocessError where it fails.
    """
    chosen = compiler or cpp_compiler()
    if chosen is None:
        raise FileNotFoundError("no C++ compiler is found")
    made = folder / "made.so"
    files = [folder / f"{source.stem}.o" for source in sources]
    with ThreadPoolExecutor(num_cpus()) as pool:  # each source is a compiler's work of seconds
        list(
            pool.map(lambda source, file: run([*chosen, *options, "-c", str(source), "-o", str(file)]), sources, files)
        )
    run([*chosen, "-shared", *linked, *map(str, files), "-o", str(made)])
    if not made.exists():
        raise FileNotFoundError(f"{' '.join(chosen)} is no C++ compiler: it made nothing; set CXX to one")
    return made


def run(command: Sequence[str]) -> None:
    """One call of a compiler.

    Raises: as `compile_library`.
    """
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

"""Compilation of the library's own C++ into a shared library: compilers, options, and digests of contents.

It needs only the standard library, because the build of a wheel (``hatch_build.py``) runs it without torch.
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
COMPILER_SECONDS = 1800  # compilation takes 20 s, or ten times that on a busy machine, and is worth the wait

COMMON = ("-std=c++17", "-O3", "-ffp-contract=off", "-w", "-fPIC")
"""Sums are fused with products only where the sources request it. Every compiler therefore produces the same bits."""
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c")
OPTIONS = {
    "AMX": (*AVX512, "-mavx512bf16", "-mavx512vnni", "-mamx-tile", "-mamx-bf16"),
    "AVX512_BF16": (*AVX512, "-mavx512bf16", "-mavx512vnni"),
    "AVX512": AVX512,
    "AVX2": ("-mavx2", "-mfma", "-mf16c"),
}
"""Compiler options by instruction set, the widest first."""

FOLDER = Path(__file__).parent
SOURCES, HEADERS = (tuple(sorted(FOLDER.glob(kind))) for kind in ("*.cpp", "*.h"))
"""Sources and headers of the kernels."""


def options_of(instruction: str) -> list[str]:
    """Return the compiler options for a key of `OPTIONS`. Sources see the macro ``FOREDRAFT_<key>``."""
    return [*COMMON, *OPTIONS[instruction], f"-DFOREDRAFT_{instruction}"]


def digest_of(files: Iterable[Path]) -> str:
    """Return a digest of the contents of source files."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def library_digest(instruction: str, files: Iterable[Path] = (*SOURCES, *HEADERS)) -> str:
    """Return a digest of all inputs of a library: sources, headers (with abi.h, which abi.py mirrors) and options."""
    return hashlib.sha256((digest_of(files) + repr(options_of(instruction))).encode()).hexdigest()[:16]


def file_digest(file: Path) -> str:
    """Return a digest of a library's contents. Loading a truncated library would kill the process."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def compile_library(
    folder: Path,
    sources: Sequence[Path],
    options: Sequence[str],
    compiler: Sequence[str] | None = None,
    linked: Sequence[str] = (),
) -> Path:
    """Compile a shared library in an empty folder.

    Args:
      folder: the empty folder.
      sources: C++ files.
      options: compiler options.
      compiler: compiler command; by default that of `cpp_compiler`.
      linked: options for linking.

    Raises: OSError, FileNotFoundError if there is no compiler, subprocess.SubprocessError if compilation fails.
    """
    chosen = compiler or cpp_compiler()
    if chosen is None:
        raise FileNotFoundError("no C++ compiler was found")
    made = folder / "made.so"
    files = [folder / f"{source.stem}.o" for source in sources]
    with ThreadPoolExecutor(num_cpus()) as pool:  # each source takes a compiler seconds
        list(
            pool.map(lambda source, file: run([*chosen, *options, "-c", str(source), "-o", str(file)]), sources, files)
        )
    run([*chosen, "-shared", *linked, *map(str, files), "-o", str(made)])
    if not made.exists():
        raise FileNotFoundError(f"{' '.join(chosen)} is not a C++ compiler: it produced no file; set CXX to a compiler")
    return made


def run(command: Sequence[str]) -> None:
    """Run one compiler command.

    Raises: the errors of `compile_library`.
    """
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILER_SECONDS)


def cpp_compiler() -> list[str] | None:
    """Return the command of a C++ compiler, ``CXX`` first; None if there is none."""
    chosen = os.environ.get("CXX", "").split()
    if chosen:
        return chosen if shutil.which(chosen[0]) else None
    found = next(filter(None, map(shutil.which, COMPILERS)), None)
    return None if found is None else [found]


def first_line(error: Exception) -> str:
    """Return the first line of a compiler's or the system's message."""
    said = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
    return next(iter((said or str(error)).strip().splitlines()), type(error).__name__)[:200]

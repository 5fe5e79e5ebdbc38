"""Kernels of instruction sets that this machine has not, in plain C++: a pytest plugin for their tests.

`immintrin.h` beside this file stands in for the compiler's: the same lanes and tiles, number by number. It shows what
a kernel computes on another CPU, not how fast, and not what a compiler makes of the real instructions.
"""

from __future__ import annotations

import hashlib
import subprocess
from functools import cache
from pathlib import Path

from foredraft.folders import cache_folder
from foredraft.native import library as native
from foredraft.native.compiler import OPTIONS, cpp_compiler

HERE = Path(__file__).parent
NOT_EMULATED = "int8_head.cpp", "int8_draft.cpp"  # heads in eight bits
ABSENT = """#include <stdint.h>
extern "C" {
int64_t foredraft_head_level() { return -1; }
int64_t foredraft_head_logits() { return -1; }
int64_t foredraft_head_grow() { return -1; }
}
"""

_real = native.library


@cache
def library(instruction: str | None = None) -> native.Library | None:
    """Those of AVX2 as they are, all wider ones emulated."""
    chosen = instruction or "AMX"
    return _real("AVX2") if chosen == "AVX2" else native.Library(_built(chosen), chosen)


def _built(instruction: str) -> Path:
    compiler = cpp_compiler()
    digest = hashlib.sha256((HERE / "immintrin.h").read_bytes() + native.source_digest().encode()).hexdigest()[:16]
    file = cache_folder("emulated", f"{instruction.lower()}-{digest}.so")
    if file.exists():
        return file
    folder = file.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "absent.cpp").write_text(ABSENT)
    sources = [source for source in native.SOURCES if source.name not in NOT_EMULATED]
    command = [*compiler, "-std=c++17", "-O1", "-ffp-contract=off", "-w", "-fPIC", *OPTIONS["AVX2"]]
    command += ["-I", str(HERE), f"-DFOREDRAFT_{instruction}"]
    objects = [str(folder / f"{source.stem}.o") for source in (*sources, folder / "absent.cpp")]
    for source, made in zip((*sources, folder / "absent.cpp"), objects, strict=True):
        subprocess.run([*command, "-c", str(source), "-o", made], check=True)
    subprocess.run([*command, "-shared", *objects, "-o", str(folder / "made.so")], check=True)
    (folder / "made.so").replace(file)
    return file


native.library = library
native.instruction_set = lambda: "AMX"

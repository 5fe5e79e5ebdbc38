"""The compiled kernels: one library per instruction set, from the wheel or compiled at its first use."""

from __future__ import annotations

import ctypes
import logging
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Literal

import torch

from foredraft.native.abi import BFLOAT16, FLOAT16, FLOAT32, FUNCTIONS, SCALED
from foredraft.native.build import compiled, instruction_set, precompiled
from foredraft.native.compiler import HEADERS, OPTIONS, SOURCES, digest_of, first_line
from foredraft.native.threads import Helpers

__all__ = ["CACHE_KINDS", "KINDS", "OPTIONS", "SOURCES", "Library", "instruction_set", "library", "source_digest"]

logger = logging.getLogger("foredraft")

KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
CACHE_KINDS = {**KINDS, torch.int8: SCALED}
"""Formats of keys and values by dtype."""
Origin = Literal["wheel", "compiler"]


class Library:
    """The compiled functions, as attributes with the names in `abi.FUNCTIONS`.

    Args:
      file: the shared library.
      instruction_set: instruction set that it was compiled for.
      origin: "wheel", or "compiler" if it was compiled on this machine now or earlier. The bits are the same.

    Attributes:
      block: outputs of a block in float32.
      helpers: controller of the number of threads.

    Raises: OSError for a file that cannot be loaded, or if the process may not use the instructions.
    """

    def __init__(self, file: Path, instruction_set: str, origin: Origin = "compiler") -> None:
        _have_openmp()
        shared = ctypes.CDLL(str(file.resolve()))  # a bare file name would be searched in system folders
        for name, (result, *arguments) in FUNCTIONS.items():
            function = shared[f"foredraft_{name}"]
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
        if not self.is_allowed():
            raise OSError(f"the system does not allow this process to use {instruction_set} instructions")
        self.instruction_set = instruction_set
        self.origin = origin
        self.block = self.num_outputs()
        self.helpers = Helpers(self.limit_threads)

    def __getattr__(self, name: str) -> Callable[..., int]:
        """Declare the type of the attributes for type checkers. Python calls this only for missing attributes."""
        raise AttributeError(name)

    @property
    def has_pairs(self) -> bool:
        """Whether bfloat16 is multiplied by bfloat16 in hardware."""
        return self.instruction_set in ("AMX", "AVX512_BF16")


_lock = threading.RLock()
_libraries: dict[str, Library | None] = {}


def library(instruction: str | None = None) -> Library | None:
    """Return the kernels for an instruction set, by default this CPU's.

    They are from the wheel if it contains them. Otherwise the first call on a machine compiles them, in about 20 s.

    Returns: None if the wheel has none and no C++ compiler can build them. The reason is logged once, at debug level.
    """
    chosen = instruction or instruction_set()
    if chosen is None:
        return None
    if chosen in _libraries:
        return _libraries[chosen]
    with _lock:
        if chosen not in _libraries:
            _libraries[chosen] = _loaded(chosen)
        return _libraries[chosen]


def _loaded(instruction: str) -> Library | None:
    for origin, found in _places(instruction):
        try:
            with found as file:
                return Library(file, instruction, origin)
        except (OSError, subprocess.SubprocessError) as error:
            logger.debug("no %s kernels from the %s: %s", instruction, origin, first_line(error))
    logger.debug("without kernels, models run eagerly and numpy chooses tokens")
    return None


def _places(instruction: str) -> Iterator[tuple[Origin, AbstractContextManager[Path]]]:
    """Yield sources of a library in order of preference. Compilation happens only when the context is entered."""
    ready = precompiled(instruction)
    if ready is not None:
        yield "wheel", nullcontext(ready)
    yield "compiler", compiled("kernels", instruction, SOURCES, HEADERS)


def _have_openmp() -> None:
    """Make OpenMP's functions available to libraries that use them by name, from torch or from the system.

    Raises: OSError if neither has them.
    """
    if not hasattr(ctypes.CDLL(None), "GOMP_parallel"):
        ctypes.CDLL("libgomp.so.1", mode=ctypes.RTLD_GLOBAL)


def loaded_helpers() -> Helpers | None:
    """Return the thread controller of the kernels for this CPU; None if they are not loaded."""
    kernels = _libraries.get(instruction_set() or "")
    return None if kernels is None else kernels.helpers


@cache
def source_digest() -> str:
    """Return a digest of the sources."""
    return digest_of((*SOURCES, *HEADERS))

"""The compiled kernels: one library for all of them, by instruction set, of the wheel or compiled at its first use."""

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
"""Of keys and values."""
Origin = Literal["wheel", "compiler"]


class Library:
    """The compiled functions, as attributes named as in `abi.FUNCTIONS`.

    Args:
      file: the shared library.
      instruction_set: that it was compiled for.
      origin: whether it came with the wheel or was compiled on this machine, now or before; bits are the same.

    Attributes:
      block: outputs of a block in float32.
      helpers: how many threads they run on.

    Raises: OSError for a file that cannot be loaded, or a process that may not use the instructions.
    """

    def __init__(self, file: Path, instruction_set: str, origin: Origin = "compiler") -> None:
        _have_openmp()
        shared = ctypes.CDLL(str(file.resolve()))  # a bare name would be looked for in the system
        for name, (result, *arguments) in FUNCTIONS.items():
            function = shared[f"foredraft_{name}"]
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
        if not self.is_allowed():
            raise OSError("the system does not let this process use them")
        self.instruction_set = instruction_set
        self.origin = origin
        self.block = self.num_outputs()
        self.helpers = Helpers(self.limit_threads)

    def __getattr__(self, name: str) -> Callable[..., int]:
        """Tell type checkers what the attributes are: one that is not there is a mistake."""
        raise AttributeError(name)

    @property
    def has_pairs(self) -> bool:
        """Whether it multiplies bfloat16 by bfloat16."""
        return self.instruction_set in ("AMX", "AVX512_BF16")


_lock = threading.RLock()
_libraries: dict[str, Library | None] = {}


def library(instruction: str | None = None) -> Library | None:
    """The kernels for an instruction set, this CPU's by default.

    Those of the wheel are taken where it has them; else they are compiled at the first call on a machine: some 20 s.

    Returns: None where there are none in the wheel, and no C++ compiler, or none that can build them; that is said
      once, at debug level.
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
            logger.debug("no %s kernels by the %s: %s", instruction, origin, first_line(error))
    logger.debug("models run eagerly, and tokens are chosen by numpy")
    return None


def _places(instruction: str) -> Iterator[tuple[Origin, AbstractContextManager[Path]]]:
    """Where a library may come from, the best first: nothing is compiled before it is asked for."""
    ready = precompiled(instruction)
    if ready is not None:
        yield "wheel", nullcontext(ready)
    yield "compiler", compiled("kernels", instruction, SOURCES, HEADERS)


def _have_openmp() -> None:
    """Have functions of OpenMP at hand for libraries that call them by name: torch's, else the system's.

    Raises: OSError where the system has none, either.
    """
    if not hasattr(ctypes.CDLL(None), "GOMP_parallel"):
        ctypes.CDLL("libgomp.so.1", mode=ctypes.RTLD_GLOBAL)


def loaded_helpers() -> Helpers | None:
    """Of the kernels for this CPU; None where they have not been loaded."""
    kernels = _libraries.get(instruction_set() or "")
    return None if kernels is None else kernels.helpers


@cache
def source_digest() -> str:
    """Names the sources."""
    return digest_of((*SOURCES, *HEADERS))

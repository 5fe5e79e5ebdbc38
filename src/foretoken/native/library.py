"""The compiled kernels: one library for all of them, built for the instruction set of this CPU at its first use."""

from __future__ import annotations

import ctypes
import logging
import subprocess
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from foretoken.native.abi import BFLOAT16, FLOAT16, FLOAT32, FUNCTIONS
from foretoken.native.build import OPTIONS, compiled, digest_of, first_line, instruction_set
from foretoken.native.threads import Helpers

__all__ = ["KINDS", "OPTIONS", "Library", "instruction_set", "library", "source_digest"]

logger = logging.getLogger("foretoken")

FOLDER = Path(__file__).parent
SOURCES, HEADERS = (tuple(sorted(FOLDER.glob(kind))) for kind in ("*.cpp", "*.h"))

KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}


class Library:
    """The compiled functions, as attributes named as in `abi.FUNCTIONS`.

    Args:
      file: the shared library.
      instruction_set: that it was compiled for.

    Attributes:
      block: outputs of a block in float32.
      helpers: how many threads they run on.

    Raises: OSError for a file that cannot be loaded, or a process that may not use the instructions.
    """

    def __init__(self, file: Path, instruction_set: str) -> None:
        shared = ctypes.CDLL(str(file.resolve()))  # a bare name would be looked for in the system
        for name, (result, *arguments) in FUNCTIONS.items():
            function = shared[f"foretoken_{name}"]
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
        if not self.is_allowed():
            raise OSError("the system does not let this process use them")
        self.instruction_set = instruction_set
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
    """The kernels for an instruction set, this CPU's by default, compiled at the first call on a machine: some 20 s.

    Returns: None where there is no C++ compiler, or none that can build them; that is said once, at debug level.
    """
    chosen = instruction or instruction_set()
    if chosen is None:
        return None
    if chosen in _libraries:
        return _libraries[chosen]
    with _lock:
        if chosen not in _libraries:
            try:
                with compiled("kernels", chosen, SOURCES, HEADERS) as file:
                    _libraries[chosen] = Library(file, chosen)
            except (OSError, subprocess.SubprocessError) as error:
                logger.debug("linear layers run through oneDNN, and tokens are chosen by numpy: %s", first_line(error))
                _libraries[chosen] = None
        return _libraries[chosen]


def loaded_helpers() -> Helpers | None:
    """Of the kernels for this CPU; None where they have not been loaded."""
    kernels = _libraries.get(instruction_set() or "")
    return None if kernels is None else kernels.helpers


@cache
def source_digest() -> str:
    """Names the sources."""
    return digest_of((*SOURCES, *HEADERS))

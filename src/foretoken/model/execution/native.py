"""Products of the library's own: a packed matrix that a step of few rows reads at the speed of memory.

A step of decoding multiplies a few rows by every weight of a model, and takes as long as reading them. oneDNN's
packed products read narrow matrices at half to two thirds of what memory gives; the kernel in ``products.cpp`` reads
them at all of it, and sums every row in the same order whatever the number of rows. It is compiled once per machine
and instruction set, and taken for the shapes at which it is measured to be faster.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from foretoken.folders import cache_folder

logger = logging.getLogger("foretoken")

COMPILERS = ("g++", "clang++", "c++")
FOLDER = Path(__file__).parent
SOURCES = tuple(FOLDER / name for name in ("products.cpp", "attention.cpp", "vectors.h"))

AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c")
OPTIONS = {
    "AMX": (*AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
    "AVX512_BF16": (*AVX512, "-mavx512bf16"),
    "AVX512": AVX512,
    "AVX2": ("-mavx2", "-mfma", "-mf16c"),
}
"""What compilers are told, by instruction set, the widest first."""

PAIRS = 0
KINDS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
PAIRS_BLOCK = 32
"""Inputs and outputs of a block of pairs."""


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


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("kind", ctypes.c_int64),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    )


@dataclass(frozen=True)
class Library:
    """The compiled kernels.

    Args:
      instruction_set: that they were compiled for.
      product: of the address of a matrix, that of the input, its rows, the address of the output, and threads.
      block: outputs of a block in float32.
      attention, attention_scratch: of the address of a call; see `few_nodes`.
      lanes: numbers in a vector.
    """

    instruction_set: str
    product: Callable[[int, int, int, int, int], None]
    block: int
    attention: Callable[..., None]
    attention_scratch: Callable[[int, int], int]
    lanes: int

    @property
    def has_pairs(self) -> bool:
        """Whether it multiplies bfloat16 by bfloat16."""
        return self.instruction_set in ("AMX", "AVX512_BF16")

    @classmethod
    def load(cls, file: Path, instruction_set: str) -> Library:
        """Raises: OSError for a file that cannot be loaded, or a process that may not use the instructions."""
        shared = ctypes.CDLL(str(file.resolve()))  # a bare name would be looked for in the system
        if not shared.foretoken_is_allowed():
            raise OSError("the system does not let this process use them")
        product = shared.foretoken_product
        product.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int)
        product.restype = None
        attention, scratch = shared.foretoken_attention, shared.foretoken_attention_scratch
        attention.argtypes = (*(ctypes.c_void_p,) * 7, ctypes.c_int)
        attention.restype = None
        scratch.argtypes = (ctypes.c_void_p, ctypes.c_int)
        scratch.restype = ctypes.c_int64
        return cls(instruction_set, product, shared.foretoken_block(), attention, scratch, shared.foretoken_lanes())


_lock = threading.RLock()
_libraries: dict[str, Library | None] = {}


def library(instruction: str | None = None) -> Library | None:
    """The kernels for an instruction set, this CPU's by default, compiled at the first call on a machine: a second.

    Returns: None where there is no C++ compiler, or none that can build them; that is said once, at debug level.
    """
    chosen = instruction or instruction_set()
    if chosen is None:
        return None
    with _lock:
        if chosen not in _libraries:
            try:
                _libraries[chosen] = Library.load(_compiled(chosen), chosen)
            except (OSError, subprocess.SubprocessError) as error:
                logger.debug("linear layers run through oneDNN alone: %s", _first_line(error))
                _libraries[chosen] = None
        return _libraries[chosen]


@cache
def source_digest() -> str:
    """Names the sources."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in SOURCES)).hexdigest()


def _compiled(instruction: str) -> Path:
    """The file of the compiled kernels; made where it is not there."""
    options = ["-std=c++17", "-O3", "-w", "-fPIC", "-shared", "-fopenmp", *OPTIONS[instruction]]
    digest = hashlib.sha256((source_digest() + repr(options)).encode()).hexdigest()[:16]
    name = f"products-{instruction.lower()}-{digest}.so"
    file = cache_folder("native", name)
    if _is_whole(file):
        return file
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise FileNotFoundError("no C++ compiler is found")
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
    folder = file.parent if os.access(file.parent, os.W_OK) else Path(tempfile.mkdtemp(prefix="foretoken-"))
    handle, made = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(handle)
    try:
        define = f"-DFORETOKEN_{instruction}"
        command = [*compiler.split(), *options, define, *map(str, SOURCES[:2]), "-o", made]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
        _sum_of(folder / name).write_text(_digest(Path(made)))
        os.replace(made, folder / name)
    except BaseException:
        with suppress(OSError):
            os.unlink(made)
        raise
    return folder / name


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


def _first_line(error: Exception) -> str:
    said = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
    return next(iter((said or str(error)).strip().splitlines()), type(error).__name__)[:200]


class NativeMatrix:
    """A weight, packed for the kernels.

    Args:
      weight: (out, in). Multiplied in bfloat16 where the CPU does that, and with float32 sums of float32 products
        otherwise; half precision is kept as it is in memory either way.
      bias: (out,), or None.

    Exactness: a row has the same bits among any number of rows. Equals ``F.linear`` within the rounding of the dtype;
      sums are in float32.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, kernels: Library) -> None:
        self.instruction_set = kernels.instruction_set
        self._size = outputs, inputs = weight.shape[0], weight.shape[1]
        self._is_pairs = weight.dtype == torch.bfloat16 and kernels.has_pairs
        self.compute_dtype = torch.bfloat16 if self._is_pairs else torch.float32
        block = PAIRS_BLOCK if self._is_pairs else kernels.block
        padded = torch.nn.functional.pad(weight, (0, 0, 0, -outputs % block))
        blocks = padded.view(-1, block, inputs)
        if self._is_pairs:  # two tiles per 32 inputs, of 16 outputs each, pairs of inputs side by side
            blocks = blocks.view(len(blocks), 2, 16, inputs // 32, 16, 2).permute(0, 3, 1, 4, 2, 5)
        else:
            blocks = blocks.transpose(1, 2)
        self.packed = blocks.contiguous()
        self.num_bytes = self.packed.numel() * self.packed.itemsize
        self._bias = None if bias is None else bias.to(torch.float32).contiguous()
        self._matrix = _Matrix(
            inputs,
            outputs,
            PAIRS if self._is_pairs else KINDS[weight.dtype],
            self.packed.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
        )
        self._address = ctypes.addressof(self._matrix)
        self._run = kernels.product

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in) of `compute_dtype` -> (..., out)."""
        outputs, inputs = self._size
        x = x.contiguous()
        shape = x.shape
        out = x.new_empty((*shape[:-1], outputs))
        self._run(self._address, x.data_ptr(), x.numel() // inputs, out.data_ptr(), torch.get_num_threads())
        return out

    def dense(self) -> torch.Tensor:
        """The weight (out, in), as it was given."""
        outputs, inputs = self._size
        if self._is_pairs:
            blocks = self.packed.permute(0, 2, 4, 1, 3, 5)
        else:
            blocks = self.packed.transpose(1, 2)
        return blocks.reshape(-1, inputs)[:outputs]


def fits(inputs: int, dtype: torch.dtype, kernels: Library) -> bool:
    """Whether a weight with so many inputs can be packed: bfloat16 where the CPU multiplies it goes by blocks of 32."""
    return dtype in KINDS and not (dtype == torch.bfloat16 and kernels.has_pairs and inputs % PAIRS_BLOCK)

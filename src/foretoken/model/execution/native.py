"""Products of the library's own: a packed matrix that a step of few rows reads at the speed of memory.

A step of decoding multiplies a few rows by every weight of a model, and takes as long as reading them. oneDNN's
packed products read narrow matrices at half to two thirds of what memory gives; the kernel in ``products.cpp`` reads
them at all of it, and sums every row in the same order whatever the number of rows. It is compiled once per machine
and instruction set, and taken for the shapes at which it is measured to be faster.
"""

from __future__ import annotations

import ctypes
import logging
import subprocess
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import torch

from foretoken.compiling import OPTIONS, compiled, digest_of, first_line, instruction_set
from foretoken.model.execution import pages
from foretoken.model.execution.helpers import Helpers

__all__ = ["KINDS", "OPTIONS", "Library", "NativeMatrix", "instruction_set", "library", "source_digest"]

logger = logging.getLogger("foretoken")

FOLDER = Path(__file__).parent
SOURCES = tuple(
    FOLDER / name
    for name in (
        *("products.cpp", "attention.cpp", "many_nodes.cpp", "many_floats.cpp", "threads.cpp"),
        *("program.cpp", "drafting.cpp", "growing.cpp"),
    )
)
HEADERS = tuple(
    FOLDER / name
    for name in (
        "calls.h",
        "program.h",
        "glue.h",
        "vectors.h",
        "floats.h",
        "nibbles.h",
        "threads.h",
        "softmax.h",
        "pairs.h",
        "tiles.h",
        "drafting.h",
    )
)

PAIRS, NIBBLES = 0, 4
KINDS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
PAIRS_BLOCK = 32
"""Inputs and outputs of a block of pairs."""


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("kind", ctypes.c_int64),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("group", ctypes.c_int64),
        ("scales", ctypes.c_void_p),
        ("zeros", ctypes.c_void_p),
    )


@dataclass(frozen=True)
class Chains:
    """Attention of many nodes: of the address of a call and what it is of, and the bytes of scratch that it needs."""

    run: Callable[..., None]
    scratch: Callable[[int, int], int]

    @classmethod
    def of(cls, shared: ctypes.CDLL) -> Chains:
        """Those of a compiled library."""
        run, scratch = shared.foretoken_prompt_attention, shared.foretoken_prompt_attention_scratch
        run.argtypes, run.restype = (*(ctypes.c_void_p,) * 6, ctypes.c_int), None
        scratch.argtypes, scratch.restype = (ctypes.c_void_p, ctypes.c_int), ctypes.c_int64
        return cls(run, scratch)


@dataclass(frozen=True)
class Library:
    """The compiled kernels.

    Args:
      instruction_set: that they were compiled for.
      product: of the address of a matrix, that of the input, its rows, the address of the output, and threads.
      block: outputs of a block in float32.
      attention, attention_scratch: of the address of a call; see `few_nodes`.
      lanes: numbers in a vector.
      forward, grown_chains: of addresses, and threads; see `native_program`.
      drafting: of heads in eight bits, by name; see ``drafting.h``.
      chains: attention of prompts by dtype; see `many_nodes`.
      helpers: how many threads they run on.
    """

    instruction_set: str
    product: Callable[[int, int, int, int, int], None]
    block: int
    attention: Callable[..., None]
    attention_scratch: Callable[[int, int], int]
    lanes: int
    forward: Callable[..., int]
    grown_chains: Callable[..., int]
    drafting: Mapping[str, Callable[..., int]] = field(default_factory=dict)
    chains: Mapping[torch.dtype, Chains] = field(default_factory=dict)
    helpers: Helpers | None = None

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
        forward, chains = shared.foretoken_forward, shared.foretoken_chains
        for function in (forward, chains):
            function.argtypes, function.restype = (*(ctypes.c_void_p,) * 5, ctypes.c_int), ctypes.c_int64
        block, lanes = shared.foretoken_block(), shared.foretoken_lanes()
        found = cls(instruction_set, product, block, attention, scratch, lanes, forward, chains)
        helpers = Helpers(shared.foretoken_limit_threads)
        own = dict.fromkeys(KINDS, Chains.of(shared))
        return replace(found, drafting=_drafting(shared), chains=own, helpers=helpers)


def _drafting(shared: ctypes.CDLL) -> dict[str, Callable[..., int]]:
    """Functions of ``drafting.cpp`` and ``growing.cpp``: of addresses, numbers of rows, and threads."""
    address, number = ctypes.c_void_p, ctypes.c_int64
    arguments = {
        "bytes_product": (address, address, number, address),
        "head_level": (address, address),
        "head_logits": (address, address, number, address),
        "head_grow": (address, address),
    }
    functions = {}
    for name, types in arguments.items():
        function = functions[name] = getattr(shared, f"foretoken_{name}")
        function.argtypes, function.restype = (*types, ctypes.c_int), number
    return functions


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
                with compiled("products", chosen, SOURCES, HEADERS) as file:
                    _libraries[chosen] = Library.load(file, chosen)
            except (OSError, subprocess.SubprocessError) as error:
                logger.debug("linear layers run through oneDNN alone: %s", first_line(error))
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
        padded = torch.nn.functional.pad(weight, (0, -inputs % PAIRS_BLOCK * self._is_pairs, 0, -outputs % block))
        blocks = padded.view(-1, block, padded.shape[1])
        if self._is_pairs:  # two tiles per 32 inputs, of 16 outputs each, pairs of inputs side by side
            blocks = blocks.view(len(blocks), 2, 16, -1, 16, 2).permute(0, 3, 1, 4, 2, 5)
        else:
            blocks = blocks.transpose(1, 2)
        self.packed = pages.empty(blocks.shape, blocks.dtype).copy_(blocks)
        self.num_bytes = self.packed.numel() * self.packed.itemsize
        self._bias = None if bias is None else bias.to(torch.float32).contiguous()
        self._matrix = _Matrix(
            inputs,
            outputs,
            PAIRS if self._is_pairs else KINDS[weight.dtype],
            self.packed.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
        )
        self.address = ctypes.addressof(self._matrix)
        self._run = kernels.product

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in) of `compute_dtype` -> (..., out)."""
        if x.dtype != self.compute_dtype:  # what the kernel writes would not fit
            raise TypeError(f"a matrix that multiplies in {self.compute_dtype} was given {x.dtype}")
        outputs, inputs = self._size
        x = x.contiguous()
        shape = x.shape
        out = x.new_empty((*shape[:-1], outputs))
        self._run(self.address, x.data_ptr(), x.numel() // inputs, out.data_ptr(), torch.get_num_threads())
        return out

    def dense(self) -> torch.Tensor:
        """The weight (out, in), as it was given."""
        outputs, inputs = self._size
        if self._is_pairs:
            blocks = self.packed.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        else:
            blocks = self.packed.transpose(1, 2)
        return blocks.flatten(0, 1)[:outputs, :inputs].contiguous()


class NibbleMatrix:
    """A weight in 4 bits, packed for the kernels.

    Args:
      codes: int32 (out, in), 0 to 15.
      scales, zeros: float32 (out, in / group); the weight is (code - 8) * scale + zero.
      bias: (out,), or None.

    Exactness: a row has the same bits among any number of rows; sums are in float32.
    """

    compute_dtype = torch.float32

    def __init__(
        self,
        codes: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor,
        bias: torch.Tensor | None,
        kernels: Library,
    ) -> None:
        self._size = outputs, inputs = codes.shape[0], codes.shape[1]
        block, groups = 2 * kernels.lanes, scales.shape[1]
        missing = -outputs % block
        padded = torch.nn.functional.pad(codes.to(torch.uint8), (0, 0, 0, missing)).view(-1, block, inputs // 2, 2)
        both = padded[..., 0] | padded[..., 1] << 4  # (blocks, outputs, pairs of inputs)
        self.packed = pages.empty((len(both), inputs // 2, block), torch.uint8).copy_(both.transpose(1, 2))
        self._scales, self._zeros = (
            torch.nn.functional.pad(each.float(), (0, 0, 0, missing))
            .view(-1, block, groups)
            .transpose(1, 2)
            .contiguous()
            for each in (scales, zeros)
        )
        self._bias = None if bias is None else bias.detach().to(torch.float32).contiguous()
        self.num_bytes = self.packed.nbytes + self._scales.nbytes + self._zeros.nbytes
        self._matrix = _Matrix(
            inputs,
            outputs,
            NIBBLES,
            self.packed.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            inputs // groups,
            self._scales.data_ptr(),
            self._zeros.data_ptr(),
        )
        self.address = ctypes.addressof(self._matrix)
        self._run = kernels.product

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in) in float32 -> (..., out)."""
        outputs, inputs = self._size
        x = x.contiguous()
        out = x.new_empty((*x.shape[:-1], outputs))
        self._run(self.address, x.data_ptr(), x.numel() // inputs, out.data_ptr(), torch.get_num_threads())
        return out

"""Linear layers through oneDNN with weights packed once, for CPUs.

Measured (docs/log.md): reading every weight once is the floor of a step; packed float32 reaches it for one row,
costs about 1.4 times as much for five. In bfloat16 up to sixteen rows cost what one costs.
"""

from __future__ import annotations

import itertools
import operator
import platform
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

BATCH_HINT = 16  # a hint of one row packs for another kernel, whose single row has other bits than its many
MIN_ELEMENTS = 2**18  # below, the 25 us that a call into oneDNN costs more than F.linear exceed what it saves
HALVES = (torch.bfloat16, torch.float16)


def cpu_has_bfloat16() -> bool:
    """True where the CPU multiplies bfloat16 itself (avx512_bf16, AMX, or Arm's BF16), not by conversion."""
    if not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():  # type: ignore[no-untyped-call]
        return False
    if platform.machine().lower() in ("aarch64", "arm64"):
        return True
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def can_pack() -> bool:
    """Whether weights can be packed on this machine at all: by oneDNN, on x86."""
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_onednn and platform.machine().lower() in ("x86_64", "amd64")


def packed_dtype(dtype: torch.dtype) -> torch.dtype | None:
    """The dtype in which weights of ``dtype`` are packed, or None where oneDNN packs none.

    Half precision without instructions for it is packed as float32: no other kernel here reads the weights once
    for several rows. The products are then exact and rounded once, at twice the memory.
    """
    if not can_pack():
        return None
    if dtype == torch.bfloat16 and cpu_has_bfloat16():
        return torch.bfloat16
    if dtype == torch.float32 or dtype in HALVES:
        return torch.float32
    return None


@dataclass(frozen=True)
class _Version:
    """A fingerprint of a tensor that changes when somebody writes into it or replaces its storage."""

    address: int
    count: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Version:
        return cls(tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version, tensor.dtype)


class PackedLinear:
    """The forward of one `nn.Linear` or `Conv1D`, over a packed copy of its weight.

    Args:
      layer: whose weight is packed.
      earlier: of a layer with the same tensors; what it packed is taken over where they still hold the same values.

    Exactness: equals ``F.linear`` within the rounding of the dtype. Up to which number of rows a row keeps its bits
    depends on the CPU: see `foretoken.model.execution.kernels`.
    """

    def __init__(self, layer: nn.Module, earlier: PackedLinear | None = None) -> None:
        self._layer = layer
        self._is_released = False
        if earlier is not None and earlier._holds(self._tensors()):
            vars(self).update({**vars(earlier), "_layer": layer, "_versions": tuple(map(_Version.of, self._tensors()))})
        else:
            self._pack()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out)."""
        if x.dtype != self._dtype:
            raise TypeError(f"a packed layer of {self._dtype} was given {x.dtype}; use execution='eager'")
        if self._dtype == self._packed_dtype:
            return _linear(x, self._packed, self._bias, "none", [], "")
        return _linear(x.to(self._packed_dtype), self._packed, self._bias, "none", [], "").to(self._dtype)

    def refresh(self) -> bool:
        """Pack again when weight or bias were written since; True when they were."""
        if self._is_released or self._versions == tuple(map(_Version.of, self._tensors())):
            return False
        self._pack()
        return True

    def release(self) -> None:
        """Free the weight that was packed, for every module that shares the parameter.

        A NaN of the same shape stays, so that code which reads the weight past the layer is noticed.
        """
        weight = self.weight
        weight.data = torch.full((), torch.nan, dtype=weight.dtype).expand(weight.shape)
        self._is_released = True

    def dense(self) -> torch.Tensor:
        """The weight (out, in) as it was packed, also where the original was released."""
        dense: torch.Tensor = self._packed.to_dense()
        return dense

    def _holds(self, tensors: list[torch.Tensor]) -> bool:
        """Whether these are the tensors that were packed, with the same values.

        The values are compared by sums, since writes through ``.data`` leave no other trace. That reads the weight
        once, as a step does, and takes a fifth of the time of packing it.
        """
        mine = self._tensors()
        same = len(tensors) == len(mine) and all(map(operator.is_, tensors, mine)) and not self._is_released
        return same and self._dtype == tensors[0].dtype and all(map(torch.equal, map(_sums, tensors), self._sums))

    @property
    def num_bytes(self) -> int:
        return self._num_elements * self._packed_dtype.itemsize

    @property
    def weight(self) -> nn.Parameter:
        weight = self._layer.weight
        assert isinstance(weight, nn.Parameter)
        return weight

    def _tensors(self) -> list[torch.Tensor]:
        bias = self._layer.bias
        return [self.weight] if bias is None else [self.weight, bias]  # type: ignore[list-item]

    def _pack(self) -> None:
        tensors = self._tensors()
        self._versions = tuple(map(_Version.of, tensors))
        self._sums = list(map(_sums, tensors))
        self._dtype = tensors[0].dtype
        packed_as = packed_dtype(self._dtype)
        if packed_as is None:
            raise TypeError(f"weights of {self._dtype} cannot be packed; rebuild the execution")
        self._packed_dtype = packed_as
        weight, *bias = (tensor.detach().to(packed_as) for tensor in tensors)
        if isinstance(self._layer, Conv1D):
            weight = weight.t()  # (in, out) -> (out, in)
        self._num_elements, self.out_features = weight.numel(), weight.shape[0]
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), BATCH_HINT)
        self._bias = bias[0] if bias else None


def _sums(tensor: torch.Tensor) -> torch.Tensor:
    """Sums over the bits of each row, eight bytes at a time where they fit: what other values hardly share."""
    rows = tensor.detach().contiguous()
    wide = all(number * rows.itemsize % 8 == 0 for number in (rows.shape[-1], rows.storage_offset()))
    return rows.view(torch.int64 if wide else torch.uint8).sum(-1, dtype=torch.int64)


if can_pack():  # builds without oneDNN (Apple silicon) lack the operator, and asking for it would break off the import
    _linear: Callable[..., torch.Tensor] = torch.ops.mkldnn._linear_pointwise.default


# An operator of its own, since inductor neither takes packed weights as inputs nor calls Python from a graph. It finds
# its layer by number; a library and this table must live as long as the module does.
_library = torch.library.Library("foretoken", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("packed_linear(Tensor x, int layer, int out_features) -> Tensor")  # type: ignore[no-untyped-call]
_numbers = itertools.count()
_layers: weakref.WeakValueDictionary[int, PackedLinear] = weakref.WeakValueDictionary()


def _run_packed(x: torch.Tensor, layer: int, out_features: int) -> torch.Tensor:
    return _layers[layer](x)


def _packed_shape(x: torch.Tensor, layer: int, out_features: int) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


_library.impl("packed_linear", _run_packed, "CPU")  # type: ignore[no-untyped-call]
torch.library.register_fake("foretoken::packed_linear", _packed_shape, lib=_library)


def as_operator(packed: PackedLinear) -> Callable[[torch.Tensor], torch.Tensor]:
    """The same forward as an operator that `torch.compile` can carry through a graph."""
    number, out_features = next(_numbers), packed.out_features
    _layers[number] = packed

    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.foretoken.packed_linear(x, number, out_features)  # type: ignore[no-any-return]

    return forward


def available_memory_bytes() -> int | None:
    """Memory that the system can still allocate without swapping; None where it does not say (Linux does)."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    kilobytes = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(kilobytes[0]) * 1024 if kilobytes else None


def packing_bytes(layers: Iterable[nn.Module], release_originals: bool) -> int:
    """Memory that packing these layers takes at its height, over what is held now."""
    total = 0
    for layer in layers:
        weight: torch.Tensor = layer.weight  # type: ignore[assignment]
        dtype = packed_dtype(weight.dtype)
        if dtype is not None:
            kept = 0 if release_originals else weight.dtype.itemsize
            total += weight.numel() * (dtype.itemsize - weight.dtype.itemsize + kept)
    return total


def packable(model: nn.Module, min_elements: int = MIN_ELEMENTS) -> Iterator[nn.Module]:
    """Layers whose weight can be packed and whose forward is their class's own.

    Tensors of other classes are left alone: quantised weights, which only look like the floats that they stand for.
    """
    for layer in model.modules():
        if type(layer) not in (nn.Linear, Conv1D) or "forward" in vars(layer):
            continue
        weight, bias = layer.weight, layer.bias
        if type(weight) is not nn.Parameter or type(bias) not in (nn.Parameter, type(None)):
            continue
        if weight.device.type == "cpu" and weight.numel() >= min_elements and packed_dtype(weight.dtype):
            yield layer

"""Linear layers through oneDNN with weights packed once, for CPUs.

Measured (docs/log.md): reading every weight once is the floor of a step; packed float32 reaches it for one row,
costs about 1.4 times as much for five. In bfloat16 up to sixteen rows cost what one costs.
"""

from __future__ import annotations

import inspect
import itertools
import operator
import platform
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
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


class RowLimit:
    """How many rows linear layers take in one call, at least and at most; None for any number."""

    num_rows: tuple[int, int] | None = None


class LimitedLinear:
    """The forward of a linear layer, in several calls where its input has too many rows, padded where it has too few.

    Exactness: a row's bits are those that the layer gives it in a call of that size.
    """

    def __init__(self, layer: nn.Module, limit: RowLimit) -> None:
        self.inner: Callable[[torch.Tensor], torch.Tensor] = layer.forward
        self.replaced = vars(layer).get("forward")
        self._limit = limit

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out)."""
        if self._limit.num_rows is None:
            return self.inner(x)
        fewest, most = self._limit.num_rows
        num_rows = x.shape[:-1].numel()
        if num_rows < fewest:
            padded = F.pad(x.flatten(0, -2), (0, 0, 0, fewest - num_rows))
            return self.inner(padded)[:num_rows].view(*x.shape[:-1], -1)
        if num_rows <= most:
            return self.inner(x)
        parts = x.flatten(0, -2).tensor_split(-(-num_rows // most))  # even: none is much smaller than the others
        return torch.cat([self.inner(part) for part in parts]).view(*x.shape[:-1], -1)


def replacement(layer: nn.Module) -> object:
    """The function that replaces the forward of a linear layer's class, limits aside; None if there is none."""
    forward = vars(layer).get("forward")
    return forward.replaced if isinstance(forward, LimitedLinear) else forward


def linears(model: nn.Module) -> list[nn.Module]:
    """Every linear layer of a model, packed or not."""
    return [layer for layer in model.modules() if isinstance(layer, (nn.Linear, Conv1D))]


class RMSNorm:
    """The forward of a root-mean-square norm in one call instead of six."""

    def __init__(self, layer: nn.Module, epsilon: float) -> None:
        self._layer = layer
        self._epsilon = epsilon

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weight = self._layer.weight
        return F.rms_norm(x, weight.shape, weight, self._epsilon)  # type: ignore[arg-type]

    @classmethod
    def of(cls, layer: nn.Module) -> RMSNorm | None:
        """The replacement, when it gives the very bits of the layer on a random sample; else None."""
        weight = _only_parameter(layer)
        if weight is None:
            return None
        generator = torch.Generator().manual_seed(0)
        sample = torch.randn(3, 2, weight.numel(), generator=generator).to(weight)
        for epsilon in (value for value in vars(layer).values() if isinstance(value, float) and value > 0):
            norm = cls(layer, epsilon)
            samples = (sample, sample * epsilon**0.5)  # the second is small enough for epsilon to matter
            if all(torch.equal(norm(x), layer(x)) for x in samples):
                return norm
        return None


def _only_parameter(layer: nn.Module) -> nn.Parameter | None:
    """The weight of a layer that maps one tensor by one vector and has nothing else."""
    if "weight" not in layer._parameters:  # of most modules, without a look at all that they hold
        return None
    parameters = dict(layer.named_parameters())
    if list(parameters) != ["weight"] or parameters["weight"].dim() != 1 or list(layer.buffers()):
        return None
    return parameters["weight"] if len(inspect.signature(layer.forward).parameters) == 1 else None


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

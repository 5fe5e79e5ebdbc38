"""What comes behind the layers of many models, a root mean square norm and a product, by the library's own kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import torch
from torch import nn

from foretoken.model.execution.linears import replacement
from foretoken.model.execution.native import KINDS, Library, NativeMatrix
from foretoken.model.execution.packing import PackedLinear
from foretoken.model.execution.surroundings import Surroundings

Integer, Address = ctypes.c_int64, ctypes.c_void_p

SAMPLED = (1, 3, 64)
"""Numbers of rows over which norms are compared."""


class _NormFields(ctypes.Structure):
    _fields_ = (("size", Integer), ("kind", Integer), ("weight", Address), ("eps", ctypes.c_float))


class TailFields(ctypes.Structure):
    """The norm, the product, and where their results go."""

    _fields_ = tuple((name, Address) for name in ("norm", "output", "read", "logits"))


class Tail:
    """The last norm of a model and its output embedding. Use `of` to make one.

    Exactness: the norm has the bits of the modules, as seen on samples; the product runs by the kernels by which its
      module runs.
    """

    def __init__(self, module: nn.Module, eps: float, output: nn.Module, kernels: Library) -> None:
        self._module = module
        self._output = output
        self._kernels = kernels
        self._eps = eps
        self._kept_alive: list[object] = []  # where calls in other threads may still look
        self._lay_out()

    def _lay_out(self) -> None:
        weight: torch.Tensor = self._module.weight  # type: ignore[assignment]
        self._weight = weight.detach()  # keeps this memory, whatever becomes of the weight
        self._norm = _NormFields(len(weight), KINDS[weight.dtype], weight.data_ptr(), self._eps)
        self._kept_alive.append((self._weight, self._norm))

    @classmethod
    def of(cls, modules: Iterable[nn.Module], output: nn.Module, around: Surroundings, kernels: Library) -> Tail | None:
        """That of a model; None where something else comes behind its layers.

        Args:
          modules: those around the layers.
        """
        if not around.ends_in_product:
            return None
        for module in modules:
            weight = module._parameters.get("weight")
            if weight is None or weight.dim() != 1 or len(module._parameters) != 1 or weight.dtype not in KINDS:
                continue
            for eps in (value for value in vars(module).values() if isinstance(value, float) and value > 0):
                tail = cls(module, eps, output, kernels)
                if tail._gives(around):
                    return tail
        return None

    @torch.inference_mode()
    def _gives(self, around: Surroundings) -> bool:
        """Whether its norm gives the bits of the operators behind the layers."""
        generator = torch.Generator().manual_seed(0)
        for num_rows in SAMPLED:
            rows = torch.randn(1, num_rows, len(self._weight), generator=generator)
            for size in (1.0, self._eps**0.5, 300.0):  # the second is small enough for epsilon to matter
                states = (rows * size).to(self._weight.dtype)
                if not torch.equal(self.read(states), around.behind(num_rows, states)):
                    return False
        return True

    def read(self, states: torch.Tensor) -> torch.Tensor:
        """The norm of states (1, S, H)."""
        found = torch.empty_like(states)
        self._kernels.norm(ctypes.addressof(self._norm), states.data_ptr(), states.shape[1], found.data_ptr())
        return found

    def look_again(self) -> None:
        """Find the weight of the norm where it is now."""
        if self._module.weight.data_ptr() != self._weight.data_ptr():  # type: ignore[operator]
            self._lay_out()

    def over(self, num_nodes: int) -> tuple[TailFields, torch.Tensor, torch.Tensor] | None:
        """What C++ is given for so many nodes; None where the product runs by other kernels now.

        Returns: with it, what the output embedding reads, (1, S, H), and its logits, (1, S, V), as they will be.
        """
        packed = replacement(self._output)
        if not isinstance(packed, PackedLinear) or len(packed.product.layers) != 1:
            return None
        matrix = packed.product.matrix
        if not isinstance(matrix, NativeMatrix):
            return None
        read = torch.empty(1, num_nodes, len(self._weight), dtype=self._weight.dtype)
        logits = torch.empty(1, num_nodes, packed.product.out_features, dtype=self._weight.dtype)
        fields = TailFields(ctypes.addressof(self._norm), matrix.address, read.data_ptr(), logits.data_ptr())
        return fields, read, logits

"""Matrices in eight bits, for drafts: half of what bfloat16 takes to read, and as good a guess."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from foretoken.model.execution.native import Library

SPAN = 64
"""Inputs that share a scale of activations."""
BLOCK = 32
LARGEST = 127.0


class Bytes(ctypes.Structure):
    """A matrix of bytes: sizes, and addresses of weights, scales and biases."""

    _fields_ = (
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("weight", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    )


class BytesMatrix:
    """A weight rounded to bytes, with a scale by output.

    Args:
      weight: (out, in) of any float dtype, ``in`` a multiple of 64.
      bias: (out,), or None.

    Attributes:
      structure: what kernels are given; it holds addresses of tensors that live as long as this object.

    Exactness: within half of a 127th of the largest weight of an output, and of the largest of 64 activations; for
      drafts alone.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        outputs, inputs = weight.shape
        wide = weight.detach().float()
        scales = wide.abs().amax(1).clamp(min=1e-30) / LARGEST
        whole = (wide / scales[:, None]).round().clamp(-LARGEST, LARGEST).add(128.0).to(torch.uint8)
        whole = torch.nn.functional.pad(whole, (0, 0, 0, -outputs % BLOCK), value=128)
        # by blocks of 32 outputs and 4 inputs: two vectors of 16 outputs x 4 inputs
        self._packed = whole.view(-1, BLOCK, inputs // 4, 4).permute(0, 2, 1, 3).contiguous()
        self._scales = scales.contiguous()
        self._bias = None if bias is None else bias.detach().float().contiguous()
        self.num_bytes = self._packed.numel()
        self.structure = Bytes(
            inputs,
            outputs,
            self._packed.data_ptr(),
            self._scales.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
        )

    def product(self, x: torch.Tensor, kernels: Library) -> torch.Tensor:
        """(n, in) in float32 -> (n, out)."""
        x = x.float().contiguous()
        out = x.new_empty(len(x), self.structure.outputs)
        address = ctypes.addressof(self.structure)
        kernels.drafting["bytes_product"](address, x.data_ptr(), len(x), out.data_ptr(), torch.get_num_threads())
        return out

    @staticmethod
    def fits(inputs: int) -> bool:
        """Whether a weight with so many inputs can be kept so."""
        return inputs % SPAN == 0

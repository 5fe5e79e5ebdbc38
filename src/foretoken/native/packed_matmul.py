"""Products with packed matrices, by weight format: a step of few rows reads them at the speed of memory.

A step of decoding multiplies a few rows by every weight of a model, and takes as long as reading them. oneDNN's packed
products read narrow matrices at half to two thirds of what memory gives; ``products.cpp`` reads them at all of it, and
sums every row in the same order whatever the number of rows.
"""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F

from foretoken.native import abi, memory
from foretoken.native.codes import Codes
from foretoken.native.library import KINDS, Library

PAIRS_BLOCK = 32
"""Inputs and outputs of a block of pairs."""
CODES_BLOCK, CODES_SPAN = 32, 64
"""Outputs of a block of codes, and inputs whose activations are rounded together."""
SCALES = {torch.float32: abi.FLOAT32, torch.float16: abi.FLOAT16, torch.uint8: abi.BYTES}
"""How scales and zeros may lie in memory."""


class PackedMatrix:
    """A weight (out, in) as kernels read it, and its product.

    Attributes:
      compute_dtype: of what is multiplied, and of the result.
      packed: the numbers of the weight, in huge pages where the system has them.
      num_bytes: of all that a product reads.
      fields, address: what the kernels are told of it, and where that lies.
      rounding: how far, relatively, what is multiplied is rounded.

    Exactness: a row has the same bits among any number of rows; sums are in float32.
    """

    rounding = torch.finfo(torch.float32).eps

    def __init__(
        self,
        kernels: Library,
        size: tuple[int, int],
        kind: int,
        packed: torch.Tensor,
        bias: torch.Tensor | None,
        scales: torch.Tensor | None = None,
        zeros: torch.Tensor | None = None,
        group: int = 0,
        activation_bytes: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._size = outputs, inputs = size
        self.packed = packed
        self._kept = [
            None if bias is None else bias.float().contiguous(),
            *(None if each is None else each.contiguous() for each in (scales, zeros)),
        ]
        self.num_bytes = packed.nbytes + sum(each.nbytes for each in self._kept[1:] if each is not None)
        of_bias, of_scales, of_zeros = (None if each is None else each.data_ptr() for each in self._kept)
        of_kinds = [abi.FLOAT32 if each is None else SCALES[each.dtype] for each in (scales, zeros)]
        of_codes = group, *of_kinds, of_scales, of_zeros, activation_bytes, KINDS[dtype]
        self.fields = abi.Matrix(inputs, outputs, kind, packed.data_ptr(), of_bias, *of_codes)
        self.address = ctypes.addressof(self.fields)
        self.compute_dtype = torch.bfloat16 if kind == abi.PAIRS else dtype
        self.instruction_set = kernels.instruction_set
        self._run, self._unpack = kernels.product, kernels.rows

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in) of `compute_dtype` -> (..., out)."""
        if x.dtype != self.compute_dtype:  # what the kernel writes would not fit
            raise TypeError(f"a matrix that multiplies in {self.compute_dtype} was given {x.dtype}")
        outputs, inputs = self._size
        x = x.contiguous()
        out = x.new_empty((*x.shape[:-1], outputs))
        self._run(self.address, x.data_ptr(), x.numel() // inputs, out.data_ptr(), torch.get_num_threads())
        return out


class NativeMatrix(PackedMatrix):
    """A weight in a float format.

    Args:
      weight: (out, in). Multiplied in bfloat16 where the CPU does that, and with float32 sums of float32 products
        otherwise; half precision is kept as it is in memory either way.
      bias: (out,), or None.

    Exactness: equals ``F.linear`` within the rounding of the dtype.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, kernels: Library) -> None:
        outputs, inputs = weight.shape
        self._is_pairs = weight.dtype == torch.bfloat16 and kernels.has_pairs
        if self._is_pairs:  # two tiles per 32 inputs, of 16 outputs each, pairs of inputs side by side
            shape: tuple[int, ...] = (-(-outputs // PAIRS_BLOCK), -(-inputs // PAIRS_BLOCK), 2, 16, 16, 2)
        else:
            shape = -(-outputs // kernels.block), inputs, kernels.block
        kind = abi.PAIRS if self._is_pairs else KINDS[weight.dtype]
        packed, weight = memory.empty(shape, weight.dtype), weight.detach().contiguous()
        threads = torch.get_num_threads()
        kernels.pack(weight.data_ptr(), outputs, inputs, kind, kernels.block, packed.data_ptr(), threads)
        super().__init__(kernels, (outputs, inputs), kind, packed, bias)

    def dense(self) -> torch.Tensor:
        """The weight (out, in), as it was given."""
        outputs, inputs = self._size
        if self._is_pairs:
            blocks = self.packed.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        else:
            blocks = self.packed.transpose(1, 2)
        return blocks.flatten(0, 1)[:outputs, :inputs].contiguous()


class CodesMatrix(PackedMatrix):
    """A weight in whole numbers, multiplied with activations in 16 bits that share a scale by 64 inputs or fewer.

    Args:
      activation_bytes: 2; or 1 of codes of 8 bits, for drafts alone: half of the arithmetic.
      dtype: float32 or bfloat16, of what is multiplied and of the result.

    Exactness: equals the product with ``codes.dense()`` within 2^-16 of the largest of these activations, or half of a
      127th of it; it has the same bits on every CPU.
    """

    def __init__(
        self,
        codes: Codes,
        bias: torch.Tensor | None,
        kernels: Library,
        *,
        activation_bytes: int = 2,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        outputs, inputs = codes.numbers.shape
        self._bits, self._group = codes.bits, codes.group
        whole = -(-inputs // (codes.group or CODES_SPAN)) * (codes.group or CODES_SPAN)
        missing, half = -outputs % CODES_BLOCK, 2 ** (codes.bits - 1)
        numbers = F.pad(codes.numbers, (0, whole - inputs, 0, missing), value=half)
        blocks = numbers.view(-1, CODES_BLOCK, whole // 4, 4).transpose(1, 2)  # (blocks, fours of inputs, outputs, 4)
        if codes.bits == 4:
            blocks = blocks[:, ::2] | blocks[:, 1::2] << 4
        packed = memory.empty(blocks.shape, torch.uint8).copy_(blocks)
        scales = self._by_block(codes.scales if codes.group else codes.scales.float())
        zeros = None if codes.zeros is None else self._by_block(codes.zeros)
        kind, of_bias = (abi.BYTES if codes.bits == 8 else abi.NIBBLES), None if bias is None else bias.detach()
        super().__init__(
            kernels, (outputs, inputs), kind, packed, of_bias, scales, zeros, codes.group, activation_bytes, dtype
        )
        self.rounding = 2.0 ** (1 - 8 * activation_bytes)

    @staticmethod
    def _by_block(numbers: torch.Tensor) -> torch.Tensor:
        """(outputs, groups) -> (blocks, groups, outputs), in memory of the kernels."""
        blocks = F.pad(numbers, (0, 0, 0, -len(numbers) % CODES_BLOCK)).view(-1, CODES_BLOCK, numbers.shape[1])
        blocks = blocks.transpose(1, 2)
        return memory.empty(blocks.shape, numbers.dtype).copy_(blocks)

    def rows(self, outputs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """(...) of int64 -> (..., in): rows of `dense`, without the others.

        Raises: IndexError for rows that there are not.
        """
        outputs = outputs.long().contiguous()
        if outputs.numel() and not 0 <= int(outputs.min()) <= int(outputs.max()) < self._size[0]:
            raise IndexError(f"rows {int(outputs.min())} to {int(outputs.max())} of {self._size[0]}")
        out = torch.empty((*outputs.shape, self._size[1]), dtype=dtype)
        self._unpack(self.address, outputs.data_ptr(), outputs.numel(), KINDS[dtype], out.data_ptr())
        return out

    @property
    def codes(self) -> Codes:
        """The weight as it was given."""
        outputs, inputs = self._size
        blocks = self.packed
        if self._bits == 4:
            blocks = torch.stack([blocks & 15, blocks >> 4], 2).flatten(1, 2)
        numbers = blocks.transpose(1, 2).reshape(len(blocks) * CODES_BLOCK, -1)[:outputs, :inputs].contiguous()
        scales, zeros = (
            None if each is None else each.transpose(1, 2).flatten(0, 1)[:outputs] for each in self._kept[1:]
        )
        assert scales is not None
        return Codes(numbers, self._bits, scales, zeros, self._group)

    def dense(self) -> torch.Tensor:
        """float32 (out, in): the weight that the codes stand for."""
        return self.codes.dense()

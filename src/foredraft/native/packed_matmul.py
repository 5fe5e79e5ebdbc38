"""Products with packed matrices, by weight format. A step with few rows reads the weights at full memory bandwidth.

A decoding step multiplies a few rows by every weight of a model, and takes as long as reading the weights. oneDNN's
packed products read narrow matrices at half to two thirds of the memory bandwidth. ``products.cpp`` reaches the full
bandwidth, and adds up every row in the same order whatever the number of rows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TypeAlias

import torch

from foredraft.native import abi, memory
from foredraft.native.codes import Codes, StoredCodes, Unrounded, pieces, shift_of, times_halves
from foredraft.native.library import KINDS, Library

PAIRS_BLOCK = 32
"""Inputs and outputs of a block in the format ``PAIRS``."""
CODES_BLOCK, CODES_SPAN = 32, 64
"""Outputs of a block of codes, and inputs whose activations share a rounding scale."""


def float_shape(kind: int, outputs: int, inputs: int, block: int) -> tuple[int, ...]:
    """Return the shape of a packed float weight. Blocks of pairs have two tiles of 16 outputs by 32 inputs."""
    if kind == abi.PAIRS:
        return -(-outputs // PAIRS_BLOCK), -(-inputs // PAIRS_BLOCK), 2, 16, 16, 2
    return -(-outputs // block), inputs, block


def kept_dtype(parts: Sequence[torch.Tensor]) -> torch.dtype:
    """Return the dtype for storing weights: their own, or a half precision that represents all numbers exactly."""
    given = parts[0].dtype
    if given != torch.float32:
        return given
    every = [part.detach()[first:last] for part in parts for first, last in pieces(part.shape)]
    for half in (torch.bfloat16, torch.float16):
        if all(torch.equal(piece.to(half).to(given), piece) for piece in every):
            return half
    return given


def codes_shapes(bits: int, group: int, outputs: int, inputs: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of packed codes, and the shape of their scales and zeros."""
    span, blocks = group or CODES_SPAN, -(-outputs // CODES_BLOCK)
    whole = -(-inputs // span) * span
    return (blocks, whole * bits // 32, CODES_BLOCK, 4), (blocks, whole // group if group else 1, CODES_BLOCK)


SCALES = {torch.float32: abi.FLOAT32, torch.float16: abi.FLOAT16, torch.uint8: abi.BYTES, torch.int8: abi.MULTIPLES}
"""Formats of scales and zeros by dtype."""
KEPT = ("bias", "scales", "zeros", "scale_halves", "zero_halves")
"""Tensors of a matrix in addition to its numbers."""
FLOATS = (abi.PAIRS, abi.FLOAT32, abi.BFLOAT16, abi.FLOAT16)
"""Formats of matrices with float numbers."""
Seen: TypeAlias = Callable[[int, torch.Tensor], object]
"""Callback that receives the number of a part and each piece of its float weight after it was packed."""


class PackedMatrix:
    """A weight (out, in) in the format of the kernels, and the product with it.

    Attributes:
      compute_dtype: dtype of inputs and results.
      packed: numbers of the weight, in huge pages if the system has them.
      parts: all tensors of the matrix, by name.
      num_bytes: bytes that a product reads.
      fields, address: description for the kernels and its address.
      rounding: relative error of rounding inputs.

    Exactness: a row has the same bits in a batch of any size. Sums are in float32.
    """

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
        scale_halves: torch.Tensor | None = None,
        zero_halves: torch.Tensor | None = None,
        ignores_infinite: bool = False,
    ) -> None:
        self._size = outputs, inputs = size
        self.packed = packed
        self._kept = [
            None if bias is None else bias.float().contiguous(),
            *(None if each is None else each.contiguous() for each in (scales, zeros, scale_halves, zero_halves)),
        ]
        parts = {"packed": packed, **dict(zip(KEPT, self._kept, strict=True))}
        self.parts = {name: each for name, each in parts.items() if each is not None}
        self.num_bytes = packed.nbytes + sum(each.nbytes for each in self._kept[1:] if each is not None)
        of_bias, of_scales, of_zeros, *halves = (None if each is None else each.data_ptr() for each in self._kept)
        of_kinds = [abi.FLOAT32 if each is None else SCALES[each.dtype] for each in (scales, zeros)]
        shift = 0 if scales is None or scale_halves is None else shift_of(scales.shape[1], scale_halves.shape[1])
        of_codes = (
            group,
            *of_kinds,
            of_scales,
            of_zeros,
            activation_bytes,
            KINDS[dtype],
            shift,
            *halves,
            ignores_infinite,
        )
        self.fields = abi.Matrix(inputs, outputs, kind, packed.data_ptr(), of_bias, *of_codes)
        self.address = ctypes.addressof(self.fields)
        self.rounding = _rounding(activation_bytes) if activation_bytes else torch.finfo(torch.float32).eps
        self.compute_dtype = torch.bfloat16 if kind == abi.PAIRS else dtype
        self.instruction_set = kernels.instruction_set
        self._run, self._unpack = kernels.product, kernels.rows

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply inputs (..., in) of `compute_dtype`, giving (..., out)."""
        if x.dtype != self.compute_dtype:  # the kernel would write beyond the output
            raise TypeError(f"a matrix that multiplies in {self.compute_dtype} was given {x.dtype}")
        outputs, inputs = self._size
        x = x.contiguous()
        out = x.new_empty((*x.shape[:-1], outputs))
        self._run(self.address, x.data_ptr(), x.numel() // inputs, out.data_ptr(), torch.get_num_threads())
        return out

    def rows(self, outputs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the rows of `dense` with these indices, int64 (...) -> (..., in), without unpacking the others.

        Raises: IndexError for rows outside the matrix, TypeError for a dtype that a float matrix does not support.
        """
        wider = torch.float32 if self.fields.kind != abi.PAIRS else self.packed.dtype
        if self.fields.kind in FLOATS and dtype not in (self.packed.dtype, wider):
            raise TypeError(f"rows of a matrix in {self.packed.dtype} cannot be returned in {dtype}")
        outputs = outputs.long().contiguous()
        if outputs.numel() and not 0 <= int(outputs.min()) <= int(outputs.max()) < self._size[0]:
            raise IndexError(f"rows {int(outputs.min())} to {int(outputs.max())} of {self._size[0]}")
        out = torch.empty((*outputs.shape, self._size[1]), dtype=dtype)
        self._unpack(self.address, outputs.data_ptr(), outputs.numel(), KINDS[dtype], out.data_ptr())
        return out


class NativeMatrix(PackedMatrix):
    """A weight in a float format.

    Args:
      parts: weights (out, in) of one dtype, which are concatenated along the outputs. bfloat16 weights are multiplied
        in bfloat16 if the CPU supports it. Otherwise products and sums are in float32. Half-precision weights stay in
        half precision in memory. So do float32 weights that half precision represents exactly, as when a checkpoint
        in float16 or bfloat16 was loaded in float32.
      bias: (out,), or None.
      kernels: compiled functions.
      seen: callback after each packed piece.

    Exactness: equals ``F.linear`` within the rounding of the dtype.
    """

    def __init__(
        self,
        parts: torch.Tensor | Sequence[torch.Tensor],
        bias: torch.Tensor | None,
        kernels: Library,
        seen: Seen | None = None,
    ) -> None:
        parts = [parts] if isinstance(parts, torch.Tensor) else parts
        dtype, inputs = parts[0].dtype, parts[0].shape[1]
        outputs = sum(map(len, parts))
        kept = kept_dtype(parts)
        kind = abi.PAIRS if dtype == torch.bfloat16 and kernels.has_pairs else KINDS[kept]
        block = PAIRS_BLOCK if kind == abi.PAIRS else kernels.block
        shape = float_shape(kind, outputs, inputs, kernels.block)
        packed, threads = memory.empty(shape, kept), torch.get_num_threads()
        if any(len(part) % block for part in parts[:-1]):  # blocks would extend from one part into the next
            joined = torch.cat([part.detach() for part in parts])
            if seen is not None:
                for number, part in enumerate(parts):
                    seen(number, part)
            parts, seen = [joined], None
        for number, (part, begin) in enumerate(zip(parts, _begins_of(parts), strict=True)):
            for first, last in pieces(part.shape):
                piece = part.detach()[first:last].to(kept).contiguous()
                to = packed[(begin + first) // block :]
                kernels.pack(piece.data_ptr(), last - first, inputs, kind, kernels.block, to.data_ptr(), threads)
                if seen is not None:
                    seen(number, part[first:last])
        super().__init__(kernels, (outputs, inputs), kind, packed, bias)

    def dense(self) -> torch.Tensor:
        """Return the weight (out, in), in its stored dtype."""
        outputs, inputs = self._size
        if self.fields.kind == abi.PAIRS:
            blocks = self.packed.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        else:
            blocks = self.packed.transpose(1, 2)
        return blocks.flatten(0, 1)[:outputs, :inputs].contiguous()


class CodesMatrix(PackedMatrix):
    """A weight in integer codes, multiplied by activations in 16 or 8 bits with one scale per 64 inputs or fewer.

    Args:
      given: codes, or parts that are concatenated along the outputs. Parts are rounded or read piece by piece, so that
        no second copy is in memory.
      bias: (out,), or None.
      kernels: compiled functions.
      activation_bytes: 2, or 1, which halves the arithmetic of many rows on most CPUs.
      ignores_infinite: multiply infinite activations, and others of their span, as 0; for drafts. By default, the
        result is NaN.
      dtype: float32 or bfloat16, dtype of inputs and results.
      seen: callback after each packed piece.

    Raises: ValueError for zeros without groups, and for codes of 5 bits with groups that are no multiple of 32, for
      which there are no kernels.
    Exactness: equals the product with ``codes.dense()`` within 2^-16 of the largest activation with the same scale, or
      within half of 1/127 of it for 1 byte. The bits are the same on every CPU.
    """

    def __init__(
        self,
        given: Codes | Sequence[Unrounded | StoredCodes],
        bias: torch.Tensor | None,
        kernels: Library,
        *,
        activation_bytes: int = 2,
        ignores_infinite: bool = False,
        dtype: torch.dtype = torch.float32,
        seen: Seen | None = None,
    ) -> None:
        parts = [StoredCodes.of(given)] if isinstance(given, Codes) else list(given)
        if len({part.form for part in parts}) > 1:
            read = [part.codes() for part in parts]
            for number, part in enumerate(parts):
                if seen is not None and isinstance(part, Unrounded):
                    seen(number, part.weight)
            parts, seen = [StoredCodes.of(Codes.joined(read))], None
        form, inputs = parts[0].form, parts[0].shape[1]
        if form.zeros is not None and not form.group:
            raise ValueError(
                f"a weight with zeros but without groups has no kernel; give it one group of all {inputs} inputs, "
                "padded to a multiple of 64"
            )
        if form.bits in (5, 6) and form.group % (16 * (7 - form.bits)):
            raise ValueError(f"codes of {form.bits} bits have no kernel for groups of {form.group} inputs")
        outputs = sum(part.shape[0] for part in parts)
        shape, of_groups = codes_shapes(form.bits, form.group, outputs, inputs)
        packed = memory.empty(shape, torch.uint8)
        if outputs % CODES_BLOCK or inputs % (form.group or CODES_SPAN):
            packed.fill_({4: 0x88, 8: 0x80}.get(form.bits, 0))
        scales, zeros = (
            None if dtype is None else memory.empty(of_groups, dtype)
            for dtype in (form.scales if form.group else torch.float32, form.zeros)
        )
        halves = [
            memory.empty((of_groups[0], of_groups[1] >> form.half_shift, CODES_BLOCK), torch.float16)
            if dtype == torch.int8
            else None
            for dtype in (form.scales, form.zeros)
        ]
        for each in (scales, zeros, *halves):
            if each is not None:
                each[-1] = 0  # padding outputs
        kind, of_bias = abi.OF_BITS[form.bits], None if bias is None else bias.detach()
        super().__init__(
            kernels,
            (outputs, inputs),
            kind,
            packed,
            of_bias,
            scales,
            zeros,
            form.group,
            activation_bytes,
            dtype,
            *halves,
            ignores_infinite,
        )
        for number, (part, begin) in enumerate(zip(parts, _begins_of(parts), strict=True)):
            for first, last in pieces(part.shape):
                self._take(kernels, part, first, last, begin + first)
                if seen is not None and isinstance(part, Unrounded):
                    seen(number, part.weight[first:last])
            if isinstance(part, StoredCodes) and part.blocks is not None:
                part.blocks.leave()

    def _take(self, kernels: Library, part: Unrounded | StoredCodes, first: int, last: int, output: int) -> None:
        """Pack outputs ``first`` to ``last`` of a part at ``output`` in the matrix."""
        count, threads = last - first, torch.get_num_threads()
        if isinstance(part, Unrounded):
            rows = part.weight[first:last].contiguous()
            kind = KINDS.get(rows.dtype)
            if kind is None:
                rows, kind = rows.float(), abi.FLOAT32
            kernels.round(self.address, rows.data_ptr(), kind, output, count, threads)
            return
        if part.blocks is not None:
            rows, order = part.blocks.rows, part.blocks.order
            rows, order = (rows[first:last], None) if order is None else (rows, order[first:last].contiguous())
            at = None if order is None else order.data_ptr()
            kernels.pack_blocks(self.address, part.blocks.type_id, rows.data_ptr(), at, output, count, threads)
            return
        codes = part.read(first, last)
        numbers = codes.numbers.contiguous()
        kernels.pack_codes(self.address, numbers.data_ptr(), output, count, threads)
        place = torch.arange(output, output + count)
        for kept, each in zip(self._kept[1:], codes.stored(), strict=True):
            if kept is not None and each is not None:
                kept[place // CODES_BLOCK, :, place % CODES_BLOCK] = each.to(kept.dtype)

    def round_activations(self, num_bytes: int) -> None:
        """Round activations of all later products to this number of bytes, 1 or 2."""
        self.fields.activation_bytes, self.rounding = num_bytes, _rounding(num_bytes)

    @property
    def codes(self) -> Codes:
        """The weight as codes, unpacked."""
        outputs, inputs = self._size
        blocks, bits = self.packed, _BITS[self.fields.kind]
        if bits == 4:
            blocks = torch.stack([blocks & 15, blocks >> 4], 2).flatten(1, 2)
        elif bits < 8:
            blocks = _without_units(blocks, bits)
        numbers = blocks.transpose(1, 2).reshape(len(blocks) * CODES_BLOCK, -1)[:outputs, :inputs].contiguous()
        scales, zeros, of_scales, of_zeros = (
            None if each is None else each.transpose(1, 2).flatten(0, 1)[:outputs] for each in self._kept[1:]
        )
        assert scales is not None
        scales = scales if of_scales is None else times_halves(scales, of_scales)
        zeros = zeros if zeros is None or of_zeros is None else times_halves(zeros, of_zeros)
        return Codes(numbers, bits, scales, zeros, self.fields.group, of_scales, of_zeros)

    def dense(self) -> torch.Tensor:
        """Return the dequantised weight, float32 (out, in)."""
        return self.codes.dense()


def _rounding(activation_bytes: int) -> float:
    """Return the largest error of rounding an activation, relative to the largest one with the same scale."""
    return 2.0 ** (1 - 8 * activation_bytes)


def _without_units(lines: torch.Tensor, bits: int) -> torch.Tensor:
    """Return codes of 5 or 6 bits with one code per byte: (blocks, lines, 32, 4) -> (blocks, inputs / 4, 32, 4)."""
    share = bits - 4
    groups = 8 // share
    units = lines.view(len(lines), -1, groups // 2 + 1, *lines.shape[2:])
    lower = torch.stack([units[:, :, :-1] & 15, units[:, :, :-1] >> 4], 3).flatten(2, 3)
    shifts = torch.arange(0, 8, share, dtype=torch.uint8)[:, None, None]
    upper = units[:, :, -1:] >> shifts & (1 << share) - 1
    codes: torch.Tensor = (lower | upper << 4).flatten(1, 2)
    return codes


def _begins_of(parts: Sequence[torch.Tensor | Unrounded | StoredCodes]) -> list[int]:
    """Return the first output of each of several concatenated parts."""
    return [0, *accumulate(part.shape[0] for part in parts)][: len(parts)]


_BITS = {kind: bits for bits, kind in abi.OF_BITS.items()}

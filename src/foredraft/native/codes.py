"""Weights in integer codes with scales and zeros, and rounding of weights to such codes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
import torch.nn.functional as F

Kind: TypeAlias = tuple[int, int, str]
"""Bits of a code, inputs of a group, and the type of zeros: "", "whole" or "float"."""


@dataclass(frozen=True)
class QuantLayout:
    """Format of integer codes: bits and group as in `Codes`, and the dtypes of scales and zeros.

    Args:
      bits: bits of a code: 4, 5, 6 or 8.
      group: inputs of a group; 0 for all.
      scales: dtype of the scales; int8 if they are multiples of half-precision factors.
      zeros: dtype of the zeros; None without zeros.
      half_shift: logarithm to base 2 of the number of groups that share a half-precision factor.
    """

    bits: int
    group: int
    scales: torch.dtype
    zeros: torch.dtype | None = None
    half_shift: int = 0

    @property
    def kind(self) -> Kind:
        """Properties that must be equal for weights to be joined without conversion."""
        zeros = "" if self.zeros is None else "whole" if self.zeros == torch.uint8 else "float"
        return self.bits, self.group, zeros


@dataclass(frozen=True)
class Codes:
    """A weight (out, in) in integer codes. Without zeros, a weight is (code - 2^(bits - 1)) * scale.

    Args:
      numbers: codes, uint8 (out, in).
      bits: bits of a code: 4, 5, 6 or 8.
      scales: float32 or float16 (out, groups). All inputs of a group share a scale; the last group may be smaller.
      zeros: zeros with the shape of the scales, or None. If they are floats, a weight is code * scale + zero. If they
        are uint8, it is (code - zero) * scale.
      group: inputs of a group: 0 for all, or a multiple of 16.
      scale_halves, zero_halves: float16 (out, groups / 2^n), factors that 2^n groups share. If given, scales and zeros
        (in float32) are integer multiples of these factors, from -128 to 127, and are stored as these integers.
    """

    numbers: torch.Tensor
    bits: int
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    group: int = 0
    scale_halves: torch.Tensor | None = None
    zero_halves: torch.Tensor | None = None

    @classmethod
    def rounded(cls, weight: torch.Tensor, bits: int, group: int = 0, *, has_zeros: bool = False) -> Codes:
        """Round to nearest, in steps symmetric about 0 that depend on the largest weight of each group.

        Args:
          weight: (out, in) of any float dtype.
          bits: bits of a code, 4 or 8.
          group: inputs of a group; 0 for all.
          has_zeros: divide the range between the smallest and the largest weight of a group instead. Zeros are integer
            codes, so that 0 is represented exactly, or floats if the weight was rounded that way before and changes
            far less with them.
        """
        return Unrounded.of(weight, bits, group, has_zeros=has_zeros).codes()

    @classmethod
    def joined(cls, parts: Sequence[Codes]) -> Codes:
        """Concatenate weights with the same inputs, bits, groups and use of zeros along the outputs, without halves."""
        first = parts[0]
        if len(parts) == 1:
            return first
        zeros = [part.zeros for part in parts if part.zeros is not None]
        if len({part.kind for part in parts}) > 1:  # some have integer zeros, some floats
            zeros = [part.begins for part in parts if part.zeros is not None]
        numbers, scales = (torch.cat([getattr(part, name) for part in parts]) for name in ("numbers", "scales"))
        return cls(numbers, first.bits, scales, torch.cat(zeros) if zeros else None, first.group)

    @property
    def begins(self) -> torch.Tensor:
        """Return the weight that a code of 0 represents, float32 (out, groups)."""
        return -(2 ** (self.bits - 1)) * self.scales.float() if self.zeros is None else _begins(self.scales, self.zeros)

    @property
    def form(self) -> QuantLayout:
        """Format in memory."""
        scales, zeros = self.scales.dtype, None if self.zeros is None else self.zeros.dtype
        if self.scale_halves is None:
            return QuantLayout(self.bits, self.group, scales, zeros)
        shift = shift_of(self.scales.shape[1], self.scale_halves.shape[1])
        return QuantLayout(self.bits, self.group, torch.int8, None if zeros is None else torch.int8, shift)

    def stored(self) -> tuple[torch.Tensor | None, ...]:
        """Return scales, zeros and the halves of both in their stored format: with halves, as integer multiples."""
        halves = self.scale_halves, self.zero_halves
        pairs = zip((self.scales, self.zeros), halves, strict=True)
        return *(each if each is None or half is None else _in_halves(each, half) for each, half in pairs), *halves

    @property
    def kind(self) -> Kind:
        """Properties that must be equal for weights to be joined without conversion."""
        return self.form.kind

    def dense(self) -> torch.Tensor:
        """Return the dequantised weight, float32 (out, in)."""
        inputs = self.numbers.shape[1]
        scales, zeros = (
            None if each is None else each.float().repeat_interleave(self.group or inputs, 1)[:, :inputs]
            for each in (self.scales, self.zeros)
        )
        assert scales is not None
        low = 2 ** (self.bits - 1) if zeros is None else zeros if self.kind[2] == "whole" else 0
        weight: torch.Tensor = (self.numbers.float() - low) * scales
        return weight + zeros if zeros is not None and self.kind[2] == "float" else weight

    def in_bytes(self) -> Codes:
        """Return the same weight in codes of 8 bits."""
        shift = 0 if self.zeros is not None else 128 - 2 ** (self.bits - 1)
        return replace(self, numbers=self.numbers + shift, bits=8)

    def part(self, first: int, last: int) -> Codes:
        """Return the outputs ``first`` to ``last``, in the same memory."""
        return self._of(slice(first, last))

    def rows(self, order: torch.Tensor) -> Codes:
        """Return the outputs with these indices, in this order."""
        return self._of(order)

    def _of(self, outputs: slice | torch.Tensor) -> Codes:
        given = self.zeros, self.scale_halves, self.zero_halves
        zeros, *halves = (None if each is None else each[outputs] for each in given)
        return Codes(self.numbers[outputs], self.bits, self.scales[outputs], zeros, self.group, *halves)


@dataclass(frozen=True)
class Unrounded:
    """A float weight and the format that it will be rounded to.

    Args:
      weight: (out, in) of any float dtype.
      form: format of the codes.
    """

    weight: torch.Tensor
    form: QuantLayout

    @classmethod
    def of(cls, weight: torch.Tensor, bits: int, group: int = 0, *, has_zeros: bool = False) -> Unrounded:
        """Choose the format, with arguments as in `Codes.rounded`. A sample decides the dtypes of zeros and scales."""
        form = QuantLayout(bits, group, torch.float32)
        if has_zeros:
            sample = _grouped(weight.detach()[:: -(-len(weight) // SAMPLE)], group)
            tried = [_form_between(sample, bits, group, are_whole) for are_whole in (True, False)]
            whole, free = (_error(sample, *_between(sample, each)) for each in tried)
            form = tried[free < whole / 4]
        return cls(weight.detach(), form)

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape

    def codes(self) -> Codes:
        """Round the whole weight."""
        outputs, inputs = self.shape
        numbers = torch.empty((outputs, inputs), dtype=torch.uint8, device=self.weight.device)
        scales, zeros = [], []
        for first, last in pieces(self.shape):
            groups = _grouped(self.weight[first:last], self.form.group)
            found, steps, begins = _rounded(groups, self.form)
            numbers[first:last] = found.view(last - first, -1)[:, :inputs]
            scales.append(steps)
            zeros += [] if begins is None else [begins]
        return Codes(numbers, self.form.bits, torch.cat(scales), torch.cat(zeros) if zeros else None, self.form.group)


@dataclass(frozen=True)
class StoredBlocks:
    """Quantised blocks of a GGUF file, which kernels pack directly.

    Args:
      rows: rows of blocks, uint8 (out, bytes), in the memory of the file.
      type_id: ggml's number of their type.
      order: row of each output, int64 (out,); None for the same.
      leave: function that releases the memory of the rows after their last use.
    """

    rows: torch.Tensor
    type_id: int
    order: torch.Tensor | None
    leave: Callable[[], object]


@dataclass(frozen=True)
class StoredCodes:
    """Codes of a weight that are read on demand, such as from a file.

    Args:
      shape: shape of the weight (out, in).
      form: format of the codes.
      read: function that returns the outputs from a first to a last one (excluded).
      blocks: blocks of a GGUF file that contain the same codes, if they come from there.
    """

    shape: torch.Size
    form: QuantLayout
    read: Callable[[int, int], Codes]
    blocks: StoredBlocks | None = None

    @classmethod
    def of(cls, codes: Codes) -> StoredCodes:
        """Wrap codes that are in memory already."""
        return cls(codes.numbers.shape, codes.form, codes.part)

    def codes(self) -> Codes:
        """Read all codes."""
        return self.read(0, self.shape[0])


def pieces(shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Divide a weight (out, in) into ranges of outputs (first, last) of whole kernel blocks; the last may be smaller.

    Example:
        >>> list(pieces((70, AT_A_TIME // 32)))
        [(0, 32), (32, 64), (64, 70)]
    """
    step = max(1, AT_A_TIME // (BLOCK * max(1, shape[1]))) * BLOCK
    return ((first, min(first + step, shape[0])) for first in range(0, shape[0], step))


BLOCK = 32
"""Outputs of a kernel block, or a multiple of it."""
AT_A_TIME = 2**20
"""Weights that are processed together. In float32 they need little memory and stay in the processor's cache."""
SAMPLE = 64
"""Outputs in the sample that decides whether zeros are integers and which dtype scales have."""
LEAST_HALF, MOST_HALF = 2.0**-16, torch.finfo(torch.float16).max
"""Smallest and largest scale in half precision."""


def shift_of(groups: int, halves: int) -> int:
    """Return the logarithm to base 2 of the number of groups per half-precision factor.

    Raises: ValueError if the number of groups is not a power of 2 times the number of factors.
    """
    shift = (groups // halves).bit_length() - 1 if halves else 0
    if halves << shift != groups:
        raise ValueError(f"{groups} groups share {halves} numbers in half precision")
    return shift


def times_halves(factors: torch.Tensor, halves: torch.Tensor) -> torch.Tensor:
    """Multiply integers by half-precision factors, exactly: float32 (out, groups)."""
    return factors.float() * halves.float().repeat_interleave(factors.shape[1] // halves.shape[1], 1)


def _in_halves(scales: torch.Tensor, halves: torch.Tensor) -> torch.Tensor:
    """Divide scales by half-precision factors to get the integers; the inverse of `times_halves`."""
    shared = halves.float().repeat_interleave(scales.shape[1] // halves.shape[1], 1)
    return torch.where(shared == 0, 0, scales / shared).nan_to_num().round().to(torch.int8)


def _grouped(rows: torch.Tensor, group: int) -> torch.Tensor:
    """Divide inputs into groups, (out, in) -> float32 (out, groups, inputs of a group), padded with zeros."""
    size = group or rows.shape[1]
    return F.pad(rows.float(), (0, -rows.shape[1] % size)).view(len(rows), -1, size)


def _begins(scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """Return the weight that a code of 0 represents, for integer or float zeros."""
    return -zeros.float() * scales.float() if zeros.dtype == torch.uint8 else zeros.float()


def _ends(groups: torch.Tensor, are_whole: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the smallest and the largest weight of each group. For integer zeros, the range includes 0."""
    low, high = groups.amin(-1), groups.amax(-1)
    return (low.clamp(max=0), high.clamp(min=0)) if are_whole else (low, high)


def _form_between(sample: torch.Tensor, bits: int, group: int, are_whole: bool) -> QuantLayout:
    """Choose the format for rounding between extremes, with float16 scales unless most weights are tiny or huge."""
    low, high = _ends(sample, are_whole)
    is_half = 2**-12 < (high - low).median() / (2**bits - 1) < 2**12
    scales = torch.float16 if is_half else torch.float32
    return QuantLayout(bits, group, scales, torch.uint8 if are_whole else scales)


def _rounded(groups: torch.Tensor, form: QuantLayout) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return codes, scales and zeros of weights (out, groups, inputs)."""
    if form.zeros is not None:
        return _between(groups, form)
    half = 2 ** (form.bits - 1)
    steps = groups.abs().amax(-1).clamp(min=1e-30) / (half - 1)
    return (groups / steps[..., None]).round_().clamp_(1 - half, half - 1).add_(half), steps, None


def _between(groups: torch.Tensor, form: QuantLayout) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes, scales and zeros for the range between the smallest and the largest weight of a group."""
    most, are_whole = 2**form.bits - 1, form.zeros == torch.uint8
    low, high = _ends(groups, are_whole)
    scales = (high - low) / most
    is_half = form.scales == torch.float16
    scales = scales.clamp(LEAST_HALF, MOST_HALF).half() if is_half else scales.clamp(min=1e-30)
    steps = scales.float()
    zeros = (-low / steps).round_().clamp_(0, most).to(torch.uint8) if are_whole else low.to(scales.dtype)
    numbers = ((groups - _begins(scales, zeros)[..., None]) / steps[..., None]).round_().clamp_(0, most).to(torch.uint8)
    return numbers, scales, zeros


def _error(groups: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> float:
    """Return the sum of squared rounding errors."""
    begins = _begins(scales, zeros)[..., None]
    return float((numbers * scales.float()[..., None] + begins - groups).square().sum())

"""Weights in whole numbers: codes with scales and zeros, and rounding to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F

Kind: TypeAlias = tuple[int, int, str]
"""Bits of a code, inputs of a group, and what zeros are."""


@dataclass(frozen=True)
class QuantLayout:
    """How whole numbers stand for a weight: as the attributes of `Codes`, of scales and zeros the dtype.

    Args:
      half_shift: 2 to this power groups share a number in half precision, where scales are whole numbers (int8) of it.
    """

    bits: int
    group: int
    scales: torch.dtype
    zeros: torch.dtype | None = None
    half_shift: int = 0

    @property
    def kind(self) -> Kind:
        """What weights that are joined have in common."""
        zeros = "" if self.zeros is None else "whole" if self.zeros == torch.uint8 else "float"
        return self.bits, self.group, zeros


@dataclass(frozen=True)
class Codes:
    """A weight (out, in) in whole numbers: (code - 2^(bits - 1)) * scale, or with zeros as these say.

    Args:
      numbers: uint8 (out, in).
      bits: of a code, 4 or 8.
      scales: float32 or float16 (out, groups): inputs in that many groups of one size share a scale; the last may be
        cut off.
      zeros: as the scales, code * scale + zero, or in uint8, (code - zero) * scale; or None.
      group: inputs of a group: all, or a multiple of 16.
      scale_halves, zero_halves: float16 (out, groups / 2^n): where scales and zeros (in float32) are whole numbers from
        -128 to 127 times these, of which so many groups share one; they are kept so in memory.
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
        """Round to nearest, in steps on both sides of 0 by the largest weight of every group.

        Args:
          weight: (out, in) of any float dtype.
          group: inputs; 0 for all.
          has_zeros: round in steps between the smallest and the largest weight instead, of which one is 0; or from the
            smallest on, where the weight has been rounded so before and is hardly changed by it.
        """
        return Unrounded.of(weight, bits, group, has_zeros=has_zeros).codes()

    @classmethod
    def joined(cls, parts: Sequence[Codes]) -> Codes:
        """Weights with the same inputs, bits and groups, with zeros or without, one after another; without halves."""
        first = parts[0]
        if len(parts) == 1:
            return first
        zeros = [part.zeros for part in parts if part.zeros is not None]
        if len({part.kind for part in parts}) > 1:  # whole zeros, and others
            zeros = [part.begins for part in parts if part.zeros is not None]
        numbers, scales = (torch.cat([getattr(part, name) for part in parts]) for name in ("numbers", "scales"))
        return cls(numbers, first.bits, scales, torch.cat(zeros) if zeros else None, first.group)

    @property
    def begins(self) -> torch.Tensor:
        """float32 (out, groups): what a code of 0 stands for."""
        return -(2 ** (self.bits - 1)) * self.scales.float() if self.zeros is None else _begins(self.scales, self.zeros)

    @property
    def form(self) -> QuantLayout:
        """How they lie in memory."""
        scales, zeros = self.scales.dtype, None if self.zeros is None else self.zeros.dtype
        if self.scale_halves is None:
            return QuantLayout(self.bits, self.group, scales, zeros)
        shift = shift_of(self.scales.shape[1], self.scale_halves.shape[1])
        return QuantLayout(self.bits, self.group, torch.int8, None if zeros is None else torch.int8, shift)

    def stored(self) -> tuple[torch.Tensor | None, ...]:
        """Scales, zeros, and the halves of both, as they lie in memory: with halves in whole numbers of these."""
        halves = self.scale_halves, self.zero_halves
        pairs = zip((self.scales, self.zeros), halves, strict=True)
        return *(each if each is None or half is None else _in_halves(each, half) for each, half in pairs), *halves

    @property
    def kind(self) -> Kind:
        """What weights that are joined have in common."""
        return self.form.kind

    def dense(self) -> torch.Tensor:
        """float32 (out, in): the weight that they stand for."""
        inputs = self.numbers.shape[1]
        scales, zeros = (
            None if each is None else each.float().repeat_interleave(self.group or inputs, 1)[:, :inputs]
            for each in (self.scales, self.zeros)
        )
        assert scales is not None
        low = 2 ** (self.bits - 1) if zeros is None else zeros if self.kind[2] == "whole" else 0
        weight: torch.Tensor = (self.numbers.float() - low) * scales
        return weight + zeros if zeros is not None and self.kind[2] == "float" else weight

    def part(self, first: int, last: int) -> Codes:
        """Of outputs from one to another, in the same memory."""
        return self._of(slice(first, last))

    def rows(self, order: torch.Tensor) -> Codes:
        """Of these outputs, in this order."""
        return self._of(order)

    def _of(self, outputs: slice | torch.Tensor) -> Codes:
        given = self.zeros, self.scale_halves, self.zero_halves
        zeros, *halves = (None if each is None else each[outputs] for each in given)
        return Codes(self.numbers[outputs], self.bits, self.scales[outputs], zeros, self.group, *halves)


@dataclass(frozen=True)
class Unrounded:
    """A weight that is to be rounded.

    Args:
      weight: (out, in) of any float dtype.
      form: that it is rounded to.
    """

    weight: torch.Tensor
    form: QuantLayout

    @classmethod
    def of(cls, weight: torch.Tensor, bits: int, group: int = 0, *, has_zeros: bool = False) -> Unrounded:
        """Arguments as of `Codes.rounded`. What the zeros are, and the dtype of scales, is seen in a sample."""
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
        """Round it all."""
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
class StoredCodes:
    """Whole numbers that a file holds of a weight, in the order of its layer.

    Args:
      shape: of the weight (out, in).
      read: outputs from one to another.
    """

    shape: torch.Size
    form: QuantLayout
    read: Callable[[int, int], Codes]

    @classmethod
    def of(cls, codes: Codes) -> StoredCodes:
        """In memory already."""
        return cls(codes.numbers.shape, codes.form, codes.part)

    def codes(self) -> Codes:
        """Read them all."""
        return self.read(0, self.shape[0])


def pieces(shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Outputs (first, last) of a weight (out, in) that are taken at a time: whole blocks of kernels, but the last.

    Example:
        >>> list(pieces((70, AT_A_TIME // 32)))
        [(0, 32), (32, 64), (64, 70)]
    """
    step = max(1, AT_A_TIME // (BLOCK * max(1, shape[1]))) * BLOCK
    return ((first, min(first + step, shape[0])) for first in range(0, shape[0], step))


BLOCK = 32
"""Outputs of a block of kernels, or a multiple of it."""
AT_A_TIME = 2**20
"""Weights that are taken together: what that takes in float32 is small beside a weight, and stays in the cache."""
SAMPLE = 64
"""Outputs from all over a weight by which it is decided whether zeros are whole, and how exact scales are."""
LEAST_HALF, MOST_HALF = 2.0**-16, torch.finfo(torch.float16).max
"""Scales in half precision."""


def shift_of(groups: int, halves: int) -> int:
    """To which power of 2 groups share a number in half precision.

    Raises: ValueError for groups that do not.
    """
    shift = (groups // halves).bit_length() - 1 if halves else 0
    if halves << shift != groups:
        raise ValueError(f"{groups} groups share {halves} numbers in half precision")
    return shift


def times_halves(factors: torch.Tensor, halves: torch.Tensor) -> torch.Tensor:
    """float32 (out, groups): whole numbers times numbers in half precision, exactly."""
    return factors.float() * halves.float().repeat_interleave(factors.shape[1] // halves.shape[1], 1)


def _in_halves(scales: torch.Tensor, halves: torch.Tensor) -> torch.Tensor:
    """The whole numbers again."""
    shared = halves.float().repeat_interleave(scales.shape[1] // halves.shape[1], 1)
    return torch.where(shared == 0, 0, scales / shared).nan_to_num().round().to(torch.int8)


def _grouped(rows: torch.Tensor, group: int) -> torch.Tensor:
    """(out, in) -> float32 (out, groups, inputs of one), with zeros behind the last input."""
    size = group or rows.shape[1]
    return F.pad(rows.float(), (0, -rows.shape[1] % size)).view(len(rows), -1, size)


def _begins(scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """What a code of 0 stands for, by whole zeros or others."""
    return -zeros.float() * scales.float() if zeros.dtype == torch.uint8 else zeros.float()


def _ends(groups: torch.Tensor, are_whole: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest and the largest weight of (out, groups, inputs); between whole zeros these have 0 between them."""
    low, high = groups.amin(-1), groups.amax(-1)
    return (low.clamp(max=0), high.clamp(min=0)) if are_whole else (low, high)


def _form_between(sample: torch.Tensor, bits: int, group: int, are_whole: bool) -> QuantLayout:
    """Scales in half precision lose nothing to speak of unless most weights are tiny, or huge."""
    low, high = _ends(sample, are_whole)
    is_half = 2**-12 < (high - low).median() / (2**bits - 1) < 2**12
    scales = torch.float16 if is_half else torch.float32
    return QuantLayout(bits, group, scales, torch.uint8 if are_whole else scales)


def _rounded(groups: torch.Tensor, form: QuantLayout) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Numbers, scales and zeros of (out, groups, inputs)."""
    if form.zeros is not None:
        return _between(groups, form)
    half = 2 ** (form.bits - 1)
    steps = groups.abs().amax(-1).clamp(min=1e-30) / (half - 1)
    return (groups / steps[..., None]).round_().clamp_(1 - half, half - 1).add_(half), steps, None


def _between(groups: torch.Tensor, form: QuantLayout) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same by the smallest and the largest weight of a group."""
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
    """Sum of the squares of what rounding changes."""
    begins = _begins(scales, zeros)[..., None]
    return float((numbers * scales.float()[..., None] + begins - groups).square().sum())

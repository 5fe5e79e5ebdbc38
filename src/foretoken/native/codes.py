"""Weights in whole numbers: codes with scales and zeros, and rounding to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F


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
    """

    numbers: torch.Tensor
    bits: int
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    group: int = 0

    @classmethod
    def rounded(cls, weight: torch.Tensor, bits: int, group: int = 0, *, has_zeros: bool = False) -> Codes:
        """Round to nearest, in steps on both sides of 0 by the largest weight of every group.

        Args:
          weight: (out, in) of any float dtype.
          group: inputs; 0 for all.
          has_zeros: round in steps between the smallest and the largest weight instead, of which one is 0; or from the
            smallest on, where the weight has been rounded so before and is hardly changed by it.
        """
        outputs, inputs = weight.shape
        size, half = group or inputs, 2 ** (bits - 1)

        def grouped(rows: torch.Tensor) -> torch.Tensor:
            return F.pad(rows.float(), (0, -inputs % size)).view(len(rows), -1, size)

        if has_zeros:
            sample = grouped(weight.detach()[:SAMPLE])
            whole, free = (_error(sample, *_between(sample, bits, each)) for each in (True, False))
        numbers = torch.empty((outputs, inputs), dtype=torch.uint8, device=weight.device)
        scales, zeros = [], []
        for rows, to in zip(torch.split(weight.detach(), AT_A_TIME), torch.split(numbers, AT_A_TIME), strict=True):
            groups = grouped(rows)
            if has_zeros:
                found, steps, begins = _between(groups, bits, not free < whole / 4)
                zeros.append(begins)
            else:
                steps = groups.abs().amax(-1).clamp(min=1e-30) / (half - 1)
                found = (groups / steps[..., None]).round_().clamp_(1 - half, half - 1).add_(half)
            scales.append(steps)
            to.copy_(found.view(len(rows), -1)[:, :inputs])
        return cls(numbers, bits, torch.cat(scales), torch.cat(zeros) if zeros else None, group)

    @classmethod
    def joined(cls, parts: Sequence[Codes]) -> Codes:
        """Weights with the same inputs, bits and groups, with zeros or without, one after another."""
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
    def kind(self) -> tuple[int, int, str]:
        """What weights that are joined have in common."""
        zeros = "" if self.zeros is None else "whole" if self.zeros.dtype == torch.uint8 else "float"
        return self.bits, self.group, zeros

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

    def rows(self, order: torch.Tensor) -> Codes:
        """Of these outputs, in this order."""
        zeros = None if self.zeros is None else self.zeros[order]
        return Codes(self.numbers[order], self.bits, self.scales[order], zeros, self.group)


AT_A_TIME = 2048
"""Outputs that are rounded together: what that takes in float32 is small beside a weight."""
SAMPLE = 64
"""Outputs by which it is decided whether zeros are whole."""


def _begins(scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """What a code of 0 stands for, by whole zeros or others."""
    return -zeros.float() * scales.float() if zeros.dtype == torch.uint8 else zeros.float()


def _between(groups: torch.Tensor, bits: int, are_whole: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers, scales and zeros of (out, groups, inputs) by their smallest and largest weight."""
    most, low, high = 2**bits - 1, groups.amin(-1), groups.amax(-1)
    if are_whole:
        low, high = low.clamp(max=0), high.clamp(min=0)
    scales = (high - low) / most
    # half precision loses nothing to speak of unless weights are tiny
    scales = scales.clamp(min=2**-16).half() if 2**-12 < scales.mean() < 2**12 else scales.clamp(min=1e-30)
    steps = scales.float()
    zeros = (-low / steps).round_().clamp_(0, most).to(torch.uint8) if are_whole else low.to(scales.dtype)
    numbers = ((groups - _begins(scales, zeros)[..., None]) / steps[..., None]).round_().clamp_(0, most).to(torch.uint8)
    return numbers, scales, zeros


def _error(groups: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> float:
    """Sum of the squares of what rounding changes."""
    begins = _begins(scales, zeros)[..., None]
    return float((numbers * scales.float()[..., None] + begins - groups).square().sum())

"""Quantised blocks of GGUF files as codes with scales and zeros.

Source: block layouts of ggml (ggml-org/ggml, ggml-common.h), as gguf dequantises them. ``native/ggml_blocks.cpp`` reads
the same layouts for kernels; this module serves systems without kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from foredraft.native.codes import Codes, QuantLayout

SUPER = 256
"""Weights of a superblock, which is divided into parts with scales of their own."""

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Contents of n blocks: codes uint8 (n, weights), scales and zeros (n, groups)."""


@dataclass(frozen=True)
class BlockType:
    """Layout of a type of quantised blocks.

    Args:
      name: name in llama.cpp.
      size, num_bytes: weights and bytes of a block.
      bits, group: parameters of `Codes`.
      unpack: function that converts blocks, uint8 (n, num_bytes), into their contents.
      halves: function that returns the half-precision factors of each block's scales and zeros, which `Codes` keeps.
    """

    name: str
    size: int
    num_bytes: int
    bits: int
    group: int
    unpack: Callable[[torch.Tensor], Parts]
    halves: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]] | None = None

    @property
    def form(self) -> QuantLayout:
        """Format of the codes."""
        return self.codes(torch.zeros(1, self.num_bytes, dtype=torch.uint8)).form

    def codes(self, rows: torch.Tensor) -> Codes:
        """Return the codes in rows of blocks, uint8 (outputs, bytes)."""
        blocks, outputs = rows.reshape(-1, self.num_bytes), len(rows)
        halves = (None, None) if self.halves is None else self.halves(blocks)
        numbers, scales, *others = (
            None if each is None else each.reshape(outputs, -1) for each in (*self.unpack(blocks), *halves)
        )
        assert numbers is not None
        assert scales is not None
        zeros, scale_halves, zero_halves = others
        return Codes(numbers, self.bits, scales, zeros, self.group, scale_halves, zero_halves)


def _halves(blocks: torch.Tensor, first: int) -> torch.Tensor:
    """Return the half-precision number at byte ``first`` of every block: (n, 1)."""
    return blocks[:, first : first + 2].contiguous().view(torch.float16)


def _nibbles(blocks: torch.Tensor) -> torch.Tensor:
    """Return the low nibbles of all bytes, then the high nibbles."""
    return torch.cat([blocks & 15, blocks >> 4], -1)


def _bits(blocks: torch.Tensor, count: int, width: int) -> torch.Tensor:
    """Split bytes into ``count`` numbers of ``width`` bits, lowest first: (n, k, bytes) -> (n, k, count, bytes)."""
    shifts = torch.arange(count, dtype=torch.uint8)[:, None] * width
    return blocks[..., None, :] >> shifts & (1 << width) - 1


def _q8_0(blocks: torch.Tensor) -> Parts:
    return blocks[:, 2:] ^ 128, _halves(blocks, 0), None  # int8 to uint8 with the zero at 128


def _q4_0(blocks: torch.Tensor) -> Parts:
    return _nibbles(blocks[:, 2:]), _halves(blocks, 0), None


def _q4_1(blocks: torch.Tensor) -> Parts:
    return _nibbles(blocks[:, 4:]), _halves(blocks, 0), _halves(blocks, 2)


def _fifth_bits(blocks: torch.Tensor) -> torch.Tensor:
    """Return the bits of four bytes, lowest first, each with the value 16."""
    return (blocks[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1) << 4


def _q5_0(blocks: torch.Tensor) -> Parts:
    return _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6]), _halves(blocks, 0), None


def _q5_1(blocks: torch.Tensor) -> Parts:
    numbers = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return numbers, _halves(blocks, 0), _halves(blocks, 2)


def _scales_of_parts(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and zeros of eight parts with 6 bits each, stored as two factors and 12 bytes."""
    lower, middle, upper = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([lower & 63, upper & 15 | lower >> 2 & 48], 1)
    zeros = torch.cat([middle & 63, upper >> 4 | middle >> 2 & 48], 1)
    return _halves(blocks, 0).float() * scales, -(_halves(blocks, 2).float() * zeros)


def _halves_of_parts(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the half-precision factors of the scales and zeros of parts."""
    return _halves(blocks, 0), -_halves(blocks, 2)


def _half_at_the_end(blocks: torch.Tensor) -> tuple[torch.Tensor, None]:
    return _halves(blocks, 208), None


def _q4_k(blocks: torch.Tensor) -> Parts:
    return _bits(blocks[:, 16:].view(-1, 4, 32), 2, 4).flatten(1), *_scales_of_parts(blocks)


def _q5_k(blocks: torch.Tensor) -> Parts:
    numbers = _bits(blocks[:, 48:].view(-1, 4, 32), 2, 4).flatten(1)
    fifths = _bits(blocks[:, 16:48].view(-1, 1, 32), 8, 1).flatten(1)
    return numbers | fifths << 4, *_scales_of_parts(blocks)


def _q6_k(blocks: torch.Tensor) -> Parts:
    numbers = _bits(blocks[:, :128].view(-1, 2, 64), 2, 4).flatten(1)
    upper = _bits(blocks[:, 128:192].view(-1, 2, 32), 4, 2).flatten(1)
    scales = blocks[:, 192:208].view(torch.int8)
    return numbers | upper << 4, _halves(blocks, 208).float() * scales, None


def _q2_k(blocks: torch.Tensor) -> Parts:
    scales = _halves(blocks, 80).float() * (blocks[:, :16] & 15)
    zeros = _halves(blocks, 82).float() * (blocks[:, :16] >> 4)
    return _bits(blocks[:, 16:80].view(-1, 2, 32), 4, 2).flatten(1), scales, -zeros


def _halves_of_q2_k(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _halves(blocks, 80), -_halves(blocks, 82)


def _q3_k(blocks: torch.Tensor) -> Parts:
    lower = _bits(blocks[:, 32:96].view(-1, 2, 32), 4, 2).flatten(1)
    upper = _bits(blocks[:, :32].view(-1, 1, 32), 8, 1).flatten(1)
    scales = _nibbles(blocks[:, 96:104]) | _bits(blocks[:, 104:108].view(-1, 1, 4), 4, 2).flatten(1) << 4
    return lower + (upper << 2) + (8 - 4), _halves(blocks, 108).float() * (scales.float() - 32), None


def _half_at_108(blocks: torch.Tensor) -> tuple[torch.Tensor, None]:
    return _halves(blocks, 108), None


_IQ4 = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
_MXFP4 = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])
"""Weights that the codes stand for."""


def _listed(blocks: torch.Tensor, weights: torch.Tensor, middle: int) -> torch.Tensor:
    return (weights[_nibbles(blocks).long()] + middle).to(torch.uint8)


def _iq4_nl(blocks: torch.Tensor) -> Parts:
    return _listed(blocks[:, 2:], _IQ4, 128), _halves(blocks, 0), None


def _iq4_xs(blocks: torch.Tensor) -> Parts:
    lower = torch.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], -1).flatten(1)
    upper = _bits(blocks[:, 2:4].view(-1, 2, 1), 4, 2).flatten(1)
    numbers = _listed(blocks[:, 8:].reshape(-1, 16), _IQ4, 128).view(len(blocks), -1)
    return numbers, _halves(blocks, 0).float() * ((lower | upper << 4).float() - 32), None


def _half_at_the_beginning(blocks: torch.Tensor) -> tuple[torch.Tensor, None]:
    return _halves(blocks, 0), None


def _mxfp4(blocks: torch.Tensor) -> Parts:
    exponents = blocks[:, :1].int()
    scales = torch.where(exponents < 2, 1 << 21 + exponents, exponents - 1 << 23).view(torch.float32)
    return _listed(blocks[:, 1:], _MXFP4, 16), scales, None


TYPES = {
    2: BlockType("Q4_0", 32, 18, 4, 32, _q4_0),
    3: BlockType("Q4_1", 32, 20, 4, 32, _q4_1),
    6: BlockType("Q5_0", 32, 22, 5, 32, _q5_0),
    7: BlockType("Q5_1", 32, 24, 5, 32, _q5_1),
    8: BlockType("Q8_0", 32, 34, 8, 32, _q8_0),
    10: BlockType("Q2_K", SUPER, 84, 4, 16, _q2_k, _halves_of_q2_k),
    11: BlockType("Q3_K", SUPER, 110, 4, 16, _q3_k, _half_at_108),
    12: BlockType("Q4_K", SUPER, 144, 4, 32, _q4_k, _halves_of_parts),
    13: BlockType("Q5_K", SUPER, 176, 5, 32, _q5_k, _halves_of_parts),
    14: BlockType("Q6_K", SUPER, 210, 6, 16, _q6_k, _half_at_the_end),
    20: BlockType("IQ4_NL", 32, 18, 8, 32, _iq4_nl),
    23: BlockType("IQ4_XS", SUPER, 136, 8, 32, _iq4_xs, _half_at_the_beginning),
    39: BlockType("MXFP4", 32, 17, 5, 32, _mxfp4),
}
"""Block types with kernels, by type number. In memory, codes of 2 and 3 bits take 4, and those of IQ4 8."""

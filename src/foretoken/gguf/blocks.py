"""Weights in whole numbers as GGUF files store them: read from their blocks, with the same values to the bit.

Source: block layouts of ggml (ggml-org/ggml, ggml-common.h), as gguf dequantises them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from foretoken.gguf.header import Header, TensorInfo
from foretoken.native.codes import Codes, StoredCodes

SUPER = 256
"""Weights of a block with scales of its own for its parts."""

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Of blocks (n, bytes): numbers uint8 (n, weights), and scales and zeros (n, groups)."""


@dataclass(frozen=True)
class BlockType:
    """A type of blocks.

    Args:
      size, num_bytes: weights and bytes of a block.
      bits, group: of `Codes`.
      unpack: blocks uint8 (n, num_bytes) into their parts.
      halves: what scales and zeros of a whole block are multiples of; they are kept so.
    """

    name: str
    size: int
    num_bytes: int
    bits: int
    group: int
    unpack: Callable[[torch.Tensor], Parts]
    halves: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]] | None = None

    def codes(self, blocks: torch.Tensor, outputs: int) -> Codes:
        """Of the blocks of so many outputs."""
        halves = (None, None) if self.halves is None else self.halves(blocks)
        numbers, scales, *others = (
            None if each is None else each.reshape(outputs, -1) for each in (*self.unpack(blocks), *halves)
        )
        assert numbers is not None
        assert scales is not None
        zeros, scale_halves, zero_halves = others
        return Codes(numbers, self.bits, scales, zeros, self.group, scale_halves, zero_halves)


def stored_codes(header: Header, tensor: TensorInfo) -> StoredCodes | None:
    """The weight in a tensor, still to be read; None where it is no matrix, or of a type that is not multiplied as it
    lies."""
    kind = TYPES.get(tensor.type_id)
    if kind is None or len(tensor.shape) != 2 or tensor.shape[1] % kind.size or not tensor.num_elements:
        return None
    row_bytes = tensor.shape[1] // kind.size * kind.num_bytes

    def read(first: int, last: int) -> Codes:
        with header.path.open("rb") as stream:
            stream.seek(header.data_start + tensor.offset + first * row_bytes)
            data = bytearray(stream.read((last - first) * row_bytes))
        return kind.codes(torch.frombuffer(data, dtype=torch.uint8).view(-1, kind.num_bytes), last - first)

    return StoredCodes(torch.Size(tensor.shape), read(0, 1).form, read)


def _halves(blocks: torch.Tensor, first: int) -> torch.Tensor:
    """The number in half precision at a byte of every block: (n, 1)."""
    return blocks[:, first : first + 2].contiguous().view(torch.float16)


def _nibbles(blocks: torch.Tensor) -> torch.Tensor:
    """The lower halves of all bytes, then the upper ones."""
    return torch.cat([blocks & 15, blocks >> 4], -1)


def _bits(blocks: torch.Tensor, count: int, width: int) -> torch.Tensor:
    """(n, k, bytes) -> (n, k, count, bytes): numbers of so many bits in every byte, the lowest first."""
    shifts = torch.arange(count, dtype=torch.uint8)[:, None] * width
    return blocks[..., None, :] >> shifts & (1 << width) - 1


def _q8_0(blocks: torch.Tensor) -> Parts:
    return blocks[:, 2:] ^ 128, _halves(blocks, 0), None  # of two's complement, 128 more


def _q4_0(blocks: torch.Tensor) -> Parts:
    return _nibbles(blocks[:, 2:]), _halves(blocks, 0), None


def _q4_1(blocks: torch.Tensor) -> Parts:
    return _nibbles(blocks[:, 4:]), _halves(blocks, 0), _halves(blocks, 2)


def _fifth_bits(blocks: torch.Tensor) -> torch.Tensor:
    """The bits of four bytes, the lowest first, as 16."""
    return (blocks[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1) << 4


def _q5_0(blocks: torch.Tensor) -> Parts:
    numbers = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return numbers + (128 - 16), _halves(blocks, 0), None


def _q5_1(blocks: torch.Tensor) -> Parts:
    numbers = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return numbers, _halves(blocks, 0), _halves(blocks, 2)


def _scales_of_parts(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of eight parts, in 6 bits each, what they are multiplied by and what is subtracted: two factors, 12 bytes."""
    lower, middle, upper = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([lower & 63, upper & 15 | lower >> 2 & 48], 1)
    zeros = torch.cat([middle & 63, upper >> 4 | middle >> 2 & 48], 1)
    return _halves(blocks, 0).float() * scales, -(_halves(blocks, 2).float() * zeros)


def _halves_of_parts(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What these are multiples of."""
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
    return (numbers | upper << 4) + (128 - 32), _halves(blocks, 208).float() * scales, None


TYPES = {
    2: BlockType("Q4_0", 32, 18, 4, 32, _q4_0),
    3: BlockType("Q4_1", 32, 20, 4, 32, _q4_1),
    6: BlockType("Q5_0", 32, 22, 8, 32, _q5_0),
    7: BlockType("Q5_1", 32, 24, 8, 32, _q5_1),
    8: BlockType("Q8_0", 32, 34, 8, 32, _q8_0),
    12: BlockType("Q4_K", SUPER, 144, 4, 32, _q4_k, _halves_of_parts),
    13: BlockType("Q5_K", SUPER, 176, 8, 32, _q5_k, _halves_of_parts),
    14: BlockType("Q6_K", SUPER, 210, 8, 16, _q6_k, _half_at_the_end),
}
"""By number, those that are multiplied as they lie. Codes of 5 and 6 bits take bytes in memory."""

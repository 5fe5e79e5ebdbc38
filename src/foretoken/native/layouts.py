"""How weights lie in memory once they are packed: in which dtype, and in which shape."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foretoken.native import abi
from foretoken.native.codes import pieces

PAIRS_BLOCK = 32
"""Inputs and outputs of a block of pairs."""
CODES_BLOCK, CODES_SPAN = 32, 64
"""Outputs of a block of codes, and inputs whose activations are rounded together."""


def float_shape(kind: int, outputs: int, inputs: int, block: int) -> tuple[int, ...]:
    """Of a packed weight in floats; of pairs two tiles of 16 outputs per 32 inputs, pairs of inputs side by side."""
    if kind == abi.PAIRS:
        return -(-outputs // PAIRS_BLOCK), -(-inputs // PAIRS_BLOCK), 2, 16, 16, 2
    return -(-outputs // block), inputs, block


def kept_dtype(parts: Sequence[torch.Tensor]) -> torch.dtype:
    """The smallest dtype that holds all numbers of weights of one dtype: their own, or of float32 a half."""
    given = parts[0].dtype
    if given != torch.float32:
        return given
    every = [part.detach()[first:last] for part in parts for first, last in pieces(part.shape)]
    for half in (torch.bfloat16, torch.float16):
        if all(torch.equal(piece.to(half).to(given), piece) for piece in every):
            return half
    return given


def codes_shapes(bits: int, group: int, outputs: int, inputs: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of packed codes, and of their scales and zeros."""
    span, blocks = group or CODES_SPAN, -(-outputs // CODES_BLOCK)
    whole = -(-inputs // span) * span
    return (blocks, whole * bits // 32, CODES_BLOCK, 4), (blocks, whole // group if group else 1, CODES_BLOCK)

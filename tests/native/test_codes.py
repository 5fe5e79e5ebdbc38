"""Products with integer codes equal a plain reference to the bit, for any number of rows and on every instruction set.

The reference rounds each row by itself, adds integers exactly, and adds the spans in order, each with one rounding.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from foredraft.native import library as native
from foredraft.native.codes import Codes
from foredraft.native.packed_matmul import CODES_SPAN, CodesMatrix

LARGEST = {1: np.float32(127), 2: np.float32(32639)}
"""Largest rounded activation, by bytes."""
ROWS = 70
COUNTS = (*range(1, 41), 64, 65, 70)
SHAPES = [(70, 96), (33, 288)]
GROUPS = {4: (0, 16, 32, 48, 96, 128), 5: (0, 32, 96), 6: (0, 16, 32), 8: (0, 16, 32, 64)}
ZEROS = ("none", "whole", "float")
FORMS = [
    (bits, group, zeros)
    for bits, groups in GROUPS.items()
    for group, zeros in product(groups, ZEROS)
    if group or zeros == "none"
]

pytestmark = pytest.mark.skipif(native.library() is None, reason="no kernels here")


def codes_of(bits: int, group: int, zeros: str, outputs: int, inputs: int) -> Codes:
    """Random codes that include the smallest and the largest, with scales in half precision where there are groups."""
    generator = torch.Generator().manual_seed(bits * 1000 + group)
    numbers = torch.randint(0, 2**bits, (outputs, inputs), generator=generator, dtype=torch.uint8)
    numbers[0], numbers[1] = 2**bits - 1, 0
    shape = outputs, -(-inputs // group) if group else 1
    scales = torch.rand(shape, generator=generator) / 16 + 1e-3
    scales = scales.half() if group else scales
    given = {
        "none": None,
        "whole": torch.randint(0, 2**bits, shape, generator=generator, dtype=torch.uint8),
        "float": torch.randn(shape, generator=generator).to(scales.dtype),
    }
    return Codes(numbers, bits, scales, given[zeros], group)


def activations(inputs: int) -> torch.Tensor:
    """Rows of different sizes. One is at its largest value with one sign, which makes sums of products largest."""
    generator = torch.Generator().manual_seed(inputs)
    x = torch.randn(ROWS, inputs, generator=generator) * torch.rand(ROWS, 1, generator=generator)
    x[2], x[3], x[4] = 1.5, -1.5, 0.0
    return x


def add_product(a: np.ndarray, b: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Return a * b + total in float32, rounded once."""
    exact = a.astype(np.longdouble) * b.astype(np.longdouble) + total.astype(np.longdouble)
    return exact.astype(np.float32)


def reference(codes: Codes, x: torch.Tensor, activation_bytes: int) -> np.ndarray:
    """Return the product (rows, out) in float32, span after span."""
    inputs, low = codes.numbers.shape[1], 2 ** (codes.bits - 1)
    whole = codes.group or CODES_SPAN
    span, padding = whole if whole <= CODES_SPAN else min(whole & -whole, CODES_SPAN), -inputs % whole
    numbers = np.pad(x.numpy(), ((0, 0), (0, padding)))
    weights = np.pad(codes.numbers.numpy().astype(np.int64), ((0, 0), (0, padding)))
    scales, zeros = (None if each is None else each.float().numpy() for each in (codes.scales, codes.zeros))
    assert scales is not None
    has_whole_zeros = codes.zeros is not None and codes.zeros.dtype == torch.uint8
    totals = np.zeros((len(x), len(weights)), np.float32)
    for first in range(0, inputs + padding, span):
        part, group = numbers[:, first : first + span], first // codes.group if codes.group else 0
        peak = np.abs(part).max(1, keepdims=True)
        is_zero = peak <= 1e-30
        factor = LARGEST[activation_bytes] / np.where(is_zero, np.float32(1), peak)
        rounded = np.where(is_zero, 0, np.rint(part * factor)).astype(np.int64)
        row_scale = np.where(is_zero, np.float32(0), peak / LARGEST[activation_bytes])
        excess = zeros[:, group].astype(np.int64)[:, None] if has_whole_zeros and zeros is not None else low
        excess = 0 if zeros is not None and not has_whole_zeros else excess
        sums = (rounded @ (weights[:, first : first + span] - excess).T).astype(np.float32)
        if not codes.group:
            totals = add_product(sums, row_scale, totals)
            continue
        totals = add_product(sums * row_scale, scales[:, group], totals)
        if zeros is not None and not has_whole_zeros:
            row_sum = rounded.sum(1, keepdims=True).astype(np.float32) * row_scale
            totals = add_product(zeros[:, group], row_sum, totals)
    nothing = np.zeros((), np.float32)
    return totals + nothing if codes.group else add_product(totals, scales[:, 0], nothing)


@pytest.mark.parametrize("activation_bytes", [1, 2])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_product_has_the_bits_of_the_reference_for_any_number_of_rows(
    form: tuple[int, int, str], activation_bytes: int
) -> None:
    for outputs, inputs in SHAPES:
        given, x = codes_of(*form, outputs, inputs), activations(inputs)
        wanted = torch.from_numpy(reference(given, x, activation_bytes))
        kernels = native.library()
        assert kernels is not None
        matrix = CodesMatrix(given, None, kernels, activation_bytes=activation_bytes)
        assert torch.equal(matrix(x), wanted)
        for count in COUNTS:
            assert torch.equal(matrix(x[-count:]), wanted[-count:]), count


@pytest.mark.parametrize("bits", GROUPS)
def test_activations_can_be_rounded_to_fewer_bytes_later(bits: int) -> None:
    kernels = native.library()
    assert kernels is not None
    given, x = codes_of(bits, 32, "none", 70, 96), activations(96)
    matrix = CodesMatrix(given, None, kernels)
    matrix.round_activations(1)
    assert torch.equal(matrix(x), CodesMatrix(given, None, kernels, activation_bytes=1)(x))
    assert matrix.rounding == 2.0**-7


@pytest.mark.parametrize("activation_bytes", [1, 2])
def test_infinite_activations_are_nan_unless_they_are_ignored(activation_bytes: int) -> None:
    """A draft keeps its keys and values, and would never recover from NaN. A target has to show that it is broken."""
    kernels = native.library()
    assert kernels is not None
    x = activations(96)[:3]
    x[1, 40] = float("inf")
    for ignores, bits in product((False, True), GROUPS):
        given = codes_of(bits, 32, "none", 33, 96)
        found = CodesMatrix(given, None, kernels, activation_bytes=activation_bytes, ignores_infinite=ignores)(x)
        assert found[[0, 2]].isfinite().all()
        assert bool(found[1].isfinite().all()) is ignores

"""Stock kernels as every CPU should have them: the bits of a row depend on the row alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F

from foredraft.testing.hostile import PLAIN, Kernel, seams


@contextmanager
def friendly_kernels() -> Iterator[None]:
    """Let products, attention and SiLU of single precision be taken in double precision, and rounded once.

    The order of a sum then shows in one number of a hundred million, as does whether an exponential is taken in a
    vector or by itself (with AVX-512 that shows in rows of 48 numbers, with AVX2 it does not). What differs from plain
    decoding under these kernels and perturbed ones, and does not under these alone, differs because of the
    perturbation.
    """
    with ExitStack() as stack:
        for holder, name, kernel in seams(_doubled, _product):
            stack.enter_context(patch.object(holder, name, kernel))
        stack.enter_context(patch.object(F, "silu", _doubled(F.silu)))
        yield


def _product(run: Kernel, first: int) -> Kernel:
    if run is torch.ops.mkldnn._linear_pointwise.default:
        return _doubled(lambda x, weight, bias, *_: F.linear(x, weight.to_dense(), bias))
    return _doubled(run)


def _doubled(run: Kernel) -> Kernel:
    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        given = [*args, *kwargs.values()]
        tensors = [value for value in given if isinstance(value, torch.Tensor)]
        if not all(type(tensor) in PLAIN for tensor in tensors) or tensors[0].dtype != torch.float32:
            return run(*args, **kwargs)
        result = run(*map(_double, args), **{name: _double(value) for name, value in kwargs.items()})
        return result.float()

    return call


def _double(value: Any) -> Any:
    is_single = isinstance(value, torch.Tensor) and value.dtype == torch.float32 and not value.is_mkldnn
    return value.double() if is_single else value

"""A simulation of stock kernels at their worst: the last bits of every result depend on the shape of the call.

A kernel of torch or oneDNN chooses the order of its sums by the size of its input. A row can therefore have other bits
when it is computed together with other rows. Which shapes are affected differs from one CPU and one version to the
next. `hostile_kernels` makes it happen for all shapes.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias
from unittest.mock import patch

import torch
import torch.nn.functional as F

from foredraft.errors import ConfigError

Kernel: TypeAlias = Callable[..., torch.Tensor]
Facts: TypeAlias = tuple[int, ...]

KINDS = ("attention", "steps", "prompts", "output")
"""Names of the kernels that `hostile_kernels` can perturb."""

MOST_ROWS_OF_STEPS = 64
"""Largest number of rows of a product that counts as part of a step; larger products count as part of a prefill."""

TALL = 8
"""Ratio of outputs to inputs from which a product counts as the output embedding."""

LINE = 64
"""Alignment in bytes that can change the result of a kernel."""

SHARE = 4
"""One of this many numbers of a result is perturbed."""

PLAIN = (torch.Tensor, torch.nn.Parameter)


@contextmanager
def hostile_kernels(*kinds: str, vocab_size: int | None = None) -> Iterator[None]:
    """Make stock kernels round by the shape of their call: results inside the context differ by one or two ulps.

    The context is for people who port foredraft to a CPU or an accelerator, change how steps are executed, or write a
    drafter. It shows whether exactness depends on the rounding of stock kernels. A quarter of the numbers of every
    result is changed by one or two units in the last place. The numbers and directions depend only on the sizes of the
    call, the number of threads and the alignment of its tensors in memory. The same call therefore always gives the
    same bits, and the same row in another call gives others.

    Load the model inside the context, because models are tested when they are loaded. The patches apply to the whole
    process with all its threads, and are removed at the end.

    These checks pass inside the context: checks up to rounding, the test of a model when it is loaded, and equality of
    output and log-probabilities for any draft if the model's guarantee is bitwise. Bitwise comparisons of two forward
    passes of different shapes do not pass if the passes run through torch or oneDNN, eagerly or compiled. If the
    model's guarantee is up to rounding, its output may differ from plain decoding where two tokens are nearly tied; see
    `divergences`.

    These kernels are not perturbed: foredraft's own kernels, on which the bitwise guarantee rests; sums of one product
    (such as rotary angles), which have one order only; and kernels that torch calls from C++ without returning to
    Python (`torch.einsum`, grouped products of experts, code compiled by the user).

    Args:
      kinds: kernels to perturb, from `KINDS`; all by default. "attention" is `scaled_dot_product_attention` and
        products of two tensors of three or more dimensions. "steps" and "prompts" are products of few and of many rows
        with a matrix; `MOST_ROWS_OF_STEPS` is the limit between them. "output" is a product of any number of rows whose
        outputs are the vocabulary.
      vocab_size: number of outputs of the output embedding. By default every product with at least eight times as many
        outputs as inputs counts as "output".

    Raises: ConfigError for an unknown kind.
    Randomness: none.
    """
    if unknown := sorted({*kinds} - {*KINDS}):
        raise ConfigError(f"hostile_kernels cannot perturb {', '.join(unknown)}; use {', '.join(KINDS)}")
    perturb = _Perturbing(frozenset(kinds or KINDS), vocab_size)
    with ExitStack() as stack:
        for holder, name, kernel in seams(perturb.attention, perturb.product):
            stack.enter_context(patch.object(holder, name, kernel))
        yield


@dataclass(frozen=True)
class _Perturbing:
    """Wrappers that perturb the results of stock kernels.

    Args:
      kinds: kernels to perturb.
      vocab_size: see `hostile_kernels`.
    """

    kinds: frozenset[str]
    vocab_size: int | None

    def attention(self, run: Kernel) -> Kernel:
        @functools.wraps(run)
        def attend(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            result = run(query, key, value, *args, **kwargs)
            return self._changed(result, "attention", (*query.shape, *key.shape, *value.shape), (query, key, value))

        return attend

    def product(self, run: Kernel, first: int) -> Kernel:
        @functools.wraps(run)
        def multiply(*args: Any, **kwargs: Any) -> torch.Tensor:
            result = run(*args, **kwargs)
            operands = args[first : first + 2]
            if len(operands) < 2 or not all(isinstance(operand, torch.Tensor) for operand in operands):
                return result  # passed by keyword, or not a product of two tensors
            return self._multiplied(result, *operands)

        return multiply

    def _multiplied(self, result: torch.Tensor, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Perturb a product: (..., inputs) with a matrix, or two stacks of matrices."""
        inputs = x.shape[-1]
        if inputs < 2 or result.dim() == 0:
            return result
        if x.dim() > 2 and other.dim() > 2:
            return self._changed(result, "attention", (*x.shape, *other.shape), (x, other))
        rows, outputs = result.shape[:-1].numel(), result.shape[-1]
        kind = "steps" if rows <= MOST_ROWS_OF_STEPS else "prompts"
        if outputs == self.vocab_size or (self.vocab_size is None and outputs >= TALL * inputs):
            kind = "output"
        return self._changed(result, kind, (rows, inputs, outputs), (x, other))

    def _changed(
        self, result: torch.Tensor, kind: str, sizes: Facts, operands: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        """Return the result, perturbed by the facts of its call. Meta tensors and tensor subclasses are not changed."""
        stand_in = type(result) not in PLAIN or result.device.type == "meta"
        if kind not in self.kinds or stand_in or not result.is_floating_point():
            return result
        facts = (KINDS.index(kind), *sizes, torch.get_num_threads(), *map(_alignment, operands))
        return result * _factors(facts, result.shape[-1], result.dtype, result.device)


def _alignment(tensor: torch.Tensor) -> int:
    """Return the offset of a tensor's memory from an aligned address; 0 if it is unknown, as for weights packed by
    oneDNN."""
    is_dense = type(tensor) in PLAIN and tensor.layout == torch.strided
    return tensor.data_ptr() % LINE if is_dense else 0


@functools.lru_cache(maxsize=256)
@torch.inference_mode(False)
def _factors(facts: Facts, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return factors for the last dimension of a result: 1, and a neighbour of 1 at places that depend on the facts.

    At least one factor differs from 1, so that no two shapes agree because nothing was changed.
    """
    state = 14695981039346656037
    for fact in facts:  # FNV-1a over integers
        state = (state ^ fact) * 1099511628211 % 2**64
    places = torch.arange(size, dtype=torch.int64)
    mixed = (places + 1) * (state % 2**31 | 1)
    mixed = (mixed ^ (mixed >> 15)) * (state >> 33 | 1)
    mixed = mixed ^ (mixed >> 13)
    direction = torch.where(mixed % (2 * SHARE) == 0, -1.0, torch.where(mixed % (2 * SHARE) == SHARE, 1.0, 0.0))
    direction[state % size] = 1.0
    return (1.0 + direction.double() * torch.finfo(dtype).eps).to(dtype=dtype, device=device)


def seams(
    attention: Callable[[Kernel], Kernel], product: Callable[[Kernel, int], Kernel]
) -> Iterator[tuple[Any, str, Kernel]]:
    """Yield the holder and the name of every reference to a stock kernel, and its replacement.

    Args:
      attention: function that returns the replacement of `scaled_dot_product_attention`.
      product: function that returns the replacement of a product. The second argument of the function is the index of
        the first of the two factors among the product's arguments.
    """
    linear, attend = F.linear, F.scaled_dot_product_attention
    stock: dict[Kernel, Kernel] = {linear: product(linear, 0), attend: attention(attend)}
    yield F, "linear", stock[linear]
    yield F, "scaled_dot_product_attention", stock[attend]
    for name, first in {"mm": 0, "bmm": 0, "matmul": 0, "addmm": 1, "baddbmm": 1}.items():
        function = getattr(torch, name)
        stock[function] = product(function, first)
        yield torch, name, stock[function]
        yield torch.Tensor, name, product(getattr(torch.Tensor, name), first)
    yield torch.Tensor, "__matmul__", product(torch.Tensor.__matmul__, 0)
    if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        packed: Any = torch.ops.mkldnn._linear_pointwise.default
        stock[packed] = product(packed, 0)
    for module in list(sys.modules.values()):  # modules that imported a kernel by name
        if getattr(module, "__name__", "").partition(".")[0] in ("foredraft", "transformers"):
            for name, value in list(vars(module).items()):
                if callable(value) and (found := _found(stock, value)) is not None:
                    yield module, name, found


def _found(stock: dict[Kernel, Kernel], value: Any) -> Kernel | None:
    """Return the replacement of a function. The function is found by identity."""
    return next((kernel for known, kernel in stock.items() if known is value), None)

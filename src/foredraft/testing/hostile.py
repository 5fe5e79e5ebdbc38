"""Stock kernels as no CPU has them, but as one might: the last bits of a result depend on the shape of the call.

A kernel of torch or oneDNN chooses the order of its sums by the size of what it is given, so that one row has other
bits beside other rows. Where, differs from one CPU and one version to the next. `hostile_kernels` lets it happen
everywhere at once.
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
"""Rows of a product up to which it counts as one of steps, and above as one of prompts."""

TALL = 8
"""Times as many outputs as inputs from which a product counts as the output embedding."""

LINE = 64
"""Bytes of alignment that kernels can make a difference between."""

SHARE = 4
"""One of so many numbers of a result is perturbed."""

PLAIN = (torch.Tensor, torch.nn.Parameter)


@contextmanager
def hostile_kernels(*kinds: str, vocab_size: int | None = None) -> Iterator[None]:
    """Let stock kernels round by the shape of their call; results inside differ from results outside by an ulp or two.

    For somebody who ports the library to a CPU or an accelerator, changes how steps are run, or writes a drafter, and
    wants to know what the promise rests on. Every result is changed at a quarter of its numbers, by one or two units in
    the last place. Which ones, and in which direction, is decided by the sizes of the call, the number of threads, and
    the alignment of its tensors in memory, and by nothing else: the same call again has the same bits, the same row in
    another call has others.

    A model has to be loaded inside: what is measured or checked when it is loaded ought to see these kernels. Patches
    hold for the whole process, all its threads included, and are taken back at the end.

    What passes: checks within rounding, the probe of a model at load; text and log-probabilities of a model whose
    promise is "native", for any draft. What does not: two forwards of different shapes that are compared to the bit
    and run through torch or oneDNN, in whatever way they run: eager modules, compiled layers. Texts of models whose
    promise is "near-ties" may then part from those of plain decoding where two tokens are nearly tied, see
    `divergences`.

    Not perturbed are the library's own kernels, which are what the promise rests on; sums of one product (of rotary
    angles), which no order can change; and kernels that torch calls from C++ without asking Python: `torch.einsum`,
    experts in one grouped product, and what a user has compiled.

    Args:
      kinds: what to perturb, of `KINDS`; everything by default. "attention" is `scaled_dot_product_attention`, and
        products of tensors of three dimensions or more by each other. "steps" and "prompts" are products of few and of
        many rows by a matrix (`MOST_ROWS_OF_STEPS` is the border, whatever the rows hold), and "output" those of any
        number of rows whose outputs are the vocabulary.
      vocab_size: outputs of the output embedding. By default every product counts as one that has eight times as many
        outputs as inputs.

    Raises: ConfigError for a kind that is none of these.
    Randomness: none.
    """
    if unknown := sorted({*kinds} - {*KINDS}):
        raise ConfigError(f"hostile_kernels perturbs {', '.join(KINDS)}, not {', '.join(unknown)}")
    perturb = _Perturbing(frozenset(kinds or KINDS), vocab_size)
    with ExitStack() as stack:
        for holder, name, kernel in seams(perturb.attention, perturb.product):
            stack.enter_context(patch.object(holder, name, kernel))
        yield


@dataclass(frozen=True)
class _Perturbing:
    """Kernels that give what stock ones give, perturbed.

    Args:
      kinds: that are perturbed.
      vocab_size: as `hostile_kernels` takes it.
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
                return result  # given by name, or not ours to change
            return self._multiplied(result, *operands)

        return multiply

    def _multiplied(self, result: torch.Tensor, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """A product (..., in) by a matrix, or of matrices of two lists by each other."""
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
        """The result, perturbed by the facts of its call. Stand-ins without values stay as they are."""
        stand_in = type(result) not in PLAIN or result.device.type == "meta"
        if kind not in self.kinds or stand_in or not result.is_floating_point():
            return result
        facts = (KINDS.index(kind), *sizes, torch.get_num_threads(), *map(_alignment, operands))
        return result * _factors(facts, result.shape[-1], result.dtype, result.device)


def _alignment(tensor: torch.Tensor) -> int:
    """Offset of a tensor in a line of memory; 0 for one that does not tell, such as weights packed by oneDNN."""
    is_dense = type(tensor) in PLAIN and tensor.layout == torch.strided
    return tensor.data_ptr() % LINE if is_dense else 0


@functools.lru_cache(maxsize=256)
@torch.inference_mode(False)
def _factors(facts: Facts, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Factors of the last dimension of a result: 1, and next to 1 at some places that depend on the facts.

    Never 1 everywhere, so that no two shapes agree because nothing was changed.
    """
    state = 14695981039346656037
    for fact in facts:  # FNV-1a, over whole numbers
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
    """Holder and name of every place that calls a stock kernel, and the kernel to put there.

    Args:
      attention: returns a kernel to use instead of `scaled_dot_product_attention`.
      product: returns one to use instead of a function whose arguments from a number on are the two that it multiplies.
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
    for module in list(sys.modules.values()):  # what was bound by name when modules were imported
        if getattr(module, "__name__", "").partition(".")[0] in ("foredraft", "transformers"):
            for name, value in list(vars(module).items()):
                if callable(value) and (found := _found(stock, value)) is not None:
                    yield module, name, found


def _found(stock: dict[Kernel, Kernel], value: Any) -> Kernel | None:
    """The kernel that replaces this very function."""
    return next((kernel for known, kernel in stock.items() if known is value), None)

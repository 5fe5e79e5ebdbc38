"""Calls that the compiled graphs of a layer make, written down in the order in which they are made.

A graph of inductor is C++ kernels, products, and Python between them that sets up memory and makes the calls. For a
given number of nodes these are always the same calls over the same places in memory, relative to the inputs of the
graph and to a piece of working memory. They are seen once, in a run whose kernels and memory are watched.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, SimpleNamespace
from typing import Any, TypeAlias

import torch

from foretoken.model.execution.native import KINDS, NativeMatrix
from foretoken.model.execution.operators import runner_of
from foretoken.model.execution.packing import PackedProduct

KERNEL, PRODUCT, ATTENTION = 0, 1, 2
MOST_OPERANDS = 24

KNOWN_NAMES = {
    *("clear", "torch", "ops", "foretoken", "product", "default", "reinterpret_tensor", "empty_strided_cpu"),
    *("assert_size_stride", "assert_alignment", "size"),
}
"""What the Python of a graph may name beside its kernels and dtypes. Anything else might compute."""

Address: TypeAlias = tuple[Any, int]
"""The memory in which something lies, and how many bytes into it; None and the number for a number."""


class NotReplayableError(Exception):
    """A graph makes calls that cannot be made without it."""


@dataclass(frozen=True)
class Call:
    """One call, of a kernel, a product or attention.

    Args:
      operands: see ``replay.cpp``.
      kernel: its address.
      foreign: a product that the library's own kernels do not run.
    """

    kind: int
    operands: tuple[Address, ...]
    kernel: int | None = None
    foreign: Foreign | None = None


@dataclass(frozen=True)
class Foreign:
    """A product that is run by Python code.

    Args:
      number: of the product in its layer.
      shape, out_shape: of its input and output, both contiguous and of one dtype.
    """

    number: int
    shape: torch.Size
    out_shape: torch.Size
    dtype: torch.dtype


@dataclass
class Recording:
    """Watches graphs.

    Args:
      given: the memory that is known beforehand, by name; no two pieces overlap.
      products: numbers of products in their layer, by those of their runners.
    """

    given: dict[Any, torch.Tensor]
    products: dict[int, int]
    calls: list[Call] = field(default_factory=list)
    buffers: list[torch.Tensor] = field(default_factory=list)

    def run(self, graph: Callable[[list[Any]], Sequence[torch.Tensor]], inputs: list[Any]) -> Sequence[torch.Tensor]:
        """Run a graph as it runs by itself, and write down its calls.

        Raises: NotReplayableError for a graph that does anything but call kernels and products.
        """
        function = getattr(graph, "__func__", graph)
        if not isinstance(function, FunctionType) or function.__closure__:
            raise NotReplayableError("a graph is no plain function")
        names, scope = set(function.__code__.co_names), function.__globals__
        kernels = {name: scope[name] for name in names if _is_kernel(scope.get(name))}
        dtypes = {name for name in names if isinstance(getattr(torch, name, None), torch.dtype)}
        if unknown := names - KNOWN_NAMES - dtypes - set(kernels):
            raise NotReplayableError(f"a graph uses {', '.join(sorted(unknown))}")
        watched = {name: self._watched(kernel) for name, kernel in kernels.items()}
        scope = {**scope, **watched, "empty_strided_cpu": self._empty, "torch": _Torch(self._product)}
        copy = FunctionType(function.__code__, scope, function.__name__, function.__defaults__)
        owner = getattr(graph, "__self__", None)
        result: Sequence[torch.Tensor] = copy(inputs) if owner is None else copy(owner, inputs)
        return result

    def address(self, value: Any) -> Address:
        """Where a tensor lies; a whole number is itself."""
        if type(value) is int:
            return None, value
        if isinstance(value, torch.Tensor):
            place = value.data_ptr()
            for name, tensor in (*self.given.items(), *enumerate(self.buffers)):
                first = tensor.data_ptr()
                if first <= place < first + tensor.untyped_storage().nbytes():
                    return name, place - first
        raise NotReplayableError(f"a call takes {type(value).__name__} from elsewhere")

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Working memory."""
        return self._keep(torch.empty(shape, dtype=dtype))

    def _empty(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self._keep(torch.empty_strided(shape, stride, dtype=dtype))

    def _keep(self, buffer: torch.Tensor) -> torch.Tensor:
        self.buffers.append(buffer)
        return buffer

    def _watched(self, kernel: BuiltinFunctionType) -> Callable[..., None]:
        def call(*values: Any) -> None:
            if len(values) > MOST_OPERANDS:
                raise NotReplayableError(f"a kernel takes {len(values)} operands, more than {MOST_OPERANDS}")
            self.calls.append(Call(KERNEL, tuple(map(self.address, values)), _address_of(kernel)))
            kernel(*values)

        return call

    def _product(self, x: torch.Tensor, runner: int, out_features: int) -> torch.Tensor:
        if not x.is_contiguous():
            raise NotReplayableError("a product takes what is not contiguous")
        run, number, num_rows = runner_of(runner).run, self.products[runner], x.shape[:-1].numel()
        out = self.empty(*x.shape[:-1], out_features, dtype=x.dtype)
        out.copy_(run(x))
        operands: list[Address] = [(("product", number), 0), self.address(x), (None, num_rows), self.address(out)]
        matrix = native_matrix(run)
        foreign = Foreign(number, x.shape, out.shape, x.dtype) if matrix is None else None
        if matrix is not None and matrix.compute_dtype != x.dtype:
            wide = [self.empty(num_rows, width, dtype=torch.float32) for width in (x.shape[-1], out_features)]
            operands += [(None, KINDS[x.dtype]), *map(self.address, wide)]
        self.calls.append(Call(PRODUCT, (*operands, *[(None, 0)] * (5 - len(operands))), foreign=foreign))
        return out


def native_matrix(run: object) -> NativeMatrix | None:
    """The matrix with which the library's own kernels run a product; None where something else runs it."""
    matrix = run.matrix if type(run) is PackedProduct else None
    return matrix if type(matrix) is NativeMatrix else None


class _Torch:
    """Stands in for torch in the Python of a graph."""

    def __init__(self, product: Callable[..., torch.Tensor]) -> None:
        self.ops = SimpleNamespace(foretoken=SimpleNamespace(product=SimpleNamespace(default=product)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _is_kernel(value: object) -> bool:
    """Whether this is a C++ kernel of inductor, in a library that exports it under that name."""
    return isinstance(value, BuiltinFunctionType) and value.__name__ == "kernel" and hasattr(value.__self__, "__file__")


def _address_of(kernel: BuiltinFunctionType) -> int:
    library = ctypes.CDLL(kernel.__self__.__file__)  # type: ignore[attr-defined]  # loaded before, and for good
    address = ctypes.cast(library.kernel, ctypes.c_void_p).value
    assert address is not None
    return address

"""Keys of decoder layers that can share graphs, and checks that a compiled layer computes what the layer does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from foredraft.model.execution.calls import LayerCall, value_at
from foredraft.model.execution.forwards import Rowwise, replacement
from foredraft.model.execution.lowering import NotTraceableError
from foredraft.model.execution.packing import PackedExperts, PackedLinear
from foredraft.model.sublayers import LeftOut
from foredraft.native.packed_matmul import PackedMatrix

TOLERANCE = 16.0
"""Maximum difference between the states that a layer and its modules add, in roundings of the dtype."""


def plain_attributes(module: nn.Module) -> tuple[Any, ...]:
    """Return the attributes of a module that choose what it computes, and the shapes and dtypes of its own tensors."""
    found: list[Any] = [
        (name, _plain(value))
        for name, value in vars(module).items()
        if name not in ("layer_idx", "name_or_path", "training")
        and not name.startswith("_")
        and not isinstance(value, Rowwise)
    ]
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        found.append((name, None if tensor is None else (tuple(tensor.shape), tensor.dtype)))
    return tuple(found)


def native_matrix(run: object) -> PackedMatrix | None:
    """Return the matrix of a product that the library's own kernels run; None for any other product."""
    matrix = getattr(run, "matrix", None)
    return matrix if isinstance(matrix, PackedMatrix) else None


def multiplies_in(run: object) -> torch.dtype:
    """Return the dtype of a product's inputs and outputs.

    Raises: NotTraceableError for a product that the library's own kernels do not run.
    """
    matrix = native_matrix(run)
    if matrix is None:
        raise NotTraceableError("its products run in other kernels")
    return matrix.compute_dtype


def _plain(value: Any) -> Any:
    if isinstance(value, (bool, int, float, str, bytes, type(None), torch.dtype)):
        return value
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    if hasattr(value, "to_json_string"):
        return value.to_json_string()
    if isinstance(value, PackedLinear):
        return "packed"
    if isinstance(value, LeftOut):
        return "left out", value.result.__name__
    of = value if hasattr(value, "__qualname__") else type(value)
    return of.__module__, of.__qualname__, getattr(getattr(of, "__code__", None), "co_code", None)


def layout_of(call: LayerCall) -> Any:
    """Return the places, shapes and dtypes of a layer's arguments."""
    tensors = [value_at(call.args, call.kwargs, place) for place in call.inputs]
    shapes = [
        tuple(None if dim == at else size for at, size in enumerate(t.shape))
        for t, dim in zip(tensors, call.node_dims, strict=True)
    ]
    others = [
        (key, value) for key, value in call.kwargs.items() if isinstance(value, (bool, int, float, str, type(None)))
    ]
    return (
        call.inputs,
        call.node_dims,
        call.mask,
        call.cache,
        tuple(shapes),
        tuple(t.dtype for t in tensors),
        tuple(others),
    )


def what_changed(layer: nn.Module) -> str:
    """Return the reason why a layer does not run the code of its class; empty if it does."""
    if replacement(layer) is not None and left_out(layer) is None:
        return "its forward was replaced"
    for path, module in layer.named_modules():
        if module is not layer and (module._forward_hooks or module._forward_pre_hooks):
            return f"its module {path} has hooks"
    return ""


def left_out(layer: nn.Module) -> LeftOut | None:
    """Return the forward that replaces a skipped layer; None for any other layer."""
    forward = replacement(layer)
    return forward if isinstance(forward, LeftOut) else None


def same_code(layer: nn.Module, other: nn.Module) -> bool:
    """Return whether the modules of a copied layer run the same code as those of the layer."""
    if layer is other:
        return True
    inside, inside_other = ([*each.modules()][1:] for each in (layer, other))
    pairs = zip(inside, inside_other, strict=True)
    return all(replacement(mine) is replacement(theirs) for mine, theirs in pairs)


def rounding_in(modules: Iterable[nn.Module], dtype: torch.dtype) -> float:
    """Return the largest relative rounding of numbers in layers of a dtype."""
    products: list[Any] = []
    for forward in map(replacement, modules):
        products += [forward.product] if isinstance(forward, PackedLinear) else []
        products += forward.products if isinstance(forward, PackedExperts) else []
    of_products = (matrix.rounding for matrix in map(native_matrix, products) if matrix is not None)
    return max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps, *of_products)


def check(want: torch.Tensor, given: torch.Tensor, got: torch.Tensor, modules: Iterable[nn.Module]) -> None:
    """Check that a layer computes what its modules do, within rounding.

    Args:
      want, given: hidden states that its modules returned, and their input.
      got: hidden states that the compiled or recorded layer returned.
      modules: modules of the layer, whose products may round their inputs.
    Raises: NotTraceableError if the difference is larger.
    """
    modules = list(modules)
    epsilon = rounding_in(modules, want.dtype)
    want, given, got = (states.double().flatten(0, -2) for states in (want, given, got))
    if any(isinstance(replacement(module), PackedExperts) for module in modules):
        # rounding routes some rows to other experts; their errors are those of single rows, so half of the rows decide
        errors = (got - want).norm(dim=-1)
        kept = errors.argsort()[: -(-len(errors) // 2)]
        want, given, got = want[kept], given[kept], got[kept]
    size, change, error = (float(each.norm()) for each in (want, want - given, got - want))
    if not error <= epsilon * (2 * size + TOLERANCE * change):  # the sum is rounded by its own size
        raise NotTraceableError(f"a layer differs from its modules (relative error {error / max(change, 1e-30):.2g})")

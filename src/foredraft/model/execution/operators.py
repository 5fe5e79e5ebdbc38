"""Torch operators that graphs of layers contain as calls: products of linear layers and of experts, and attention."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import count

import torch

# inductor accepts neither packed weights as inputs nor Python code, so an operator finds its layer by number. The
# library object must live as long as this module.
_library = torch.library.Library("foredraft", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("product(Tensor x, SymInt number, int out_features) -> Tensor")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "grouped_product(Tensor x, Tensor chosen, SymInt number, int num_experts, int out_features) -> Tensor"
)
_library.define("attention(Tensor query, Tensor key, Tensor value) -> Tensor")  # type: ignore[no-untyped-call]
_numbers = count()
_runners: weakref.WeakValueDictionary[int, Runner] = weakref.WeakValueDictionary()


class Runner:
    """Function that runs one product, found by operators through its number."""

    def __init__(self, run: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.run = run
        self.number = next(_numbers)
        _runners[self.number] = self


def _run(x: torch.Tensor, number: int, out_features: int) -> torch.Tensor:
    return _runners[number].run(x)


def _product_shape(x: torch.Tensor, number: int, out_features: int) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


def _grouped_shape(
    x: torch.Tensor, chosen: torch.Tensor, number: int, num_experts: int, out_features: int
) -> torch.Tensor:
    return x.new_empty((*chosen.shape, out_features))


def _attention_shape(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


_library.impl("product", _run, "CPU")  # type: ignore[no-untyped-call]
torch.library.register_fake("foredraft::product", _product_shape, lib=_library)
torch.library.register_fake("foredraft::grouped_product", _grouped_shape, lib=_library)
torch.library.register_fake("foredraft::attention", _attention_shape, lib=_library)

product = torch.ops.foredraft.product
"""(..., in) and the number of a `Runner` -> (..., out_features)."""

grouped_product = torch.ops.foredraft.grouped_product
"""(T, in) or (T, K, in), experts (T, K), numbers of a product and of experts -> (T, K, out_features). Never run."""

attention = torch.ops.foredraft.attention
"""Query (1, H, S, D), key and value -> (1, S, H, D_v). Marks the place where a graph is cut in two; never run."""

"""Which blocks of a GGUF file are the weights of which linear layers: found by their values.

What readers do with names and rows (llama.cpp stores queries and keys with the rows of a head in another order) is
followed so without being known here, and a weight that is not the file's to the bit stays dequantised.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from foretoken.errors import ConfigError
from foretoken.gguf.blocks import TYPES, stored_codes
from foretoken.gguf.header import Header, TensorInfo
from foretoken.gguf.model import is_quantised, type_name
from foretoken.model.execution.packing import dense_weight, row_sums
from foretoken.model.execution.rounding import roundable, take_codes
from foretoken.native import memory
from foretoken.native.codes import Codes, StoredCodes, pieces

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_INPUT = "token_embd.weight"


@torch.inference_mode()
def multiply_as_stored(model: PreTrainedModel, header: Header, dtype: torch.dtype) -> str:
    """Let the linear layers of a model multiply by the blocks of the file that it was read from.

    Args:
      model: that nobody else holds, with its dequantised weights, in any dtype.
      dtype: of everything else.

    Returns: the types that are multiplied as they lie, and those that are not, for people.
    Raises: ConfigError for a file without any that are.
    """
    weights = _Weights(model)
    found: dict[nn.Module, StoredCodes] = {}
    taken, left = Counter[str](), Counter[str]()
    for tensor in header.tensors:
        match = weights.match(header, tensor) if is_quantised(tensor) else None
        if match is not None:
            layer, found[layer] = match
            taken[type_name(tensor)] += 1
        elif is_quantised(tensor) and tensor.name != _INPUT:  # rows are looked up in it
            left[type_name(tensor)] += 1
    if not found:
        kinds = ", ".join(sorted({type_name(tensor) for tensor in header.tensors}))
        raise ConfigError(
            f"weights is 'stored', and {header.path} holds no matrix that is multiplied as it lies (it holds {kinds}; "
            f"these are {', '.join(kind.name for kind in TYPES.values())}); leave weights out, or take "
            "quantization='int8'"
        )
    take_codes(model, found, dtype=dtype)
    dequantised = f"; dequantised are {_listed(left)}" if left else ""
    return f"{_listed(taken)}{dequantised}"


class _Weights:
    """Linear layers by what their weights hold. Pages of a file that weights are mapped from are given back as read."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._layers: dict[tuple[torch.Size, int], list[tuple[nn.Module, torch.Tensor]]] = {}
        for layer in roundable(model):
            weight = dense_weight(layer)
            sums = torch.cat([row_sums(weight[first:last]) for first, last in _left(weight)])
            self._layers.setdefault((weight.shape, int(sums.sum())), []).append((layer, sums))
        self._shapes = {shape for shape, _ in self._layers}
        self._dtype = model.dtype

    def match(self, header: Header, tensor: TensorInfo) -> tuple[nn.Module, StoredCodes] | None:
        """Take out the layer with the weight of a tensor."""
        codes = stored_codes(header, tensor) if tensor.shape in self._shapes else None
        if codes is None:
            return None
        of_exact, of_given = [], []
        for first, last in pieces(codes.shape):
            exact = codes.read(first, last).dense()
            of_exact.append(row_sums(exact))
            of_given.append(row_sums(exact.to(self._dtype)))
        sums = torch.cat(of_given)
        alike = self._layers.get((codes.shape, int(sums.sum())), [])
        for layer, wanted in alike:
            order = None if torch.equal(sums, wanted) else _order(sums, wanted)
            is_told = order is None or len(torch.unique(sums)) == len(torch.unique(torch.cat(of_exact)))
            if not is_told or not self._holds(dense_weight(layer), codes, order):
                continue  # in rows that look alike in another dtype there may be others
            alike.remove((layer, wanted))
            return layer, codes if order is None else _reordered(codes, order)
        return None

    def _holds(self, weight: torch.Tensor, codes: StoredCodes, order: torch.Tensor | None) -> bool:
        """Whether codes in an order of outputs are a weight, to the bit."""
        given = codes if order is None else _reordered(codes, order)
        return all(
            torch.equal(given.read(first, last).dense().to(self._dtype), weight[first:last])
            for first, last in _left(weight)
        )


def _left(weight: torch.Tensor) -> Iterator[tuple[int, int]]:
    """As `pieces`; what was read of a file is let go after each."""
    leave = memory.Leaving([weight])
    for first, last in pieces(weight.shape):
        yield first, last
        leave(weight[first:last])


def _reordered(codes: StoredCodes, order: torch.Tensor) -> StoredCodes:
    """With outputs in another order, which are read from the first to the last that is wanted."""

    def read(first: int, last: int) -> Codes:
        wanted = order[first:last]
        begin = int(wanted.min())
        return codes.read(begin, int(wanted.max()) + 1).rows(wanted - begin)

    return StoredCodes(codes.shape, codes.form, read)


def _order(sums: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Which rows have to stand where, for their sums to be as wanted."""
    order = torch.empty_like(sums)
    order[wanted.argsort()] = sums.argsort()
    return order


def _listed(types: Counter[str]) -> str:
    """``210 of Q4_1 and 1 of Q8_0``."""
    return " and ".join(f"{count} of {name}" for name, count in types.most_common())

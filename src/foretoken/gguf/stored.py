"""Which blocks of a GGUF file are the weights of which linear layers: found by their values.

What readers do with names and rows (llama.cpp stores queries and keys with the rows of a head in another order) is
followed so without being known here, and a weight that is not the file's to the bit stays dequantised.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from foretoken.errors import ConfigError
from foretoken.gguf.blocks import TYPES, read_codes
from foretoken.gguf.header import Header, TensorInfo
from foretoken.gguf.model import is_quantised, type_name
from foretoken.model.execution.packing import dense_weight, row_sums
from foretoken.model.execution.rounding import StoredCodes, roundable, take_codes
from foretoken.native.codes import Codes

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
    """Linear layers by what their weights hold."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._layers: dict[tuple[torch.Size, int], list[nn.Module]] = {}
        for layer in roundable(model):
            weight = dense_weight(layer)
            self._layers.setdefault((weight.shape, int(row_sums(weight).sum())), []).append(layer)
        self._shapes = {shape for shape, _ in self._layers}
        self._dtype = model.dtype

    def match(self, header: Header, tensor: TensorInfo) -> tuple[nn.Module, StoredCodes] | None:
        """Take out the layer with the weight of a tensor."""
        codes = read_codes(header, tensor) if tensor.shape in self._shapes else None
        if codes is None:
            return None
        exact = codes.dense()
        given = exact.to(self._dtype)
        sums = row_sums(given)
        for layer in self._layers.get((given.shape, int(sums.sum())), []):
            weight = dense_weight(layer)
            order = None if torch.equal(given, weight) else _order(sums, row_sums(weight))
            if order is not None and not (torch.equal(given[order], weight) and _tells_as_much(sums, exact)):
                continue
            self._layers[given.shape, int(sums.sum())].remove(layer)
            return layer, StoredCodes(codes.kind, partial(_read, header, tensor, order))
        return None


def _read(header: Header, tensor: TensorInfo, order: torch.Tensor | None) -> Codes:
    """The weight of a tensor, with its rows in an order."""
    codes = read_codes(header, tensor)
    assert codes is not None
    return codes if order is None else codes.rows(order)


def _order(sums: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Which rows have to stand where, for their sums to be as wanted."""
    order = torch.empty_like(sums)
    order[wanted.argsort()] = sums.argsort()
    return order


def _tells_as_much(sums: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether rows that look alike in another dtype are alike."""
    return len(torch.unique(sums)) == len(torch.unique(row_sums(exact)))


def _listed(types: Counter[str]) -> str:
    """``210 of Q4_1 and 1 of Q8_0``."""
    return " and ".join(f"{count} of {name}" for name, count in types.most_common())

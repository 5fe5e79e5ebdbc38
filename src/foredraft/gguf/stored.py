"""Assignment of the quantised blocks in a GGUF file to the linear layers of a model, by comparing values.

Readers rename tensors and reorder rows (llama.cpp stores the rows of query and key heads in another order). Comparing
values follows these changes without knowing them. A weight that differs from the file in any bit stays dequantised.

Source: block layouts of ggml (ggml-org/ggml, ggml-common.h), as gguf dequantises them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from foredraft.errors import ConfigError
from foredraft.gguf.header import Header, TensorInfo
from foredraft.gguf.model import is_quantised, type_name
from foredraft.model.execution.packing import dense_weight, row_sums
from foredraft.model.execution.rounding import roundable, take_codes
from foredraft.native import memory
from foredraft.native.codes import Codes, StoredCodes, pieces

SUPER = 256
"""Weights of a superblock, which is divided into parts with scales of their own."""

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Contents of n blocks: codes uint8 (n, weights), scales and zeros (n, groups)."""


@dataclass(frozen=True)
class BlockType:
    """Layout of a type of quantised blocks.

    Args:
      name: name in llama.cpp.
      size, num_bytes: weights and bytes of a block.
      bits, group: parameters of `Codes`.
      unpack: function that converts blocks, uint8 (n, num_bytes), into their contents.
      halves: function that returns the half-precision factors of each block's scales and zeros, which `Codes` keeps.
    """

    name: str
    size: int
    num_bytes: int
    bits: int
    group: int
    unpack: Callable[[torch.Tensor], Parts]
    halves: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]] | None = None

    def codes(self, blocks: torch.Tensor, outputs: int) -> Codes:
        """Return the codes in blocks that contain ``outputs`` rows."""
        halves = (None, None) if self.halves is None else self.halves(blocks)
        numbers, scales, *others = (
            None if each is None else each.reshape(outputs, -1) for each in (*self.unpack(blocks), *halves)
        )
        assert numbers is not None
        assert scales is not None
        zeros, scale_halves, zero_halves = others
        return Codes(numbers, self.bits, scales, zeros, self.group, scale_halves, zero_halves)


def stored_codes(header: Header, tensor: TensorInfo) -> StoredCodes | None:
    """Return the codes of a tensor, which are read later; None if it is not a matrix or its type has no kernel."""
    kind = TYPES.get(tensor.type_id)
    if kind is None or len(tensor.shape) != 2 or tensor.shape[1] % kind.size or not tensor.num_elements:
        return None
    row_bytes = tensor.shape[1] // kind.size * kind.num_bytes

    def read(first: int, last: int) -> Codes:
        with header.path.open("rb") as stream:
            stream.seek(header.data_start + tensor.offset + first * row_bytes)
            data = bytearray(stream.read((last - first) * row_bytes))
        return kind.codes(torch.frombuffer(data, dtype=torch.uint8).view(-1, kind.num_bytes), last - first)

    return StoredCodes(torch.Size(tensor.shape), read(0, 1).form, read)


def _halves(blocks: torch.Tensor, first: int) -> torch.Tensor:
    """Return the half-precision number at byte ``first`` of every block: (n, 1)."""
    return blocks[:, first : first + 2].contiguous().view(torch.float16)


def _nibbles(blocks: torch.Tensor) -> torch.Tensor:
    """Return the low nibbles of all bytes, then the high nibbles."""
    return torch.cat([blocks & 15, blocks >> 4], -1)


def _bits(blocks: torch.Tensor, count: int, width: int) -> torch.Tensor:
    """Split bytes into ``count`` numbers of ``width`` bits, lowest first: (n, k, bytes) -> (n, k, count, bytes)."""
    shifts = torch.arange(count, dtype=torch.uint8)[:, None] * width
    return blocks[..., None, :] >> shifts & (1 << width) - 1


def _q8_0(blocks: torch.Tensor) -> Parts:
    return blocks[:, 2:] ^ 128, _halves(blocks, 0), None  # int8 to uint8 with the zero at 128


def _q4_0(blocks: torch.Tensor) -> Parts:
    return _nibbles(blocks[:, 2:]), _halves(blocks, 0), None


def _q4_1(blocks: torch.Tensor) -> Parts:
    return _nibbles(blocks[:, 4:]), _halves(blocks, 0), _halves(blocks, 2)


def _fifth_bits(blocks: torch.Tensor) -> torch.Tensor:
    """Return the bits of four bytes, lowest first, each with the value 16."""
    return (blocks[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1) << 4


def _q5_0(blocks: torch.Tensor) -> Parts:
    numbers = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return numbers + (128 - 16), _halves(blocks, 0), None


def _q5_1(blocks: torch.Tensor) -> Parts:
    numbers = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return numbers, _halves(blocks, 0), _halves(blocks, 2)


def _scales_of_parts(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and zeros of eight parts with 6 bits each, stored as two factors and 12 bytes."""
    lower, middle, upper = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([lower & 63, upper & 15 | lower >> 2 & 48], 1)
    zeros = torch.cat([middle & 63, upper >> 4 | middle >> 2 & 48], 1)
    return _halves(blocks, 0).float() * scales, -(_halves(blocks, 2).float() * zeros)


def _halves_of_parts(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the half-precision factors of the scales and zeros of parts."""
    return _halves(blocks, 0), -_halves(blocks, 2)


def _half_at_the_end(blocks: torch.Tensor) -> tuple[torch.Tensor, None]:
    return _halves(blocks, 208), None


def _q4_k(blocks: torch.Tensor) -> Parts:
    return _bits(blocks[:, 16:].view(-1, 4, 32), 2, 4).flatten(1), *_scales_of_parts(blocks)


def _q5_k(blocks: torch.Tensor) -> Parts:
    numbers = _bits(blocks[:, 48:].view(-1, 4, 32), 2, 4).flatten(1)
    fifths = _bits(blocks[:, 16:48].view(-1, 1, 32), 8, 1).flatten(1)
    return numbers | fifths << 4, *_scales_of_parts(blocks)


def _q6_k(blocks: torch.Tensor) -> Parts:
    numbers = _bits(blocks[:, :128].view(-1, 2, 64), 2, 4).flatten(1)
    upper = _bits(blocks[:, 128:192].view(-1, 2, 32), 4, 2).flatten(1)
    scales = blocks[:, 192:208].view(torch.int8)
    return (numbers | upper << 4) + (128 - 32), _halves(blocks, 208).float() * scales, None


TYPES = {
    2: BlockType("Q4_0", 32, 18, 4, 32, _q4_0),
    3: BlockType("Q4_1", 32, 20, 4, 32, _q4_1),
    6: BlockType("Q5_0", 32, 22, 8, 32, _q5_0),
    7: BlockType("Q5_1", 32, 24, 8, 32, _q5_1),
    8: BlockType("Q8_0", 32, 34, 8, 32, _q8_0),
    12: BlockType("Q4_K", SUPER, 144, 4, 32, _q4_k, _halves_of_parts),
    13: BlockType("Q5_K", SUPER, 176, 8, 32, _q5_k, _halves_of_parts),
    14: BlockType("Q6_K", SUPER, 210, 8, 16, _q6_k, _half_at_the_end),
}
"""Block types with kernels, by type number. Codes of 5 and 6 bits take one byte each in memory."""


_INPUT = "token_embd.weight"


@torch.inference_mode()
def multiply_as_stored(model: PreTrainedModel, header: Header, dtype: torch.dtype) -> str:
    """Make the linear layers of a model multiply by the quantised blocks of the file that it was loaded from.

    Args:
      model: model with dequantised weights in any dtype, which no other code uses.
      header: header of the file.
      dtype: dtype of all other weights.

    Returns: a readable list of the types that stay quantised and of those that are dequantised.
    Raises: ConfigError if no matrix in the file has a type with a kernel.
    """
    weights = _Weights(model)
    found: dict[nn.Module, StoredCodes] = {}
    taken, left = Counter[str](), Counter[str]()
    for tensor in header.tensors:
        match = weights.match(header, tensor) if is_quantised(tensor) else None
        if match is not None:
            layer, found[layer] = match
            taken[type_name(tensor)] += 1
        elif is_quantised(tensor) and tensor.name != _INPUT:  # the input embedding is looked up, not multiplied
            left[type_name(tensor)] += 1
    if not found:
        kinds = ", ".join(sorted({type_name(tensor) for tensor in header.tensors}))
        raise ConfigError(
            f"weights is 'stored', but {header.path} contains no matrix of a supported type (it contains {kinds}; "
            f"supported are {', '.join(kind.name for kind in TYPES.values())}); leave weights out, or use "
            "quantization='int8'"
        )
    take_codes(model, found, dtype=dtype)
    dequantised = f"; dequantised are {_listed(left)}" if left else ""
    return f"{_listed(taken)}{dequantised}"


class _Weights:
    """Index of linear layers by the values of their weights. Memory-mapped pages are released after they were read."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._layers: dict[tuple[torch.Size, int], list[tuple[nn.Module, torch.Tensor]]] = {}
        for layer in roundable(model):
            weight = dense_weight(layer)
            sums = torch.cat([row_sums(weight[first:last]) for first, last in _left(weight)])
            self._layers.setdefault((weight.shape, int(sums.sum())), []).append((layer, sums))
        self._shapes = {shape for shape, _ in self._layers}
        self._dtype = model.dtype

    def match(self, header: Header, tensor: TensorInfo) -> tuple[nn.Module, StoredCodes] | None:
        """Remove and return the layer whose weight equals the tensor, with its codes; None if there is none."""
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
                continue  # rows that are equal in this dtype may differ in the file
            alike.remove((layer, wanted))
            return layer, codes if order is None else _reordered(codes, order)
        return None

    def _holds(self, weight: torch.Tensor, codes: StoredCodes, order: torch.Tensor | None) -> bool:
        """Whether codes with outputs in this order equal a weight bit for bit."""
        given = codes if order is None else _reordered(codes, order)
        return all(
            torch.equal(given.read(first, last).dense().to(self._dtype), weight[first:last])
            for first, last in _left(weight)
        )


def _left(weight: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Yield the ranges of `pieces`, and release the mapped memory of each after use."""
    leave = memory.PageReleaser([weight])
    for first, last in pieces(weight.shape):
        yield first, last
        leave(weight[first:last])


def _reordered(codes: StoredCodes, order: torch.Tensor) -> StoredCodes:
    """Return codes with outputs in another order. A read covers the range from the first to the last output needed."""

    def read(first: int, last: int) -> Codes:
        wanted = order[first:last]
        begin = int(wanted.min())
        return codes.read(begin, int(wanted.max()) + 1).rows(wanted - begin)

    return StoredCodes(codes.shape, codes.form, read)


def _order(sums: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return the permutation of rows that turns their sums into the wanted ones."""
    order = torch.empty_like(sums)
    order[wanted.argsort()] = sums.argsort()
    return order


def _listed(types: Counter[str]) -> str:
    """List types with their counts: ``210 of Q4_1 and 1 of Q8_0``."""
    return " and ".join(f"{count} of {name}" for name, count in types.most_common())

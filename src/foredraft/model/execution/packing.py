"""Linear layers with weights packed once, for the library's own kernels on CPUs.

Reading every weight once is the floor of a step. The kernels (`native`) sum every row by itself. Where there are none,
modules run as they are.
"""

from __future__ import annotations

import operator
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from foredraft.model.execution.forwards import StandIn, replace_forward, replacement
from foredraft.model.state import version_of
from foredraft.native import memory
from foredraft.native.codes import Codes, StoredCodes, Unrounded
from foredraft.native.library import KINDS, library
from foredraft.native.packed_matmul import CodesMatrix, NativeMatrix, PackedMatrix, Seen


def cpu_has_bfloat16() -> bool:
    """True where the CPU multiplies bfloat16 itself (avx512_bf16, AMX, or Arm's BF16), not by conversion."""
    if not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():  # type: ignore[no-untyped-call]
        return False
    if platform.machine().lower() in ("aarch64", "arm64"):
        return True
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def packs(dtype: torch.dtype) -> bool:
    """Whether the library's own kernels run here and multiply weights of this dtype."""
    return dtype in KINDS and library() is not None


class DenseMatrix:
    """A weight (out, in) as torch multiplies it, on any device and in any dtype, and a bias (out,) or None."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.compute_dtype, self.num_bytes = weight.dtype, weight.nbytes
        self.packed, self._bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in) of `compute_dtype` -> (..., out)."""
        return F.linear(x, self.packed, self._bias)

    def dense(self) -> torch.Tensor:
        """The weight (out, in)."""
        return self.packed


Matrix: TypeAlias = NativeMatrix | CodesMatrix | DenseMatrix


def _matrix(weights: Sequence[torch.Tensor], bias: torch.Tensor | None, seen: Seen) -> Matrix:
    """Packed for the library's own kernels; where there are none, as torch multiplies it."""
    kernels = library() if weights[0].device.type == "cpu" else None
    if kernels is None:
        for number, weight in enumerate(weights):
            seen(number, weight)
        return DenseMatrix(weights[0] if len(weights) == 1 else torch.cat(list(weights)), bias)
    if weights[0].dtype not in KINDS:
        raise TypeError(f"weights of {weights[0].dtype} cannot be packed; rebuild the execution")
    return NativeMatrix(weights, bias, kernels, seen)


def _codes_matrix(
    parts: Sequence[Unrounded | StoredCodes],
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    device: torch.device,
    seen: Seen,
) -> Matrix:
    """Packed for the library's own kernels; where there are none, the weight that the codes stand for."""
    kernels = library() if dtype in KINDS and device.type == "cpu" else None
    if kernels is not None:
        of = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        return CodesMatrix(parts, bias, kernels, dtype=of, seen=seen)
    read = [part.codes() for part in parts]
    for number, (part, codes) in enumerate(zip(parts, read, strict=True)):
        seen(number, part.weight if isinstance(part, Unrounded) else codes)
    return DenseMatrix(Codes.joined(read).dense().to(dtype), bias)


class PackedProduct:
    """One matrix of linear layers that are given the same input: its product is split among them.

    Args:
      layers: each an `nn.Linear` or `Conv1D`, all with or all without a bias, of one dtype and number of inputs.
      earlier: of layers with the same tensors; what it packed is taken over where they still hold the same values.
      codes: gives the weight of a layer in whole numbers, where it is rounded; otherwise it is packed as it is.
      dtype: that it takes and gives; by default that of the weights.
      leaving: weights that are freed once they are packed (`release`): pages of a file a piece of a weight at a time.

    Attributes:
      is_released: whether weights of its layers are gone.

    Exactness: equals ``F.linear`` within the rounding of the dtype; by the library's own kernels a row has the same
    bits among any number of rows.
    """

    matrix: Matrix
    sizes: list[int]
    _sums: list[torch.Tensor]
    _weight_dtype: torch.dtype

    num_packed = 0
    """How often any product was packed in this process: as long as it stays the same, so do all matrices."""

    def __init__(
        self,
        layers: Sequence[nn.Module],
        earlier: PackedProduct | None = None,
        codes: Callable[[nn.Module], Codes | Unrounded | StoredCodes] | None = None,
        dtype: torch.dtype | None = None,
        leaving: memory.PageReleaser | None = None,
    ) -> None:
        self.layers = tuple(layers)
        self._codes = codes
        weight: torch.Tensor = layers[0].weight  # type: ignore[assignment]
        self._dtype = dtype or weight.dtype
        self.is_released = False
        self._shared: tuple[torch.Tensor, tuple[torch.Tensor, ...], set[int]] | None = None
        if earlier is None or not earlier._holds(self._tensors()):
            self._pack(leaving)
        else:
            self._versions = tuple(map(version_of, self._tensors()))
            self.matrix, self.sizes = earlier.matrix, earlier.sizes
            self._sums, self._weight_dtype = earlier._sums, earlier._weight_dtype
        if leaving is not None:
            self.release(leaving)

    @classmethod
    def taken(
        cls,
        layers: Sequence[nn.Module],
        matrix: NativeMatrix | CodesMatrix,
        sizes: Sequence[int],
        sums: Sequence[torch.Tensor],
        *,
        dtype: torch.dtype,
        weight_dtype: torch.dtype,
        is_released: bool,
    ) -> PackedProduct:
        """A product that another process has packed.

        Args:
          layers: of the same model.
          sizes: of their outputs.
          sums: of their weights and biases, as `row_sums` gives them.
          is_released: whether their own weights are gone.
        """
        product = object.__new__(cls)
        product.layers, product.matrix, product.sizes = tuple(layers), matrix, list(sizes)
        product._codes = product._shared = None
        product._dtype, product._weight_dtype, product._sums = dtype, weight_dtype, list(sums)
        product.is_released = is_released
        product.settle()
        cls.num_packed += 1
        return product

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out of all layers, one after another)."""
        if x.dtype != self._dtype:
            raise TypeError(f"a packed layer of {self._dtype} was given {x.dtype}; use execution='eager'")
        matrix = self.matrix
        if self._dtype == matrix.compute_dtype:
            return matrix(x)
        return matrix(x.to(matrix.compute_dtype)).to(self._dtype)

    def part(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """(..., in) -> (..., out) of one layer. The others find theirs when they are given the very same tensor."""
        if len(self.layers) == 1:
            return self(x)
        shared = self._shared
        if shared is None or shared[0] is not x or index not in shared[2]:
            shared = x, torch.split(self(x), self.sizes, -1), set(range(len(self.layers)))
            self._shared = shared
        shared[2].discard(index)
        if not shared[2]:
            self._shared = None
        return shared[1][index]

    def refresh(self) -> bool:
        """Pack again when a weight or bias was written since; True when it was."""
        if self.is_released or self._versions == tuple(map(version_of, self._tensors())):
            return False
        self._pack()
        return True

    def put_in(self) -> PackedProduct:
        """Let its layers run by it."""
        for index, layer in enumerate(self.layers):
            replace_forward(layer, PackedLinear(self, index))
        return self

    def release(self, leaving: memory.PageReleaser | None = None) -> None:
        """Free the weights that were packed, for every module that shares the parameters.

        A NaN of the same shape stays, so that code which reads the weight past the layer is noticed.

        Args:
          leaving: weights that may be freed; None for all.
        """
        freed = [weight for weight in self._weights() if leaving is None or weight in leaving]
        if freed:
            release(freed, self._dtype, leaving)
            self.is_released = True

    def settle(self) -> None:
        """Take tensors that the library itself has converted for those that were packed."""
        self._versions = tuple(map(version_of, self._tensors()))

    def dense(self, index: int = 0) -> torch.Tensor:
        """The weight (out, in) of one layer as it was packed, also where the original was released."""
        weight = torch.split(self.matrix.dense(), self.sizes)[index]
        return weight.to(self._weight_dtype) if isinstance(self.matrix, NativeMatrix) else weight

    def codes(self, index: int) -> Codes | None:
        """The weight of one layer in whole numbers; None where it is not multiplied in these."""
        if not isinstance(self.matrix, CodesMatrix):
            return None
        first = sum(self.sizes[:index])
        return self.matrix.codes.rows(torch.arange(first, first + self.sizes[index]))

    def sums(self, index: int) -> torch.Tensor:
        """Over the bits of one layer's weight as it was given."""
        return self._sums[index]

    def _holds(self, tensors: list[torch.Tensor]) -> bool:
        """Whether these are the tensors that were packed, with the same values.

        The values are compared by sums, since writes through ``.data`` leave no other trace. That reads the weight
        once, as a step does, and takes a fifth of the time of packing it.
        """
        mine = self._tensors()
        same = len(tensors) == len(mine) and all(map(operator.is_, tensors, mine)) and not self.is_released
        return (
            same
            and self._weight_dtype == tensors[0].dtype
            and all(map(torch.equal, map(row_sums, tensors), self._sums))
        )

    @property
    def dtype(self) -> torch.dtype:
        """What it takes and gives."""
        return self._dtype

    @property
    def weight_dtype(self) -> torch.dtype:
        """Of what was packed."""
        return self._weight_dtype

    @property
    def all_sums(self) -> Sequence[torch.Tensor]:
        """Of weights, and then of biases."""
        return self._sums

    @property
    def num_bytes(self) -> int:
        return self.matrix.num_bytes

    @property
    def num_weights(self) -> int:
        return sum(weight.numel() for weight in self._weights())

    @property
    def out_features(self) -> int:
        return sum(self.sizes)

    def _weights(self) -> list[nn.Parameter]:
        return [layer.weight for layer in self.layers]  # type: ignore[misc]

    def _tensors(self) -> list[torch.Tensor]:
        biases: list[torch.Tensor] = [layer.bias for layer in self.layers if layer.bias is not None]  # type: ignore[misc]
        return [*self._weights(), *biases]

    def _pack(self, leaving: memory.PageReleaser | None = None) -> None:
        tensors = self._tensors()
        self._versions = tuple(map(version_of, tensors))
        self._weight_dtype = tensors[0].dtype
        biases = [tensor.detach() for tensor in tensors[len(self.layers) :]]
        bias = torch.cat(biases) if biases else None
        found = [list[torch.Tensor]() for _ in self.layers]

        def see(number: int, piece: torch.Tensor | Codes) -> None:
            """Sum up what is packed while it is at hand, and let go of it."""
            if isinstance(piece, Codes):  # the weight that they stand for is nowhere
                found[number].append(row_sums(piece.dense().to(self._weight_dtype)))
            elif type(self.layers[number]) is not Conv1D:
                found[number].append(row_sums(piece))
                if leaving is not None:
                    leaving(piece)

        if self._codes is None:
            weights = [dense_weight(layer) for layer in self.layers]
            self.sizes = [len(weight) for weight in weights]
            self.matrix = _matrix(weights, bias, see)
        else:
            given = map(self._codes, self.layers)
            parts = [StoredCodes.of(each) if isinstance(each, Codes) else each for each in given]
            self.sizes = [part.shape[0] for part in parts]
            self.matrix = _codes_matrix(parts, bias, self._dtype, tensors[0].device, see)
        of_weights = zip(self._weights(), found, strict=True)
        sums = [torch.cat(each) if each else row_sums(weight) for weight, each in of_weights]
        self._sums = [*sums, *map(row_sums, biases)]
        PackedProduct.num_packed += 1


class PackedLinear:
    """The forward of one `nn.Linear` or `Conv1D`, as its part of a packed product."""

    def __init__(self, product: PackedProduct, index: int = 0) -> None:
        self.product = product
        self.index = index

    @classmethod
    def of(cls, layer: nn.Module) -> PackedLinear:
        """Of a layer whose input nobody shares."""
        return cls(PackedProduct([layer]))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out)."""
        return self.product.part(x, self.index)

    def dense(self) -> torch.Tensor:
        """The weight (out, in) as it was packed, also where the original was released."""
        return self.product.dense(self.index)

    def codes(self) -> Codes | None:
        """The weight in whole numbers; None where it is not multiplied in these."""
        return self.product.codes(self.index)

    @property
    def sums(self) -> torch.Tensor:
        """Over the bits of the weight as it was given, a row at a time."""
        return self.product.sums(self.index)


class PackedRows(StandIn):
    """The forward of an input embedding whose rows are those of a packed output embedding: no table is kept of them.

    Args:
      output: of the output embedding, which shares its product with no other layer.

    Exactness: rows are those of ``output.dense()`` in the dtype of the model, to the bit.
    """

    def __init__(self, output: PackedLinear) -> None:
        self.output = output
        self._table: tuple[Matrix, torch.Tensor] | None = None

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """(...) -> (..., H)."""
        packed = self.packed
        if packed is not None:
            return packed.rows(ids, self.dtype)
        matrix = self.output.product.matrix
        if self._table is None or self._table[0] is not matrix:  # other kernels read no single rows
            self._table = matrix, self.dense()
        return F.embedding(ids, self._table[1])

    @property
    def packed(self) -> PackedMatrix | None:
        """What rows are unpacked from; None where they lie in a table."""
        matrix = self.output.product.matrix
        return matrix if isinstance(matrix, PackedMatrix) else None

    def dense(self) -> torch.Tensor:
        """The weight (V, H), in the dtype of the model."""
        return self.output.dense().to(self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """Of the model."""
        return self.output.product.dtype

    @property
    def sums(self) -> torch.Tensor:
        """As of `PackedLinear`."""
        return self.output.sums


def embedding_weight(embedding: nn.Module) -> torch.Tensor:
    """The weight (V, H) of an input embedding, also where its rows are read from the output embedding."""
    forward, weight = replacement(embedding), embedding.weight
    return forward.dense() if isinstance(forward, PackedRows) else weight.detach()  # type: ignore[operator]


def embedding_rows(embedding: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """The same rows of it, whatever else the embedding does: (...) -> (..., H)."""
    forward = replacement(embedding)
    return forward(ids) if isinstance(forward, PackedRows) else F.embedding(ids, embedding.weight)  # type: ignore[arg-type]


def release(weights: Iterable[torch.Tensor], dtype: torch.dtype, leaving: memory.PageReleaser | None = None) -> None:
    """Free the memory of weights, which may be among those that are leaving: a NaN of its shape stays of each."""
    given = []
    for weight in weights:
        given.append(weight.data)
        weight.data = torch.full((), torch.nan, dtype=dtype).expand(weight.shape)
    (leaving or memory.PageReleaser(given)).whole(given)


def packed_products(model: nn.Module) -> list[PackedProduct]:
    """Those that layers of a model run by already."""
    forwards = map(replacement, model.modules())
    return list(dict.fromkeys(forward.product for forward in forwards if isinstance(forward, PackedLinear)))


def layers_in_floats(model: nn.Module) -> Iterator[nn.Module]:
    """Layers that run by packed products already, of weights that were not rounded."""
    for product in packed_products(model):
        if isinstance(product.matrix, NativeMatrix):
            yield from product.layers


def packed_layers(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Linear layers in modules that run by packed products."""
    inside = (layer for module in modules for layer in module.modules())
    return [layer for layer in inside if isinstance(replacement(layer), PackedLinear)]


def named_weights(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, PackedLinear | PackedRows | None]]:
    """Every parameter, tied ones by each of their names, and what multiplies in its place where it is packed."""
    for name, module in model.named_modules():
        forward = replacement(module)
        for key, weight in module.named_parameters(name, recurse=False):
            is_packed = isinstance(forward, (PackedLinear, PackedRows)) and weight is getattr(module, "weight", None)
            yield key, weight, forward if is_packed else None


def weight_sums(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """By name of every dense parameter, sums over its bits as it was given, also where packing has released it."""
    for name, weight, packed in named_weights(model):
        if packed is not None:
            yield name, packed.sums
        elif weight.layout == torch.strided and not weight.is_mkldnn and weight.numel():
            yield name, row_sums(weight.reshape(-1, weight.shape[-1] if weight.dim() > 1 else 1))


def dense_weight(layer: nn.Module) -> torch.Tensor:
    """The weight (out, in) of a linear layer."""
    weight: torch.Tensor = layer.weight.detach()  # type: ignore[operator]
    return weight.t() if isinstance(layer, Conv1D) else weight  # of a Conv1D it is (in, out)


def unpacked_weight(layer: nn.Module) -> torch.Tensor:
    """The same, also where packing has released it: as it was packed."""
    forward = replacement(layer)
    return forward.dense() if isinstance(forward, PackedLinear) else dense_weight(layer)


def row_sums(tensor: torch.Tensor) -> torch.Tensor:
    """Sums over the bits of each row, eight bytes at a time where they fit: what other values hardly share."""
    rows = tensor.detach().contiguous()
    if rows.shape[-1] * rows.itemsize % 8:
        return rows.view(torch.uint8).sum(-1, dtype=torch.int64)
    if rows.storage_offset() * rows.itemsize % 8:
        rows = rows.clone()
    return rows.view(torch.int64).sum(-1, dtype=torch.int64)


def packing_bytes(layers: Iterable[nn.Module], release_originals: bool) -> int:
    """Memory that packing these layers takes at its height, over what is held now."""
    return 0 if release_originals else sum(layer.weight.nbytes for layer in layers)  # type: ignore[misc]


def packable(model: nn.Module) -> Iterator[nn.Module]:
    """Layers whose weight can be packed and whose forward is their class's own.

    Tensors of other classes are left alone: quantised weights, which only look like the floats that they stand for.
    """
    for layer in model.modules():
        if type(layer) not in (nn.Linear, Conv1D) or replacement(layer) is not None:
            continue
        weight, bias = layer.weight, layer.bias
        if type(weight) is not nn.Parameter or type(bias) not in (nn.Parameter, type(None)):
            continue
        if weight.device.type == "cpu" and packs(weight.dtype):
            yield layer

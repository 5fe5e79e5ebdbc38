"""Linear layers whose weights are packed once for the library's own CPU kernels.

A step cannot be faster than reading every weight once. The kernels (`native`) sum every row by itself. Where the
kernels are not available, modules run unchanged.
"""

from __future__ import annotations

import copy
import operator
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from foredraft.model.execution.forwards import Rowwise, StandIn, replace_forward, replacement
from foredraft.model.state import version_of
from foredraft.native import memory
from foredraft.native.codes import Codes, StoredCodes, Unrounded
from foredraft.native.library import KINDS, library
from foredraft.native.packed_matmul import CodesMatrix, NativeMatrix, PackedMatrix, Seen


def cpu_has_bfloat16() -> bool:
    """Return whether the CPU multiplies bfloat16 natively (avx512_bf16, AMX, or Arm's BF16), not by conversion."""
    if not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():  # type: ignore[no-untyped-call]
        return False
    if platform.machine().lower() in ("aarch64", "arm64"):
        return True
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def packs(dtype: torch.dtype) -> bool:
    """Return whether the library's own kernels are available and multiply weights of this dtype."""
    return dtype in KINDS and library() is not None


class DenseMatrix:
    """A weight (out, in) and an optional bias (out,), multiplied by torch on any device and in any dtype."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.compute_dtype, self.num_bytes = weight.dtype, weight.nbytes
        self.packed, self._bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in) of `compute_dtype` -> (..., out)."""
        return F.linear(x, self.packed, self._bias)

    def grouped(self, x: torch.Tensor, chosen: torch.Tensor, num_experts: int) -> torch.Tensor:
        """Multiply inputs by the experts that they choose, as `PackedMatrix.grouped` does."""
        weights = self.packed.view(num_experts, -1, self.packed.shape[1])
        rows = x[..., None, :].expand(*chosen.shape, -1) if x.dim() == chosen.dim() else x
        out = x.new_empty((*chosen.shape, weights.shape[1]))
        for expert in sorted(set(chosen.flatten().tolist())):
            out[chosen == expert] = F.linear(rows[chosen == expert], weights[expert])
        return out

    def dense(self) -> torch.Tensor:
        """Return the weight (out, in)."""
        return self.packed


Matrix: TypeAlias = NativeMatrix | CodesMatrix | DenseMatrix


def _matrix(weights: Sequence[torch.Tensor], bias: torch.Tensor | None, seen: Seen) -> Matrix:
    """Return the weights packed for the library's own kernels; if they are not available, as torch multiplies them."""
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
    """Return integer weights packed for the library's own kernels; if they are not available, dequantised."""
    kernels = library() if dtype in KINDS and device.type == "cpu" else None
    if kernels is not None:
        of = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        return CodesMatrix(parts, bias, kernels, dtype=of, seen=seen)
    read = [part.codes() for part in parts]
    for number, part in enumerate(parts):
        if isinstance(part, Unrounded):
            seen(number, part.weight)
    return DenseMatrix(Codes.joined(read).dense().to(dtype), bias)


class StackedWeight(nn.Module):
    """The matrices of all experts of a mixture as the weight of one linear layer, expert after expert.

    Args:
      weight: parameter (E, outputs, in) of the mixture.
      outputs: first and last output of every expert that belong to the layer, if the parameter contains more.
    """

    bias = None

    def __init__(self, weight: nn.Parameter, outputs: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.weight = weight
        self.num_experts = weight.shape[0]
        self.first, self.last = outputs or (0, weight.shape[1])

    @property
    def out_features(self) -> int:
        """Outputs of one expert."""
        return self.last - self.first

    def dense(self) -> torch.Tensor:
        """Return the weight (E * out, in)."""
        return self.weight.detach()[:, self.first : self.last].flatten(0, 1)


class PackedProduct:
    """One matrix for several linear layers with the same input; its product is split among them.

    Args:
      layers: `nn.Linear` or `Conv1D` layers of one dtype and number of inputs, all with or all without a bias; or one
        `StackedWeight`.
      earlier: product of layers with the same tensors, whose packed matrix is reused if their values are unchanged.
      codes: function that returns the rounded weight of a layer as integers; None to pack the weight as it is.
      dtype: dtype of inputs and outputs; by default that of the weights. Weights that are not rounded are packed in it.
      leaving: releaser of the original weights, which frees their memory, piece by piece while a weight is packed.

    Attributes:
      is_released: True if original weights of its layers were freed.

    Exactness: equals ``F.linear`` within the rounding of the dtype. In the library's own kernels, the bits of a row do
    not depend on the number of rows.
    """

    matrix: Matrix
    sizes: list[int]
    _sums: list[torch.Tensor] | None
    _weight_dtype: torch.dtype

    num_packed = 0
    """Number of packings in this process. While it is constant, all matrices are unchanged."""

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

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., outputs of all layers, concatenated)."""
        if x.dtype != self._dtype:
            raise TypeError(f"a packed layer of {self._dtype} was given {x.dtype}; use execution='eager'")
        matrix = self.matrix
        if self._dtype == matrix.compute_dtype:
            return matrix(x)
        return matrix(x.to(matrix.compute_dtype)).to(self._dtype)

    def grouped(self, x: torch.Tensor, chosen: torch.Tensor, num_experts: int) -> torch.Tensor:
        """Multiply inputs by the experts that they choose: (T, in) or (T, K, in), int64 (T, K) -> (T, K, out)."""
        matrix = self.matrix
        return matrix.grouped(x.to(matrix.compute_dtype), chosen, num_experts).to(self._dtype)

    def part(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """(..., in) -> (..., out) of one layer. The others reuse the product if they get the same tensor object."""
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
        """Pack again if a weight or bias has been written since; return True if so."""
        if self.is_released or self._versions == tuple(map(version_of, self._tensors())):
            return False
        self._pack()
        return True

    def put_in(self) -> PackedProduct:
        """Make the layers run this product."""
        for index, layer in enumerate(self.layers):
            replace_forward(layer, PackedLinear(self, index))
        return self

    def release(self, leaving: memory.PageReleaser | None = None) -> None:
        """Free the original weights, for every module that shares the parameters.

        A NaN of the same shape remains, so that code which reads the weight directly is noticed.

        Args:
          leaving: releaser of the weights that may be freed; None for all.
        """
        freed = [weight for weight in self._weights() if leaving is None or weight in leaving]
        if freed:
            release(freed, self._dtype, leaving)
            self.is_released = True

    def settle(self) -> None:
        """Accept the present tensors as those that were packed, after the library itself has converted them."""
        self._versions = tuple(map(version_of, self._tensors()))

    def dense(self, index: int = 0) -> torch.Tensor:
        """Return the weight (out, in) of one layer as it was packed, even if the original was released."""
        weight = torch.split(self.matrix.dense(), self.sizes)[index]
        return weight.to(self._weight_dtype) if isinstance(self.matrix, NativeMatrix) else weight

    def codes(self, index: int) -> Codes | None:
        """Return the integer weight of one layer; None if it is not multiplied in integers."""
        if not isinstance(self.matrix, CodesMatrix):
            return None
        first = sum(self.sizes[:index])
        return self.matrix.codes.rows(torch.arange(first, first + self.sizes[index]))

    def sums(self, index: int) -> torch.Tensor:
        """Return sums that identify one layer's weight."""
        return self._all_sums()[index]

    def _holds(self, tensors: list[torch.Tensor]) -> bool:
        """Return whether these are the tensors that were packed, with the same values.

        The values are compared by sums, since writes through ``.data`` leave no other trace. That reads the weight
        once, as a step does, and takes a fifth of the time of packing it.
        """
        mine = self._tensors()
        same = len(tensors) == len(mine) and all(map(operator.is_, tensors, mine)) and not self.is_released
        return (
            same
            and self._weight_dtype == tensors[0].dtype
            and all(map(torch.equal, map(row_sums, tensors), self._all_sums()))
        )

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of inputs and outputs."""
        return self._dtype

    def _all_sums(self) -> list[torch.Tensor]:
        """Return `row_sums` of all weights and all biases; if the original weights were freed, sums over the matrix."""
        if self._sums is None and isinstance(self.matrix, CodesMatrix):
            parts = [row_sums(part.flatten(1)) for name, part in self.matrix.parts.items() if name != "bias"]
            self._sums = [torch.stack(parts).sum(0)] * len(self.layers)
        elif self._sums is None:
            self._sums = list(map(row_sums, torch.split(self.matrix.dense(), self.sizes)))
        return self._sums

    @property
    def num_bytes(self) -> int:
        return self.matrix.num_bytes

    @property
    def num_weights(self) -> int:
        return sum(map(_num_weights, self.layers))

    @property
    def out_features(self) -> int:
        return sum(self.sizes)

    def _weights(self) -> list[nn.Parameter]:
        return [layer.weight for layer in self.layers]  # type: ignore[misc]

    def _tensors(self) -> list[torch.Tensor]:
        biases = [getattr(layer, "bias", None) for layer in self.layers]  # an embedding has none
        return [*self._weights(), *(bias for bias in biases if bias is not None)]

    def _pack(self, leaving: memory.PageReleaser | None = None) -> None:
        tensors = self._tensors()
        self._versions = tuple(map(version_of, tensors))
        self._weight_dtype = tensors[0].dtype
        biases = [tensor.detach() for tensor in tensors[len(self.layers) :]]
        bias = torch.cat(biases) if biases else None
        found = [list[torch.Tensor]() for _ in self.layers]

        are_leaving = leaving is not None and all(weight in leaving for weight in self._weights())
        is_converted = self._codes is None and self._weight_dtype != self._dtype

        def see(number: int, piece: torch.Tensor) -> None:
            """Add up the packed piece while it is in the processor's cache, or free the original."""
            if type(self.layers[number]) is Conv1D or is_converted:
                return
            if not are_leaving:
                found[number].append(row_sums(piece))
            if leaving is not None:
                leaving(piece)

        if self._codes is None:
            weights = [dense_weight(layer).to(self._dtype) for layer in self.layers]
            self.sizes = [len(weight) for weight in weights]
            self.matrix = _matrix(weights, bias, see)
        else:
            given = map(self._codes, self.layers)
            parts = [StoredCodes.of(each) if isinstance(each, Codes) else each for each in given]
            self.sizes = [part.shape[0] for part in parts]
            self.matrix = _codes_matrix(parts, bias, self._dtype, tensors[0].device, see)
        PackedProduct.num_packed += 1
        if are_leaving:  # nothing can compare them with the packed matrix, so that is added up if needed
            self._sums = None
            return
        of_weights = zip(self._weights(), found, strict=True)
        sums = [torch.cat(each) if each else row_sums(weight) for weight, each in of_weights]
        self._sums = [*sums, *map(row_sums, biases)]


class PackedLinear:
    """Replacement forward of one `nn.Linear` or `Conv1D`, which returns its part of a packed product."""

    def __init__(self, product: PackedProduct, index: int = 0) -> None:
        self.product = product
        self.index = index

    @classmethod
    def of(cls, layer: nn.Module) -> PackedLinear:
        """Return the packed forward of a layer that shares its input with no other layer."""
        return cls(PackedProduct([layer]))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out)."""
        return self.product.part(x, self.index)

    def dense(self) -> torch.Tensor:
        """Return the weight (out, in) as it was packed, even if the original was released."""
        return self.product.dense(self.index)

    def codes(self) -> Codes | None:
        """Return the integer weight; None if it is not multiplied in integers."""
        return self.product.codes(self.index)

    @property
    def sums(self) -> torch.Tensor:
        """`row_sums` of the original weight."""
        return self.product.sums(self.index)


class PackedStack:
    """One parameter (E, outputs, in) of a mixture's experts, packed.

    Args:
      products: products whose outputs, expert by expert, are concatenated.
    """

    def __init__(self, products: Sequence[PackedProduct]) -> None:
        self.products = tuple(products)
        self.stacks: list[StackedWeight] = [product.layers[0] for product in products]  # type: ignore[misc]
        self.num_experts = self.stacks[0].num_experts

    def grouped(self, x: torch.Tensor, chosen: torch.Tensor) -> list[torch.Tensor]:
        """Multiply inputs by the experts that they choose: (T, in) or (T, K, in), int64 (T, K) -> (T, K, out) each."""
        return [product.grouped(x, chosen, self.num_experts) for product in self.products]

    def dense(self) -> torch.Tensor:
        """Return the weight (E, outputs, in) as it was packed, even if the original was released."""
        whole = [product.dense() for product in self.products]
        return torch.cat([each.view(self.num_experts, -1, each.shape[1]) for each in whole], 1)

    @property
    def sums(self) -> torch.Tensor:
        """`row_sums` of the original weight."""
        return torch.cat([product.sums(0) for product in self.products])


class PackedExperts(StandIn):
    """Replacement forward of the experts of a mixture. Only weights of experts that some row chooses are read.

    Args:
      gate_up: weights of both inner projections: one stack with the gate first, or one product for each.
      down: weight of the outer projection.
      act_fn: activation of the gate.

    Exactness: equals the experts of `transformers` within the rounding of the dtype. Every row is multiplied by itself,
      and the results of its experts are added in the order in which the router returns them. In the library's own
      kernels, its bits do not depend on other rows.
    """

    def __init__(self, gate_up: PackedStack, down: PackedStack, act_fn: nn.Module) -> None:
        self.gate_up = gate_up
        self.down = down
        self.activation = Rowwise(type(act_fn).forward.__get__(act_fn))

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of the chosen experts: (T, H), int64 (T, K), (T, K) -> (T, H)."""
        products = self.activation, self.gate_up.grouped, self.down.grouped
        return weighted_experts(*products, hidden_states, top_k_index, top_k_weights)

    @property
    def products(self) -> tuple[PackedProduct, ...]:
        return *self.gate_up.products, *self.down.products

    def stack_of(self, weight: nn.Parameter) -> PackedStack | None:
        """Return the packed form of a parameter of the experts; None for a parameter that is not packed."""
        return next((stack for stack in (self.gate_up, self.down) if stack.stacks[0].weight is weight), None)


Grouped: TypeAlias = Callable[[torch.Tensor, torch.Tensor], Sequence[torch.Tensor]]
"""Function from inputs (T, in) or (T, K, in) and experts (T, K) to the parts of a result (T, K, out)."""


def weighted_experts(
    activation: Callable[[torch.Tensor], torch.Tensor],
    inner: Grouped,
    outer: Grouped,
    hidden_states: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Return the weighted sum of chosen gated experts, added in the order of the choices, in float32.

    Args:
      activation: elementwise activation of the gate.
      inner: products with the gate and the other inner projection, in one part or in two.
      outer: product with the outer projection, in one part.
      hidden_states, chosen, weights: (T, H), int64 (T, K) and (T, K).
    """
    parts = inner(hidden_states, chosen)
    gate, up = parts if len(parts) > 1 else parts[0].chunk(2, dim=-1)
    (results,) = outer(activation(gate) * up, chosen)
    terms = results.float() * weights.float()[..., None]
    total = terms.select(1, 0)
    for place in range(1, terms.shape[1]):
        total = total + terms.select(1, place)
    return total.to(hidden_states.dtype)


class PackedRows(StandIn):
    """Replacement forward of an input embedding that reads the rows of a packed output embedding, without its own
    table.

    An embedding that also scales its rows, as in Gemma, runs the code of its class over a table of just these rows.

    Args:
      output: forward of the output embedding, which shares its product with no other layer.
      embedding: the input embedding, which uses tokens only to look up rows.

    Exactness: rows equal those of ``output.dense()`` in the dtype of the model, bit for bit.
    """

    def __init__(self, output: PackedLinear, embedding: nn.Module) -> None:
        self.output = output
        self._table: tuple[Matrix, torch.Tensor] | None = None
        self._own = None if type(embedding) is nn.Embedding else over_rows(embedding)

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Run the embedding: (...) -> (..., H)."""
        rows = self.rows(ids)
        return rows if self._own is None else self._own(rows)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows of the weight: (...) -> (..., H)."""
        packed = self.packed
        if packed is not None:
            return packed.rows(ids, self.dtype)
        matrix = self.output.product.matrix
        if self._table is None or self._table[0] is not matrix:  # other kernels cannot read single rows
            self._table = matrix, self.dense()
        return F.embedding(ids, self._table[1])

    @property
    def packed(self) -> PackedMatrix | None:
        """Matrix from which rows are unpacked; None if they come from a table."""
        matrix = self.output.product.matrix
        return matrix if isinstance(matrix, PackedMatrix) else None

    def dense(self) -> torch.Tensor:
        """Return the weight (V, H) in the dtype of the model."""
        return self.output.dense().to(self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the model."""
        return self.output.product.dtype

    @property
    def sums(self) -> torch.Tensor:
        """`row_sums` of the original weight."""
        return self.output.sums


def over_rows(embedding: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the code of an embedding's class as a function of the rows that were looked up: (..., H) -> (..., H).

    The embedding must use tokens only to look up rows. The function refers to its other tensors, not to the embedding.
    """
    own = copy.copy(embedding)
    vars(own).pop("forward", None)
    vars(own)["padding_idx"] = None  # it only stops gradients, and is not among the few rows

    def run(rows: torch.Tensor) -> torch.Tensor:
        each = copy.copy(own)  # threads may run at the same time
        table = rows.reshape(-1, rows.shape[-1])
        vars(each)["_parameters"] = {**own._parameters, "weight": table}
        numbers = torch.arange(len(table), device=table.device)
        return each.forward(numbers.view(rows.shape[:-1]))  # type: ignore[no-any-return]

    vars(own)["_parameters"] = {name: each for name, each in own._parameters.items() if name != "weight"}
    return run


def embedding_weight(embedding: nn.Module) -> torch.Tensor:
    """Return the weight (V, H) of an input embedding, even if its rows are read from the output embedding."""
    forward, weight = replacement(embedding), embedding.weight
    return forward.dense() if isinstance(forward, PackedRows) else weight.detach()  # type: ignore[operator]


def embedding_rows(embedding: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return rows of an embedding's weight, without anything else that the embedding does: (...) -> (..., H)."""
    forward = replacement(embedding)
    return forward.rows(ids) if isinstance(forward, PackedRows) else F.embedding(ids, embedding.weight)  # type: ignore[arg-type]


def released(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a NaN of this shape that takes no memory, in place of a weight that is stored elsewhere."""
    return torch.full((), torch.nan, dtype=dtype).expand(shape)


def release(weights: Iterable[torch.Tensor], dtype: torch.dtype, leaving: memory.PageReleaser | None = None) -> None:
    """Free the memory of weights; each is replaced by a NaN of its shape.

    Args:
      dtype: dtype of the NaN.
      leaving: releaser that these weights belong to; None for none.
    """
    given = []
    for weight in weights:
        given.append(weight.data)
        weight.data = released(weight.shape, dtype)
    (leaving or memory.PageReleaser(given)).whole(given)


def packed_products(model: nn.Module) -> list[PackedProduct]:
    """Return the packed products that layers of a model already run."""
    forwards = list(map(replacement, model.modules()))
    of_linears = [forward.product for forward in forwards if isinstance(forward, PackedLinear)]
    of_experts = [product for each in forwards if isinstance(each, PackedExperts) for product in each.products]
    return list(dict.fromkeys([*of_linears, *of_experts]))


def layers_in_floats(model: nn.Module) -> Iterator[nn.Module]:
    """Yield layers that already run packed products of unrounded weights."""
    for product in packed_products(model):
        if isinstance(product.matrix, NativeMatrix):
            yield from product.layers


def packed_layers(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the linear layers and experts in these modules that run packed products."""
    inside = (layer for module in modules for layer in module.modules())
    return [layer for layer in inside if isinstance(replacement(layer), (PackedLinear, PackedExperts))]


def named_weights(
    model: nn.Module,
) -> Iterator[tuple[str, nn.Parameter, PackedLinear | PackedRows | PackedStack | None]]:
    """Yield every parameter, tied ones under each of their names, and its packed form or None."""
    for name, module in model.named_modules():
        forward = replacement(module)
        for key, weight in module.named_parameters(name, recurse=False):
            if isinstance(forward, PackedExperts):
                yield key, weight, forward.stack_of(weight)
                continue
            is_packed = isinstance(forward, (PackedLinear, PackedRows)) and weight is getattr(module, "weight", None)
            yield key, weight, forward if is_packed else None


def weight_sums(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name of every dense parameter and the `row_sums` of its original values, even if it was released."""
    for name, weight, packed in named_weights(model):
        if packed is not None:
            yield name, packed.sums
        elif weight.layout == torch.strided and not weight.is_mkldnn and weight.numel():
            yield name, row_sums(weight.reshape(-1, weight.shape[-1] if weight.dim() > 1 else 1))


def dense_weight(layer: nn.Module) -> torch.Tensor:
    """Return the weight (out, in) of a linear layer."""
    if isinstance(layer, StackedWeight):
        return layer.dense()
    weight: torch.Tensor = layer.weight.detach()  # type: ignore[operator]
    return weight.t() if isinstance(layer, Conv1D) else weight  # a Conv1D stores (in, out)


def _num_weights(layer: nn.Module) -> int:
    weight: torch.Tensor = layer.weight  # type: ignore[assignment]
    if isinstance(layer, StackedWeight):
        return layer.num_experts * layer.out_features * weight.shape[2]
    return weight.numel()


def unpacked_weight(layer: nn.Module) -> torch.Tensor:
    """Return the weight (out, in) of a linear layer; as it was packed, if the original was released."""
    forward = replacement(layer)
    return forward.dense() if isinstance(forward, PackedLinear) else dense_weight(layer)


def row_sums(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum over the bits of each row, in words of eight bytes where possible, to detect changes.

    Rows of a stack of matrices are those of one after another.
    """
    rows = tensor.detach().contiguous()
    rows = rows.flatten(0, -2) if rows.dim() > 2 else rows
    if rows.shape[-1] * rows.itemsize % 8:
        return rows.view(torch.uint8).sum(-1, dtype=torch.int64)
    if rows.storage_offset() * rows.itemsize % 8:
        rows = rows.clone()
    return rows.view(torch.int64).sum(-1, dtype=torch.int64)


def packing_bytes(layers: Iterable[nn.Module], release_originals: bool) -> int:
    """Return the peak memory that packing these layers needs beyond present use, in bytes."""
    return 0 if release_originals else sum(layer.weight.nbytes for layer in layers)  # type: ignore[misc]


def packable(model: nn.Module) -> Iterator[nn.Module]:
    """Yield layers whose weight can be packed and whose forward is that of their class.

    Tensors of other classes are skipped: quantised weights may have a floating-point dtype although they are not stored
    as floats.
    """
    for layer in model.modules():
        if type(layer) not in (nn.Linear, Conv1D) or replacement(layer) is not None:
            continue
        weight, bias = layer.weight, layer.bias
        if type(weight) is not nn.Parameter or type(bias) not in (nn.Parameter, type(None)):
            continue
        if weight.device.type == "cpu" and packs(weight.dtype):
            yield layer

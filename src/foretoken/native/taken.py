"""Packed matrices as data: what has to be kept of one besides its tensors, and the same matrix again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from foretoken.native import abi
from foretoken.native.layouts import codes_shapes, float_shape
from foretoken.native.library import KINDS, Library
from foretoken.native.packed_matmul import (
    FLOATS,
    SCALES,
    CodesMatrix,
    NativeMatrix,
    PackedMatrix,
)

_DTYPES = {kind: dtype for dtype, kind in KINDS.items()}


@dataclass(frozen=True)
class Facts:
    """What the kernels are told of a matrix: fields of `abi.Matrix`."""

    inputs: int
    outputs: int
    kind: int
    group: int
    activation_bytes: int
    value_kind: int
    half_shift: int

    @classmethod
    def of(cls, matrix: PackedMatrix) -> Facts:
        """Of a matrix in memory."""
        return cls(**{name: getattr(matrix.fields, name) for name in cls.__dataclass_fields__})

    def matrix(self, kernels: Library, parts: Mapping[str, torch.Tensor]) -> NativeMatrix | CodesMatrix:
        """The matrix again, over the parts that it had, for kernels by which these were packed.

        Raises: ValueError for parts that are not those of such a matrix: kernels would read past them.
        """
        self._check(kernels, parts)
        kind: type[NativeMatrix] | type[CodesMatrix] = NativeMatrix if self.kind in FLOATS else CodesMatrix
        matrix = object.__new__(kind)
        PackedMatrix.__init__(
            matrix,
            kernels,
            (self.outputs, self.inputs),
            self.kind,
            parts["packed"],
            parts.get("bias"),
            parts.get("scales"),
            parts.get("zeros"),
            self.group,
            self.activation_bytes,
            _DTYPES[self.value_kind],
            parts.get("scale_halves"),
            parts.get("zero_halves"),
        )
        return matrix

    def _check(self, kernels: Library, parts: Mapping[str, torch.Tensor]) -> None:
        wanted: dict[str, tuple[int, ...]] = {"bias": (self.outputs,)} if "bias" in parts else {}
        if self.kind in FLOATS:
            dtypes = {torch.bfloat16 if self.kind == abi.PAIRS else _DTYPES[self.kind]}
            is_known = self.kind != abi.PAIRS or kernels.has_pairs
            wanted["packed"] = float_shape(self.kind, self.outputs, self.inputs, kernels.block)
        else:
            dtypes, is_known = {torch.uint8}, self.kind in (abi.NIBBLES, abi.BYTES) and self.activation_bytes in (1, 2)
            bits = 8 if self.kind == abi.BYTES else 4
            wanted["packed"], wanted["scales"] = codes_shapes(bits, self.group, self.outputs, self.inputs)
            blocks, groups, lanes = wanted["scales"]
            for name in [name for name in ("scales", "zeros") if name in parts]:
                wanted[name], dtype = wanted["scales"], parts[name].dtype
                is_known &= dtype in SCALES
                if dtype == torch.int8:
                    wanted[f"{name[:-1]}_halves"] = blocks, groups >> self.half_shift, lanes
            halves = [part.dtype for name, part in parts.items() if name.endswith("_halves")]
            is_known &= set(halves) <= {torch.float16} and groups >> self.half_shift << self.half_shift == groups
        found = {name: tuple(part.shape) for name, part in parts.items()}
        if not is_known or found != wanted or parts["packed"].dtype not in dtypes or self.value_kind not in _DTYPES:
            raise ValueError(f"{found} are no parts of a matrix of {self}")

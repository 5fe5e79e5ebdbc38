"""Reading of the tensors of a GGUF file as weights of a model of `transformers`, tensor by tensor, from a mapped file.

llama.cpp names tensors in its own way, and stores the rows of query and key heads of some models in another order.
transformers has a table of these changes. The order of rows is found by applying its code to the row numbers.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from foredraft.errors import CheckpointError, ConfigError
from foredraft.gguf.blocks import TYPES
from foredraft.gguf.header import INPUT, PLAIN, Header, TensorInfo
from foredraft.model.execution.experts import packable_experts
from foredraft.model.execution.packing import released
from foredraft.model.execution.rounding import roundable
from foredraft.model.execution.sharing import gives_rows
from foredraft.native import memory
from foredraft.native.codes import Codes, StoredBlocks, StoredCodes, pieces
from foredraft.native.library import KINDS, library
from foredraft.progress import counted


@dataclass
class Weights:
    """Weights of a model.

    Args:
      state: tensors by parameter name; NaN for those in ``codes``.
      codes: quantised weights by the name of their layer. They are read later.
      experts: quantised weights (E * outputs, in) by the name of a mixture's experts and of their parameter. Parts
        of every expert are numbered in their order.
      kept, dequantised: numbers of matrices by type.
    """

    state: dict[str, torch.Tensor] = field(default_factory=dict)
    codes: dict[str, StoredCodes] = field(default_factory=dict)
    experts: dict[str, dict[str, dict[int, StoredCodes]]] = field(default_factory=dict)
    kept: Counter[str] = field(default_factory=Counter)
    dequantised: Counter[str] = field(default_factory=Counter)

    @property
    def types(self) -> str:
        """List of the types that stay quantised and of those that are dequantised."""
        more = f"; dequantised are {_listed(+self.dequantised)}" if +self.dequantised else ""
        return f"{_listed(self.kept)}{more}"

    def codes_by_layer(self, model: nn.Module) -> dict[nn.Module, StoredCodes]:
        """Return the quantised weights by module."""
        return {model.get_submodule(name): codes for name, codes in self.codes.items()}

    def codes_by_experts(self, model: nn.Module) -> dict[nn.Module, dict[str, list[StoredCodes]]]:
        """Return the quantised weights of experts by module and name of their parameter."""
        return {
            model.get_submodule(name): {
                key: [parts[number] for number in sorted(parts)] for key, parts in named.items()
            }
            for name, named in self.experts.items()
        }


def type_name(tensor: TensorInfo) -> str:
    """Return llama.cpp's name of a tensor's type. The type must be known to gguf."""
    import gguf

    return gguf.GGMLQuantizationType(tensor.type_id).name


def read_weights(header: Header, structure: PreTrainedModel, dtype: torch.dtype, *, as_stored: bool) -> Weights:
    """Read all weights.

    Args:
      header: header of a file that passed ``check_readable``.
      structure: the model on the meta device.
      dtype: dtype of dequantised weights.
      as_stored: keep matrices of linear layers and of embeddings quantised if their type has a kernel.

    Raises: CheckpointError for a tensor of another shape than the model's; ConfigError if nothing stays quantised.
    """
    found, file, names = Weights(), _File(header), _Names(header, structure)
    layers, looked_up = _layers(structure) if as_stored else ({}, set())
    shapes = {name: weight.shape for name, weight in structure.named_parameters(remove_duplicate=False)}
    stacks = _Stacks(structure, names, header, as_stored=as_stored)
    for tensor in counted("reading tensors", header.tensors, lambda tensor: tensor.num_elements):
        if tensor.name in stacks:
            stacks.read(tensor, file, found, dtype)
            continue
        name, order, is_turned = names.of(tensor)
        if name is None:  # of another order than that of rows, or without a place in the model
            names.convert(tensor, file.dense(tensor, torch.float32).numpy(), found.state)
            found.dequantised[type_name(tensor)] += tensor.type_id not in PLAIN
            file.leave(tensor)
            continue
        shape = torch.Size(tensor.shape[::-1] if is_turned else tensor.shape)
        if shapes.get(name, shape) != shape:
            raise _other_shape(header.path, tensor, shapes[name])
        layer = layers.get(name)
        codes = None if layer is None else file.codes(tensor, order)
        if layer is not None and codes is not None:
            found.codes[layer] = codes
            found.kept[type_name(tensor)] += 1
        elif tensor.type_id not in PLAIN and (layer is not None or tensor.name != INPUT):
            found.dequantised[type_name(tensor)] += 1
        if codes is not None and name not in looked_up:
            found.state[name] = released(shape, dtype)
            continue
        dense = file.dense(tensor, dtype, order)
        found.state[name] = dense.t().contiguous() if is_turned else dense
        if codes is None:
            file.leave(tensor)
    found.state = {name: tensor.to(dtype) for name, tensor in found.state.items()}
    if as_stored and not found.codes and not found.experts:
        kinds = ", ".join(sorted({type_name(tensor) for tensor in header.tensors}))
        raise ConfigError(
            f"weights is 'stored', but {header.path} contains no matrix of a supported type (it contains {kinds}; "
            f"supported are {', '.join(kind.name for kind in TYPES.values())}); leave weights out, or use "
            "quantization='int8'"
        )
    return found


def _layers(structure: PreTrainedModel) -> tuple[dict[str, str], set[str]]:
    """Return the names of layers whose weight can stay quantised, by the name of the weight in a state.

    The second value contains the weights that are needed dequantised as well: a tied embedding that does more than look
    up rows.
    """
    linear = set(roundable(structure))
    layers = {f"{name}.weight": name for name, module in structure.named_modules() if module in linear}
    output, embedding = structure.get_output_embeddings(), structure.get_input_embeddings()
    paths = {module: name for name, module in structure.named_modules()}
    is_tied = output in linear and output.weight is embedding.weight
    name = f"{paths[embedding]}.weight"
    if is_tied:
        layers[name] = paths[output]
    elif gives_rows(embedding):
        layers[name] = paths[embedding]
    return layers, {name} if is_tied and not gives_rows(embedding) else set()


@dataclass(frozen=True)
class _Part:
    """Place of a tensor (E, outputs, in) in a parameter of a mixture's experts.

    Args:
      name: name of the parameter.
      number, count: number of the tensor among the equal parts of every expert's outputs, and number of parts.
    """

    name: str
    number: int
    count: int


class _Stacks:
    """Tensors that contain matrices of all experts of a layer.

    A parameter stays quantised if the types of all its parts have kernels, and its experts can be packed.
    """

    def __init__(self, structure: nn.Module, names: _Names, header: Header, *, as_stored: bool) -> None:
        self._shapes = {name: weight.shape for name, weight in structure.named_parameters()}
        self._path = header.path
        found = [(tensor, names.part_of(tensor, self._shapes)) for tensor in header.tensors if len(tensor.shape) == 3]
        self._parts = {tensor.name: part for tensor, part in found if part is not None}
        packable = set(packable_experts(structure)) if as_stored else set()
        paths = {name for name, module in structure.named_modules() if module in packable}
        self._stored = {part.name for part in self._parts.values() if part.name.rpartition(".")[0] in paths}
        self._stored -= {part.name for tensor, part in found if part is not None and tensor.type_id not in TYPES}

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def read(self, tensor: TensorInfo, file: _File, found: Weights, dtype: torch.dtype) -> None:
        """Read a tensor.

        Raises: CheckpointError for a tensor of another shape than the model's.
        """
        part = self._parts[tensor.name]
        shape, size = self._shapes[part.name], tensor.shape[1]
        if tuple(shape) != (tensor.shape[0], part.count * size, tensor.shape[2]):
            raise _other_shape(self._path, tensor, shape)
        if part.name in self._stored:
            layer, _, key = part.name.rpartition(".")
            codes = file.codes(tensor, None)
            assert codes is not None  # its type has a kernel
            found.experts.setdefault(layer, {}).setdefault(key, {})[part.number] = codes
            found.kept[type_name(tensor)] += 1
            found.state[part.name] = released(shape, dtype)
            return
        found.dequantised[type_name(tensor)] += tensor.type_id not in PLAIN
        if part.name not in found.state:
            found.state[part.name] = torch.empty(shape, dtype=dtype)
        found.state[part.name][:, part.number * size : (part.number + 1) * size] = file.dense(tensor, dtype)
        file.leave(tensor)


def _other_shape(path: Path, tensor: TensorInfo, shape: torch.Size) -> CheckpointError:
    return CheckpointError(
        f"{path} contains {tensor.name} of shape {tuple(tensor.shape)}, but the model that its metadata "
        f"describes has {tuple(shape)} there: it is damaged; download or convert the model again"
    )


class _Names:
    """The names of weights in transformers and the order of their rows, from the table of transformers."""

    def __init__(self, header: Header, structure: PreTrainedModel) -> None:
        import gguf
        from transformers import modeling_gguf_pytorch_utils as theirs

        kind = theirs.TENSOR_PROCESSORS.get(header.architecture, theirs.TensorProcessor)
        self._processor: Any = kind(config=structure.config.to_dict())
        self._names: dict[str, str] = {}
        architectures = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
        table = gguf.get_tensor_name_map(architectures[header.architecture], structure.config.num_hidden_layers)
        base = f"{structure.base_model_prefix}."
        for full in structure.state_dict():
            name = self._processor.preprocess_name(full)
            stem, suffix = name, ""
            if name.endswith((".weight", ".bias")):
                stem, _, suffix = name.rpartition(".")
                suffix = f".{suffix}"
            found = table.get_name(stem) or table.get_name(stem.removeprefix(base))
            if found is None:
                self._processor.perform_fallback_tensor_mapping(self._names, suffix, "", name)
            else:
                self._names[found + suffix] = name

    def of(self, tensor: TensorInfo) -> tuple[str | None, torch.Tensor | None, bool]:
        """Return the name of a tensor; the order of its rows, None for that of the file; and whether it is transposed.

        The name is None if the tensor is changed in another way.
        """
        if len(tensor.shape) != 2 or not tensor.num_elements:
            return None, None, False
        rows = tensor.shape[0]
        numbers = np.arange(2 * rows, dtype=np.float64).reshape(rows, 2)
        state: dict[str, torch.Tensor] = {}
        with suppress(Exception):  # code that needs the other numbers of a row as well
            self.convert(tensor, numbers, state)
        if len(state) != 1:
            return None, None, False
        ((name, made),) = state.items()
        is_turned = made.shape == (2, rows) and rows != 2
        found = made.t() if is_turned else made
        order = (found[:, 0] / 2).long()
        if found.shape != numbers.shape or not np.array_equal(numbers[order], found):
            return None, None, False
        is_same = bool((order == torch.arange(rows)).all())
        return name, None if is_same else order, is_turned

    def part_of(self, tensor: TensorInfo, shapes: Mapping[str, torch.Size]) -> _Part | None:
        """Return the place of a tensor (E, outputs, in) in a parameter of experts; None if it is changed otherwise.

        Args:
          shapes: shapes of all parameters.
        """
        experts, size, _ = tensor.shape
        numbers = np.arange(1, 2 * experts * size + 1, dtype=np.float32).reshape(experts, size, 2)
        state: dict[str, torch.Tensor] = {}
        with suppress(Exception):  # code that needs the other numbers of a row as well
            self.convert(tensor, numbers, state)
        if len(state) != 1:
            return None
        ((name, made),) = state.items()
        if name not in shapes or made.dim() != 3 or not size or made.shape[1] % size:
            return None
        count, wanted = made.shape[1] // size, torch.from_numpy(numbers)
        for number in range(count):
            placed = torch.zeros_like(made)
            placed[:, number * size : (number + 1) * size] = wanted
            if torch.equal(made, placed):
                return _Part(name, number, count)
        return None

    def convert(self, tensor: TensorInfo, data: np.ndarray[Any, Any], state: dict[str, torch.Tensor]) -> None:
        """Add the contents of a tensor to a state as transformers does. Tensors that it does not use are left out."""
        made = self._processor.process(
            weights=data, name=tensor.name, tensor_key_mapping=self._names, parsed_parameters={"tensors": state}
        )
        if made.name in self._names:
            state[self._names[made.name]] = torch.from_numpy(np.array(made.weights))


class _File:
    """The tensors of a model's files, which are mapped into memory."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self._data = []
        for file in header.files:
            with file.path.open("rb") as stream:
                mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
            self._data.append(torch.frombuffer(mapped, dtype=torch.uint8))
        self._pages = memory.PageReleaser(self._data)

    def raw(self, tensor: TensorInfo) -> torch.Tensor:
        """Return the bytes of a tensor, uint8 (rows, bytes)."""
        import gguf

        size, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor.type_id)]
        count = tensor.shape[-1] // size * num_bytes
        first = self.header.files[tensor.part].data_start + tensor.offset
        return self._data[tensor.part][first : first + tensor.num_elements // size * num_bytes].view(-1, count)

    def leave(self, tensor: TensorInfo) -> None:
        """Release the pages of a tensor that will not be read again."""
        if tensor.num_elements:
            self._pages(self.raw(tensor))

    def codes(self, tensor: TensorInfo, order: torch.Tensor | None) -> StoredCodes | None:
        """Return the codes of a matrix, which are read later; None if its type has no kernel."""
        kind = TYPES.get(tensor.type_id)
        if kind is None:
            return None
        rows = self.raw(tensor)

        def read(first: int, last: int) -> Codes:
            return kind.codes(rows[first:last] if order is None else rows[order[first:last]])

        blocks = StoredBlocks(rows, tensor.type_id, order, lambda: self.leave(tensor))
        return StoredCodes(torch.Size((len(rows), tensor.shape[-1])), kind.form, read, blocks)

    def dense(self, tensor: TensorInfo, dtype: torch.dtype, order: torch.Tensor | None = None) -> torch.Tensor:
        """Return a copy of a tensor, dequantised."""
        if not tensor.num_elements:
            return torch.empty(tensor.shape, dtype=dtype)
        rows = self.raw(tensor)
        plain, kind, kernels = PLAIN.get(tensor.type_id), TYPES.get(tensor.type_id), library()
        if plain is not None:
            rows = rows.clone().view(plain)
            dense = (rows if order is None else rows[order]).to(dtype)
        elif kind is not None and kernels is not None and dtype in KINDS:
            inputs, given = tensor.shape[-1], None if order is None else order.contiguous()
            dense = torch.empty(len(rows), inputs, dtype=dtype)
            at = None if given is None else given.data_ptr()
            kernels.read_blocks(
                *(tensor.type_id, inputs, rows.data_ptr(), at, len(rows)),
                *(KINDS[dtype], dense.data_ptr(), torch.get_num_threads()),
            )
        else:
            shape, parts = (len(rows), tensor.shape[-1]), []
            for first, last in pieces(shape):
                part = rows[first:last] if order is None else rows[order[first:last]]
                parts.append((_dequantised(part, tensor) if kind is None else kind.codes(part).dense()).to(dtype))
            dense = torch.cat(parts)
        return dense.view(tensor.shape)


def _dequantised(rows: torch.Tensor, tensor: TensorInfo) -> torch.Tensor:
    """Return the weights in rows of blocks, as the package gguf reads them."""
    import gguf

    return torch.from_numpy(gguf.dequantize(rows.contiguous().numpy(), gguf.GGMLQuantizationType(tensor.type_id)))


def _listed(types: Mapping[str, int]) -> str:
    """List types with their counts: ``210 of Q4_1 and 1 of Q8_0``."""
    return " and ".join(f"{count} of {name}" for name, count in Counter(types).most_common())

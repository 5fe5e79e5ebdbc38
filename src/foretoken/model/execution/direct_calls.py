"""What ``forward.cpp`` is given: the layers of a model over a number of nodes, tables of inputs, a cache, and nodes."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from foretoken.model.cache.storage import RaggedLayer
from foretoken.model.execution.few_nodes import AttentionFields, FewNodes
from foretoken.model.execution.node_lists import array_of
from foretoken.model.execution.packing import PackedProduct
from foretoken.model.execution.programs import SCRATCH, Program

if TYPE_CHECKING:
    from foretoken.model.cache.ragged import KVCache
    from foretoken.model.execution.regions import CompiledLayer
    from foretoken.model.execution.surroundings import Surroundings

Integer, Address = ctypes.c_int64, ctypes.c_void_p


class FormFields(ctypes.Structure):
    """Layers that run attention alike."""

    _fields_ = (("call", AttentionFields), ("window", Integer), ("item", Integer))


class LayerFields(ctypes.Structure):
    """The calls of a layer, and the pointers that they take."""

    _fields_ = (
        ("steps", Address),
        ("num_steps", Integer),
        ("pointers", Address),
        ("num_pointers", Integer),
        ("form", Integer),
        ("inputs", Address),
        ("num_inputs", Integer),
    )


class TableFields(ctypes.Structure):
    """An input, by tokens or by positions; one that is given has no rows."""

    _fields_ = (("rows", Address), *((name, Integer) for name in ("bytes", "count", "by_position")))


class ForwardFields(ctypes.Structure):
    """All layers."""

    _fields_ = (
        *((name, Integer) for name in ("num_layers", "num_forms", "num_inputs", "state_bytes", "working_bytes")),
        ("layers", Address),
        ("forms", Address),
    )


class StoreFields(ctypes.Structure):
    """Keys and values of every layer."""

    _fields_ = (("keys", Address), ("values", Address), ("columns", Integer))


class FedFields(ctypes.Structure):
    """Rows of nodes."""

    _fields_ = (
        *((name, Integer) for name in ("rows", "width", "nodes", "earlier")),
        *((name, Address) for name in ("tokens", "depths", "counts", "lengths", "offsets", "ancestors")),
        ("first_row", Integer),
    )


class DirectCalls:
    """All layers of a model over one number of nodes. Made by `of`.

    Attributes:
      shape, dtype: of hidden states, (1, S, H).
    """

    def __init__(
        self,
        layers: Sequence[CompiledLayer],
        programs: Sequence[Program],
        pointers: Sequence[Sequence[int | None]],
        forms: Sequence[FormFields],
        form_of: Sequence[int],
        inputs_of: Sequence[Sequence[int]],
    ) -> None:
        self.shape, self.dtype = programs[0].shape, programs[0].dtype
        self._tensors = [tensor for layer in layers for tensor in layer.tensors]
        self._memory = [tensor.detach() for tensor in self._tensors]  # kept, whatever becomes of the weights
        self._num_packed = PackedProduct.num_packed
        arrays = [(Address * len(numbers))(*numbers) for numbers in pointers]
        of_inputs = [array_of(numbers) for numbers in inputs_of]
        of_layers, of_forms = (LayerFields * len(layers))(), (FormFields * len(forms))(*forms)
        for place, program, form in zip(of_layers, programs, form_of, strict=True):
            place.steps, place.num_steps, place.form = program.address, program.num_steps, form
        for place, array, numbers in zip(of_layers, arrays, of_inputs, strict=True):
            place.pointers, place.num_pointers = ctypes.addressof(array), len(array)
            place.inputs, place.num_inputs = ctypes.addressof(numbers), len(numbers)
        self._kept_alive = programs, arrays, of_inputs, of_layers, of_forms
        num_inputs = 1 + max((number for numbers in inputs_of for number in numbers), default=0)
        working = max(program.num_bytes for program in programs)
        sizes = len(layers), len(forms), num_inputs, self.shape[2] * self.dtype.itemsize, working
        self._fields = ForwardFields(*sizes, ctypes.addressof(of_layers), ctypes.addressof(of_forms))
        self.address = ctypes.addressof(self._fields)

    @classmethod
    def of(
        cls,
        layers: Sequence[CompiledLayer],
        programs: Sequence[Program],
        around: Surroundings,
        windows: Mapping[str, int | None],
        cache: KVCache,
    ) -> DirectCalls | None:
        """Those of some layers; None where they cannot be made in a row.

        Args:
          programs: the calls of every layer over the same number of nodes.
          around: the layers.
          windows: positions that a node looks back by kind, its own included; None for all.
          cache: one that these layers write into.
        """
        if any((program.shape, program.dtype) != (programs[0].shape, programs[0].dtype) for program in programs):
            return None
        forms: dict[Any, tuple[int, FormFields]] = {}
        pointers, form_of = [], []
        for layer, program, kind in zip(layers, programs, around.kinds, strict=True):
            numbers = layer.replay.pointers(program, [0] * (SCRATCH + 1), [0] * len(layer.needed))
            form = -1
            if program.query is not None and kind is not None:
                key = _form_key(layer, program, kind, cache)
                if key not in forms:
                    fields = _form_of(layer, program, windows[kind], cache)
                    if fields is None:
                        return None
                    forms[key] = len(forms), fields
                form = forms[key][0]
            if numbers is None or (form < 0) != (program.query is None):
                return None
            pointers.append(numbers)
            form_of.append(form)
        return cls(layers, programs, pointers, [fields for _, fields in forms.values()], form_of, around.inputs_of)

    def still_hold(self) -> bool:
        """Whether weights are where they were."""
        return self._num_packed == PackedProduct.num_packed and all(
            tensor.data_ptr() == known.data_ptr() for tensor, known in zip(self._tensors, self._memory, strict=True)
        )


def _form_key(layer: CompiledLayer, program: Program, kind: str, cache: KVCache) -> Any:
    keys, values = _buffers(layer, cache)
    query = program.query
    assert query is not None
    return kind, query.shape, query.stride(), keys.shape[1::2], values.shape[1::2], layer.replay.scaling


def _form_of(layer: CompiledLayer, program: Program, window: int | None, cache: KVCache) -> FormFields | None:
    keys, values = _buffers(layer, cache)
    query, kernels = program.query, layer.replay.kernels
    assert query is not None
    assert kernels is not None
    one = [query.shape[2]]  # all nodes as if they were of one row; C++ puts in whose they are
    few = FewNodes(kernels, one, one)
    known = few.call(query, keys, values, None, layer.replay.scaling, 1)
    return None if known is None else FormFields(known[0], window or 0, query.itemsize)


def _buffers(layer: CompiledLayer, cache: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
    of_layer: Any = cache.layers[layer.index or 0]
    return of_layer.keys, of_layer.values


class Store:
    """Where a cache keeps the keys and values of some layers, as long as its memory is the same."""

    def __init__(self, layers: Sequence[CompiledLayer], cache: KVCache) -> None:
        self.memory = cache.memory
        buffers = [_buffers(layer, cache) for layer in layers if layer.index is not None]
        self._keys, self._values = (
            (Address * len(layers))(
                *(None if layer.index is None else _buffers(layer, cache)[part].data_ptr() for layer in layers)
            )
            for part in (0, 1)
        )
        columns = {buffer.shape[2] for pair in buffers for buffer in pair}
        self.is_even = len(columns) == 1 and all(buffer.is_contiguous() for pair in buffers for buffer in pair)
        self._fields = StoreFields(ctypes.addressof(self._keys), ctypes.addressof(self._values), next(iter(columns), 0))
        self.address = ctypes.addressof(self._fields)

    @staticmethod
    def is_possible(layers: Sequence[CompiledLayer], cache: KVCache) -> bool:
        """Whether all layers have their memory in this cache."""
        places = [layer.index for layer in layers if layer.index is not None]
        if any(place >= len(cache.layers) for place in places):
            return False
        found: list[Any] = [cache.layers[place] for place in places]
        return all(type(layer) is RaggedLayer and layer.is_initialized for layer in found)


class Tables:
    """Inputs of layers by tokens and by positions.

    Args:
      num_positions: that there are rows for.
    """

    @torch.inference_mode()
    def __init__(self, around: Surroundings, num_positions: int) -> None:
        self.num_positions = num_positions
        self._around = around
        embedding = around.embedding
        self._place = None if embedding is None else embedding.data_ptr()
        by_position = iter(around.by_position(torch.arange(num_positions)[None]))
        self._fields = (TableFields * len(around.by))()
        self._tensors = []
        for place, by in zip(self._fields, around.by, strict=True):
            if by is None:
                continue
            found = embedding if by == "token" else next(by_position)[0]
            assert found is not None
            table = found.detach().contiguous()  # keeps this memory, whatever becomes of the weight
            self._tensors.append(table)
            place.rows, place.bytes, place.count = table.data_ptr(), table[0].nbytes, len(table)
            place.by_position = by == "position"
        self.address = ctypes.addressof(self._fields)

    def still_hold(self) -> bool:
        """Whether embeddings lie where they lay."""
        found = self._around.embedding
        return found is None or found.data_ptr() == self._place

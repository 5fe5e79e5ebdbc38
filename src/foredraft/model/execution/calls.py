"""How a model calls its decoder layers, and they their attention: seen in forwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from foredraft.model.cache.ragged import KVCache
from foredraft.model.execution.attention import PLAIN_ARGUMENTS, SPECIAL_ARGUMENTS, seen_by
from foredraft.model.execution.lowering import NotTraceableError
from foredraft.model.execution.packing import packed_layers
from foredraft.model.execution.sharing import unmultiplied

NUM_NODES = (11, 13)
"""Nodes of the forwards in which calls of layers are seen; what has these sizes counts nodes."""


@dataclass(frozen=True)
class LayerCall:
    """How a model calls one of its layers, as seen in forwards.

    Args:
      args, kwargs: of the call.
      inputs: places of its tensors: (index or name, and an index within a tuple or None).
      node_dims: for each of them, the dimension that counts nodes, or None.
      mask: place of the attention mask, or None.
      cache: place of the cache.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[tuple[Any, int | None], ...]
    node_dims: tuple[int | None, ...]
    mask: Any
    cache: Any

    def emptied(self) -> LayerCall:
        """The form of the call without the numbers that were in it."""
        args, kwargs = list(self.args), dict(self.kwargs)
        for place, dim in zip(self.inputs, self.node_dims, strict=True):
            tensor = value_at(args, kwargs, place)
            put(args, kwargs, place, tensor if dim is None else torch.empty_like(tensor, device="meta"))
        put(args, kwargs, (self.cache, None), None)
        return replace(self, args=tuple(args), kwargs=kwargs)


class Recording:
    """How a model calls its layers, as seen in two forwards of its modules.

    Args:
      layers: all of the decoder layers.
      forward: runs so many nodes through the model, and gives logits (1, S, V).

    Attributes:
      calls: their common forms, by layer.
      attention: module and arguments of the attention of every layer; None without attention.
      cache_index: of the keys and values of every layer; None without attention.
      of_layers, outputs, logits: arguments and results of every layer in the second forward, and its logits, until
        `keep_forms`.

    Raises: NotTraceableError where calls have no common form.
    """

    def __init__(self, layers: Sequence[nn.Module], forward: Callable[[int], torch.Tensor]) -> None:
        with unmultiplied(packed_layers(layers)):  # of the first forward sizes are compared, and no numbers
            self._see(layers, forward, NUM_NODES[0])
        first = self.of_layers
        self._see(layers, forward, NUM_NODES[1])
        self.calls = [call_of(*each) for each in zip(first, self.of_layers, strict=True)]

    def keep_forms(self) -> None:
        """Drop the tensors that were in the calls."""
        self.of_layers.clear()
        self.outputs.clear()
        del self.logits
        self.calls = [call.emptied() for call in self.calls]

    def _see(self, layers: Sequence[nn.Module], forward: Callable[[int], torch.Tensor], num_nodes: int) -> None:
        self.of_layers: list[tuple[tuple[Any, ...], dict[str, Any]]] = [((), {})] * len(layers)
        self.outputs: list[Any] = [None] * len(layers)
        self.attention: list[tuple[nn.Module, dict[str, Any]] | None] = [None] * len(layers)
        self.cache_index: list[int | None] = [None] * len(layers)
        self._running = 0
        handles = []
        for number, layer in enumerate(layers):
            handles.append(layer.register_forward_pre_hook(self._enter(number), with_kwargs=True))
            handles.append(layer.register_forward_hook(self._leave(number)))
        try:
            with seen_by(self._see_attention):
                self.logits = forward(num_nodes)
        finally:
            for handle in handles:
                handle.remove()
        if not all(args or kwargs for args, kwargs in self.of_layers):
            raise NotTraceableError("some layers were not called")

    def _enter(self, number: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._running = number
            self.of_layers[number] = args, dict(kwargs)

        return hook

    def _leave(self, number: int) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            self.outputs[number] = output

        return hook

    def _see_attention(self, module: nn.Module, query: Any, key: Any, value: Any, mask: Any, **others: Any) -> None:
        number = self._running
        if self.attention[number] is not None:
            raise NotTraceableError("it has more than one attention")
        used = {name: other for name, other in others.items() if name in (*PLAIN_ARGUMENTS, *SPECIAL_ARGUMENTS)}
        held = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        computed = [name for name, other in used.items() if isinstance(other, torch.Tensor) and id(other) not in held]
        if computed:
            raise NotTraceableError(f"its attention takes {', '.join(computed)}, computed in every forward")
        self.attention[number] = module, used
        args, kwargs = self.of_layers[number]
        cache = value_at(args, kwargs, (_place_of(args, kwargs, KVCache), None))
        address = key.data_ptr()
        owners = [
            index
            for index, layer in enumerate(cache.layers)
            if layer.is_initialized and layer.keys.data_ptr() == address
        ]
        if len(owners) != 1:
            raise NotTraceableError("its attention does not read the cache")
        self.cache_index[number] = owners[0]


def _place_of(args: Sequence[Any], kwargs: dict[str, Any], kind: type) -> Any:
    """Index or name of the argument of this type."""
    for key, value in (*enumerate(args), *kwargs.items()):
        if isinstance(value, kind):
            return key
    raise NotTraceableError(f"it is given no {kind.__name__}")


def call_of(first: tuple[Any, dict[str, Any]], second: tuple[Any, dict[str, Any]]) -> LayerCall:
    """The common form of calls over different numbers of nodes."""
    args, kwargs = first
    cache = _place_of(args, kwargs, KVCache)
    if kwargs.get("flat_nodes") is None:
        raise NotTraceableError("it is not told of lists of nodes")
    mask, inputs, dims = None, [], []
    for key, value in (*enumerate(args), *kwargs.items()):
        if isinstance(value, torch.Tensor) and value.dim() == 4 and value.shape[-2] == NUM_NODES[0]:
            mask = key
            continue
        several = isinstance(value, (tuple, list))
        for index, tensor in enumerate(value) if several else [(None, value)]:
            if isinstance(tensor, torch.Tensor):
                place = key, index
                inputs.append(place)
                dims.append(_nodes_dim(tensor, value_at(*second, place)))
    if not inputs or inputs[0][0] not in (0, "hidden_states") or dims[0] != 1:
        raise NotTraceableError("its first argument is not the hidden states of a list of nodes")
    return LayerCall(args, kwargs, tuple(inputs), tuple(dims), mask, cache)


def _nodes_dim(tensor: torch.Tensor, other: torch.Tensor) -> int | None:
    """The dimension in which two inputs differ."""
    dims = [dim for dim, (size, wider) in enumerate(zip(tensor.shape, other.shape, strict=True)) if size != wider]
    if len(dims) > 1 or any((tensor.shape[dim], other.shape[dim]) != NUM_NODES for dim in dims):
        raise NotTraceableError("it is given tables of nodes by nodes")
    return dims[0] if dims else None


def value_at(args: Sequence[Any], kwargs: dict[str, Any], place: tuple[Any, int | None]) -> Any:
    """An argument of a call, or what a tuple there holds."""
    key, index = place
    value = args[key] if isinstance(key, int) else kwargs[key]
    return value if index is None else value[index]


def put(args: list[Any], kwargs: dict[str, Any], place: tuple[Any, int | None], value: Any) -> None:
    """Give a call another argument."""
    key, index = place
    holder: Any = args if isinstance(key, int) else kwargs
    if index is None:
        holder[key] = value
    else:
        holder[key] = (*holder[key][:index], value, *holder[key][index + 1 :])

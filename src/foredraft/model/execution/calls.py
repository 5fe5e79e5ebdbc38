"""Recording of the calls that a model makes to its decoder layers and to their attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
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
"""Numbers of nodes in the two recorded forward passes; a dimension with these sizes counts nodes."""


@dataclass(frozen=True)
class LayerCall:
    """Call of a decoder layer, as recorded in forward passes.

    Args:
      args, kwargs: arguments of the call.
      inputs: places of its tensors, each an index or name, and an index within a tuple or None.
      node_dims: dimension that counts nodes, for each input, or None.
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
        """Return the call without the values of its tensors."""
        args, kwargs = list(self.args), dict(self.kwargs)
        for place, dim in zip(self.inputs, self.node_dims, strict=True):
            tensor = value_at(args, kwargs, place)
            put(args, kwargs, place, tensor if dim is None else torch.empty_like(tensor, device="meta"))
        put(args, kwargs, (self.cache, None), None)
        return replace(self, args=tuple(args), kwargs=kwargs)


class Recording:
    """Calls that a model makes to its layers, recorded in two forward passes over different numbers of nodes.

    Args:
      layers: all decoder layers.
      forward: function that runs a number of nodes through the model, and returns logits (1, S, V).
      of_values: also record what layers compute. Otherwise no weights are read, and outputs and logits are meaningless.

    Attributes:
      calls: common form of the calls, by layer.
      attention: attention module of every layer and its arguments; None without attention.
      cache_index: index of every layer's keys and values in the cache; None without attention.
      of_layers, outputs, logits: arguments and results of every layer in the second forward pass, and its logits;
        removed by `keep_forms`.

    Raises: NotTraceableError if calls have no common form.
    """

    def __init__(
        self, layers: Sequence[nn.Module], forward: Callable[[int], torch.Tensor], *, of_values: bool = True
    ) -> None:
        with unmultiplied(packed_layers(layers)):  # only the sizes of the first forward pass are compared
            self._see(layers, forward, NUM_NODES[0])
        first = self.of_layers
        with nullcontext() if of_values else unmultiplied(packed_layers(layers)):
            self._see(layers, forward, NUM_NODES[1])
        self.calls = [call_of(*each) for each in zip(first, self.of_layers, strict=True)]

    def keep_forms(self) -> None:
        """Free the tensors of the recorded calls."""
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
            raise NotTraceableError("the model did not call all decoder layers")

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
            raise NotTraceableError("a layer calls attention more than once")
        used = {name: other for name, other in others.items() if name in (*PLAIN_ARGUMENTS, *SPECIAL_ARGUMENTS)}
        held = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        computed = [name for name, other in used.items() if isinstance(other, torch.Tensor) and id(other) not in held]
        if computed:
            raise NotTraceableError(f"its attention has the argument {', '.join(computed)}, computed in every forward")
        self.attention[number] = module, used
        args, kwargs = self.of_layers[number]
        cache = value_at(args, kwargs, (_place_of_cache(args, kwargs), None))
        address = key.data_ptr()
        owners = [
            index
            for index, layer in enumerate(cache.layers)
            if layer.is_initialized and layer.keys.data_ptr() == address
        ]
        if len(owners) != 1:
            raise NotTraceableError("its attention does not read the cache")
        self.cache_index[number] = owners[0]


def _place_of_cache(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the index or name of the argument that is the cache."""
    for key, value in (*enumerate(args), *kwargs.items()):
        if isinstance(value, KVCache):
            return key
    raise NotTraceableError("a layer does not get the cache as an argument")


def call_of(first: tuple[Any, dict[str, Any]], second: tuple[Any, dict[str, Any]]) -> LayerCall:
    """Return the common form of two calls over different numbers of nodes."""
    args, kwargs = first
    cache = _place_of_cache(args, kwargs)
    if kwargs.get("flat_nodes") is None:
        raise NotTraceableError("a layer does not get the argument flat_nodes")
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
        raise NotTraceableError("the first argument of a layer is not the hidden states of a list of nodes")
    return LayerCall(args, kwargs, tuple(inputs), tuple(dims), mask, cache)


def _nodes_dim(tensor: torch.Tensor, other: torch.Tensor) -> int | None:
    """Return the dimension in which two inputs differ; None if they have the same shape."""
    dims = [dim for dim, (size, wider) in enumerate(zip(tensor.shape, other.shape, strict=True)) if size != wider]
    if len(dims) > 1 or any((tensor.shape[dim], other.shape[dim]) != NUM_NODES for dim in dims):
        raise NotTraceableError("a layer gets an argument of shape nodes by nodes")
    return dims[0] if dims else None


def value_at(args: Sequence[Any], kwargs: dict[str, Any], place: tuple[Any, int | None]) -> Any:
    """Return an argument of a call, or an item of it if it is a tuple."""
    key, index = place
    value = args[key] if isinstance(key, int) else kwargs[key]
    return value if index is None else value[index]


def put(args: list[Any], kwargs: dict[str, Any], place: tuple[Any, int | None], value: Any) -> None:
    """Replace an argument of a call, or an item of it if it is a tuple."""
    key, index = place
    holder: Any = args if isinstance(key, int) else kwargs
    if index is None:
        holder[key] = value
    else:
        holder[key] = (*holder[key][:index], value, *holder[key][index + 1 :])

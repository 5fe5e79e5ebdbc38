"""Which linear layers are given the same tensor, such as query, key and value, or gate and up: seen in a forward."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from foretoken.model.execution.forwards import replaced

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def groups(model: PreTrainedModel, layers: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """The given linear layers in the order of their calls, those together that can be one product.

    These are layers that a forward of two tokens calls once each and with the very same tensor, alike in their number
    of inputs, dtype, class and having a bias or not, and at the same place but for one name in their paths: the
    matrices of an adapter do not mix with those that it adapts, and so can be switched by themselves. Layers that the
    forward does not call, such as experts, come alone.
    """
    calls = _calls(model, layers)
    paths = {module: path.split(".") for path, module in model.named_modules()}
    found: dict[Any, list[list[nn.Module]]] = {}
    for layer, inputs in calls.items():
        alike = found.setdefault((id(inputs[0]), _kind(layer)) if len(inputs) == 1 else id(layer), [])
        for group in alike:
            if _are_side_by_side(paths[layer], paths[group[0]]):
                group.append(layer)
                break
        else:
            alike.append([layer])
    alone = [[layer] for layer in layers if layer not in calls]
    return [*(group for alike in found.values() for group in alike), *alone]


def _are_side_by_side(path: Sequence[str], other: Sequence[str]) -> bool:
    """Whether two paths differ in one name: a.q.base, a.k.base."""
    return len(path) == len(other) and sum(map(operator.ne, path, other)) == 1


def _kind(layer: nn.Module) -> Any:
    """What layers of one product have in common."""
    weight: torch.Tensor = layer.weight  # type: ignore[assignment]
    return type(layer), weight.dtype, weight.shape[0 if isinstance(layer, Conv1D) else 1], layer.bias is None


@torch.inference_mode()
def _calls(model: PreTrainedModel, layers: Sequence[nn.Module]) -> dict[nn.Module, list[torch.Tensor]]:
    """The inputs of every layer in one forward; nothing for a model that does not run by itself."""
    calls: dict[nn.Module, list[torch.Tensor]] = {}

    def see(layer: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        calls.setdefault(layer, []).append(args[0])  # kept, so that no other tensor gets its id

    handles = [layer.register_forward_pre_hook(see) for layer in layers]
    try:
        with unmultiplied(layers):
            model.base_model(input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=False)
    except Exception:  # whatever a model's code raises: whether it can be decoded is for the probe to say
        return {}
    finally:
        for handle in handles:
            handle.remove()
    return calls


@contextmanager
def unmultiplied(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Let linear layers give zeros inside, so that weights are not read."""

    def zeros(layer: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        weight: torch.Tensor = layer.weight  # type: ignore[assignment]
        size = weight.shape[1 if isinstance(layer, Conv1D) else 0]
        return lambda x: x.new_zeros((*x.shape[:-1], size))

    with replaced({layer: zeros(layer) for layer in layers}):
        yield


def shared_storages(model: nn.Module) -> set[int]:
    """Addresses of weights that more than one module uses, such as tied embeddings."""
    owners = Counter(
        parameter.data_ptr() for module in model.modules() for parameter in module.parameters(recurse=False)
    )
    return {address for address, count in owners.items() if count > 1}


def move_out(model: nn.Module, released: Iterable[torch.Tensor]) -> None:
    """Copy what stays of a model that was mapped from a file, so that the file can be unmapped.

    Weights that are read from a file refer to all of it: a single norm would keep in memory what was released. Where
    more stays than goes, all of it does.

    Args:
      model: what shares memory in it still does afterwards, and parameters stay the same objects.
      released: weights of it that go.
    """
    leaving = {id(weight): weight.nbytes for weight in released}
    staying: dict[tuple[object, ...], list[torch.Tensor]] = {}
    for tensor in chain(model.parameters(), model.buffers()):
        if id(tensor) not in leaving and _is_mapped(tensor):
            staying.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride()), []).append(tensor)
    if sum(tensors[0].nbytes for tensors in staying.values()) < sum(leaving.values()):
        for tensors in staying.values():
            copied = tensors[0].detach().clone()
            for tensor in tensors:
                tensor.data = copied


def _is_mapped(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in memory that torch did not allocate. Quantised weights have none of their own."""
    return type(tensor) in (nn.Parameter, torch.Tensor) and not tensor.untyped_storage().resizable()

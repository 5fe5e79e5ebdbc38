"""What layers share: their input, such as query, key and value, or gate and up, seen in a forward; and weights, such as
those of tied embeddings, whose rows are read from the output embedding once that is packed."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from foredraft.model.execution.forwards import replace_forward, replaced, replacement
from foredraft.model.execution.packing import PackedLinear, PackedRows
from foredraft.native import memory


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


def tied_embedding(model: PreTrainedModel) -> Any:
    """The input embedding, where its weight is the output embedding's and no other's, and it gives rows alone."""
    output, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if type(output) is not nn.Linear or not gives_rows(embedding) or output.weight is not embedding.weight:
        return None
    owners = sum(embedding.weight is each for module in model.modules() for each in module.parameters(recurse=False))
    return embedding if owners == 2 else None


def gives_rows(embedding: Any) -> bool:
    """Whether an input embedding looks rows up in its weight, and does nothing else."""
    return type(embedding) is nn.Embedding and embedding.max_norm is None and replacement(embedding) is None


def make_ready(model: PreTrainedModel, layers: Iterable[nn.Module], tied: Any) -> memory.PageReleaser:
    """Move what stays when the weights of layers go out of the file that it is mapped from.

    Args:
      tied: the embedding that goes with the output embedding; None for one that stays.

    Returns: the weights of these layers that go: those that no other module reads.
    """
    given = set() if tied is None else {tied.weight.data_ptr()}
    shared = shared_storages(model) - given
    weights: list[torch.Tensor] = [layer.weight for layer in layers]  # type: ignore[misc]
    move_out(model, [weight for weight in weights if weight.data_ptr() not in shared])
    shared = shared_storages(model) - given
    return memory.PageReleaser(weight for weight in weights if weight.data_ptr() not in shared)


def read_rows(model: PreTrainedModel, embedding: nn.Module) -> None:
    """Let an input embedding read the rows of the output embedding, where this has been packed."""
    output = packed_output(model)
    if output is not None:
        replace_forward(embedding, PackedRows(output))


def packed_output(model: PreTrainedModel) -> PackedLinear | None:
    """The packed output embedding, if it has a product of its own."""
    forward = replacement(model.get_output_embeddings())
    return forward if isinstance(forward, PackedLinear) and len(forward.product.layers) == 1 else None

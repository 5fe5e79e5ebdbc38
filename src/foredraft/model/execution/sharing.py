"""Detection of shared inputs and weights.

Layers that share an input (query, key and value; gate and up) are found in a forward pass. Layers that share a weight
are tied embeddings, for example; their rows are read from the output embedding once it is packed.
"""

from __future__ import annotations

import copy
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from foredraft.model.execution.experts import is_mixture, packable_experts
from foredraft.model.execution.forwards import replace_forward, replaced, replacement
from foredraft.model.execution.packing import PackedLinear, PackedRows
from foredraft.native import memory


def groups(model: PreTrainedModel, layers: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Group the given linear layers in the order of their calls; each group can run as one product.

    A forward pass over two tokens calls every layer of a group once, with the same input tensor. The layers have equal
    class, dtype and number of inputs, and all or none have a bias. Their paths differ in one name only, so matrices of
    an adapter are not mixed with those that it adapts, and can be switched separately. A layer that the forward pass
    does not call, such as an expert, is a group of its own.
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
    """Return whether two paths differ in exactly one name: a.q.base, a.k.base."""
    return len(path) == len(other) and sum(map(operator.ne, path, other)) == 1


def _kind(layer: nn.Module) -> Any:
    """Key that layers of one product share."""
    weight: torch.Tensor = layer.weight  # type: ignore[assignment]
    return type(layer), weight.dtype, weight.shape[0 if isinstance(layer, Conv1D) else 1], layer.bias is None


@torch.inference_mode()
def _calls(model: PreTrainedModel, layers: Sequence[nn.Module]) -> dict[nn.Module, list[torch.Tensor]]:
    """Return the inputs of every layer in one forward pass; empty for a model that does not run by itself."""
    calls: dict[nn.Module, list[torch.Tensor]] = {}

    def see(layer: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        calls.setdefault(layer, []).append(args[0])  # kept, so that no other tensor gets its id

    handles = [layer.register_forward_pre_hook(see) for layer in layers]
    try:
        with unmultiplied([*layers, *packable_experts(model)]):
            model.base_model(input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=False)
    except Exception:  # any error of the model's code; the probe reports whether the model can be decoded
        return {}
    finally:
        for handle in handles:
            handle.remove()
    return calls


@contextmanager
def unmultiplied(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Make linear layers and experts return zeros inside the block, so that no weights are read."""

    def zeros(layer: nn.Module) -> Callable[..., torch.Tensor]:
        if is_mixture(layer):
            return lambda x, *_: x.new_zeros(x.shape)
        weight: torch.Tensor = layer.weight  # type: ignore[assignment]
        size = weight.shape[1 if isinstance(layer, Conv1D) else 0]
        return lambda x: x.new_zeros((*x.shape[:-1], size))

    with replaced({layer: zeros(layer) for layer in layers}):
        yield


def shared_storages(model: nn.Module) -> set[int]:
    """Return the addresses of weights that more than one module uses, such as tied embeddings."""
    owners = Counter(
        parameter.data_ptr() for module in model.modules() for parameter in module.parameters(recurse=False)
    )
    return {address for address, count in owners.items() if count > 1}


def move_out(model: nn.Module, released: Iterable[torch.Tensor]) -> None:
    """Copy the remaining weights of a model out of the file that they are mapped from, so that it can be unmapped.

    A weight mapped from a file keeps the whole file in memory; a single norm would keep all released weights. If more
    bytes remain than are released, nothing is copied.

    Args:
      model: the model. Tensors that share memory still do afterwards, and parameters remain the same objects.
      released: its weights that will be freed.
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
    """Return whether a tensor lies in memory that torch did not allocate. False for quantised weights."""
    return type(tensor) in (nn.Parameter, torch.Tensor) and not tensor.untyped_storage().resizable()


def tied_embedding(model: PreTrainedModel) -> Any:
    """Return the input embedding if its weight is shared with the output embedding only, and it `gives_rows`."""
    output, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if type(output) is not nn.Linear or not gives_rows(embedding) or output.weight is not embedding.weight:
        return None
    owners = sum(embedding.weight is each for module in model.modules() for each in module.parameters(recurse=False))
    return embedding if owners == 2 else None


def gives_rows(embedding: Any) -> bool:
    """Return whether an input embedding uses tokens only to look up rows of its weight, once.

    It may do more with the rows, as Gemma's embedding does, which scales them.
    """
    if not isinstance(embedding, nn.Embedding) or embedding.max_norm is not None or replacement(embedding) is not None:
        return False
    return type(embedding) is nn.Embedding or _looks_up_only(embedding)


class _Uses(TorchFunctionMode):
    """Records the functions that use a tensor."""

    def __init__(self, of: torch.Tensor) -> None:
        super().__init__()
        self.functions: list[Any] = []
        self._of = of

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(each is self._of for each in (*args, *(kwargs or {}).values())):
            self.functions.append(func)
        return func(*args, **(kwargs or {}))


@torch.inference_mode()
def _looks_up_only(embedding: nn.Embedding) -> bool:
    """Run the code of an embedding's class over a small table, and see where it uses the tokens."""
    weight = torch.zeros(2, embedding.weight.shape[1], dtype=embedding.weight.dtype)
    small = copy.copy(embedding)
    buffers = {
        name: None if each is None else torch.zeros(each.shape, dtype=each.dtype)
        for name, each in embedding._buffers.items()
    }
    vars(small).update(_parameters={**embedding._parameters, "weight": weight}, _buffers=buffers, padding_idx=None)
    tokens = torch.zeros(1, 2, dtype=torch.long)
    try:
        with _Uses(tokens) as uses:
            small.forward(tokens)
    except Exception:  # any error of the model's code
        return False
    return bool(uses.functions == [F.embedding])


def make_ready(model: PreTrainedModel, layers: Iterable[nn.Module], tied: Any) -> memory.PageReleaser:
    """Move the weights that remain out of the mapped file before the weights of these layers are released.

    Args:
      tied: input embedding that is released together with the output embedding; None to keep it.

    Returns: a releaser of the weights of these layers that no other module uses.
    """
    given = set() if tied is None else {tied.weight.data_ptr()}
    shared = shared_storages(model) - given
    weights: list[torch.Tensor] = [layer.weight for layer in layers]  # type: ignore[misc]
    move_out(model, [weight for weight in weights if weight.data_ptr() not in shared])
    shared = shared_storages(model) - given
    return memory.PageReleaser(weight for weight in weights if weight.data_ptr() not in shared)


def read_rows(model: PreTrainedModel, embedding: nn.Module) -> None:
    """Make an input embedding read the rows of the packed output embedding; without effect if that is not packed."""
    output = packed_output(model)
    if output is not None:
        replace_forward(embedding, PackedRows(output, embedding))


def packed_output(model: PreTrainedModel) -> PackedLinear | None:
    """Return the packed output embedding if it has its own product; None otherwise."""
    forward = replacement(model.get_output_embeddings())
    return forward if isinstance(forward, PackedLinear) and len(forward.product.layers) == 1 else None

"""Copies of a model over the same tensors, and trial forward passes.

A *shadow* is a private copy of the modules; the user's modules are never changed. A *reduced* shadow runs only a few
layers in single precision, to test how a model uses masks, positions and caches. Correct use is a property of the
model's code, not of its depth, vocabulary or dtype. The reduced model runs the same code over the same tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from foredraft.errors import UnsupportedModelError
from foredraft.model.execution.attention import use_grouped_sdpa
from foredraft.model.execution.execution import Execution
from foredraft.model.execution.forwards import StandIn, replace_forward, replacement
from foredraft.model.execution.packing import PackedLinear, packed_layers
from foredraft.model.execution.sharing import unmultiplied
from foredraft.model.nodes import Nodes
from foredraft.model.support import model_name, take_out_compilation

if TYPE_CHECKING:
    from foredraft.model.lm import CausalLM

Model = TypeVar("Model", bound=nn.Module)

SHARED = (PackedLinear, StandIn)
"""Classes of replacement forwards that copies of a module share."""
MAX_LAYERS = 6
Tensors = dict[str, torch.Tensor | None]


def shadow(model: Model) -> Model:
    """Return a copy of the module tree, hooks and configs of ``model`` that shares all parameters, buffers and packed
    weights.

    Raises: UnsupportedModelError if the module tree cannot be copied.
    """
    forwards = [replacement(module) for module in model.modules()]
    shared = [
        *model.parameters(),
        *model.buffers(),
        *(forward for forward in forwards if isinstance(forward, SHARED)),
    ]
    memo: dict[int, Any] = {id(item): item for item in shared}
    try:
        copied = copy.deepcopy(model, memo)
    except (TypeError, RuntimeError, copy.Error) as error:
        raise UnsupportedModelError(
            f"{model_name(model)} contains an object that cannot be copied ({error}), and foredraft needs a copy "
            "of the modules. Remove the attribute, hook or wrapper that contains it, or load the model from its path."
        ) from error
    take_out_compilation(copied)
    return copied


def representatives(layers: Sequence[nn.Module], kinds: Sequence[str], limit: int = MAX_LAYERS) -> tuple[int, ...]:
    """Return the indices of one layer of every construction, at least two if the model has two layers, at most
    ``limit``.

    Args:
      kinds: attention type of every layer.
    """
    first: dict[Any, int] = {}
    for index, layer in enumerate(layers):
        first.setdefault((kinds[index], _build_of(layer)), index)
    chosen = sorted(first.values())[:limit]
    return tuple(chosen) if len(chosen) > 1 else tuple(range(min(2, len(layers))))


def _build_of(layer: nn.Module) -> tuple[Any, ...]:
    """Return a key that layers share if they run the same code: classes, switches, hooks, and replaced methods."""
    return tuple(
        (
            path,
            type(module),
            tuple(sorted((name, value) for name, value in vars(module).items() if _is_switch(name, value))),
            tuple(map(_code_of, (replacement(module), *module._forward_pre_hooks.values()))),
            tuple(map(_code_of, module._forward_hooks.values())),
        )
        for path, module in layer.named_modules()
    )


def _is_switch(name: str, value: Any) -> bool:
    """Return whether an attribute selects a way to compute: a flag, a name or a window, but no other number."""
    if name.startswith("_") or name == "training":
        return False
    return isinstance(value, (bool, str)) or (isinstance(value, int) and "window" in name)


def _code_of(function: Any) -> Any:
    return getattr(function, "__code__", type(function))


def reduced(
    model: PreTrainedModel,
    layers: Sequence[nn.Module],
    kept: Iterable[int],
    dtype: torch.dtype | None,
    window: int | None,
) -> PreTrainedModel:
    """Return a shadow of ``model`` that runs only the kept layers, in ``dtype``; its logits are the states before the
    head.

    Weights are converted for the duration of a call, so at most one layer is held twice.

    Args:
      layers: decoder layers of ``model``.
      kept: indices of the layers to run, the first one included.
      dtype: dtype of the kept layers; None to change nothing except the window.
      window: width of every sliding window, small enough for a short sequence to fill it; None for the model's own.
    """
    paths = {module: path for path, module in model.named_modules()}
    copied = shadow(model)
    if window is not None:
        _narrow(copied, window)
    if dtype is None:
        return copied
    inner = [copied.get_submodule(paths[layer]) for layer in layers]
    inside = {module for layer in inner for module in layer.modules()}
    head, embedding = copied.get_output_embeddings(), copied.get_input_embeddings()
    for module in set(copied.modules()) - inside - {head}:
        if module is embedding or isinstance(module, nn.Embedding):
            replace_forward(module, _casting(module.forward, dtype))  # exact, and no second table
        elif next(_floating(module), None) is not None:
            replace_forward(module, _converting(module.forward, [module], dtype))
    replace_forward(head, lambda states: states)
    if isinstance(head.weight, nn.Parameter):  # some models read its dtype
        head._parameters["weight"] = nn.Parameter(head.weight.new_empty(0, dtype=dtype), requires_grad=False)
    others: list[Any] = [None]  # further values in the tuple that layers return, taken from a layer that runs

    def learning(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            result = forward(*args, **kwargs)
            others[0] = result[1:] if isinstance(result, tuple) else None
            return result

        return run

    def left_out(*args: Any, **kwargs: Any) -> Any:
        states = args[0] if args else kwargs["hidden_states"]
        return states if others[0] is None else (states, *others[0])

    kept = set(kept)
    for index, layer in enumerate(inner):
        run = learning(_converting(layer.forward, list(layer.modules()), dtype))
        replace_forward(layer, run if index in kept else left_out)
    return copied


def converted_bytes(layer: nn.Module, dtype: torch.dtype | None) -> int:
    """Return the additional memory of a layer while it runs in ``dtype``, in bytes."""
    tensors = [tensors[name] for module in layer.modules() for tensors, name in _floating(module)]
    return sum(
        tensor.numel() * dtype.itemsize
        for tensor in tensors
        if dtype is not None and tensor is not None and tensor.dtype != dtype and not _is_one_number(tensor)
    )


def _casting(forward: Callable[..., torch.Tensor], dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    return lambda *args, **kwargs: forward(*args, **kwargs).to(dtype)


def _converting(forward: Callable[..., Any], modules: list[nn.Module], dtype: torch.dtype) -> Callable[..., Any]:
    """Return a forward that runs with the floating-point tensors of some modules converted to another dtype."""

    def run(*args: Any, **kwargs: Any) -> Any:
        held = [(tensors, name, tensors[name]) for module in modules for tensors, name in _floating(module)]
        try:
            for tensors, name, tensor in held:
                assert tensor is not None
                tensors[name] = _converted(tensor.detach(), dtype)
            return forward(*args, **kwargs)
        finally:
            for tensors, name, tensor in held:
                tensors[name] = tensor

    return run


def _converted(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert a tensor. A weight that packing has released is one repeated number, also after the conversion."""
    if _is_one_number(tensor):
        return tensor[(0,) * tensor.dim()].to(dtype).expand(tensor.shape)
    return tensor.to(dtype)


def _is_one_number(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 1 and not any(tensor.stride())


def _floating(module: nn.Module) -> Iterator[tuple[Tensors, str]]:
    """Yield the places of a module's own floating-point tensors."""
    for tensors in (module._parameters, module._buffers):
        for name, tensor in tensors.items():
            if tensor is not None and tensor.is_floating_point():
                yield tensors, name  # type: ignore[misc]


def _narrow(model: PreTrainedModel, window: int) -> None:
    """Set the window in the configs of a shadow, and in the modules that have copied it from there."""
    configs = [model.config, *(module.config for module in model.modules() if hasattr(module, "config"))]
    configs += [config.get_text_config(decoder=True) for config in configs]
    widths = {config.sliding_window for config in configs if getattr(config, "sliding_window", None)}
    for holder in (*configs, *model.modules()):
        for name, value in list(vars(holder).items()):
            if "window" in name and type(value) is int and value in widths:
                setattr(holder, name, window)


@torch.inference_mode()
def trial(lm: CausalLM, num_nodes: int) -> torch.Tensor:
    """Return logits (1, N, V) of a chain of ``num_nodes`` nodes. The forward pass is not counted."""
    count, tokens = lm.num_forwards, [number % lm.vocab_size for number in range(num_nodes)]
    try:
        return lm.forward(Nodes.from_chains([tokens]), lm.new_cache(1, rounds=False))
    finally:
        lm.num_forwards = count


@torch.inference_mode()
def runs_own_attention(lm: CausalLM) -> str:
    """Return the reason why attention of some layer does not run in the library's own kernels; empty if all of it does.

    The structure decides, not values: dtype, layout and attention type select the kernel.
    """
    count, cache = lm.num_forwards, lm.new_cache(2, rounds=False)
    with unmultiplied(packed_layers([lm.shadow])):
        lm.forward(Nodes.from_chains([[0], [0, 0]]), cache)
    lm.num_forwards = count
    flat = lm.nodes_of_last_forward
    if flat is None:
        return "its code does not pass the node list on to attention"
    if flat.runs_stock_attention:
        return "its attention is more than masked sums (a soft cap, sinks, a bias of its own)"
    return ""


def representative(lm: CausalLM, layers: Sequence[int], dtype: torch.dtype | None, window: int) -> CausalLM:
    """Return an adapter over a few of the layers, for the probe; see `foredraft.model.reduced`.

    Args:
      dtype: dtype of these layers; None for the whole model as it is.
      window: width of every sliding window, if the model has wider ones.
    """
    narrow = None if lm.window is None else min(lm.window, window)
    small = reduced(lm.shadow, lm.layers, layers, dtype, narrow)
    return lm.over(small, Execution(small, "eager"), dtype=dtype, window=narrow)


def group_attention(lm: CausalLM) -> None:
    """Make an adapter run attention as packed execution does."""
    lm.execution.uses_grouped_attention = use_grouped_sdpa(lm.shadow)
    lm.run_by(lm.execution)

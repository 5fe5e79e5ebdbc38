"""Copies of a model over the same tensors: its modules, which are never changed themselves, as a private shadow, and
reduced to what decides how it uses masks, positions and caches: a few of its layers, in single precision; and
forwards by which it is tried out how a model runs.

That use is a property of a model's code, not of its depth, its vocabulary or its dtype. The reduced model runs that
very code, and shares every tensor with the model it is made of.
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
from foredraft.model.support import take_out_compilation

if TYPE_CHECKING:
    from foredraft.model.lm import CausalLM

Model = TypeVar("Model", bound=nn.Module)

SHARED = (PackedLinear, StandIn)
"""Forwards that copies of a module share."""
MAX_LAYERS = 6
Tensors = dict[str, torch.Tensor | None]


def shadow(model: Model) -> Model:
    """A copy of the module tree, hooks and configs of ``model`` that shares every parameter, buffer and packed weight.

    Raises: UnsupportedModelError when the module tree cannot be copied.
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
            f"{type(model).__name__} holds something that cannot be copied ({error}), and foredraft only changes "
            "copies. Remove the attribute, hook or wrapper that holds it, or load the model from its path."
        ) from error
    take_out_compilation(copied)
    return copied


def representatives(layers: Sequence[nn.Module], kinds: Sequence[str], limit: int = MAX_LAYERS) -> tuple[int, ...]:
    """Indices of one layer of every construction, two where there are two layers, at most ``limit``.

    Args:
      kinds: attention type of every layer.
    """
    first: dict[Any, int] = {}
    for index, layer in enumerate(layers):
        first.setdefault((kinds[index], _build_of(layer)), index)
    chosen = sorted(first.values())[:limit]
    return tuple(chosen) if len(chosen) > 1 else tuple(range(min(2, len(layers))))


def _build_of(layer: nn.Module) -> tuple[Any, ...]:
    """A key that layers share if they run the same code: classes, switches, hooks, and methods of single objects."""
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
    """Whether an attribute chooses between ways to compute: a flag, a name or a window, but no other number."""
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
    """A shadow of ``model`` that runs the kept layers alone, in ``dtype``; its logits are the states before the head.

    Weights are converted for the length of a call, so that at most one layer is held twice.

    Args:
      layers: the decoder layers of ``model``, of which the first is kept.
      dtype: None to leave everything as it is but the window.
      window: width of every sliding window instead of the model's own, which no short text fills; None for that.
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
    if isinstance(head.weight, nn.Parameter):  # some code asks for its dtype
        head._parameters["weight"] = nn.Parameter(head.weight.new_empty(0, dtype=dtype), requires_grad=False)
    others: list[Any] = [None]  # that layers return beside their states, in a tuple; learnt from those that run

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
    """Memory that a layer takes besides its own while it runs in ``dtype``."""
    tensors = [tensors[name] for module in layer.modules() for tensors, name in _floating(module)]
    return sum(
        tensor.numel() * dtype.itemsize
        for tensor in tensors
        if dtype is not None and tensor is not None and tensor.dtype != dtype and not _is_one_number(tensor)
    )


def _casting(forward: Callable[..., torch.Tensor], dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    return lambda *args, **kwargs: forward(*args, **kwargs).to(dtype)


def _converting(forward: Callable[..., Any], modules: list[nn.Module], dtype: torch.dtype) -> Callable[..., Any]:
    """A forward that finds the floating-point tensors of some modules in another dtype."""

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
    """In another dtype; of a weight that packing has released again one number for all."""
    if _is_one_number(tensor):
        return tensor[(0,) * tensor.dim()].to(dtype).expand(tensor.shape)
    return tensor.to(dtype)


def _is_one_number(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 1 and not any(tensor.stride())


def _floating(module: nn.Module) -> Iterator[tuple[Tensors, str]]:
    """Where a module itself holds floating-point tensors."""
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
    """Logits (1, N, V) of a chain of so many nodes. The forward is not counted."""
    count, tokens = lm.num_forwards, [number % lm.vocab_size for number in range(num_nodes)]
    try:
        return lm.forward(Nodes.from_chains([tokens]), lm.new_cache(1, rounds=False))
    finally:
        lm.num_forwards = count


@torch.inference_mode()
def runs_own_attention(lm: CausalLM) -> str:
    """Why attention of some layer does not run by the library's own kernels; empty where all does.

    Structure decides, not values: which kernel takes a call follows from dtype, layout and kind of attention.
    """
    count, cache = lm.num_forwards, lm.new_cache(2, rounds=False)
    with unmultiplied(packed_layers([lm.shadow])):
        lm.forward(Nodes.from_chains([[0], [0, 0]]), cache)
    lm.num_forwards = count
    flat = lm.nodes_of_last_forward
    if flat is None:
        return "its code does not tell attention which node is whose"
    if flat.runs_stock_attention:
        return "its attention is more than masked sums (a soft cap, sinks, a bias of its own)"
    return ""


def representative(lm: CausalLM, layers: Sequence[int], dtype: torch.dtype | None, window: int) -> CausalLM:
    """An adapter over a few of the layers, for the probe; see `foredraft.model.reduced`.

    Args:
      dtype: None for the whole model as it is.
      window: of every sliding layer, if the model has any and theirs is wider.
    """
    narrow = None if lm.window is None else min(lm.window, window)
    small = reduced(lm.shadow, lm.layers, layers, dtype, narrow)
    return lm.over(small, Execution(small, "eager"), dtype=dtype, window=narrow)


def group_attention(lm: CausalLM) -> None:
    """Run attention as packed execution does."""
    lm.execution.uses_grouped_attention = use_grouped_sdpa(lm.shadow)
    lm.run_by(lm.execution)

"""Mixtures of experts: detection of their modules by structure, and their products in the library's own kernels.

transformers keeps the matrices of all experts of a layer in two parameters (E, outputs, in). A router chooses the
experts of every row by a product with its own weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from foredraft.model.execution.forwards import Rowwise, StandIn, replacement
from foredraft.model.execution.packing import PackedExperts, PackedProduct, PackedStack, StackedWeight
from foredraft.native.packed_matmul import CODES_BLOCK

GATE_UP, DOWN = "gate_up_proj", "down_proj"
"""Names of the parameters of gated experts: both inner projections of every expert, the gate first; and the outer
one."""
_MARKS = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
_USUAL = {**_MARKS, "has_post_expert_norm": False, "_is_expert_parallel": False}
"""Attributes of experts that `PackedExperts` computes, as transformers sets them. All versions set the first four; one
that does not set the others lacks what they switch on."""
_USUAL_GATE = "_default_apply_gate"
"""Function of transformers that multiplies the activated gate by the other inner projection."""


def is_mixture(module: nn.Module) -> bool:
    """Return whether a module consists of experts whose weights transformers stacks."""
    return all(hasattr(module, name) for name in _MARKS) and isinstance(getattr(module, DOWN, None), nn.Parameter)


def why_not_packed(module: nn.Module) -> str:
    """Return the reason why the experts of a mixture cannot run in the library's own kernels; empty if they can.

    The structure decides, so that a model on the meta device gives the same answer.
    """
    changed = next((name for name, usual in _USUAL.items() if getattr(module, name, usual) != usual), None)
    if changed is not None:
        return f"{changed.lstrip('_')} is {getattr(module, changed)}"
    if getattr(getattr(type(module), "_apply_gate", None), "__qualname__", "") != _USUAL_GATE:
        return "they have a gate of their own"
    if not Rowwise.fits(module.act_fn):  # type: ignore[arg-type]
        return "their activation is not one of transformers"
    for name in (GATE_UP, DOWN):
        weight = getattr(module, name, None)
        if type(weight) is not nn.Parameter or weight.dim() != 3 or not weight.is_floating_point():
            return f"{name} is not a stack of matrices of floats"
    gate_up, down = getattr(module, GATE_UP), getattr(module, DOWN)
    if gate_up.shape[1] % (2 * CODES_BLOCK) or down.shape[1] % CODES_BLOCK:
        sizes = f"{gate_up.shape[1] // 2} and {down.shape[1]}"
        return f"their projections have {sizes} outputs, which are no multiples of {CODES_BLOCK}"
    return ""


def packable_experts(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the experts of mixtures that can be packed and whose forward is that of their class."""
    for module in model.modules():
        if is_mixture(module) and replacement(module) is None and not why_not_packed(module):
            yield module


def stacks_of(experts: nn.Module, num_parts: Mapping[str, int] | None = None) -> dict[str, list[StackedWeight]]:
    """Return both parameters of packable experts as linear layers, by name.

    Args:
      num_parts: numbers of equal parts that the outputs of every expert are divided into, by name; 1 by default.
    """
    found = {}
    for name in (GATE_UP, DOWN):
        weight, count = getattr(experts, name), (num_parts or {}).get(name, 1)
        size = weight.shape[1] // count
        found[name] = [StackedWeight(weight, (part * size, (part + 1) * size)) for part in range(count)]
    return found


def packed_experts(
    experts: nn.Module,
    stacks: Mapping[str, Sequence[StackedWeight]],
    product_of: Callable[[StackedWeight], PackedProduct],
) -> PackedExperts:
    """Return the packed forward of experts.

    Args:
      stacks: result of `stacks_of`.
      product_of: function that packs a part of a parameter.
    """
    gate_up, down = (PackedStack([product_of(stack) for stack in stacks[name]]) for name in (GATE_UP, DOWN))
    return PackedExperts(gate_up, down, experts.act_fn)  # type: ignore[arg-type]


# -- routers -------------------------------------------------------------------------------------------------------


def routers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the routers of packed or packable experts whose forward is that of their class.

    A router is a module beside the experts that multiplies its input once by its own weight (E, H).
    """
    for parent in model.modules():
        children = list(parent.children())
        if any(is_mixture(child) and not why_not_packed(child) for child in children):
            yield from (child for child in children if _is_router(child))


def own_matrices(model: nn.Module) -> set[nn.Module]:
    """Return the experts and routers of a model whose products run in the library's own kernels once it is packed."""
    packed = {each for each in model.modules() if isinstance(replacement(each), (PackedExperts, PackedRouter))}
    return packed.union(packable_experts(model), routers(model))


def _is_router(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    is_plain = type(weight) is nn.Parameter and weight.dim() == 2 and weight.is_floating_point()
    if isinstance(module, nn.Linear) or not is_plain or replacement(module) is not None:
        return False
    assert weight is not None
    seen = _OwnProducts(weight, lambda x: F.linear(x, weight.to(x.dtype)))
    try:
        with torch.inference_mode(), seen:
            module(weight.new_zeros(2, weight.shape[1]))
    except Exception:  # a module that needs other inputs
        return False
    return seen.count == 1


class PackedRouter(StandIn):
    """Replacement forward of a router, whose product runs in the library's own kernels in float32.

    Args:
      router: the router.
      product: product with its weight.
    """

    def __init__(self, router: nn.Module, product: PackedProduct) -> None:
        self.router = router
        self.product = product

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the router returns."""
        return self.run_with(self.product, self.router, *args, **kwargs)

    @staticmethod
    def run_with(multiply: Callable[[torch.Tensor], torch.Tensor], router: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run the code of a router's class with a function for its product, float32 (..., H) -> (..., E)."""
        with _OwnProducts(router.weight, multiply):  # type: ignore[arg-type]
            return type(router).forward(router, *args, **kwargs)


class _OwnResult(torch.Tensor):
    """Result of a product in the library's own kernels. Results computed from it are plain tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


class _OwnProducts(TorchFunctionMode):
    """Context in which a function replaces products with one weight, also after the weight's conversion to a dtype.

    Attributes:
      count: number of these products.
    """

    def __init__(self, weight: torch.Tensor, multiply: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._same = [weight]
        self._multiply = multiply
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "linear" and len(args) == 2 and self._is_weight(args[1]) and not kwargs:
            self.count += 1
            result = self._multiply(args[0].float()).to(args[1].dtype)
            # a fake tensor is a subclass already
            return result.as_subclass(_OwnResult) if type(result) is torch.Tensor else result
        result = func(*args, **kwargs)
        is_conversion = name in ("to", "type", "float") and bool(args) and self._is_weight(args[0])
        if is_conversion and isinstance(result, torch.Tensor) and result.shape == args[0].shape:
            self._same.append(result)
        return result

    def _is_weight(self, tensor: Any) -> bool:
        return any(tensor is each for each in self._same)

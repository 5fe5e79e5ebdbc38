"""The attention and MLP sublayers of any decoder, found by their structure, and how to leave them out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from foredraft.errors import UnsupportedModelError
from foredraft.model.execution.forwards import replace_forward, replacement


@dataclass(frozen=True)
class Sublayers:
    """One decoder layer and its two residual branches.

    Args:
      mlp: the modules that the MLP branch consists of; several where the layer holds its linears itself (OPT).
    """

    layer: nn.Module
    attention: nn.Module
    mlp: tuple[nn.Module, ...]

    @classmethod
    def of(cls, layer: nn.Module) -> Sublayers:
        """Tell the branches apart: attention has that name, or knows its place in the cache; norms have no
        matrices, the MLP has.

        Raises: UnsupportedModelError when a layer has not exactly one attention and at least one MLP module.
        """
        matrices = [child for child in layer.children() if any(weight.dim() > 1 for weight in child.parameters())]
        attention = [child for child in matrices if "attention" in type(child).__name__.lower()]
        attention = attention or [child for child in matrices if hasattr(child, "layer_idx")]
        mlp = tuple(child for child in matrices if child not in attention)
        if len(attention) != 1 or not mlp:
            names = [type(child).__name__ for child in matrices]
            raise UnsupportedModelError(
                f"{type(layer).__name__} consists of {', '.join(names) or 'nothing known'}; sublayers can be left out "
                "where a layer has one attention and one MLP. Use another method."
            )
        return cls(layer, attention[0], mlp)


class SkippableLayers:
    """Decoder layers whose residual branches can be left out, and put back: what a skipped module adds becomes zero.

    A layer without both branches passes its input on, norms included. Only instances are changed: use it on a shadow.

    Args:
      layers: decoder layers, in order.
      run: makes one forward through the layers, to learn the shape of what the modules return.
      changed: called after branches were left out or put back.

    Raises: UnsupportedModelError for layers that are built differently.
    """

    def __init__(
        self, layers: Iterable[nn.Module], run: Callable[[], Any], changed: Callable[[], None] | None = None
    ) -> None:
        self._changed = changed
        self._parts = [Sublayers.of(layer) for layer in layers]
        modules = [module for part in self._parts for module in (part.layer, part.attention, *part.mlp)]
        self._outputs = _outputs_of(modules, run)
        self._forwards = {module: replacement(module) for module in modules}

    def leave_out(self, attention: Iterable[int], mlp: Iterable[int]) -> None:
        """Let exactly these branches, by the indices of their layers, be left out from now on."""
        for module, forward in self._forwards.items():
            replace_forward(module, forward)
        without_attention, without_mlp = set(attention), set(mlp)
        for index, part in enumerate(self._parts):
            if index in without_attention and index in without_mlp:
                _replace(part.layer, self._outputs, Identity)
                continue
            if index in without_attention:
                _replace(part.attention, self._outputs, ZeroResidual)
            if index in without_mlp:
                for module in part.mlp[:-1]:
                    _replace(module, self._outputs, Identity)  # so that the last one sees the width of the stream
                _replace(part.mlp[-1], self._outputs, ZeroResidual)
        if self._changed is not None:
            self._changed()


class LeftOut:
    """The forward of a module that is left out, in the form of its usual output.

    Args:
      num_others: how many values beside its first the module returns, in a tuple; None for no tuple.
    """

    def __init__(self, num_others: int | None) -> None:
        self.num_others = num_others

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.instead(args[0] if args else kwargs["hidden_states"])
        return result if self.num_others is None else (result, *(None,) * self.num_others)

    def instead(self, x: torch.Tensor) -> torch.Tensor:
        """What it returns of its input."""
        raise NotImplementedError


class Identity(LeftOut):
    """Returns what it is given."""

    def instead(self, x: torch.Tensor) -> torch.Tensor:
        return x


class ZeroResidual(LeftOut):
    """Returns zeros."""

    def instead(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x)


def _outputs_of(modules: Iterable[nn.Module], run: Callable[[], Any]) -> dict[nn.Module, Any]:
    """Return the output of every module in one forward."""
    outputs: dict[nn.Module, Any] = {}
    handles = [module.register_forward_hook(lambda m, _, output: outputs.update({m: output})) for module in modules]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return outputs


def _replace(module: nn.Module, outputs: dict[nn.Module, Any], by: type[LeftOut]) -> None:
    output = outputs[module]
    replace_forward(module, by(len(output) - 1 if isinstance(output, tuple) else None))

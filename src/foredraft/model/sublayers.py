"""Detection of the attention and MLP sublayers of any decoder by their structure, and functions to skip them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from foredraft.errors import UnsupportedModelError
from foredraft.model.execution.forwards import replace_forward, replacement


def sublayers(layer: nn.Module) -> tuple[nn.Module, tuple[nn.Module, ...]]:
    """Return the attention of a decoder layer, and its MLP: several modules if the layer owns the linears itself (OPT).

    Attention is found by its class name or its layer index. Of the other modules, those with matrices are the MLP,
    which excludes norms.

    Raises: UnsupportedModelError for a layer without exactly one attention and at least one MLP module.
    """
    matrices = [child for child in layer.children() if any(weight.dim() > 1 for weight in child.parameters())]
    attention = [child for child in matrices if "attention" in type(child).__name__.lower()]
    attention = attention or [child for child in matrices if hasattr(child, "layer_idx")]
    mlp = tuple(child for child in matrices if child not in attention)
    if len(attention) != 1 or not mlp:
        names = [name for name, child in layer.named_children() if child in matrices]
        raise UnsupportedModelError(
            f"a decoder layer consists of {', '.join(names) or 'no modules with weights'}; sublayers can be skipped "
            "only if a layer has one attention and one MLP. Use another method."
        )
    return attention[0], mlp


class SkippableLayers:
    """Decoder layers whose attention and MLP can be skipped and restored. A skipped module adds zero.

    A layer without both returns its input unchanged; its norms are skipped too. Module instances are changed, so use it
    on a shadow.

    Args:
      layers: decoder layers, in order.
      run: function that runs one forward pass through the layers, which records the form of the modules' outputs.
      changed: function called after modules were skipped or restored.

    Raises: UnsupportedModelError for layers with another structure.
    """

    def __init__(
        self, layers: Iterable[nn.Module], run: Callable[[], Any], changed: Callable[[], None] | None = None
    ) -> None:
        self._changed = changed
        self._parts = [(layer, *sublayers(layer)) for layer in layers]
        modules = [module for layer, attention, mlp in self._parts for module in (layer, attention, *mlp)]
        self._outputs = _outputs_of(modules, run)
        self._forwards = {module: replacement(module) for module in modules}

    def leave_out(self, attention: Iterable[int], mlp: Iterable[int]) -> None:
        """Skip exactly these attention and MLP sublayers, by layer index, and restore all others."""
        for module, forward in self._forwards.items():
            replace_forward(module, forward)
        without_attention, without_mlp = set(attention), set(mlp)
        for index, (layer, of_attention, of_mlp) in enumerate(self._parts):
            if index in without_attention and index in without_mlp:
                _replace(layer, self._outputs, same)
                continue
            if index in without_attention:
                _replace(of_attention, self._outputs, torch.zeros_like)
            if index in without_mlp:
                for module in of_mlp[:-1]:
                    _replace(module, self._outputs, same)  # the last one then gets an input of the hidden size
                _replace(of_mlp[-1], self._outputs, torch.zeros_like)
        if self._changed is not None:
            self._changed()


class LeftOut:
    """Forward of a skipped module, in the form of its usual output.

    Args:
      result: function of the module's input: `same`, or zeros like it.
      num_others: number of further values in the tuple that the module returns; None if it returns no tuple.
    """

    def __init__(self, result: Callable[[torch.Tensor], torch.Tensor], num_others: int | None) -> None:
        self.result = result
        self.num_others = num_others

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.result(args[0] if args else kwargs["hidden_states"])
        return result if self.num_others is None else (result, *(None,) * self.num_others)


def same(x: torch.Tensor) -> torch.Tensor:
    """Return the input itself."""
    return x


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


def _replace(module: nn.Module, outputs: dict[nn.Module, Any], result: Callable[[torch.Tensor], torch.Tensor]) -> None:
    output = outputs[module]
    replace_forward(module, LeftOut(result, len(output) - 1 if isinstance(output, tuple) else None))

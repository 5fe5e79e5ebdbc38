"""Sample outputs of linear layers' own code, kept for comparison with the code that replaces it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from foretoken.model.execution.forwards import replacement
from foretoken.model.execution.packing import packable

NUM_ROWS = 2  # of every layer


class LinearSamples:
    """Inputs and outputs of the linear layers of a model, a few rows of each."""

    def __init__(self, model: nn.Module) -> None:
        self._paths = {module: path for path, module in model.named_modules()}
        self._samples: dict[nn.Module, tuple[torch.Tensor, torch.Tensor]] = {}

    @classmethod
    @contextmanager
    def taken(cls, model: nn.Module | None) -> Iterator[LinearSamples | None]:
        """Take samples in the forwards of the block; without a model, none."""
        if model is None:
            yield None
            return
        samples = cls(model)
        # in front of the model's own hooks: they are not what is replaced
        handles = [layer.register_forward_hook(samples._keep, prepend=True) for layer in packable(model)]
        try:
            yield samples
        finally:
            for handle in handles:
                handle.remove()

    def _keep(self, layer: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        rows = (tensor.reshape(-1, tensor.shape[-1])[:NUM_ROWS].clone() for tensor in (args[0], output))
        self._samples[layer] = (next(rows), next(rows))

    def errors(self) -> dict[str, float]:
        """Relative errors, by path, of the layers whose forward was replaced since."""
        return {
            self._paths[layer]: _relative_distance(layer.forward(inputs), outputs)
            for layer, (inputs, outputs) in self._samples.items()
            if replacement(layer) is not None
        }


def _relative_distance(got: torch.Tensor, want: torch.Tensor) -> float:
    error, size = (float(tensor.square().sum().sqrt()) for tensor in (got.double() - want.double(), want.double()))
    return 0.0 if error == 0.0 else error / max(size, 1e-30)

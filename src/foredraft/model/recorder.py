"""Recording of features: hidden states inside a model on the way to its logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from foredraft.errors import UnsupportedModelError
from foredraft.model.nodes import NOTHING, FlatNodes, Logits, Output
from foredraft.model.support import model_name


class Recorder:
    """Records hidden states of a shadow: the output of its decoder and the inputs of its layers.

    The last hidden states are taken from the output of the decoder, so that prompts need no logits. If the output
    embedding reads something else (scaled states, for instance), its input is recorded instead, and forward passes with
    this feature compute all logits. `settle` determines the case.
    """

    def __init__(self, model: PreTrainedModel, num_layers: int) -> None:
        self._model = model
        self.layers = _decoder_layers(model, num_layers)
        self.needs_logits: bool | None = None
        self.wanted = NOTHING  # features requested by the running forward pass
        self._returned: torch.Tensor | None = None
        self._read: torch.Tensor | None = None
        self._layer_inputs: dict[int, torch.Tensor] = {}
        self.flat: FlatNodes | None = None  # node list of the last forward pass through modules

    def settle(self, forward: Callable[[], object]) -> None:
        """Find out from a forward pass with all logits whether last hidden states are available without logits."""
        with self._seeing([self._see_decoder(), self._see_head()]):
            forward()
        returned, read = self._returned, self._read
        is_same = returned is not None and read is not None and torch.equal(returned, read)
        self.needs_logits = not is_same

    @contextmanager
    def seeing(self) -> Iterator[None]:
        """Record the requested features of modules that run inside the block."""
        wanted = self.wanted
        if wanted is NOTHING:
            yield
            return
        handles = [self._see_layer(index) for index in wanted.layer_inputs]
        if wanted.last_hidden:
            handles.append(self._see_head() if self.needs_logits else self._see_decoder())
        with self._seeing(handles):
            yield

    def take(self, flat: FlatNodes, states: torch.Tensor, read: torch.Tensor) -> None:
        """Record the requested features of a forward pass over a list of nodes that ran without modules.

        Args:
          states: (layers + 1, 1, S, H), input of the first layer, and output of every layer.
          read: (1, S, H), input of the output embedding.
        """
        self.flat, self._layer_inputs = None, {}
        self._returned = self._read = flat.spread(read[0]) if self.wanted.last_hidden else None
        for layer in self.wanted.layer_inputs:
            of_layer = states[layer, 0]
            self._layer_inputs[layer] = of_layer.view(*flat.shape, -1) if flat.is_full else flat.spread(of_layer)

    def output(self, logits: Logits) -> Output:
        """Return the last recorded features together with the logits."""
        hidden = self._read if self.needs_logits else self._returned
        if self.flat is None:
            return Output(logits, hidden, self._layer_inputs)
        layers = {layer: self.flat.spread(states[0]) for layer, states in self._layer_inputs.items()}
        return Output(logits, None if hidden is None else self.flat.spread(hidden[0]), layers)

    def release(self) -> None:
        """Free the last recorded features."""
        self._returned, self._read, self._layer_inputs, self.flat = None, None, {}, None

    @contextmanager
    def _seeing(self, handles: list[RemovableHandle]) -> Iterator[None]:
        self._returned, self._read, self._layer_inputs = None, None, {}
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _see_decoder(self) -> RemovableHandle:
        def hook(_module: Any, _args: Any, output: Any) -> None:
            self._returned = output[0]

        handle: RemovableHandle = self._model.base_model.register_forward_hook(hook)
        return handle

    def _see_head(self) -> RemovableHandle:
        def hook(_module: Any, args: Any) -> None:
            self._read = args[0]

        handle: RemovableHandle = self._model.get_output_embeddings().register_forward_pre_hook(hook)
        return handle

    def _see_layer(self, index: int) -> RemovableHandle:
        def hook(_module: Any, args: Any, kwargs: Any) -> None:
            self._layer_inputs[index] = args[0] if args else kwargs["hidden_states"]

        handle: RemovableHandle = self.layers[index].register_forward_pre_hook(hook, with_kwargs=True)
        return handle


def _decoder_layers(model: PreTrainedModel, num_layers: int) -> Any:
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == num_layers:
            return module
    raise UnsupportedModelError(
        f"{model_name(model)} does not keep its {num_layers} decoder layers in one list, so foredraft cannot find "
        "them. Use a transformers model whose layers are in one torch.nn.ModuleList."
    )

"""Features of a forward: what it computed on the way to its logits, as part of its result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from foredraft.errors import UnsupportedModelError
from foredraft.model.nodes import FlatNodes, Logits


@dataclass(frozen=True)
class Wanted:
    """Features that a forward is to return.

    Args:
      last_hidden: what the output embedding reads, after the final norm.
      layer_inputs: indices of decoder layers whose inputs are wanted.
    """

    last_hidden: bool = False
    layer_inputs: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return self.last_hidden or bool(self.layer_inputs)


@dataclass(frozen=True)
class Output:
    """The result of a forward over B rows of N nodes.

    Args:
      logits: (B, kept, V) of the nodes whose logits were wanted; as a list where that was asked for, and they ran so.
      last_hidden: (B, N, H) of all nodes, whether their logits were wanted or not; None unless asked for.
      layer_inputs: (B, N, H) by layer, of those that were asked for.
    """

    logits: Logits
    last_hidden: torch.Tensor | None = None
    layer_inputs: dict[int, torch.Tensor] = field(default_factory=dict)


def check_width(name: str, model: PreTrainedModel) -> None:
    """Refuse a target for heads: one that projects its last hidden states to another width (OPT-350m).

    Raises: UnsupportedModelError.
    """
    size, output = int(model.config.hidden_size), model.get_output_embeddings()
    read = getattr(output, "in_features", size)
    if read != size:
        raise UnsupportedModelError(
            f"layers of {name} pass on {size} numbers, and its output layer reads {read}; heads need one width for "
            "both: use a method without a head, such as 'suffix'"
        )


class Recorder:
    """Sees what passes through a shadow: the output of its decoder and the inputs of its layers.

    The last hidden states are taken where the decoder returns them, so that prompts cost no logits. Where the output
    embedding reads something else (scaled states, for instance), they are taken in front of it instead, and forwards
    that want them compute all logits; `settle` finds out which.
    """

    def __init__(self, model: PreTrainedModel, num_layers: int) -> None:
        self._model = model
        self.layers = _decoder_layers(model, num_layers)
        self.needs_logits: bool | None = None
        self._wanted = Wanted()
        self._returned: torch.Tensor | None = None
        self._read: torch.Tensor | None = None
        self._layer_inputs: dict[int, torch.Tensor] = {}
        self.flat: FlatNodes | None = None  # of the forward that is recorded

    def settle(self, forward: Callable[[], object]) -> None:
        """Learn from a forward that keeps all logits whether hidden states can be had without them."""
        with self._seeing([self._see_decoder(), self._see_head()]):
            forward()
        returned, read = self._returned, self._read
        is_same = returned is not None and read is not None and torch.equal(returned, read)
        self.needs_logits = not is_same

    def recording(self, wanted: Wanted) -> Recording:
        """Record the forward inside; `output` then has it."""
        return Recording(self, wanted)

    @contextmanager
    def seeing(self) -> Iterator[None]:
        """See what passes through modules inside, where it is to be recorded."""
        wanted = self._wanted
        if not wanted:
            yield
            return
        handles = [self._see_layer(index) for index in wanted.layer_inputs]
        if wanted.last_hidden:
            handles.append(self._see_head() if self.needs_logits else self._see_decoder())
        with self._seeing(handles):
            yield

    def take(self, flat: FlatNodes, states: torch.Tensor, read: torch.Tensor) -> None:
        """Record what a forward over a list of nodes has computed that ran without its modules.

        Args:
          states: (layers + 1, 1, S, H): what the first layer was given, and what each has returned.
          read: what the output embedding reads, (1, S, H).
        """
        wanted, self.flat = self._wanted, flat
        if wanted:
            self._returned = self._read = read if wanted.last_hidden else None
            self._layer_inputs = {index: states[index] for index in wanted.layer_inputs}

    def output(self, logits: Logits) -> Output:
        """What was recorded last, beside the logits."""
        hidden = self._read if self.needs_logits else self._returned
        if self.flat is None:
            return Output(logits, hidden, self._layer_inputs)
        layers = {layer: self.flat.spread(states[0]) for layer, states in self._layer_inputs.items()}
        return Output(logits, None if hidden is None else self.flat.spread(hidden[0]), layers)

    def release(self) -> None:
        """Drop what was recorded last."""
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


class Recording:
    """See `Recorder.recording`. A class: a generator that Ctrl-C leaves suspended would end a later forward's."""

    def __init__(self, recorder: Recorder, wanted: Wanted) -> None:
        self._recorder = recorder
        self._wanted = wanted

    def __enter__(self) -> None:
        self._recorder._wanted = self._wanted

    def __exit__(self, *_: object) -> None:
        self._recorder._wanted = Wanted()


def _decoder_layers(model: PreTrainedModel, num_layers: int) -> Any:
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == num_layers:
            return module
    raise UnsupportedModelError(f"{type(model).__name__} has no list of {num_layers} decoder layers.")

"""What a model computes before its first decoder layer and behind its last, as the operators that it calls.

Traced in one forward whose layers only hand on what they are given, over stand-ins of any number of nodes. Nothing is
compiled or fused, so that the operators give the bits that they give in their modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import fx, nn
from transformers.pytorch_utils import Conv1D

from foretoken.model.execution.calls import value_at
from foretoken.model.execution.inductor import NotTraceableError, one_trace_at_a_time
from foretoken.model.execution.linears import linears
from foretoken.model.execution.norms import RMSNorm
from foretoken.model.execution.operators import Runner, product, runner_of
from foretoken.model.execution.tracing import (
    NODES_HINT,
    Symbols,
    ancestors,
    fake_mode,
    held,
    replaced,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from foretoken.model.execution.regions import CompiledLayer
    from foretoken.model.nodes import FlatNodes, Nodes

Part: TypeAlias = Callable[..., tuple[torch.Tensor, ...]]
"""A traced function of a number of nodes and tensors (1, nodes, ...)."""


class Surroundings:
    """Runs what lies around the layers. Use `trace` to make one.

    Args:
      by: of every input of the layers, hidden states of the first one first: "token" for embeddings and nothing else,
        "position" for what depends on a node's position alone, None for others.
      by_position: of positions, these inputs.
      computed: of tokens and positions, the others.
      behind: what lies between the layers and the output embedding.
      logits: the output embedding, and what follows it.
      table: the module that embeds tokens, and the name of its weight.
      kinds: of attention, of every layer.
      inputs_of: numbers of the inputs that each layer is given beside hidden states.
      ends_in_product: whether nothing follows the output embedding.

    Attributes:
      by, kinds, inputs_of, ends_in_product: as given.
    """

    def __init__(
        self,
        by: Sequence[str | None],
        by_position: Part,
        computed: Part,
        behind: Part,
        logits: Part,
        table: tuple[nn.Module, str] | None,
        kinds: Sequence[str | None],
        inputs_of: Sequence[Sequence[int]],
        ends_in_product: bool,
    ) -> None:
        self.by = list(by)
        self.inputs_of = inputs_of
        self.ends_in_product = ends_in_product
        self.kinds = list(kinds)
        self._by_position = by_position
        self._computed = computed
        self._behind = behind
        self._logits = logits
        self._table = table
        self._nothing: list[torch.Tensor | None] = [None] * len(self.by)

    @property
    def embedding(self) -> torch.Tensor | None:
        """Hidden states by tokens (V, H), where that is what the first layer is given."""
        return None if self._table is None else getattr(*self._table)

    def by_position(self, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Inputs of the layers at positions (1, S), those that depend on nothing else."""
        return self._by_position(positions.shape[1], positions)

    def given(
        self, nodes: Nodes, flat: FlatNodes, lengths: Sequence[int], offsets: Sequence[int] | None
    ) -> list[torch.Tensor | None]:
        """What layers are given and no table has, input by input: (1, S, ...), contiguous."""
        if None not in self.by:
            return self._nothing
        ends = torch.tensor(lengths if offsets is None else [*map(int.__add__, lengths, offsets)])[:, None]
        positions = ends - nodes.num_fed + nodes.depths[:, nodes.num_fed :]
        tokens, positions = flat.listed(nodes.tokens)[None], flat.listed(positions)[None]
        computed = iter(self._computed(tokens.shape[1], tokens, positions))
        return [next(computed).contiguous() if by is None else None for by in self.by]

    def behind(self, num_nodes: int, states: torch.Tensor) -> torch.Tensor:
        """What the output embedding reads, of the output (1, S, H) of the last layer."""
        return self._behind(num_nodes, states)[0]

    def logits(self, num_nodes: int, read: torch.Tensor) -> torch.Tensor:
        """(1, K, V) of K nodes, of what the output embedding reads of them."""
        return self._logits(num_nodes, read)[0]


def modules_around(model: nn.Module, layers: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules of a model outside of its layers, the model itself included."""
    inside = {module for layer in layers for module in layer.modules()}
    return [module for module in model.modules() if module not in inside]


def trace(model: PreTrainedModel, layers: Sequence[CompiledLayer], forward: Callable[[], object]) -> Surroundings:
    """Trace a forward of a model around its layers.

    Args:
      model: a shadow, which is left as it was.
      layers: all of its decoder layers.
      forward: runs the model over a list of nodes.
    Raises: NotTraceableError, and whatever the code of a model raises where it cannot be traced.
    """
    seen: dict[str, Any] = {}
    handle = model.register_forward_pre_hook(lambda _, __, arguments: seen.update(arguments), with_kwargs=True)
    try:
        forward()
    finally:
        handle.remove()
    return _Tracer(model, layers, seen).surroundings()


class _Tracer:
    def __init__(self, model: PreTrainedModel, layers: Sequence[CompiledLayer], arguments: dict[str, Any]) -> None:
        self._model = model
        self._layers = layers
        self._arguments = arguments
        self._modules = [layer.kept_alive for layer in layers]
        outside = modules_around(model, self._modules)
        of_linears = set(linears(model))
        self._leaves = [
            module for module in outside if module in of_linears or isinstance(vars(module).get("forward"), RMSNorm)
        ]
        self._runners = [Runner(lambda x, leaf=leaf: leaf.forward(x)) for leaf in self._leaves]  # type: ignore[misc]
        self._tensors = [
            (module, name)
            for module in outside
            if module not in self._leaves
            for name, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None
        ]
        self._kinds: list[str | None] = [None] * len(layers)
        self._inputs_of: list[list[int]] = [[] for _ in layers]
        self._given: list[torch.Tensor] = []
        self._read: list[torch.Tensor] = []

    def surroundings(self) -> Surroundings:
        traced = self._traced()
        nodes, tokens, positions, *others = (node for node in traced.graph.nodes if node.op == "placeholder")
        states, tensors = others[: len(self._layers)], others[len(self._layers) :]
        (results,) = next(iter(reversed(traced.graph.nodes))).args
        *given, read, logits = results
        places = dict(zip(tensors, self._tensors, strict=True))
        by: list[str | None] = ["position" if tokens not in ancestors(node) else None for node in given]
        first, table = given[0], None
        if first.target is torch.ops.aten.embedding.default and first.args[1] is tokens:
            table = places.get(first.args[0])
            by[0] = None if table is None else "token"

        def part(inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> Part:
            return _part(traced, [nodes, *inputs], outputs, places)

        return Surroundings(
            by,
            part([positions], [node for node, each in zip(given, by, strict=True) if each == "position"]),
            part([tokens, positions], [node for node, each in zip(given, by, strict=True) if each is None]),
            part([states[-1]], [read]),
            part([read], [logits]),
            table,
            self._kinds,
            self._inputs_of,
            logits.target is product.default and logits.args[0] is read,
        )

    def _traced(self) -> fx.GraphModule:
        from torch.fx.experimental.proxy_tensor import make_fx

        with ExitStack() as stack:
            mode, shapes = fake_mode(stack)
            nodes = Symbols(shapes)(NODES_HINT)
            tensors = [mode.from_tensor(getattr(*place).detach(), static_shapes=True) for place in self._tensors]
            like = self._model.get_input_embeddings().weight
            with mode:
                tokens, positions = (torch.empty((1, nodes), dtype=torch.long) for _ in range(2))
                width = self._model.config.get_text_config(decoder=True).hidden_size
                states = [torch.empty((1, nodes, width), dtype=like.dtype) for _ in self._layers]
            stack.enter_context(mode)

            def run(*given: Any) -> Any:
                return self._run(*given)

            with one_trace_at_a_time:
                return make_fx(run)(nodes, tokens, positions, states, tensors)

    def _run(self, nodes: Any, tokens: torch.Tensor, positions: torch.Tensor, states: Any, tensors: Any) -> Any:
        """The model over stand-ins."""
        forwards: dict[nn.Module, Callable[..., Any]] = {
            layer: self._passing(index, states) for index, layer in enumerate(self._modules)
        }
        output = self._model.get_output_embeddings()
        for leaf, runner in zip(self._leaves, self._runners, strict=True):
            forwards[leaf] = self._called(leaf, runner, is_output=leaf is output)
        arguments = {**self._arguments, "input_ids": tokens, "position_ids": positions, "logits_to_keep": 0}
        self._given, self._read = [], []
        with replaced(forwards), held(self._tensors, tensors):
            logits = self._model(**arguments).logits
        if not self._given or len(self._read) != 1:
            raise NotTraceableError("its layers or its output embedding are not called as modules")
        return *self._given, *self._read, logits

    def _passing(self, index: int, states: Sequence[torch.Tensor]) -> Callable[..., Any]:
        """A layer that hands on stand-ins of its states."""
        layer = self._layers[index]

        def forward(*args: Any, **kwargs: Any) -> Any:
            states_given, *others = layer.inputs(args, kwargs)
            if index == 0:
                self._given = [states_given]
            elif states_given is not states[index - 1]:
                raise NotTraceableError("a layer is not given what the one before it gives")
            known = {id(tensor): number for number, tensor in enumerate(self._given)}
            for tensor in others:
                if id(tensor) not in known:
                    known[id(tensor)] = len(self._given)
                    self._given.append(tensor)
            self._inputs_of[index] = [known[id(tensor)] for tensor in others]
            mask = None if layer.call.mask is None else value_at(args, kwargs, (layer.call.mask, None))
            self._kinds[index] = self._arguments["flat_nodes"].kinds.get(id(mask))
            return layer.returned(states[index])

        return forward

    def _called(self, leaf: nn.Module, runner: Runner, *, is_output: bool) -> Callable[[torch.Tensor], torch.Tensor]:
        """A module that stays one: a linear layer, or a norm in one call."""
        weight: torch.Tensor = leaf.weight  # type: ignore[assignment]
        size = weight.shape[1] if isinstance(leaf, Conv1D) else weight.shape[0]

        def forward(x: torch.Tensor) -> torch.Tensor:
            if is_output:
                self._read.append(x)
            return product(x, runner.number, size)  # type: ignore[no-any-return]

        return forward


def _part(
    traced: fx.GraphModule,
    inputs: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    weights: Mapping[fx.Node, tuple[nn.Module, str]],
) -> Part:
    """The nodes between some inputs and outputs as a function of the inputs.

    Raises: NotTraceableError where outputs depend on anything else, weights aside.
    """
    needed = set(outputs).union(*(ancestors(node, inputs) for node in outputs))
    used = [node for node in weights if node in needed and node not in inputs]
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in (*inputs, *used):
        copies[node] = graph.placeholder(node.name)
    for node in traced.graph.nodes:
        if node not in needed or node in copies:
            continue
        if node.op == "placeholder":
            raise NotTraceableError("what lies around its layers depends on what they compute")
        copy = copies[node] = graph.node_copy(node, copies.__getitem__)
        if node.target is product.default:
            copy.target, copy.args = _called(runner_of(node.args[1])), copy.args[:1]
    graph.output(tuple(copies[node] for node in outputs))
    run, places = fx.GraphModule(traced, graph).forward, [weights[node] for node in used]

    def part(*given: Any) -> tuple[torch.Tensor, ...]:
        return run(*given, *[getattr(module, name) for module, name in places])  # type: ignore[no-any-return]

    return part


def _called(runner: Runner) -> Callable[[torch.Tensor], torch.Tensor]:
    """A module as a graph can call it."""

    def run(x: torch.Tensor) -> torch.Tensor:
        return runner.run(x)

    return run

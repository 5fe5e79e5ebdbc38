"""The parts of a model before its first decoder layer (prologue) and after its last one (epilogue).

They are traced in one forward pass, in which layers only pass their inputs on, over fake tensors of any number of
nodes. The inputs of layers are then looked up by token or by position, or computed from those; see `NativeProgram`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from foredraft.model.execution.builds import native_matrix, plain_attributes
from foredraft.model.execution.calls import value_at
from foredraft.model.execution.forwards import changed_forward, linears, replaced, replacement
from foredraft.model.execution.lowering import (
    Lowering,
    NotTraceableError,
    Program,
    Source,
    ancestors,
    dims_of,
    only_moves,
)
from foredraft.model.execution.operators import product
from foredraft.model.execution.packing import PackedLinear, PackedRows
from foredraft.model.execution.sharing import unmultiplied
from foredraft.model.execution.stored_programs import TorchCalls, store, stored
from foredraft.model.execution.tracing import (
    LayerProgram,
    Place,
    held,
    traced,
)


@dataclass(frozen=True)
class PositionRows:
    """Computes a table's rows from positions.

    Args:
      sources: sources of the inputs of the calls; None for the positions.
      calls: operators that compute the rows.
    """

    sources: Sequence[Source | None]
    calls: TorchCalls

    def __call__(self, places: Sequence[Place], positions: torch.Tensor) -> torch.Tensor:
        """Rows of positions (1, S), from the tensors in places."""

        def value(source: Source | None) -> Any:
            if source is None:
                return positions
            kind, key = source
            return positions.shape[1] if kind == "nodes" else getattr(*places[key])

        return self.calls(*map(value, self.sources))  # type: ignore[no-any-return]

    def as_dict(self) -> dict[str, Any]:
        """Content for a file."""
        return {"sources": self.sources, "calls": self.calls.as_dict()}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> PositionRows:
        """Make what `as_dict` has written."""
        sources = [None if source is None else (source[0], source[1]) for source in content["sources"]]
        return cls(sources, TorchCalls.from_dict(content["calls"]))


@dataclass(frozen=True)
class Table:
    """An input that is looked up by token or by position. Tensors are named by their numbers in `Ends.places`.

    Args:
      embedding: number of the table by tokens; None for a table by positions.
      rows: function for a table by positions. From all places and positions (1, S) it computes a tensor such as
        (1, S, ...), with nodes in dimension `node_dim`.
      node_dim: dimension that counts nodes.
      read: tensors that these rows are computed from.
    """

    embedding: int | None
    rows: PositionRows | None
    node_dim: int
    read: Sequence[int] = ()


@dataclass(frozen=True)
class Ends:
    """Prologue and epilogue of a model.

    Args:
      tables: inputs that are looked up.
      before: program that computes further inputs from those; None if there are none.
      first: number of the input that contains the hidden states of the first layer.
      behind: program from the states of the last layer to the input of the output embedding.
      head: program from that input to logits.
      kinds: attention type of every layer.
      inputs_of: for every layer, the model's input number for each of the layer's own inputs.
      places, runners: tensors and products of this model, by number; empty in the form that equal models share.
      key: structure of the model; None for a model that runs code other than that of its classes.
    """

    tables: Sequence[Table]
    before: Program | None
    first: int
    behind: Program
    head: Program
    kinds: Sequence[str | None]
    inputs_of: Sequence[Mapping[int, int]]
    places: Sequence[Place] = ()
    runners: Sequence[Any] = ()
    key: Any = None

    def as_dict(self) -> dict[str, Any]:
        """Content for a file.

        Raises: NotStorableError where a table is computed by something that has no stable form.
        """
        programs = {
            name: None if program is None else program.as_dict()
            for name, program in (("before", self.before), ("behind", self.behind), ("head", self.head))
        }
        tables = [
            {**vars(table), "rows": None if table.rows is None else table.rows.as_dict()} for table in self.tables
        ]
        inputs_of = [list(numbers.items()) for numbers in self.inputs_of]
        return {**programs, "tables": tables, "first": self.first, "kinds": self.kinds, "inputs_of": inputs_of}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Ends:
        """Make what `as_dict` has written."""
        before = content["before"]
        tables = [
            Table(**{**table, "rows": None if table["rows"] is None else PositionRows.from_dict(table["rows"])})
            for table in content["tables"]
        ]
        return cls(
            tables,
            None if before is None else Program.from_dict(before),
            content["first"],
            Program.from_dict(content["behind"]),
            Program.from_dict(content["head"]),
            content["kinds"],
            [{int(key): int(number) for key, number in numbers} for numbers in content["inputs_of"]],
        )


_forms: dict[Any, Ends] = {}
"""Traced forms of this process, by build."""


def modules_around(model: PreTrainedModel, layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules of a model that are not inside its layers."""
    inside = {module for layer in layers for module in layer.modules()}
    return [module for module in model.modules() if module not in inside]


def trace_ends(model: PreTrainedModel, layers: Sequence[LayerProgram], forward: Callable[[], object]) -> Ends:
    """Trace the prologue and epilogue of a model.

    Args:
      model: a shadow, which is restored afterwards.
      layers: programs of all its decoder layers.
      forward: function that runs the model over a list of nodes.
    Raises: NotTraceableError, and any error of the model's code while it is traced.
    """
    seen: dict[str, Any] = {}

    def see(_: nn.Module, __: Any, arguments: dict[str, Any]) -> None:
        seen.update(arguments)

    handle = model.register_forward_pre_hook(see, with_kwargs=True)
    try:
        with unmultiplied(linears(model)):
            forward()
    finally:
        handle.remove()
    tracer = EndsTracer(model, layers, seen)
    key = tracer.build()
    form = _forms.get(key)
    if form is None:
        form = None if key is None else stored(("ends", key), Ends.from_dict)
        form = form or tracer.form()
        if key is not None:
            _forms[key] = form
    return replace(form, places=tracer.places, runners=tracer.runners, key=key)


def store_traced(layers: Sequence[LayerProgram], ends: Ends) -> None:
    """Store the programs that were traced in this process, after they were found to compute what the modules do."""
    for layer in layers:
        if not layer.program.is_stored:
            layer.program.is_stored = True
            store(("layer", layer.key), layer.program.as_dict)
    if ends.key is not None and not ends.head.is_stored:
        ends.head.is_stored = True
        store(("ends", ends.key), ends.as_dict)


class EndsTracer:
    """Traces what a model computes before its first layer and behind its last one."""

    def __init__(self, model: PreTrainedModel, layers: Sequence[LayerProgram], arguments: dict[str, Any]) -> None:
        self._model = model
        self._layers = layers
        self._arguments = arguments
        self._modules = [layer.module for layer in layers]
        outside = modules_around(model, self._modules)
        self._outside = set(outside)
        of_linears = set(linears(model))
        self._leaves = [module for module in outside if module in of_linears]
        self.runners = [_runner(leaf) for leaf in self._leaves]
        self.places = [
            (module, name)
            for module in outside
            if module not in self._leaves
            for name, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None
        ]
        self._kinds: list[str | None] = [None] * len(layers)
        self._inputs_of: list[dict[int, int]] = [{} for _ in layers]
        self._given: list[torch.Tensor] = []
        self._read: list[torch.Tensor] = []

    def build(self) -> Any:
        """Return a key that models with equal prologue and epilogue share; None with hooks or changed forwards."""
        parts: list[Any] = [self._model.config.to_json_string(), type(self._model)]
        layers, leaves = set(self._modules), dict(zip(self._leaves, self.runners, strict=True))
        for path, module in self._model.named_modules():
            if module in layers:
                parts.append((path, type(module)))
            if module not in self._outside:
                continue
            forward = changed_forward(module)
            if module._forward_hooks or module._forward_pre_hooks or not (forward is None or module in leaves):
                return None
            parts.append((path, type(module), plain_attributes(module)))
            parts.append((type(leaves.get(module)).__name__, _dtype_of(leaves.get(module))))
        parts += [(layer.key, layer.call.inputs, layer.call.mask) for layer in self._layers]
        return tuple(parts)

    def form(self) -> Ends:
        """Trace the model."""
        model, sources, _ = traced(self._run, self.places, len(self._leaves), self._stand_ins)
        graph = model.graph
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        tokens, positions, *states = placeholders[len(sources) :]
        (results,) = next(iter(reversed(graph.nodes))).args
        *given, read, logits = results
        self._source_of: dict[fx.Node, Source] = dict(zip(placeholders, sources, strict=False))
        self._graph, self._tokens, self._positions = graph, tokens, positions
        leaves = self._looked_up(given)
        numbers = {node: number for number, node in enumerate(leaves)}
        computed = [node for node in given if node not in numbers]
        before = self._program(computed, {node: number + 1 for node, number in numbers.items()}) if computed else None
        numbers |= {node: len(leaves) + number for number, node in enumerate(computed)}
        return Ends(
            [self._table(model, node) for node in leaves],
            before,
            numbers[given[0]],
            self._program([read], {states[-1]: 0}),
            self._program([logits], {read: 0}),
            self._kinds,
            [{key: numbers[given[place]] for key, place in keys.items()} for keys in self._inputs_of],
        )

    def _looked_up(self, given: Sequence[fx.Node]) -> list[fx.Node]:
        """Return the nodes that inputs are computed from: embeddings of tokens, and functions of the position alone."""
        found: dict[fx.Node, None] = {}
        waiting, known = list(given), set(given)
        while waiting:
            node = waiting.pop()
            if self._is_looked_up(node):
                found[node] = None
                continue
            for parent in node.all_input_nodes:
                if parent not in known:
                    known.add(parent)
                    waiting.append(parent)
        return list(found)

    def _is_looked_up(self, node: fx.Node) -> bool:
        if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
            return False
        if self._embeds_tokens(node):
            return self._source_of.get(node.args[0], ("", 0))[0] == "tensor"  # type: ignore[arg-type]
        inputs = {parent for parent in ancestors(node) if parent.op == "placeholder"}
        inputs -= {each for each, (kind, _) in self._source_of.items() if kind in ("nodes", "tensor")}
        return inputs == {self._positions} and node.meta["val"].is_floating_point() and dims_of(node)[1] is not None

    def _embeds_tokens(self, node: fx.Node) -> bool:
        if node.target is not torch.ops.aten.embedding.default:
            return False
        index: Any = node.args[1]
        while index is not self._tokens and only_moves(index):
            index = index.args[0]
        return index is self._tokens

    def _table(self, model: fx.GraphModule, node: fx.Node) -> Table:
        node_dim = dims_of(node)[1]
        assert node_dim is not None
        if self._embeds_tokens(node):
            return Table(self._source_of[node.args[0]][1], None, node_dim)  # type: ignore[index]
        sources = [self._source_of.get(parent, ("", 0)) for parent in ancestors(node)]
        read = [key for kind, key in sources if kind == "tensor"]
        return Table(None, self._function_of_positions(model, node), node_dim, read)

    def _function_of_positions(self, model: fx.GraphModule, wanted: fx.Node) -> PositionRows:
        """Return the computation of a table's rows from the places of tensors and positions (1, S)."""
        needed = {wanted, *ancestors(wanted)}
        inputs = [node for node in model.graph.nodes if node.op == "placeholder" and node in needed]
        body = [node for node in model.graph.nodes if node.op != "placeholder" and node in needed]
        return PositionRows([self._source_of.get(node) for node in inputs], TorchCalls.of(model, inputs, body))

    def _program(self, outputs: Sequence[fx.Node], leaves: Mapping[fx.Node, int]) -> Program:
        dtypes = [_dtype_of(run) for run in self.runners]
        return Lowering(self._graph, self._source_of, outputs, dtypes, leaves).program()  # type: ignore[arg-type]

    def _stand_ins(self, mode: Any, nodes: Any) -> list[torch.Tensor]:
        """Return fake tokens and positions, and fake output states of every layer."""
        like = self._model.get_input_embeddings().weight
        width = self._model.config.get_text_config(decoder=True).hidden_size
        with mode:
            tokens, positions = (torch.empty((1, nodes), dtype=torch.long) for _ in range(2))
            return [tokens, positions, *(torch.empty((1, nodes, width), dtype=like.dtype) for _ in self._layers)]

    def _run(self, nodes: Any, numbers: Any, tensors: Any, given: Any) -> Any:
        """Run the model over fake tensors."""
        tokens, positions, *states = given
        forwards: dict[nn.Module, Callable[..., Any] | None] = {
            layer: self._passing(index, states) for index, layer in enumerate(self._modules)
        }
        output = self._model.get_output_embeddings()
        for leaf, number in zip(self._leaves, numbers, strict=True):
            forwards[leaf] = self._called(leaf, number, is_output=leaf is output)
        forwards |= {each: None for each in self._outside if isinstance(replacement(each), PackedRows)}  # looked up
        arguments = {**self._arguments, "input_ids": tokens, "position_ids": positions, "logits_to_keep": 0}
        self._given, self._read = [], []
        with replaced(forwards), held(self.places, tensors):
            logits = self._model(**arguments).logits
        if not self._given or len(self._read) != 1:
            raise NotTraceableError("the model does not call its layers or its output embedding as modules")
        return *self._given, *self._read, logits

    def _passing(self, index: int, states: Sequence[torch.Tensor]) -> Callable[..., Any]:
        """Return a replacement forward of a layer, which records its inputs and returns fake states."""
        layer, size = self._layers[index], self._layers[index].program.in_tuple

        def forward(*args: Any, **kwargs: Any) -> Any:
            states_given, *others = (value_at(args, kwargs, layer.call.inputs[key]) for key in layer.program.inputs)
            if index == 0:
                self._given = [states_given]
            elif states_given is not states[index - 1]:
                raise NotTraceableError("the input of a layer is not the output of the layer before it")
            known = {id(tensor): number for number, tensor in enumerate(self._given)}
            for key, tensor in zip(layer.program.inputs[1:], others, strict=True):
                if id(tensor) not in known:
                    known[id(tensor)] = len(self._given)
                    self._given.append(tensor)
                self._inputs_of[index][key] = known[id(tensor)]
            mask = None if layer.call.mask is None else value_at(args, kwargs, (layer.call.mask, None))
            self._kinds[index] = getattr(mask, "stands_for", (None, None))[1]
            return states[index] if size is None else (states[index], *(None,) * (size - 1))

        return forward

    def _called(self, leaf: nn.Module, number: Any, *, is_output: bool) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a replacement forward of a linear layer, which is traced as one product."""
        weight: torch.Tensor = leaf.weight  # type: ignore[assignment]
        size = weight.shape[1] if isinstance(leaf, Conv1D) else weight.shape[0]

        def forward(x: torch.Tensor) -> torch.Tensor:
            if is_output:
                self._read.append(x)
            return product(x, number, size)  # type: ignore[no-any-return]

        return forward


def _runner(leaf: nn.Module) -> Any:
    forward = replacement(leaf)
    return forward.product if isinstance(forward, PackedLinear) and len(forward.product.layers) == 1 else forward


def _dtype_of(run: object) -> torch.dtype | None:
    """Return the dtype of a product's inputs and outputs; None if the library's own kernels do not run it."""
    return getattr(native_matrix(run), "compute_dtype", None)

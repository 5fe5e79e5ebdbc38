"""Forward passes over few nodes in one call, without the modules of the model.

A decoding step runs a model over a few nodes. Modules need a dozen calls per layer, which take as long as the
arithmetic of a small model. The model is therefore recorded once, in its layers (`tracing`) and around them (`ends`),
and lowered to operations, products and attention (`lowering`). One C++ function then runs it (``program.cpp``). If
anything has changed since the recording, modules run instead.
"""

from __future__ import annotations

import ctypes
import logging
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules import module as torch_modules
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from foredraft.model.cache.ragged import KVCache
from foredraft.model.cache.storage import RaggedLayer
from foredraft.model.execution.attention import SEEN_BY
from foredraft.model.execution.builds import TOLERANCE, check, native_matrix, rounding_in
from foredraft.model.execution.calls import Recording
from foredraft.model.execution.ends import Ends, Table, modules_around
from foredraft.model.execution.forwards import StandIn, changed_forward, linears, replacement
from foredraft.model.execution.lowering import NotTraceableError, Program
from foredraft.model.execution.packing import PackedProduct, PackedRows
from foredraft.model.execution.tracing import LayerProgram
from foredraft.model.nodes import NOTHING, FlatNodes, Logits, NodeLogits, Nodes
from foredraft.model.state import version_of
from foredraft.native import abi
from foredraft.native.library import CACHE_KINDS, KINDS, Library
from foredraft.native.packed_matmul import PackedMatrix

if TYPE_CHECKING:
    from foredraft.model.recorder import Recorder

logger = logging.getLogger("foredraft")

LARGE = 2**25
"""Number of weights from which a model is read from memory rather than from the processor's caches."""
LEAST_SHARED = 2**19
"""Minimum weights of a product, or numbers that attention reads, for which threads share the work of a model in caches.

Smaller work is done before the threads have started.
"""
READ_BESIDE = torch.float32, torch.bfloat16
"""Dtype of a model, and the other dtype of keys and values that kernels can read with it."""
TABLE_BLOCK = 64
"""Number of positions whose angles are computed together: whole vectors, and too few to be split among threads.

A position then has the same angles in every table.
"""
FIRST_POSITIONS = 4 * TABLE_BLOCK
"""Number of positions in tables that have not grown."""


class _Layout:
    """The C structures of a model's layers, valid while its weights stay at the same addresses."""

    def __init__(
        self, layers: Sequence[LayerProgram], ends: Ends, windows: Mapping[str, int | None], dtype: torch.dtype
    ) -> None:
        self.num_packed = PackedProduct.num_packed
        self.num_layers = len(layers)
        self._watched: list[tuple[nn.Module, str, int]] = []
        self._kept: list[object] = []
        self._matrices: dict[int, Any] = {}
        forms: dict[Any, int] = {}
        fields: list[abi.AttentionShape] = []
        of_layers = (abi.Layer * len(layers))()
        self.kv_sizes: dict[int, tuple[int, int, int]] = {}
        for index, (place, layer) in enumerate(zip(of_layers, layers, strict=True)):
            form = -1
            if layer.program.heads is not None:
                heads, kind = layer.program.heads, ends.kinds[index]
                if kind is None:
                    raise NotTraceableError("the type of its attention is not known")
                key = heads, kind, layer.scaling
                if key not in forms:
                    forms[key] = len(fields)
                    scale = heads.size**-0.5 if layer.scaling is None else layer.scaling
                    sizes = heads.heads, heads.group, heads.size, heads.value_size
                    fields.append(abi.AttentionShape(*sizes, KINDS[dtype], windows[kind] or 0, scale))
                form = forms[key]
                assert layer.cache_index is not None
                self.kv_sizes[layer.cache_index] = heads.heads, heads.size, heads.value_size
            inputs = [ends.inputs_of[index][key] for key in layer.program.inputs[1:]]
            self._fill(place, layer.program, layer.tensors, layer.runners, inputs)
            place.form, place.cache = form, -1 if layer.cache_index is None else layer.cache_index
        of_forms = (abi.AttentionShape * len(fields))(*fields)
        of_ends = (abi.Layer * 3)()
        computed: Sequence[int] = ()
        for place, end in zip(of_ends, (ends.before, ends.behind, ends.head), strict=True):
            if end is not None:
                self._fill(place, end, ends.places, ends.runners, [key - 1 for key in end.inputs[1:]])
                place.form = place.cache = -1
        if ends.before is not None:
            computed = [size * dtype.itemsize for size in ends.before.output_sizes]
        self.computed_bytes = computed
        addresses = [ctypes.addressof(of_ends[number]) for number in range(3)]
        self.num_read, self.num_logits = ends.behind.output_sizes[0], ends.head.output_sizes[0]
        (self.width,) = {layer.program.output_sizes[0] for layer in layers}
        weights = sum(matrix.packed.numel() for matrix in self._matrices.values())
        self.fields = abi.Model(
            len(layers),
            len(fields),
            len(ends.tables),
            len(computed),
            ends.first,
            *(size * dtype.itemsize for size in (self.width, self.num_read, self.num_logits)),
            KINDS[dtype],
            0 if weights >= LARGE else LEAST_SHARED,
            ctypes.addressof(of_layers),
            ctypes.addressof(of_forms),
            addresses[0] if ends.before is not None else None,
            *addresses[1:],
        )
        self._kept += [of_layers, of_forms, of_ends, layers, ends]
        self.address = ctypes.addressof(self.fields)

    def _fill(
        self,
        place: abi.Layer,
        program: Program,
        tensors: Sequence[tuple[nn.Module, str]],
        runners: Sequence[Any],
        inputs: Sequence[int],
    ) -> None:
        addresses: list[int] = []
        for kind, key in program.given:
            if kind == "constants":
                addresses.append(program.constants.data_ptr())
            elif kind == "tensor":
                module, name = tensors[key]
                tensor = getattr(module, name).detach()  # keeps the memory alive if the weight is replaced
                self._watched.append((module, name, tensor.data_ptr()))
                self._kept.append(tensor)
                addresses.append(tensor.data_ptr())
            else:
                matrix = native_matrix(runners[key])
                if matrix is None:
                    raise NotTraceableError("its products run in other kernels")
                self._kept.append(matrix)
                self._matrices[matrix.address] = matrix
                addresses.append(matrix.address)
        given, numbers = (abi.Address * len(addresses))(*addresses), (abi.Integer * max(len(inputs), 1))(*inputs)
        self._kept += [given, numbers, program]
        place.program, place.given, place.inputs = program.address, ctypes.addressof(given), ctypes.addressof(numbers)
        place.num_inputs = len(inputs)

    def still_holds(self) -> bool:
        """Return whether all weights are at the same addresses."""
        return self.num_packed == PackedProduct.num_packed and all(
            getattr(module, name).data_ptr() == address for module, name, address in self._watched
        )


class _Tables:
    """Tables of inputs that are looked up by token or by position.

    Args:
      num_positions: number of positions that have rows.
      computed_bytes: size in bytes, per node, of every input that is computed from these tables.
    """

    @torch.inference_mode()
    def __init__(self, ends: Ends, num_positions: int, computed_bytes: Sequence[int]) -> None:
        self.num_positions = num_positions
        self._fields = (abi.Table * (len(ends.tables) + len(computed_bytes)))()
        self._kept: list[torch.Tensor] = []
        self._watched: list[tuple[nn.Module, str, int]] = []
        self._read: list[tuple[nn.Module, str, Any]] = []
        self._packed: list[tuple[PackedRows, PackedMatrix]] = []
        for place, table in zip(self._fields, ends.tables, strict=False):
            if table.embedding is not None:
                embedding = ends.places[table.embedding]
                forward = replacement(embedding[0])
                packed = forward.packed if isinstance(forward, PackedRows) else None
                if packed is not None:
                    dtype = forward.dtype
                    self._packed.append((forward, packed))
                    place.matrix, place.kind, place.count = packed.address, KINDS[dtype], packed.fields.outputs
                    place.bytes = packed.fields.inputs * dtype.itemsize
                    continue
                found = getattr(*embedding).detach()
                self._watched.append((*embedding, found.data_ptr()))
            else:
                assert table.rows is not None
                read = [ends.places[number] for number in table.read]
                self._read += [(*each, version_of(getattr(*each))) for each in read]
                blocks = torch.split(torch.arange(num_positions), TABLE_BLOCK)
                of_blocks = [table.rows(ends.places, block[None]) for block in blocks]
                found = torch.cat([rows.movedim(table.node_dim, 0) for rows in of_blocks])
            rows = found.contiguous()
            self._kept.append(rows)
            place.rows, place.bytes, place.count = rows.data_ptr(), rows[0].nbytes, len(rows)
            place.by_position = table.embedding is None
        for place, size in zip(self._fields[len(ends.tables) :], computed_bytes, strict=True):
            place.bytes = size
        self.address = ctypes.addressof(self._fields)

    def still_hold(self) -> bool:
        """Return whether embeddings are at the same addresses, and the tensors that angles depend on are unchanged."""
        return (
            all(getattr(module, name).data_ptr() == address for module, name, address in self._watched)
            and all(version_of(getattr(module, name)) == version for module, name, version in self._read)
            and all(forward.packed is packed for forward, packed in self._packed)
        )


class _Store:
    """Addresses of the keys and values of a cache, valid while its memory stays the same.

    Attributes:
      kv_sizes: sizes of keys and values, by layer of the cache.
      is_taken: True if kernels can read the keys and values in this format.
    """

    def __init__(self, cache: KVCache, kv_sizes: object, dtype: torch.dtype) -> None:
        self.memory, self.kv_sizes = cache.memory, kv_sizes
        layers: list[Any] = list(cache.layers)
        has = [type(layer) is RaggedLayer and layer.is_initialized for layer in layers]
        buffers: list[Any] = [
            (layer.keys, layer.values) if ready else (None, None) for layer, ready in zip(layers, has, strict=True)
        ]
        self._arrays = [
            (abi.Address * len(layers))(*(None if pair[part] is None else pair[part].data_ptr() for pair in buffers))
            for part in (0, 1)
        ]
        found = [buffer for pair in buffers for buffer in pair if buffer is not None]
        columns, dtypes = {buffer.shape[2] for buffer in found}, {buffer.dtype for buffer in found}
        is_even = len(columns) <= 1 and len(dtypes) <= 1 and all(buffer.is_contiguous() for buffer in found)
        stored = next(iter(dtypes), torch.float32)
        self.is_taken = is_even and (stored in (dtype, torch.int8) or (dtype, stored) == READ_BESIDE)
        kind = CACHE_KINDS.get(stored, abi.FLOAT32)
        self._fields = abi.Store(*map(ctypes.addressof, self._arrays), next(iter(columns), 0), kind)
        self.address = ctypes.addressof(self._fields)


class NativeProgram:
    """A recorded model that runs in one C++ call. `Execution.record` makes one.

    Args:
      model: a shadow.
      layers: programs of all its decoder layers.
      windows: number of positions that a node sees, by attention type, including its own; None for all.
      context_length: number of positions that have angles; None for no limit.

    Attributes:
      num_runs: number of forward passes so far.

    Exactness: the bits of a node do not depend on other nodes, other rows or the number of threads. They equal those of
      the modules within the rounding of the dtype.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Sequence[LayerProgram],
        ends: Ends,
        windows: Mapping[str, int | None],
        kernels: Library,
        dtype: torch.dtype,
        context_length: int | None = None,
    ) -> None:
        self.num_runs = 0
        self.layers = layers
        self.ends = ends
        self._windows = windows
        self._kernels = kernels
        self._dtype = dtype
        self._context_length = context_length
        modules = [layer.module for layer in layers]
        self._watched = [*modules_around(model, modules), *modules]
        self._linears = linears(model)  # run as products
        of_linears = set(self._linears)
        self._forwards = [(each, changed_forward(each)) for each in self._watched if each not in of_linears]
        self._age = 0
        self._seen: tuple[int, int] | None = None  # id of the next hook, and age, when modules were last checked
        self._is_unchanged = False
        self._layout = _Layout(layers, ends, windows, dtype)
        self._vocab_size: int = model.get_input_embeddings().weight.shape[0]
        self._tables = self._tables_of(FIRST_POSITIONS)

    def over(self, model: PreTrainedModel, layers: Sequence[LayerProgram], ends: Ends) -> NativeProgram:
        """Return the program of another shadow of the same form.

        Args:
          model: shadow with some changed modules.
          layers: programs of all its decoder layers.
          ends: prologue and epilogue of that shadow.
        """
        return NativeProgram(model, layers, ends, self._windows, self._kernels, self._dtype, self._context_length)

    def has_around(self, model: PreTrainedModel, layers: Sequence[nn.Module]) -> bool:
        """Return whether a copy still has the same modules as this model around its layers."""
        mine, theirs = self._watched[: -len(layers)], modules_around(model, layers)
        return len(mine) == len(theirs) and all(map(_are_same, mine, theirs))

    def look_again(self) -> None:
        """Check for changed modules and weights before the next forward pass."""
        self._age += 1

    @property
    def is_possible(self) -> bool:
        """True if the code that modules run is unchanged and nothing observes it, such as a hook."""
        if self._seen != (RemovableHandle.next_id, self._age):
            self._look()
        return self._is_unchanged and SEEN_BY.get() is None

    def _look(self) -> None:
        """Check whether modules or weights have changed."""
        has_hooks = torch_modules._has_any_global_hook() or any(  # type: ignore[no-untyped-call]
            module._forward_hooks or module._forward_pre_hooks for module in self._watched
        )
        self._is_unchanged = not has_hooks
        for module, forward in self._forwards:
            found = vars(module).get("forward")
            self._is_unchanged &= (None if isinstance(found, StandIn) else found) is forward
        self._seen = (RemovableHandle.next_id, self._age) if self._is_unchanged else None  # hooks may be removed later
        if self._is_unchanged and not self._layout.still_holds():
            self._layout = _Layout(self.layers, self.ends, self._windows, self._dtype)
        if not self._tables.still_hold():
            self._tables = self._tables_of(self._tables.num_positions)

    def takes(self, counts: Iterable[int]) -> bool:
        """Return whether the program runs rows with these numbers of nodes."""
        return max(counts) <= abi.MOST_NODES and self.is_possible

    def forward(
        self, nodes: Nodes, cache: KVCache, first_row: int, kept: range, recorder: Recorder, listed: bool
    ) -> Logits | None:
        """Run nodes and write their keys and values after the committed columns; return None if modules must run
        instead.

        Args:
          nodes: B rows; row i is row ``first_row + i`` of the cache.
          kept: node columns whose logits are returned.
          recorder: receiver of the requested features.
        Returns: logits as `CausalLM.forward` returns them.
        """
        counts, width = nodes.counts, nodes.tokens.shape[1]
        if not 0 < max(counts) <= abi.MOST_NODES or not self.is_possible:
            return None
        if (opened := self._open(nodes, cache, first_row)) is None:
            return None
        flat = of_kept = FlatNodes(counts, width, nodes.tokens.device)
        numbers = None
        if len(kept) < width:
            numbers, of_kept = flat.kept(kept)
        found = self._compute(self._layout, *opened, numbers, sum(of_kept.counts), torch.get_num_threads())
        if found is None:
            return None
        self.num_runs += 1
        states, read, logits = found
        if recorder.wanted is not NOTHING:
            recorder.take(flat, states, read)
        return NodeLogits(logits, of_kept.counts) if listed and kept else of_kept.spread(logits)

    def _open(
        self, nodes: Nodes, cache: KVCache, first_row: int = 0, more: int = 0
    ) -> tuple[_Tables, _Store, abi.Nodes] | None:
        """Return tables, cache memory and node fields, with ``more`` spare columns per row; None if unsupported."""
        lengths = cache.row_lengths(first_row, len(nodes.counts))
        offsets = cache.row_offsets(first_row, len(nodes.counts)) if any(cache.offsets) else None
        end = max(map(int.__add__, lengths, nodes.counts)) + more
        store = self._store(self._layout, cache, end, first_row + len(nodes.counts))
        if store is None:
            return None
        last = max(lengths) + nodes.tokens.shape[1] + more + (0 if offsets is None else max(offsets))
        if last > self._tables.num_positions:
            self._grow_tables(last)
        return self._tables, store, nodes.fields(lengths, offsets, first_row)

    def _compute(
        self,
        layout: _Layout,
        tables: _Tables,
        store: _Store,
        fields: abi.Nodes,
        kept: torch.Tensor | None,
        count: int,
        threads: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Return states (layers + 1, 1, S, H), input of the output embedding, and logits (count, V) of kept nodes."""
        states = torch.empty(layout.num_layers + 1, 1, fields.count, layout.width, dtype=self._dtype)
        read = torch.empty(1, fields.count, layout.num_read, dtype=self._dtype)
        logits = torch.empty(count, layout.num_logits, dtype=self._dtype)
        results = abi.Results(
            states.data_ptr(), read.data_ptr(), None if kept is None else kept.data_ptr(), count, logits.data_ptr()
        )
        given = layout.address, tables.address, store.address, ctypes.addressof(fields), ctypes.addressof(results)
        return (states, read, logits) if self._kernels.forward(*given, threads) == 0 else None

    def chains(
        self,
        chains: Sequence[Sequence[int]],
        cache: KVCache,
        depths: Sequence[int],
        num_columns: int,
        names: torch.Tensor | None,
        first_row: int = 0,
    ) -> tuple[list[list[int]], int] | None:
        """Extend several rows greedily in one call: run a chain of tokens per row, then each most likely token in turn.

        The last new token is not run; the others are written to the columns after the chains.

        Args:
          chains: at least one next token for every row of the cache from ``first_row`` on.
          depths: number of new tokens per row.
          num_columns: number of logit columns to consider.
          names: int64 (V,), token id of every column; None if the column numbers are the token ids.

        Returns: the new tokens of every row, fewer where logits are not finite, and the number of forward passes; None
          if modules must run instead.
        """
        most, nodes = max(depths), Nodes.from_chains(chains)
        nodes.tokens.clamp_(max=self._vocab_size - 1)  # unknown tokens are replaced by the last one
        if not self.takes(nodes.counts) or (opened := self._open(nodes, cache, first_row, most - 1)) is None:
            return None
        tables, store, fields = opened
        tokens, wanted = (abi.Integer * (most * len(depths)))(), array("q", depths)
        drafts = abi.Drafts(
            wanted.buffer_info()[0],
            most,
            min(num_columns, self._layout.num_logits),
            self._vocab_size,
            None if names is None else names.data_ptr(),
            ctypes.addressof(tokens),
        )
        given = self._layout.address, tables.address, store.address, ctypes.addressof(fields), ctypes.addressof(drafts)
        num_forwards = self._kernels.chains(*given, torch.get_num_threads())
        if num_forwards < 0:
            return None
        self.num_runs += num_forwards
        rows = [tokens[row * most : (row + 1) * most] for row in range(len(depths))]
        return [row[: row.index(-1)] if -1 in row else row for row in rows], num_forwards

    def check(self, seen: Recording) -> None:
        """Check that every layer, and the part after them, computes what modules have computed, within rounding.

        Raises: NotTraceableError if one does not.
        """
        logits = seen.logits  # (1, S, V)
        num_nodes, first = logits.shape[1], len(self.ends.tables)
        inner = torch.empty(num_nodes, self._layout.width, dtype=self._dtype)
        holder = nn.Module()  # contains the inputs of a layer as a table by token
        holder.register_buffer("states", inner)
        tables = [*self.ends.tables, Table(len(self.ends.places), None, 0)]
        ends = replace(self.ends, tables=tables, first=first, places=[*self.ends.places, (holder, "states")])
        looked_up = _Tables(ends, TABLE_BLOCK, self._layout.computed_bytes)
        cache = KVCache(len(self.layers), num_rows=1, capacity=TABLE_BLOCK)  # lives as long as its memory is used
        store = self._store(self._layout, cache, num_nodes, 1)
        fields = Nodes.from_chains([list(range(num_nodes))]).fields([0])
        for index, layer in enumerate(self.layers):
            args, kwargs = seen.of_layers[index]
            given, want = args[0] if args else kwargs["hidden_states"], seen.outputs[index]
            inner.copy_(given[0])
            inputs = {key: number + (number >= first) for key, number in ends.inputs_of[index].items()}
            alone = replace(ends, kinds=[ends.kinds[index]], inputs_of=[inputs])
            layout = _Layout([layer], alone, self._windows, self._dtype)
            count = num_nodes if index + 1 == len(self.layers) else 0
            found = None if store is None else self._compute(layout, looked_up, store, fields, None, count, 1)
            if found is None:
                raise NotTraceableError("a layer has inputs that do not depend on tokens and positions alone")
            states, _, last = found
            check(want[0] if isinstance(want, tuple) else want, given, states[1], layer.module.modules())
        error = float((last.double() - logits[0].double()).norm() / logits[0].double().norm())
        around = [*self._watched, *self._linears]
        if not error <= max(256 * torch.finfo(torch.float32).eps, TOLERANCE * rounding_in(around, logits.dtype)):
            raise NotTraceableError(f"its logits differ from those of its modules (relative error {error:.2g})")

    def _store(self, layout: _Layout, cache: KVCache, capacity: int, num_slots: int) -> _Store | None:
        """Return the memory of a cache with space for this many columns; None for an unsupported format."""
        cache.reserve(capacity, num_slots)
        store: _Store | None = cache.addresses
        if store is None or store.memory is not cache.memory or store.kv_sizes is not layout.kv_sizes:
            for index, (heads, size, value_size) in layout.kv_sizes.items():
                layer: Any = cache.layers[index] if index < len(cache.layers) else None
                if type(layer) is not RaggedLayer:
                    return None
                if not layer.is_initialized:
                    layer.lazy_initialization(
                        *(torch.zeros(1, heads, 1, each, dtype=self._dtype) for each in (size, value_size))
                    )
            store = cache.addresses = _Store(cache, layout.kv_sizes, self._dtype)
        return store if store.is_taken else None

    def _grow_tables(self, end: int) -> None:
        """Extend the tables to positions before ``end``, within the model's limit."""
        known = self._tables.num_positions
        if known != self._context_length:
            self._tables = self._tables_of(max(2 * known, -(-end // TABLE_BLOCK) * TABLE_BLOCK))

    def release_tables(self) -> None:
        """Replace tables that long rows have enlarged by small ones."""
        if self._tables.num_positions > FIRST_POSITIONS:
            self._tables = self._tables_of(FIRST_POSITIONS)

    def _tables_of(self, num_positions: int) -> _Tables:
        if self._context_length is not None:
            num_positions = min(num_positions, self._context_length)
        return _Tables(self.ends, num_positions, self._layout.computed_bytes)


def _are_same(module: nn.Module, other: nn.Module) -> bool:
    """Return whether two modules run the same code over the same tensors."""
    held = [{**each._parameters, **each._buffers} for each in (module, other)]
    return (
        type(module) is type(other)
        and changed_forward(module) is changed_forward(other)
        and held[0].keys() == held[1].keys()
        and all(held[0][name] is held[1][name] for name in held[0])
    )

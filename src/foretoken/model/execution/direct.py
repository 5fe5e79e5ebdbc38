"""Forwards over few nodes in one call, without the modules of the model.

Modules, decorators, masks and the bookkeeping of a list of nodes take a tenth of the time of a step of one node, and
more of small models: little by themselves, they find the processor's caches full of weights. What lies around the
layers are a few operators, which are traced once. From then on such a forward gathers what layers are given, runs all
of them in one call, and calls the operators behind them. Where anything is not as it was when the model was traced, its
modules run. See ``forward.cpp``.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.modules import module as torch_modules
from torch.utils.hooks import RemovableHandle

from foretoken.model.execution.calls import NUM_NODES
from foretoken.model.execution.direct_calls import DirectCalls, FedFields, Store, Tables
from foretoken.model.execution.inductor import NotTraceableError
from foretoken.model.execution.linears import linears
from foretoken.model.execution.node_lists import array_of
from foretoken.model.execution.surroundings import Surroundings, modules_around, trace
from foretoken.model.execution.tail import Tail
from foretoken.model.nodes import FlatNodes, NodeLogits
from foretoken.model.promise import MOST_NODES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from foretoken.model.cache.ragged import KVCache
    from foretoken.model.capture import Recorder
    from foretoken.model.execution.chain import Chain
    from foretoken.model.execution.execution import Execution
    from foretoken.model.nodes import Logits, Nodes

logger = logging.getLogger("foretoken")

CHECKED = ((1, NUM_NODES[0]), (NUM_NODES[1], NUM_NODES[0]))
"""Forwards in which bits are compared: of so many nodes, behind so many committed ones."""

LATER = 256
"""Forwards of a changed model after which it goes without modules: to trace it takes as long as some hundred steps
gain, and a model whose adapters are switched back and forth may change before."""

MOST_KNOWN = 128
"""Numbers of nodes for which calls are kept."""


@dataclass(frozen=True, slots=True)
class Passed:
    """What a forward over a list of nodes has computed on its way.

    Args:
      flat: how the nodes of the list lie in rows.
      first: what the first layer was given, (1, S, H).
      outputs: of all layers, (layers, 1, S, H).
      read: what the output embedding reads, (1, S, H).
      logits: (1, S, V), if they were computed in the same call.
    """

    flat: FlatNodes
    first: torch.Tensor
    outputs: torch.Tensor
    read: torch.Tensor
    logits: torch.Tensor | None = None

    def layer_input(self, index: int) -> torch.Tensor:
        """What a layer was given, (1, S, H)."""
        return self.outputs[index - 1] if index else self.first


class _Known(threading.local):
    """What one thread has laid out for calls."""

    def __init__(self) -> None:
        self.calls: dict[int, tuple[int, DirectCalls]] = {}  # with the age at which they were looked at
        self.store: Store | None = None


class DirectForward:
    """Runs a model whose layers are one chain. Use `start_direct` to make one.

    Args:
      model: a shadow.
      chain: all of its layers.
      windows: positions that a node looks back by kind of attention, its own included; None for all.

    Attributes:
      num_runs: forwards so far.

    Exactness: the bits of the modules: the same operators and kernels run over the same numbers.
    """

    def __init__(
        self, model: PreTrainedModel, chain: Chain, surroundings: Surroundings, windows: Mapping[str, int | None]
    ) -> None:
        self.num_runs = 0
        self._chain = chain
        self._around = surroundings
        self._windows = windows
        layers = [layer.kept_alive for layer in chain.layers]
        self._watched = [*modules_around(model, layers), *layers]
        of_linears = set(linears(model))  # they are called as modules
        self._forwards = [(each, vars(each).get("forward")) for each in self._watched if each not in of_linears]
        self._known = _Known()
        self._age = 0
        self._seen: tuple[int, int] | None = None  # hooks ever registered, and age, when modules were looked at
        self._is_unchanged = False
        self._tables = Tables(surroundings, 256)
        kernels = chain.layers[0].replay.kernels
        if kernels is None:
            raise NotTraceableError("its layers do not run by the library's own kernels")
        self._kernels = kernels
        output = model.get_output_embeddings()
        self._tail = Tail.of((module for module, _ in self._forwards), output, surroundings, kernels)

    def look_again(self) -> None:
        """See whether modules or weights have changed, before the next forward."""
        self._age += 1

    def run(self, nodes: Nodes, cache: KVCache, first_row: int, *, with_logits: bool = True) -> Passed | None:
        """Run all layers, and what comes before and behind them; None where modules have to.

        Args:
          nodes: B rows; row i is row ``first_row + i`` of the cache.
          with_logits: compute the logits of all nodes, where that is one call.
        """
        num_nodes, (num_rows, width) = nodes.num_real, nodes.tokens.shape
        if num_nodes < 1 or max(nodes.counts) > MOST_NODES or not self.is_possible:
            return None
        chain, known, around = self._chain, self._known, self._around
        tokens, depths, ancestors = nodes.tokens, nodes.depths, nodes.ancestors
        lie_together = tokens.is_contiguous() and depths.is_contiguous()
        lie_together = lie_together and (ancestors is None or ancestors.is_contiguous())
        if not lie_together or chain.program(0, num_nodes) is None:
            return None
        lengths = cache.row_lengths(first_row, num_rows)
        offsets = cache.row_offsets(first_row, num_rows)
        cache.reserve(max(map(int.__add__, lengths, nodes.counts)), first_row + num_rows)
        store = known.store
        if store is None or store.memory is not cache.memory:
            if not Store.is_possible(chain.layers, cache):
                return None
            store = known.store = Store(chain.layers, cache)
        calls = self._calls(num_nodes, cache)
        if calls is None or not store.is_even:
            return None
        tables = self._tables_for(max(lengths) + width + (0 if offsets is None else max(offsets)))
        of_rows = [array_of(nodes.counts), array_of(lengths), None if offsets is None else array_of(offsets)]
        fed = FedFields(
            num_rows,
            width,
            num_nodes,
            nodes.num_fed,
            tokens.data_ptr(),
            depths.data_ptr(),
            *(None if each is None else ctypes.addressof(each) for each in of_rows),
            None if ancestors is None else ancestors.data_ptr(),
            first_row,
        )
        flat = FlatNodes(nodes.counts, width, tokens.device)
        given = around.given(nodes, flat, lengths, offsets)
        addresses = (ctypes.c_void_p * len(given))(*(None if each is None else each.data_ptr() for each in given))
        states = torch.empty(len(chain.layers) + 1, *calls.shape, dtype=calls.dtype)
        first = states.data_ptr()
        tail = None if self._tail is None or not with_logits else self._tail.over(num_nodes)
        result = self._kernels.forward(
            calls.address,
            tables.address,
            store.address,
            ctypes.addressof(fed),
            ctypes.addressof(addresses),
            first,
            first + states[0].nbytes,
            None if tail is None else ctypes.addressof(tail[0]),
            torch.get_num_threads(),
        )
        if result != 0:
            return None
        self.num_runs += 1
        before = states[0] if given[0] is None else given[0]
        if tail is not None:
            return Passed(flat, before, states[1:], *tail[1:])
        return Passed(flat, before, states[1:], around.behind(num_nodes, states[-1]))

    def forward(
        self, nodes: Nodes, cache: KVCache, first_row: int, kept: range, recorder: Recorder, listed: bool
    ) -> Logits | None:
        """Logits as of `CausalLM.forward`; None where modules have to run.

        Args:
          kept: columns whose logits are wanted.
          recorder: of features.
        """
        passed = self.run(nodes, cache, first_row, with_logits=len(kept) == nodes.width)
        if passed is None:
            return None
        recorder.take(passed)
        flat, read = passed.flat, passed.read
        if len(kept) < nodes.width:
            numbers, flat = flat.kept(kept)
            read = read[:, numbers]
        logits = (self._around.logits(read.shape[1], read) if passed.logits is None else passed.logits)[0]
        return NodeLogits(logits, flat.counts) if listed and len(kept) else flat.spread(logits)

    def gives(self, wanted: Sequence[torch.Tensor], forward: Callable[[int, int], torch.Tensor]) -> bool:
        """Whether forwards of the shapes in `CHECKED` come this way now, and have the bits that are wanted."""
        for want, shape in zip(wanted, CHECKED, strict=True):
            count, found = self.num_runs, forward(*shape)
            if self.num_runs == count or not torch.equal(found, want):
                logger.debug("all of the model but its layers runs as modules: it does not keep its bits without them")
                return False
        return True

    @property
    def is_possible(self) -> bool:
        """Whether nobody sees, or has changed, what modules outside of the layers do."""
        state = RemovableHandle.next_id, self._age
        if self._seen != state:
            self._is_unchanged = not torch_modules._has_any_global_hook() and all(  # type: ignore[no-untyped-call]
                not module._forward_hooks and not module._forward_pre_hooks for module in self._watched
            )
            self._is_unchanged &= all(vars(module).get("forward") is forward for module, forward in self._forwards)
            self._seen = state if self._is_unchanged else None  # hooks may be taken away again
            if not self._tables.still_hold():
                self._tables = Tables(self._around, self._tables.num_positions)
            if self._tail is not None:
                self._tail.look_again()
        return self._is_unchanged

    def _calls(self, num_nodes: int, cache: KVCache) -> DirectCalls | None:
        known, age = self._known.calls, self._age
        found = known.get(num_nodes)
        if found is not None and (found[0] == age or found[1].still_hold()):
            if found[0] != age:
                known[num_nodes] = age, found[1]
            return found[1]
        calls = self._new_calls(num_nodes, cache)
        if calls is not None:
            if len(known) >= MOST_KNOWN:
                known.clear()
            known[num_nodes] = age, calls
        return calls

    def _new_calls(self, num_nodes: int, cache: KVCache) -> DirectCalls | None:
        chain = self._chain
        programs = [chain.program(position, num_nodes) for position in range(len(chain.layers))]
        found = [program for program in programs if program is not None]
        if len(found) < len(programs):
            return None
        return DirectCalls.of(chain.layers, found, self._around, self._windows, cache)

    def _tables_for(self, num_positions: int) -> Tables:
        if num_positions > self._tables.num_positions:
            self._tables = Tables(self._around, 2 * num_positions)
        return self._tables


def start_direct(
    execution: Execution,
    chain: Chain,
    windows: Mapping[str, int | None],
    forward: Callable[[int, int], torch.Tensor],
) -> None:
    """Let an execution run without modules, where what lies around the layers can be traced and keeps its bits.

    Args:
      chain: of all layers.
      windows: as for `DirectForward`.
      forward: logits of a number of nodes behind a number of committed ones, by this execution.
    """
    model = execution.model
    try:
        direct = DirectForward(model, chain, trace(model, chain.layers, lambda: forward(NUM_NODES[0], 0)), windows)
    except Exception as error:  # of the code of a model, or of torch
        logger.debug("all of %s but its layers runs as modules: %s", type(model).__name__, error)
        return
    wanted = [forward(*shape) for shape in CHECKED]
    execution.direct = direct
    if not direct.gives(wanted, forward):
        execution.direct = None

"""Guarantees of a machine's kernels: the shapes at which a row has the same bits whatever runs beside it.

Kernels choose how to sum by the size of what they are given, so the logits of a text may differ in their last bits
between a forward over one token and one over a whole draft. CPUs and libraries differ in where: measured here, on the
model and the machine at hand, never assumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from foretoken.model.execution.linears import linears, replacement
from foretoken.model.execution.packing import PackedLinear
from foretoken.model.execution.trials import PREFILL_MULTIPLE, VIEW_MULTIPLES, ModelTrial, leaves_one_query

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from foretoken.model.lm import CausalLM

ROW_COUNTS = (1, 2, 3, 5, 8, 13, 16, 24, 31, 32, 33, 48, 64)
"""Numbers of rows at which every kind of linear layer is tried."""

PREFILL_ROW_COUNTS = (48, 64, 96, 128, 160, 192, 256)
"""Numbers of rows at which linear layers are tried for prompts."""

MIN_OUTPUTS = 1 << 17
"""A linear layer is tried on at least this many output values per number of rows: in bfloat16 few of them reveal a
different order of summation, one in twenty thousand on a CPU with AMX."""


@dataclass(frozen=True)
class Bucket:
    """Shapes at which a row keeps its bits, however many nodes, rows and columns run beside it.

    Args:
      min_nodes, max_nodes: the fewest and the most nodes that every row runs, padding included.
      min_rows, max_rows: the fewest and the most rows that linear layers are given in one call, over all rows.
      view_multiple: attention runs over a multiple of this many columns.
      group_size: queries of attention per node.
      prefill_rows: the least and the most rows that linear layers are given in one call where prompts of one padded
        length are read side by side; None where these do not keep their bits, and are read one at a time.
    """

    max_nodes: int
    min_nodes: int = 1
    min_rows: int = 1
    max_rows: int = ROW_COUNTS[-1]
    view_multiple: int = VIEW_MULTIPLES[0]
    group_size: int = 1
    prefill_rows: tuple[int, int] | None = None

    def width(self, num_rows: int, num_nodes: int) -> int:
        """The number of nodes to which the rows of a step are padded.

        One row of 1 node with min_rows 3: 3. Two rows of 1 node: 2 each, which makes 4 in all. 11 nodes in groups of
        3 are 33 queries, one more than a block: 12.
        """
        return self.nodes(max(num_nodes, -(-self.min_rows // num_rows)))

    def nodes(self, num_nodes: int) -> int:
        """The number of nodes to which rows that run attention together are padded."""
        width = max(num_nodes, self.min_nodes)
        return width + leaves_one_query(width, self.group_size)

    def prefill_width(self, num_tokens: int) -> int:
        """The number of nodes to which a chunk of a prompt is padded: 50 -> 56; unpadded where it is read alone."""
        width = -(-num_tokens // PREFILL_MULTIPLE) * PREFILL_MULTIPLE
        return num_tokens if self.rows_per_call(width) is None else width

    def rows_per_call(self, width: int) -> tuple[int, int] | None:
        """How many rows linear layers are given in one call where chunks of this width are read together; else None."""
        return self.prefill_rows if self.prefill_rows is not None and width <= self.prefill_rows[1] else None

    def rows_in_a_call(self, num_rows: int) -> tuple[int, int] | None:
        """The limits of a call of a linear layer, where this many rows do not keep to them anyway."""
        limits = self.min_rows, self.max_rows
        return None if limits[0] <= num_rows <= limits[1] else limits

    def view_length(self, length: int) -> int:
        """The view that holds ``length`` columns: 257 -> 512 for a multiple of 256."""
        return -(-length // self.view_multiple) * self.view_multiple


@dataclass(frozen=True)
class KernelFacts:
    """The measured guarantees of a machine's kernels.

    Args:
      bucket: shapes that keep bits, or None where there are none.
      reason: why there are none; empty otherwise.
      seconds: what the measurement took.
    """

    bucket: Bucket | None
    reason: str = ""
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    def describe(self) -> str:
        """One line for people."""
        if self.bucket is None:
            return f"no shapes are known to keep the bits of a row: {self.reason}"
        b = self.bucket
        return (
            f"a row keeps its bits from {b.min_nodes} to {b.max_nodes} nodes, over columns in multiples of "
            f"{b.view_multiple}, with {b.min_rows} to {b.max_rows} rows in one call of a linear layer; prompts are "
            f"read {'one at a time' if b.prefill_rows is None else 'together if they are of about the same length'}"
        )


@torch.inference_mode()
def measure(lm: CausalLM, max_nodes: int) -> KernelFacts:
    """Find the shapes at which this model keeps the bits of a row on this machine.

    Linear layers are tried one of each kind at `ROW_COUNTS`; then the first layers of the model, over caches of random
    content, at several numbers of nodes, rows and columns: some twenty forwards of a few nodes.

    Args:
      max_nodes: the longest draft wanted, its root included. Where bits change below, the bucket ends there.

    Exactness: a measurement on random numbers and not a proof, but kernels choose by shape, not by content.
    """
    start = perf_counter()
    facts = _measure(lm, max_nodes)
    return replace(facts, seconds=perf_counter() - start)


def _measure(lm: CausalLM, max_nodes: int) -> KernelFacts:
    if lm.device.type != "cpu":
        return KernelFacts(None, f"nothing is measured on {lm.device.type}")
    if other := _other_products(lm.shadow):
        return KernelFacts(None, f"{other} multiplies by matrices of its own, in calls whose size depends on the text")
    low, high = 1, ROW_COUNTS[-1]
    for kind in _kinds(linears(lm.shadow)):
        rows = kind.row_range()
        if rows is None:
            return KernelFacts(None, f"a linear layer of {kind.shape} has different bits at another place in the batch")
        low, high = max(low, rows[0]), min(high, rows[1])
    if high < 2 * low:
        return KernelFacts(None, f"linear layers agree on calls of {low} to {high} rows only")
    trial = ModelTrial(lm)
    for nodes, multiple in trial.candidates(max_nodes):
        bucket = Bucket(nodes[1], nodes[0], low, high, multiple, trial.group_size)
        if trial.keeps_bits(bucket):
            return KernelFacts(replace(bucket, prefill_rows=_prefill_rows(trial)))
    return KernelFacts(None, "the bits of a row change with the nodes, rows or columns beside it")


@dataclass(frozen=True)
class _Kind:
    """Products of one shape that are run in one way.

    Args:
      run: one of them, (M, in) -> (M, out).
      shape: (in, out), of all layers that share it.
    """

    run: Callable[[torch.Tensor], torch.Tensor]
    shape: tuple[int, int]
    dtype: torch.dtype

    def row_range(self, counts: Sequence[int] = ROW_COUNTS) -> tuple[int, int] | None:
        """The widest range of numbers of rows, of those tried, in which a row has the same bits; None for no range."""
        generator = torch.Generator().manual_seed(0)
        size_in, size_out = self.shape
        x = torch.randn(max(counts[-1], MIN_OUTPUTS // size_out), size_in, generator=generator).to(self.dtype)
        if not torch.equal(self.run(x[:16].roll(1, 0)).roll(-1, 0), self.run(x[:16])):
            return None
        best = (counts[0], counts[0])
        low, first = 0, torch.empty(0)
        for count in counts:
            output = self._in_calls(x, count)
            if not torch.equal(output, first):
                low, first = count, output
            if count * best[0] > best[1] * low:  # by the ratio of its ends
                best = (low, count)
        return best

    def _in_calls(self, x: torch.Tensor, count: int) -> torch.Tensor:
        """(M, in) -> (M, out), this many rows in every call; the last one takes some of the rows before it along."""
        starts = range(0, len(x) - count, count)
        num_left = len(x) - len(starts) * count
        return torch.cat([*(self.run(x[start : start + count]) for start in starts), self.run(x[-count:])[-num_left:]])


def _kinds(layers: Iterable[nn.Module]) -> list[_Kind]:
    """One product of every shape and way of being run."""
    found: dict[Any, _Kind] = {}
    for layer in layers:
        forward = replacement(layer)
        run: Any = forward.product if isinstance(forward, PackedLinear) else layer
        weight: torch.Tensor = layer.weight  # type: ignore[assignment]
        size_in, size_out = weight.shape if isinstance(layer, Conv1D) else weight.shape[::-1]
        shape = size_in, run.out_features if isinstance(forward, PackedLinear) else size_out
        found.setdefault((shape, weight.dtype, type(forward), layer.bias is None), _Kind(run, shape, weight.dtype))
    return list(found.values())


def _below_the_head(model: PreTrainedModel) -> list[nn.Module]:
    """The linear layers that prompts reach: all but the output embedding."""
    head = model.get_output_embeddings()
    return [layer for layer in linears(model) if layer is not head]


def _prefill_rows(trial: ModelTrial) -> tuple[int, int] | None:
    """The range of numbers of rows in which every layer that reads prompts keeps bits; None where it is too small."""
    low, high = PREFILL_ROW_COUNTS[0], PREFILL_ROW_COUNTS[-1]
    for kind in _kinds(_below_the_head(trial.model)):
        rows = kind.row_range(PREFILL_ROW_COUNTS)
        if rows is None:
            return None
        low, high = max(low, rows[0]), min(high, rows[1])
    return (low, high) if high >= 2 * low and trial.keeps_prompts_apart((low, high)) else None


def _other_products(model: nn.Module) -> str | None:
    """The name of a module that holds a matrix and is neither a linear layer nor an embedding, such as experts."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, Conv1D, nn.Embedding)):
            continue
        if any(parameter.dim() > 1 for parameter in module.parameters(recurse=False)):
            return type(module).__name__
    return None

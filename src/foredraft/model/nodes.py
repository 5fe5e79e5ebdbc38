"""Input and output of a forward pass: ragged rows of nodes padded to a rectangle, and their logits and features."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import attrgetter
from typing import TypeAlias

import numpy as np
import torch

from foredraft.devices import upload
from foredraft.native import abi
from foredraft.native.attention import DecodeAttention, PrefillAttention
from foredraft.tree import DraftTree

BLOCK = 256
"""Number of nodes of a long chain for which attention is computed together."""


_is_chain, _tokens = attrgetter("is_chain"), attrgetter("tokens")


@dataclass(frozen=True)
class Nodes:
    """B ragged rows of up to N nodes, padded to one width.

    Args:
      tokens: int64 (B, N). Padding repeats the first token of its row. A token that the row does not contain may have a
        NaN embedding, which would reach all nodes of the row through masked columns.
      depths: int64 (B, S + N), distance from the root of the row. The depth of padding may be any number that gives
        a position inside the context.
      counts: number of real nodes of every row; the other nodes are padding that attends only to itself.
      ancestors: bool (B, N, S + N), True for the ancestors of a node and the node itself; None when every row is a
        chain.
      num_fed: S, the number of nodes of the same tree that were fed earlier. They are the last S committed columns of
        every row. New nodes see those among them that are their ancestors, and depths count from the root before them.
    """

    tokens: torch.Tensor
    depths: torch.Tensor
    counts: tuple[int, ...]
    ancestors: torch.Tensor | None = None
    num_fed: int = 0

    @property
    def width(self) -> int:
        return self.tokens.shape[1]

    @classmethod
    def from_chains(cls, chains: Sequence[Sequence[int]]) -> Nodes:
        """Return rows of consecutive tokens, for prefill and catch-up."""
        counts = tuple(map(len, chains))
        width = max(counts)
        depths = np.empty((len(counts), width), dtype=np.int64)
        depths[:] = np.arange(width)
        if min(counts) == width:
            tokens = np.array(chains, dtype=np.int64)
            return cls(torch.from_numpy(tokens), torch.from_numpy(depths), counts)
        some = next((chain[0] for chain in chains if chain), 0)  # padding for empty rows
        first = np.array([[chain[0] if chain else some] for chain in chains], dtype=np.int64)
        tokens = first.repeat(width, axis=1)
        for row, chain in enumerate(chains):
            tokens[row, : len(chain)] = chain
            depths[row, len(chain) :] = 0
        return cls(torch.from_numpy(tokens), torch.from_numpy(depths), counts)

    @classmethod
    def from_trees(cls, trees: Sequence[DraftTree]) -> Nodes:
        """Return one draft tree per row; as chains if all trees are chains."""
        if all(map(_is_chain, trees)):
            return cls.from_chains(list(map(_tokens, trees)))
        counts = tuple(map(len, trees))
        width = max(counts)
        tokens = np.array([[tree.tokens[0]] for tree in trees], dtype=np.int64).repeat(width, axis=1)
        depths = np.zeros((len(trees), width), dtype=np.int64)
        ancestors = np.broadcast_to(np.eye(width, dtype=bool), (len(trees), width, width)).copy()
        for row, tree in enumerate(trees):
            size = len(tree)
            tokens[row, :size] = tree.tokens
            depths[row, :size] = tree.depths
            ancestors[row, :size, :size] = tree.ancestor_mask
        return cls(torch.from_numpy(tokens), torch.from_numpy(depths), counts, torch.from_numpy(ancestors))

    def fields(self, lengths: Sequence[int], offsets: Sequence[int] | None = None, first_row: int = 0) -> abi.Nodes:
        """Return the C structure that kernels read.

        Args:
          lengths: committed columns of every row, including the fed nodes.
          offsets: distance between positions and columns, by row; None if they are equal.
          first_row: cache row of the first row.
        """
        tokens, depths, ancestors = self.tokens.contiguous(), self.depths.contiguous(), self.ancestors
        ancestors = None if ancestors is None else ancestors.contiguous()
        counts, of_lengths, of_offsets = array("q", self.counts), array("q", lengths), array("q", offsets or ())
        found = abi.Nodes(
            *tokens.shape,
            sum(self.counts),
            self.num_fed,
            tokens.data_ptr(),
            depths.data_ptr(),
            counts.buffer_info()[0],
            of_lengths.buffer_info()[0],
            None if offsets is None else of_offsets.buffer_info()[0],
            None if ancestors is None else ancestors.data_ptr(),
            first_row,
        )
        found.kept = tokens, depths, ancestors, counts, of_lengths, of_offsets  # keeps the memory alive
        return found

    @property
    def num_real(self) -> int:
        """Number of nodes in all rows, without padding."""
        return sum(self.counts)

    @property
    def are_chains(self) -> bool:
        """True if every row is a chain directly after its committed columns."""
        return self.ancestors is None and self.num_fed == 0

    @property
    def is_one_token(self) -> bool:
        return self.tokens.shape == (1, 1)


class FlatNodes:
    """The real nodes of a rectangle of rows as one list, row after row. All modules except attention run over this
    list.

    Rows of 1 and 3 nodes, padded to width 3, have 4 real nodes at places 0 3 4 5 of the rectangle. The numbers
    0 0 0 1 2 3 spread the list over the rectangle again; padding repeats the first node of the list.

    Args:
      counts: number of real nodes of every row.
      width: N, the padded width of the rectangle.
    """

    def __init__(self, counts: Sequence[int], width: int, device: torch.device) -> None:
        self.shape = len(counts), width
        self.counts = tuple(counts)
        self.is_full = min(counts) == width
        self.groups: tuple[RowGroup, ...] = ()  # set where our own attention runs
        self.runs_stock_attention = False  # True once a layer ran attention outside the library's own kernels
        self._device = device
        if self.is_full:
            return
        is_real = np.arange(width) < np.array(counts)[:, None]
        places = np.flatnonzero(is_real)
        numbers = np.zeros(is_real.size, dtype=np.int64)
        numbers[places] = np.arange(len(places))
        self._places, self._numbers = upload([torch.from_numpy(places), torch.from_numpy(numbers)], device)

    def __len__(self) -> int:
        """Number of nodes S."""
        return sum(self.counts)

    def listed(self, values: torch.Tensor) -> torch.Tensor:
        """(B, N, ...) -> (S, ...)."""
        flat = values.flatten(0, 1)
        return flat if self.is_full else flat.index_select(0, self._places)

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """(S, ...) -> (B, N, ...); padding repeats the first node of the list."""
        spread = values if self.is_full else values.index_select(0, self._numbers)
        return spread.view(*self.shape, *values.shape[1:])

    def kept(self, columns: range) -> tuple[torch.Tensor, FlatNodes]:
        """Return the indices of the nodes in some columns of the rectangle, and these nodes as a new list."""
        starts = [0, *accumulate(self.counts)]
        rows = [range(min(columns.start, count), min(columns.stop, count)) for count in self.counts]
        numbers = [start + column for start, row in zip(starts, rows, strict=False) for column in row]
        index = upload([torch.tensor(numbers, dtype=torch.long, device="cpu")], self._device)[0]
        return index, FlatNodes([len(row) for row in rows], len(columns), self._device)


@dataclass(frozen=True)
class RowGroup:
    """Neighbouring rows of one forward pass that run attention together.

    Args:
      rows: rows of the forward pass.
      nodes: range of their nodes in the flat list.
      flat: layout of their nodes in a rectangle.
      columns: T, the number of cache columns that attention reads.
      masks: (R or 1, 1, N, T) by kind of attention; None where every column is visible.
      head: number of columns before the first node, for a group of one row with a chain; None for others.
      decode, prefill: attention of these rows in the library's own kernels; None if these kernels do not run it.
    """

    rows: range
    nodes: range
    flat: FlatNodes
    columns: int
    masks: dict[str, torch.Tensor | None]
    head: int | None = None
    decode: DecodeAttention | None = None
    prefill: PrefillAttention | None = None
    _folded: dict[tuple[str, int, int], torch.Tensor] = field(default_factory=dict)

    @property
    def blocks(self) -> Iterator[tuple[int, int, int]]:
        """Blocks of nodes that run together, as (first, end, number of visible columns).

        A long chain runs in blocks because its first nodes do not see the last columns. For a prompt this saves half.
        """
        width = self.flat.shape[1]
        if self.head is None or width <= BLOCK:
            yield 0, width, self.columns
            return
        for first in range(0, width, BLOCK):
            last = min(first + BLOCK, width)
            yield first, last, self.columns if last == width else self.head + last

    def folded(self, kind: str, group_size: int, block: tuple[int, int, int]) -> torch.Tensor | None:
        """Mask of a block for grouped heads: the query heads of a group become extra queries, (R or 1, 1, g * N, T)."""
        mask = self.masks[kind]
        first, last, columns = block
        if mask is None:
            return None
        key = kind, group_size, first
        if key not in self._folded:
            self._folded[key] = folded(mask[:, :, first:last, :columns], group_size)
        return self._folded[key]


def folded(mask: torch.Tensor, group_size: int) -> torch.Tensor:
    """Repeat a mask (B, 1, N, T) for the g query heads of a group: (B, 1, g * N, T).

    A mask of a single query stays as it is, since all heads see the same columns.
    """
    return mask if group_size == 1 or mask.shape[2] == 1 else mask.repeat(1, 1, group_size, 1)


def logits_to_keep(kept: range, width: int, device: torch.device) -> int | torch.Tensor:
    """Return the `transformers` argument: 0 for all columns, k for the last k, else indices. At least one is kept."""
    if len(kept) == width:
        return 0
    if len(kept) == 0:
        return 1
    if kept.stop == width and kept.step == 1:
        return len(kept)
    return torch.tensor(list(kept), device=device)


class NodeLogits:
    """Logits of the nodes of several rows, without padding: ``logits[i]`` is (nodes of row i, V).

    Args:
      values: (S, V), row after row.
      counts: number of nodes of every row.
    """

    def __init__(self, values: torch.Tensor, counts: Sequence[int]) -> None:
        self.values = values
        self.starts = [0, *accumulate(counts)]

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.starts) - 1

    def __getitem__(self, row: int) -> torch.Tensor:
        return self.values[self.starts[row] : self.starts[row + 1]]

    @property
    def device(self) -> torch.device:
        return self.values.device

    def of(self, rows: Sequence[int]) -> NodeLogits:
        """Return the logits of some rows, in this order."""
        several = [self[row] for row in rows]
        return NodeLogits(torch.cat(several), [len(each) for each in several])


Logits: TypeAlias = torch.Tensor | NodeLogits
"""Logits of the nodes of rows, padded (B, N, V) or as `NodeLogits`: ``logits[i]`` is row i in both."""


@dataclass(frozen=True)
class Wanted:
    """Features that a forward pass returns.

    Args:
      last_hidden: True for the input of the output embedding, after the final norm.
      layer_inputs: indices of decoder layers whose inputs are returned.
    """

    last_hidden: bool = False
    layer_inputs: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return self.last_hidden or bool(self.layer_inputs)


NOTHING = Wanted()


@dataclass(frozen=True)
class Output:
    """Result of a forward pass over B rows of N nodes.

    Args:
      logits: (B, kept, V), logits of the selected nodes; `NodeLogits` if requested with ``listed`` and run as a list.
      last_hidden: (B, N, H) of all nodes, also those without logits; None unless requested.
      layer_inputs: (B, N, H) by layer index, for the requested layers.
    """

    logits: Logits
    last_hidden: torch.Tensor | None = None
    layer_inputs: dict[int, torch.Tensor] = field(default_factory=dict)

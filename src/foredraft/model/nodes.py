"""Ragged rows of nodes, padded to one rectangle: the input of a forward, and its output of logits and features."""

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
"""Nodes of a long chain that run attention together."""


_is_chain, _tokens = attrgetter("is_chain"), attrgetter("tokens")


@dataclass(frozen=True)
class Nodes:
    """B ragged rows of up to N nodes, padded to one width.

    Args:
      tokens: int64 (B, N); padding repeats the first token of its row: it lies in masked columns of that row, where the
        NaN embedding of a token that the row does not have would reach all its nodes.
      depths: int64 (B, S + N), distance from the root of the row; in padding any that gives a position inside of the
        context.
      counts: number of real nodes of every row; the rest is padding that only sees itself.
      ancestors: bool (B, N, S + N) or None when every row is a chain.
      num_fed: S, the number of committed columns at the end of every row that are nodes of the same tree, fed
        earlier: nodes see those among them that are their ancestors, and positions count from before them.
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
        """Rows of consecutive tokens, for prefill and catch-up."""
        counts = tuple(map(len, chains))
        width = max(counts)
        depths = np.empty((len(counts), width), dtype=np.int64)
        depths[:] = np.arange(width)
        if min(counts) == width:
            tokens = np.array(chains, dtype=np.int64)
            return cls(torch.from_numpy(tokens), torch.from_numpy(depths), counts)
        some = next((chain[0] for chain in chains if chain), 0)  # for rows without any
        first = np.array([[chain[0] if chain else some] for chain in chains], dtype=np.int64)
        tokens = first.repeat(width, axis=1)
        for row, chain in enumerate(chains):
            tokens[row, : len(chain)] = chain
            depths[row, len(chain) :] = 0
        return cls(torch.from_numpy(tokens), torch.from_numpy(depths), counts)

    @classmethod
    def from_trees(cls, trees: Sequence[DraftTree]) -> Nodes:
        """One draft per row; chains when they all are."""
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
        """What kernels are given of them.

        Args:
          lengths: committed columns of every row, the fed nodes among them.
          offsets: how far the positions of every row are ahead of its columns; None for nowhere.
          first_row: of the cache.
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
        found.kept = tokens, depths, ancestors, counts, of_lengths, of_offsets  # as long as it is used
        return found

    @property
    def num_real(self) -> int:
        """Nodes of all rows, padding not counted."""
        return sum(self.counts)

    @property
    def are_chains(self) -> bool:
        """Whether every row is a chain right behind its committed columns."""
        return self.ancestors is None and self.num_fed == 0

    @property
    def is_one_token(self) -> bool:
        return self.tokens.shape == (1, 1)


class FlatNodes:
    """The real nodes of a rectangle of rows as one list, row after row: what is not attention runs over it.

    Rows of 1 and 3 nodes, padded to 3, have 4 nodes in the places 0 3 4 5 of the rectangle; the list is spread over it
    by the numbers 0 0 0 1 2 3, where padding takes the first node along.

    Args:
      counts: real nodes of every row.
      width: N, to which rows are padded in the rectangle.
    """

    def __init__(self, counts: Sequence[int], width: int, device: torch.device) -> None:
        self.shape = len(counts), width
        self.counts = tuple(counts)
        self.is_full = min(counts) == width
        self.groups: tuple[RowGroup, ...] = ()  # of rows that run attention together, set where attention is ours
        self.runs_stock_attention = False  # attention of some layer was not run by the library's own kernels
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
        """(S, ...) -> (B, N, ...); padding holds what the first node has."""
        spread = values if self.is_full else values.index_select(0, self._numbers)
        return spread.view(*self.shape, *values.shape[1:])

    def kept(self, columns: range) -> tuple[torch.Tensor, FlatNodes]:
        """Numbers of the nodes in some columns of the rectangle, and these nodes as a list of their own."""
        starts = [0, *accumulate(self.counts)]
        rows = [range(min(columns.start, count), min(columns.stop, count)) for count in self.counts]
        numbers = [start + column for start, row in zip(starts, rows, strict=False) for column in row]
        index = upload([torch.tensor(numbers, dtype=torch.long, device="cpu")], self._device)[0]
        return index, FlatNodes([len(row) for row in rows], len(columns), self._device)


@dataclass(frozen=True)
class RowGroup:
    """Neighbouring rows of one forward.

    Args:
      rows: of the forward.
      nodes: theirs in the list.
      flat: how they lie in a rectangle.
      columns: T, over which they run attention.
      masks: (R or 1, 1, N, T) by kind of attention, None where every column is seen.
      head: columns before the first node, of one row with a chain; None for others.
      decode, prefill: attention of these rows by kernels of the library's own; None where there are none.
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
        """Nodes that run together, from and to, and the columns that any of them sees.

        A long chain runs in blocks, since its first nodes see none of the last columns: half of all, for a prompt.
        """
        width = self.flat.shape[1]
        if self.head is None or width <= BLOCK:
            yield 0, width, self.columns
            return
        for first in range(0, width, BLOCK):
            last = min(first + BLOCK, width)
            yield first, last, self.columns if last == width else self.head + last

    def folded(self, kind: str, group_size: int, block: tuple[int, int, int]) -> torch.Tensor | None:
        """The mask of a block where the query heads of a group are more queries of one head: (R or 1, 1, g * N, T)."""
        mask = self.masks[kind]
        first, last, columns = block
        if mask is None:
            return None
        key = kind, group_size, first
        if key not in self._folded:
            self._folded[key] = folded(mask[:, :, first:last, :columns], group_size)
        return self._folded[key]


def folded(mask: torch.Tensor, group_size: int) -> torch.Tensor:
    """The mask (B, 1, N, T) where the query heads of a group are more queries of one head: (B, 1, g * N, T).

    Of a single query it stays as it is: all heads see the same.
    """
    return mask if group_size == 1 or mask.shape[2] == 1 else mask.repeat(1, 1, group_size, 1)


def logits_to_keep(kept: range, width: int, device: torch.device) -> int | torch.Tensor:
    """`transformers`' argument: 0 for all, k for the last k, else column indices; never nothing at all."""
    if len(kept) == width:
        return 0
    if len(kept) == 0:
        return 1
    if kept.stop == width and kept.step == 1:
        return len(kept)
    return torch.tensor(list(kept), device=device)


class NodeLogits:
    """Logits of the nodes of several rows, without padding: ``logits[i]`` are those of row i, (nodes, V).

    Args:
      values: (S, V), row after row.
      counts: nodes of every row.
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
        """Those of some rows, in this order."""
        several = [self[row] for row in rows]
        return NodeLogits(torch.cat(several), [len(each) for each in several])


Logits: TypeAlias = torch.Tensor | NodeLogits
"""Logits of the nodes of rows, padded to one width (B, N, V) or not: ``logits[i]`` are those of row i either way."""


@dataclass(frozen=True)
class Wanted:
    """The features that a forward is to return.

    Args:
      last_hidden: what the output embedding reads, after the final norm.
      layer_inputs: indices of decoder layers whose inputs are wanted.
    """

    last_hidden: bool = False
    layer_inputs: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return self.last_hidden or bool(self.layer_inputs)


NOTHING = Wanted()


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

"""What ``decoder.cpp`` is given: sizes and addresses of a model, nodes, and drafts that are wanted."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

MOST_NODES, MOST_IN_CALL = 32, 64
"""Of a row and of all rows in one call. Beyond, calling modules is little beside the arithmetic, which is theirs."""

Integer, Address, _Float = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float


class LayerFields(ctypes.Structure):
    """Addresses of what a layer multiplies by."""

    _fields_ = tuple(
        (name, Address) for name in ("input_norm", "post_norm", "heads_in", "heads_out", "gate_up", "down")
    )


class DecoderFields(ctypes.Structure):
    """Sizes of a model, and addresses of its weights."""

    _fields_ = (
        *((name, Integer) for name in ("kind", "layers", "size", "heads", "kv_heads", "head_dim", "inner", "tokens")),
        *((name, Address) for name in ("table", "cosines", "sines", "of_layers", "norm", "output")),
        ("eps", _Float),
        ("scale", _Float),
    )


class FedFields(ctypes.Structure):
    """Nodes, and where their keys and values are written."""

    _fields_ = (
        *((name, Integer) for name in ("nodes", "rows")),
        *((name, Address) for name in ("tokens", "positions", "columns", "prefix", "above")),
        ("most_above", Integer),
        *((name, Address) for name in ("counts", "firsts", "view", "keys", "values")),
        *((name, Integer) for name in ("row", "head")),
    )


class DraftsFields(ctypes.Structure):
    """Chains that are wanted, and where they are written."""

    _fields_ = (
        ("depths", Address),
        ("most", Integer),
        ("columns", Integer),
        ("names", Address),
        ("tokens", Address),
    )


@dataclass(frozen=True)
class Fed:
    """Nodes of the first rows of a cache, row after row.

    Args:
      tokens, positions: of every node.
      columns: of the cache that they are written to.
      prefixes: every node sees the columns before this one,
      above: and these, its ancestors behind the prefix and itself; without it there are none.
      counts: nodes of every row.
    """

    tokens: Sequence[int]
    positions: Sequence[int]
    columns: Sequence[int]
    prefixes: Sequence[int]
    counts: Sequence[int]
    above: Sequence[Sequence[int]] = ()

    @classmethod
    def chains(cls, chains: Sequence[Sequence[int]], lengths: Sequence[int]) -> Fed:
        """The next tokens of rows that hold so many columns."""
        columns = [length + i for length, chain in zip(lengths, chains, strict=True) for i in range(len(chain))]
        tokens = [token for chain in chains for token in chain]
        return cls(tokens, columns, columns, [column + 1 for column in columns], list(map(len, chains)))

    def views(self) -> list[int]:
        """By row, columns up to the last one that is written; one where there is no node."""
        starts = accumulate(self.counts, initial=0)
        rows = [self.columns[start : start + count] for start, count in zip(starts, self.counts, strict=False)]
        return [1 + max(columns, default=0) for columns in rows]


def are_few(counts: Sequence[int]) -> bool:
    """Whether so many nodes of every row are for these kernels."""
    return 0 < max(counts) <= MOST_NODES and sum(counts) <= MOST_IN_CALL


def array_of(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    """As C takes them."""
    return (Integer * len(values))(*values)

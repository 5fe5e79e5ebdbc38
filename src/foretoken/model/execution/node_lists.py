"""Nodes as kernels that run a whole model, or a head, are given them: row after row, each with its place in a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class NodeList:
    """Nodes of neighbouring rows of a cache that are fed together, row after row.

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
    def chains(cls, chains: Sequence[Sequence[int]], lengths: Sequence[int]) -> NodeList:
        """The next tokens of rows that hold so many columns."""
        columns = [length + i for length, chain in zip(lengths, chains, strict=True) for i in range(len(chain))]
        tokens = [token for chain in chains for token in chain]
        return cls(tokens, columns, columns, [column + 1 for column in columns], list(map(len, chains)))

    def firsts(self) -> list[int]:
        """By row, the number of its first node."""
        return list(accumulate(self.counts, initial=0))[:-1]

    def views(self) -> list[int]:
        """By row, columns up to the last one that is written; one where there is no node."""
        rows = [self.columns[start : start + count] for start, count in zip(self.firsts(), self.counts, strict=True)]
        return [1 + max(columns, default=0) for columns in rows]

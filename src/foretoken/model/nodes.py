"""Ragged rows of nodes, padded to one rectangle: what a forward takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from foretoken.tree import DraftTree


@dataclass(frozen=True)
class Nodes:
    """B ragged rows of up to N nodes, padded to one width.

    Args:
      tokens: int64 (B, N).
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
    def from_chains(cls, chains: Sequence[Sequence[int]], width: int | None = None) -> Nodes:
        """Rows of consecutive tokens, for prefill and catch-up."""
        counts = tuple(map(len, chains))
        width = width or max(counts)
        tokens = np.zeros((len(chains), width), dtype=np.int64)
        depths = np.zeros((len(chains), width), dtype=np.int64)
        for row, chain in enumerate(chains):
            tokens[row, : len(chain)] = chain
            depths[row, : len(chain)] = np.arange(len(chain))
        return cls(torch.from_numpy(tokens), torch.from_numpy(depths), counts)

    @classmethod
    def from_trees(cls, trees: Sequence[DraftTree], width: int | None = None) -> Nodes:
        """One draft per row; chains when they all are."""
        if all(tree.is_chain for tree in trees):
            return cls.from_chains([tree.tokens for tree in trees], width)
        counts = tuple(map(len, trees))
        width = width or max(counts)
        tokens = np.zeros((len(trees), width), dtype=np.int64)
        depths = np.zeros((len(trees), width), dtype=np.int64)
        ancestors = np.broadcast_to(np.eye(width, dtype=bool), (len(trees), width, width)).copy()
        for row, tree in enumerate(trees):
            size = len(tree)
            tokens[row, :size] = tree.tokens
            depths[row, :size] = tree.depths
            ancestors[row, :size, :size] = tree.ancestor_mask
        return cls(torch.from_numpy(tokens), torch.from_numpy(depths), counts, torch.from_numpy(ancestors))

    @property
    def is_one_token(self) -> bool:
        return self.tokens.shape == (1, 1)

"""Retrieval as the survey's listing calls it: a datastore that is asked for a tree and its buffers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from foretoken.classic.request import check_least
from foretoken.classic.survey.buffers import attention_mask, flat_places, retrieve_indices
from foretoken.errors import ConfigError
from foretoken.retrieval import datastore
from foretoken.retrieval.growth import Shape
from foretoken.tree import DraftTree

PAD = -2
"""After the end of a retrieved path."""

Retrieved = tuple[list[list[int]], Tensor, Tensor, Tensor, Tensor]


class Datastore:
    """What followed the end of a text elsewhere.

    Source: REST (He et al. 2023, arXiv:2311.08252).

    Args:
      folder: that ``foretoken datastore build`` wrote.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._datastore = datastore.Datastore.open(Path(folder))

    def search(self, token_list: Sequence[int], choices: int = 64) -> Retrieved:
        """The most frequent continuations of the longest end of a text that is known.

        Args:
          token_list: the end of the text; its last token is the root.
          choices: most nodes below the root.

        Returns: the paths, padded with -2; and for N nodes, the root included, the mask (N, N), where each one's token
          stands in the root and then the different tokens of every depth (N,), depths (N,), and the nodes of every
          path (leaves, depth + 1), padded with -1. Without a match no path, and the root alone.
        Raises: ConfigError.
        """
        check_least("choices", choices, 1)
        if not token_list:
            raise ConfigError("token_list is empty; give the end of the text, one token or more")
        match = self._datastore.query(list(token_list))
        shape = Shape(choices + 1, datastore.Lookup.depth)
        tree = DraftTree.root(token_list[-1]) if match is None else match.trie.tree(token_list[-1], shape)
        ranks, width = _ranks(tree)
        return (
            _paths(tree),
            attention_mask(tree),
            flat_places(ranks, tree.depths, width),
            torch.tensor(tree.depths),
            retrieve_indices(tree),
        )


def _paths(tree: DraftTree) -> list[list[int]]:
    """Tokens below the root to every leaf, in the order of `retrieve_indices`."""
    paths = [tree.path_tokens(leaf) for leaf in reversed(tree.leaves) if leaf]
    return [[*path, *[PAD] * (tree.depth - len(path))] for path in paths]


def _ranks(tree: DraftTree) -> tuple[list[int], int]:
    """Place of every node's token among the different tokens of its depth, as paths name them; most of any depth."""
    seen: list[dict[int, int]] = [{} for _ in range(tree.depth + 1)]
    for path in _paths(tree):
        for depth, token in enumerate(path, 1):
            if token != PAD:
                seen[depth].setdefault(token, len(seen[depth]))
    ranks = [0, *(seen[depth][token] for depth, token in zip(tree.depths[1:], tree.tokens[1:], strict=True))]
    return ranks, max(map(len, seen))

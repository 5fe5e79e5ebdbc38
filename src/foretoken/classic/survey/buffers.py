"""A tree of drafted tokens as the index tensors of the original programs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foretoken.errors import TreeError
from foretoken.tree import DraftTree


def attention_mask(tree: DraftTree) -> Tensor:
    """Float (N, N): 1 where a node is another or one of its ancestors."""
    return torch.from_numpy(tree.ancestor_mask).float()


def retrieve_indices(tree: DraftTree) -> Tensor:
    """Int64 (leaves, depth + 1): the nodes from the root to every leaf, the last leaf first; -1 after its end."""
    paths = [tree.path(leaf) for leaf in reversed(tree.leaves)]
    return torch.tensor([[*path, *[-1] * (tree.depth + 1 - len(path))] for path in paths])


def parents_of(paths: Tensor, num_nodes: int) -> tuple[int, ...]:
    """The parent of every node, from `retrieve_indices`: ((0, 2, 3), (0, 1, -1)) -> (-1, 0, 0, 2).

    Raises: TreeError for a node that stands on no path.
    """
    parents = {0: -1}
    for path in paths.tolist():
        nodes = [node for node in path if node >= 0]
        parents.update(zip(nodes[1:], nodes, strict=False))
    lost = sorted(set(range(num_nodes)) - parents.keys())
    if lost:
        raise TreeError(f"node {lost[0]} of {num_nodes} stands on no path of retrieve_indices; take both of one tree")
    return tuple(parents[node] for node in range(num_nodes))


def flat_places(ranks: Sequence[int], depths: Sequence[int], width: int) -> Tensor:
    """Int64 (N,): where every node's token stands in the root and then ``width`` candidates for every depth.

    A node of depth 2 and rank 1 stands at 1 + 10 + 1 = 12 where ``width`` is 10.
    """
    return torch.tensor(
        [0 if not depth else 1 + (depth - 1) * width + rank for rank, depth in zip(ranks, depths, strict=True)]
    )

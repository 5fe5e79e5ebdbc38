"""Medusa step by step, as the survey's listings call it: buffers of a tree, its candidates, and their logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import Module

from foretoken.classic.adapters import adapter_of
from foretoken.classic.survey.buffers import attention_mask, flat_places, parents_of, retrieve_indices
from foretoken.errors import ShapeError, TreeError
from foretoken.model.cache.ragged import KVCache
from foretoken.model.capture import Wanted
from foretoken.model.nodes import Nodes
from foretoken.tree import DraftTree

TOPK = 10
"""Candidates of every head that a tree can name."""

Heads = Callable[[Tensor], Tensor]
"""Hidden states (..., H) -> logits of every head (heads, ..., V)."""


def generate_medusa_buffers(
    medusa_choices: Sequence[Sequence[int]], device: str | torch.device = "cpu"
) -> dict[str, Tensor]:
    """What does not change from step to step of a sparse tree.

    Source: Medusa (Cai et al. 2024, arXiv:2401.10774); names and shapes are those of its program.

    Args:
      medusa_choices: paths of ranks, [[0], [0, 0], [1]]: the best token of the first head, after it the best of the
        second, and the second best of the first. Every prefix of a path must be among them.

    Returns: for N nodes, the root included, which stand by depth and then by ranks:
      ``medusa_attn_mask`` (1, 1, N, N), ``tree_indices`` (N,) into `generate_candidates`' flat list,
      ``medusa_position_ids`` (N,), ``retrieve_indices`` (leaves, depth + 1), padded with -1.
    Raises: TreeError for a path without its parent, named twice, or with a rank beyond `TOPK`.
    """
    paths = sorted((tuple(path) for path in medusa_choices), key=lambda path: (len(path), path))
    _check_choices(paths)
    node_of = {(): 0, **{path: node for node, path in enumerate(paths, 1)}}
    tree = DraftTree(tuple(range(len(node_of))), (-1, *(node_of[path[:-1]] for path in paths)))
    ranks = [0, *(path[-1] for path in paths)]
    made = {
        "medusa_attn_mask": attention_mask(tree)[None, None],
        "tree_indices": flat_places(ranks, tree.depths, TOPK),
        "medusa_position_ids": torch.tensor(tree.depths),
        "retrieve_indices": retrieve_indices(tree),
    }
    return {name: tensor.to(device) for name, tensor in made.items()}


def _check_choices(paths: Sequence[tuple[int, ...]]) -> None:
    known: set[tuple[int, ...]] = {()}
    for path in paths:
        if not path or path in known or path[:-1] not in known:
            raise TreeError(
                f"medusa_choices has {list(path)} twice, or without {list(path[:-1])}; name every node once"
            )
        if not 0 <= path[-1] < TOPK:
            raise TreeError(f"medusa_choices has rank {path[-1]} in {list(path)}; ranks are 0 to {TOPK - 1}")
        known.add(path)


def generate_candidates(
    medusa_logits: Tensor, logits: Tensor, tree_indices: Tensor, retrieve_indices: Tensor
) -> tuple[Tensor, Tensor]:
    """The tokens of a tree: its root is the target's own next token, the others are the best ones of the heads.

    Args:
      medusa_logits: (heads, 1, T, V), of which the last place is taken.
      logits: (1, T, V), of the target.
      tree_indices, retrieve_indices: of `generate_medusa_buffers`.

    Returns: int64 candidates (leaves, depth + 1), 0 after the end of a path, and the tree's tokens (1, N).
    Raises: ShapeError for fewer heads than the tree is deep.
    """
    if len(medusa_logits) < retrieve_indices.shape[1] - 1:
        raise ShapeError(
            f"the tree is {retrieve_indices.shape[1] - 1} levels deep, and there are logits of {len(medusa_logits)} "
            "heads; want one for every level"
        )
    best = medusa_logits[:, 0, -1].topk(TOPK).indices
    tokens = torch.cat([logits[:, -1].argmax(-1), best.reshape(-1)])[tree_indices]
    padded = torch.cat([tokens, tokens.new_zeros(1)])  # what -1 names
    return padded[retrieve_indices], tokens[None]


def tree_decoding(
    tree_candidates: Tensor,
    past_key_values: KVCache,
    medusa_position_ids: Tensor,
    retrieve_indices: Tensor,
    *,
    model: Module,
    heads: Heads | None = None,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """One forward of the target over all nodes of a tree.

    Args:
      tree_candidates: (1, N), of `generate_candidates`.
      past_key_values: ``adapter_of(model).target.new_cache(1)``, which holds the text before the root. The nodes are
        written behind it; ``past_key_values.commit([path])`` keeps those of one path, a row of ``retrieve_indices``.
      medusa_position_ids: (N,), how far every node is from the root.
      retrieve_indices: (leaves, depth + 1).
      model: the target, of `transformers`.
      heads: Medusa's, which read its last hidden states.

    Returns: logits of the heads (heads, leaves, depth + 1, V), None without any; of the target (leaves, depth + 1, V);
      and of the target by node (1, N, V). What stands after the end of a path is that of the last node.
    Raises: TreeError where positions and paths are not of one tree.
    Exactness: the logits of a node are those of a plain forward over the text and its path, within rounding.
    """
    tokens = tuple(tree_candidates[0].tolist())
    tree = DraftTree(tokens, parents_of(retrieve_indices, len(tokens)))
    if tree.depths != tuple(medusa_position_ids.tolist()):
        raise TreeError(
            f"medusa_position_ids are {medusa_position_ids.tolist()}, and the paths say {list(tree.depths)}"
        )
    logits, hidden = _read(tree, past_key_values, model, wants_hidden=heads is not None)
    by_head = None if heads is None else heads(hidden)[:, 0, retrieve_indices]
    return by_head, logits[0, retrieve_indices], logits


def _read(tree: DraftTree, cache: KVCache, model: Module, *, wants_hidden: bool) -> tuple[Tensor, Tensor]:
    """Logits (1, N, V) and last hidden states (1, N, H) of a tree; of the latter none unless they are wanted."""
    adapter = adapter_of(model)
    with adapter.lock:
        output = adapter.target.forward_with(Wanted(last_hidden=wants_hidden), Nodes.from_trees([tree]), cache)
    assert isinstance(output.logits, Tensor)  # a list of nodes only where that is asked for
    return output.logits, output.logits.new_empty(0) if output.last_hidden is None else output.last_hidden

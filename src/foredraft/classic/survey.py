"""The functions in the listings of the survey, built on parts of the engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers.generation import CandidateGenerator

from foredraft.classic.adapters import adapter_of
from foredraft.classic.request import check_least
from foredraft.drafters.lookup.ngram import SuffixIndex
from foredraft.errors import ConfigError, ShapeError, TreeError
from foredraft.model.cache.ragged import KVCache
from foredraft.model.nodes import Nodes, Wanted
from foredraft.retrieval import datastore
from foredraft.retrieval.growth import TreeLimits
from foredraft.tree import DraftTree


def attention_mask(tree: DraftTree) -> Tensor:
    """Return a float mask (N, N): 1 where the column is the node itself or one of its ancestors."""
    return torch.from_numpy(tree.ancestor_mask).float()


def retrieve_indices(tree: DraftTree) -> Tensor:
    """Return int64 (leaves, depth + 1): nodes from the root to every leaf, the last leaf first, padded with -1."""
    paths = [tree.path(leaf) for leaf in reversed(tree.leaves)]
    return torch.tensor([[*path, *[-1] * (tree.depth + 1 - len(path))] for path in paths])


def parents_of(paths: Tensor, num_nodes: int) -> tuple[int, ...]:
    """Return the parent of every node from the result of `retrieve_indices`: ((0, 2, 3), (0, 1, -1)) -> (-1, 0, 0, 2).

    Raises: TreeError for a node that is on no path.
    """
    parents = {0: -1}
    for path in paths.tolist():
        nodes = [node for node in path if node >= 0]
        parents.update(zip(nodes[1:], nodes, strict=False))
    lost = sorted(set(range(num_nodes)) - parents.keys())
    if lost:
        raise TreeError(
            f"node {lost[0]} of {num_nodes} is on no path of retrieve_indices; use the tokens and paths of one tree"
        )
    return tuple(parents[node] for node in range(num_nodes))


def flat_places(ranks: Sequence[int], depths: Sequence[int], width: int) -> Tensor:
    """Return int64 (N,): index of every node's token in a list of the root and then ``width`` candidates per depth.

    A node of depth 2 and rank 1 has the index 1 + 10 + 1 = 12 if ``width`` is 10.
    """
    return torch.tensor(
        [0 if not depth else 1 + (depth - 1) * width + rank for rank, depth in zip(ranks, depths, strict=True)]
    )


TOPK = 10
"""Number of candidates per head that a tree can use."""

Heads = Callable[[Tensor], Tensor]
"""Function from hidden states (..., H) to the logits of every head (heads, ..., V)."""


def generate_medusa_buffers(
    medusa_choices: Sequence[Sequence[int]], device: str | torch.device = "cpu"
) -> dict[str, Tensor]:
    """Return the tensors of a sparse tree that are the same in every step.

    Source: Medusa (Cai et al. 2024, arXiv:2401.10774); names and shapes are those of its program.

    Args:
      medusa_choices: paths of ranks. [[0], [0, 0], [1]] contains the best token of the first head, then the best token
        of the second head below it, and the second best token of the first head. Every prefix of a path must be
        included.

    Returns: tensors for N nodes, root included, ordered by depth and then by ranks: ``medusa_attn_mask`` (1, 1, N, N),
      ``tree_indices`` (N,) into the flat list of `generate_candidates`, ``medusa_position_ids`` (N,),
      ``retrieve_indices`` (leaves, depth + 1), padded with -1.
    Raises: TreeError for a path whose parent is missing, a repeated path, or a rank of `TOPK` or more.
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
                f"medusa_choices contains {list(path)} twice, or without {list(path[:-1])}; give every node once"
            )
        if not 0 <= path[-1] < TOPK:
            raise TreeError(f"medusa_choices contains rank {path[-1]} in {list(path)}; ranks are 0 to {TOPK - 1}")
        known.add(path)


def generate_candidates(
    medusa_logits: Tensor, logits: Tensor, tree_indices: Tensor, retrieve_indices: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the tokens of a tree: the root is the target's own next token, and the others are the best of the heads.

    Args:
      medusa_logits: (heads, 1, T, V), of which the last position is used.
      logits: (1, T, V), logits of the target.
      tree_indices, retrieve_indices: results of `generate_medusa_buffers`.

    Returns: int64 candidates (leaves, depth + 1), padded with 0, and the tree's tokens (1, N).
    Raises: ShapeError for fewer heads than the tree is deep.
    """
    if len(medusa_logits) < retrieve_indices.shape[1] - 1:
        raise ShapeError(
            f"the tree is {retrieve_indices.shape[1] - 1} levels deep, but there are logits of {len(medusa_logits)} "
            "heads; one head per level is needed"
        )
    best = medusa_logits[:, 0, -1].topk(TOPK).indices
    tokens = torch.cat([logits[:, -1].argmax(-1), best.reshape(-1)])[tree_indices]
    padded = torch.cat([tokens, tokens.new_zeros(1)])  # index -1 selects the appended 0
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
    """Run one forward pass of the target over all nodes of a tree.

    Args:
      tree_candidates: (1, N), result of `generate_candidates`.
      past_key_values: cache with the text before the root, from ``adapter_of(model).target.new_cache(1)``. The nodes
        are appended to the cache; ``past_key_values.commit([path])`` keeps the nodes of one path, a row of
        ``retrieve_indices``.
      medusa_position_ids: (N,), depth of every node.
      retrieve_indices: (leaves, depth + 1).
      model: the target, a `transformers` model.
      heads: Medusa heads over the last hidden states; None for none.

    Returns: logits of the heads (heads, leaves, depth + 1, V), or None without heads; logits of the target (leaves,
      depth + 1, V); and logits of the target by node (1, N, V). Positions after the end of a path repeat the last node.
    Raises: TreeError if positions and paths are not from one tree.
    Exactness: the logits of a node equal those of a plain forward pass over the text and the node's path, up to
      rounding.
    """
    tokens = tuple(tree_candidates[0].tolist())
    tree = DraftTree(tokens, parents_of(retrieve_indices, len(tokens)))
    if tree.depths != tuple(medusa_position_ids.tolist()):
        raise TreeError(
            f"medusa_position_ids are {medusa_position_ids.tolist()}, but the depths in retrieve_indices are "
            f"{list(tree.depths)}; use both of one tree"
        )
    logits, hidden = _read(tree, past_key_values, model, wants_hidden=heads is not None)
    by_head = None if heads is None else heads(hidden)[:, 0, retrieve_indices]
    return by_head, logits[0, retrieve_indices], logits


def _read(tree: DraftTree, cache: KVCache, model: Module, *, wants_hidden: bool) -> tuple[Tensor, Tensor]:
    """Return logits (1, N, V) and last hidden states (1, N, H) of a tree. The hidden states are empty unless
    requested."""
    adapter = adapter_of(model)
    with adapter.lock:
        output = adapter.target.forward_with(Wanted(last_hidden=wants_hidden), Nodes.from_trees([tree]), cache)
    assert isinstance(output.logits, Tensor)  # a list of logits is only returned on request
    return output.logits, output.logits.new_empty(0) if output.last_hidden is None else output.last_hidden


class PromptLookupCandidateGenerator(CandidateGenerator):  # type: ignore[misc]
    """Continuations of the last tokens of a text, after the longest matching n-gram, at its earliest occurrence.

    Source: prompt lookup decoding (Saxena 2023), with the arguments of the class of transformers.

    Args:
      eos_token_id: id or ids before which a candidate ends.
      num_output_tokens: largest number of tokens of a candidate.
      max_matching_ngram_size: length of the longest n-gram; shorter ones are tried down to one token.
      max_length: index in the text from which nothing is copied. If only one token is left before it, nothing is
        proposed. The default of transformers is 20, which is low.
      logits_processor: function for scores. A candidate ends before a token whose score the processor makes -inf. If
        nothing is left, the next occurrence is tried. The processor is called with equal scores, since there are no
        logits.
      vocab_size: V, required with ``logits_processor``.
      match: "earliest", or "latest", which is more often right for text that repeats itself with changes.

    Raises: ConfigError for a number below 1, an unknown ``match``, or a processor without ``vocab_size``.
    """

    def __init__(
        self,
        eos_token_id: Tensor | int | Sequence[int] | None = None,
        num_output_tokens: int = 10,
        max_matching_ngram_size: int = 2,
        max_length: int = 1 << 30,
        logits_processor: Callable[[Tensor, Tensor], Tensor] | None = None,
        vocab_size: int | None = None,
        *,
        match: str = "earliest",
    ) -> None:
        for name, value in (
            ("num_output_tokens", num_output_tokens),
            ("max_matching_ngram_size", max_matching_ngram_size),
            ("max_length", max_length),
        ):
            check_least(name, value, 1)
        if logits_processor is not None and vocab_size is None:
            raise ConfigError("logits_processor needs vocab_size; set it to the number of logits of the model")
        self.eos_token_id, self.logits_processor, self.vocab_size = eos_token_id, logits_processor, vocab_size
        self.num_output_tokens, self.max_length = num_output_tokens, max_length
        self.max_matching_ngram_size, self.match = max_matching_ngram_size, match
        self._ends = set() if eos_token_id is None else set(torch.as_tensor(eos_token_id).reshape(-1).tolist())
        self._new_index()

    def _new_index(self) -> SuffixIndex:
        return SuffixIndex(range(1, self.max_matching_ngram_size + 1), match=self.match)

    def get_candidates(self, input_ids: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        """Return a text (1, T) with the candidate appended, (1, T + k); the text itself if nothing matches.

        The second value takes the place of logits, of which there are none. Other arguments are ignored.

        Raises: ShapeError for more than one text.
        """
        if input_ids.ndim != 2 or len(input_ids) != 1:
            raise ShapeError(f"input_ids have the shape {tuple(input_ids.shape)}; it must be one text, (1, T)")
        tokens = input_ids[0].tolist()
        index = self._new_index()
        index.extend(tokens)
        limit = 0 if len(tokens) + 1 == self.max_length else min(len(tokens), self.max_length)
        for start in index.occurrences(tokens):
            chosen = self._allowed(input_ids, tokens[start : min(start + self.num_output_tokens, limit)])
            if chosen:
                end = next((place for place, token in enumerate(chosen) if token in self._ends), len(chosen))
                return torch.cat([input_ids, input_ids.new_tensor([chosen[:end]])], dim=1), None
        return input_ids, None

    def _allowed(self, input_ids: Tensor, chosen: list[int]) -> list[int]:
        """Return the tokens before the first one that the processor forbids."""
        if self.logits_processor is None:
            return chosen
        for place, token in enumerate(chosen):
            text = torch.cat([input_ids, input_ids.new_tensor([chosen[:place]])], dim=1)
            score = self.logits_processor(text, torch.ones(1, self.vocab_size or 0, device=input_ids.device))[0, token]
            if score <= torch.finfo(score.dtype).min:
                return chosen[:place]
        return chosen


PAD = -2
"""Padding of retrieved paths."""

Retrieved = tuple[list[list[int]], Tensor, Tensor, Tensor, Tensor]


class Datastore:
    """A datastore in which continuations of a text are looked up.

    Source: REST (He et al. 2023, arXiv:2311.08252).

    Args:
      folder: output of ``foredraft datastore build``.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._datastore = datastore.Datastore.open(Path(folder))

    def search(self, token_list: Sequence[int], choices: int = 64) -> Retrieved:
        """Return the most frequent continuations of the longest known suffix of a text.

        Args:
          token_list: last tokens of the text; the last one is the root.
          choices: largest number of nodes below the root.

        Returns: the paths, padded with -2. Then, for N nodes with the root: the mask (N, N); the index of every node's
          token in a list of the root and the different tokens of every depth (N,); depths (N,); and the nodes of every
          path (leaves, depth + 1), padded with -1. Without a match the result has no path, and only the root.
        Raises: ConfigError.
        """
        check_least("choices", choices, 1)
        if not token_list:
            raise ConfigError("token_list is empty; give one or more tokens from the end of the text")
        match = self._datastore.query(list(token_list))
        shape = TreeLimits(choices + 1, datastore.Lookup.depth)
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
    """Return the tokens below the root to every leaf, in the order of `retrieve_indices`."""
    paths = [tree.path_tokens(leaf) for leaf in reversed(tree.leaves) if leaf]
    return [[*path, *[PAD] * (tree.depth - len(path))] for path in paths]


def _ranks(tree: DraftTree) -> tuple[list[int], int]:
    """Return the index of every node's token among the different tokens of its depth, and the most tokens of any
    depth."""
    seen: list[dict[int, int]] = [{} for _ in range(tree.depth + 1)]
    for path in _paths(tree):
        for depth, token in enumerate(path, 1):
            if token != PAD:
                seen[depth].setdefault(token, len(seen[depth]))
    ranks = [0, *(seen[depth][token] for depth, token in zip(tree.depths[1:], tree.tokens[1:], strict=True))]
    return ranks, max(map(len, seen))

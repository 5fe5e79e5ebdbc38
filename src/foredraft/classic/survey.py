"""The functions that the listings of the survey call, over the parts that the engine runs."""

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


TOPK = 10
"""Candidates of every head that a tree can name."""

Heads = Callable[[Tensor], Tensor]
"""Hidden states (..., H) -> logits of every head (heads, ..., V)."""


def generate_medusa_buffers(
    medusa_choices: Sequence[Sequence[int]], device: str | torch.device = "cpu"
) -> dict[str, Tensor]:
    """Tensors of a sparse tree that are the same in every step.

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


class PromptLookupCandidateGenerator(CandidateGenerator):  # type: ignore[misc]
    """Continuations of the last tokens of a text: of the longest n-gram, at its earliest place.

    Source: prompt lookup decoding (Saxena 2023), with the arguments of the class of transformers.

    Args:
      eos_token_id: id or ids before which a candidate ends.
      num_output_tokens: most tokens of a candidate.
      max_matching_ngram_size: tokens of the longest n-gram; shorter ones are tried down to one.
      max_length: places of a text from which on nothing is copied, and tokens of a text after which only one is to
        come. transformers has 20 here, which is little.
      logits_processor: a candidate ends before a token whose score it makes -inf; the next place is tried where
        nothing is left. It is called with equal scores.
      vocab_size: V, which ``logits_processor`` needs.
      match: "earliest", or "latest", which is right more often where a text repeats itself with changes.

    Raises: ConfigError for a number below 1, another word, or a processor without ``vocab_size``.
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
            raise ConfigError("logits_processor needs vocab_size; give the number of logits that the model returns")
        self.eos_token_id, self.logits_processor, self.vocab_size = eos_token_id, logits_processor, vocab_size
        self.num_output_tokens, self.max_length = num_output_tokens, max_length
        self.max_matching_ngram_size, self.match = max_matching_ngram_size, match
        self._ends = set() if eos_token_id is None else set(torch.as_tensor(eos_token_id).reshape(-1).tolist())
        self._new_index()

    def _new_index(self) -> SuffixIndex:
        return SuffixIndex(range(1, self.max_matching_ngram_size + 1), match=self.match)

    def get_candidates(self, input_ids: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        """A text (1, T) with the candidate behind it, (1, T + k); the text itself where nothing matches.

        The second value stands for logits, of which there are none. Other arguments are not used.
        Raises: ShapeError for more than one text.
        """
        if input_ids.ndim != 2 or len(input_ids) != 1:
            raise ShapeError(f"input_ids have shape {tuple(input_ids.shape)}; want one text, (1, T)")
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
        """The tokens before the first one that the processor forbids."""
        if self.logits_processor is None:
            return chosen
        for place, token in enumerate(chosen):
            text = torch.cat([input_ids, input_ids.new_tensor([chosen[:place]])], dim=1)
            score = self.logits_processor(text, torch.ones(1, self.vocab_size or 0, device=input_ids.device))[0, token]
            if score <= torch.finfo(score.dtype).min:
                return chosen[:place]
        return chosen


PAD = -2
"""After the end of a retrieved path."""

Retrieved = tuple[list[list[int]], Tensor, Tensor, Tensor, Tensor]


class Datastore:
    """Continuations of the end of a text in a datastore.

    Source: REST (He et al. 2023, arXiv:2311.08252).

    Args:
      folder: output of ``foredraft datastore build``.
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

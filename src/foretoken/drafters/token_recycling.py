"""Token recycling: what the target ranked high after a token the last time makes the tree of the next time."""

from __future__ import annotations

import os
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import pairwise

import numpy as np

from foretoken.drafters.adjacency import AdjacencyMatrix
from foretoken.drafters.base import ContextDrafter, Features, Requirements, StepResult
from foretoken.engine.errors import ConfigError
from foretoken.engine.sequence import Sequence
from foretoken.engine.tree import DraftTree

RANK_SHARES = (0.45, 0.13, 0.07, 0.05, 0.035, 0.025, 0.02, 0.015)
"""How often the target's token is the candidate of each rank. Further ranks are worth half of the one before."""

INITIAL_STATES = ("prompt", "empty")


class TokenRecyclingDrafter(ContextDrafter):
    """A static tree, filled breadth-first from a matrix of the target's own candidates.

    Source: token recycling (Luo et al. 2024, arXiv:2408.08696; Luowaterbi/TokenRecycling). Deviations: unknown
    successors are left out of the tree, where the published code drafts token 0; the text of the prompt fills rows
    before the first step; where a token stands at several nodes its row comes from the accepted one; the matrix ends
    with its request unless it is shared. The published tree is not described by a rule; see `best_shape` for ours.

    Args:
      vocab_size: of the target.
      num_speculative_tokens: deepest level of the tree; 1 or more.
      num_candidates: successors kept per token, k; 1 or more.
      max_nodes: nodes of the tree, root included; 2 or more.
      shared: one matrix for all requests, as published, instead of one each.
      initial_state: "prompt" lets the prompt's own text into the matrix, "empty" does not.
      state_file: a matrix that was saved, to start from.

    Raises: ConfigError when a number is out of range; CheckpointError, ConfigError for a file that does not fit.
    Exactness: lossless for any acceptance rule that takes deterministic trees. Randomness: none.
    Cost: array operations on the nodes of the tree per step, whatever the length of the text; one pass over the
    prompt.
    """

    name = "token_recycling"

    def __init__(
        self,
        vocab_size: int,
        num_speculative_tokens: int = 6,
        *,
        num_candidates: int = 8,
        max_nodes: int = 80,
        shared: bool = False,
        initial_state: str = "prompt",
        state_file: str | os.PathLike[str] | None = None,
    ) -> None:
        for option, value, least in (
            ("num_speculative_tokens", num_speculative_tokens, 1),
            ("num_candidates", num_candidates, 1),
            ("max_draft_nodes", max_nodes, 2),
        ):
            if value < least:
                raise ConfigError(f"{option} is {value}; want {least} or more")
        if initial_state not in INITIAL_STATES:
            raise ConfigError(f"initial_state is {initial_state!r}; choose one of {', '.join(INITIAL_STATES)}")
        num_candidates = min(num_candidates, vocab_size)
        self.requires = Requirements(top_k=num_candidates, prompt_top_k=initial_state != "empty", all_nodes=True)
        self._shape = best_shape(max_nodes, num_speculative_tokens, num_candidates)
        self._start = AdjacencyMatrix(vocab_size, num_candidates)
        if state_file is not None:
            self._start = AdjacencyMatrix.load(state_file, vocab_size, num_candidates)
        self._is_empty = state_file is None
        self._shared = shared
        self._matrix_of: dict[int, AdjacencyMatrix] = {}

    def start(self, rows: Seq[Sequence], features: Seq[Features]) -> None:
        for row, prompt in zip(rows, features, strict=True):
            matrix = self._matrix_of[row.id] = self._matrix()
            if self.requires.prompt_top_k:
                if prompt.top_ids is not None:
                    known = row.token_ids[-1 - len(prompt.top_ids) : -1]
                    matrix.update(known, prompt.top_ids.cpu().numpy())
                matrix.add_text(row.token_ids)

    def propose_row(self, row: Sequence, budget: int) -> DraftTree:
        return self._shape.filled(row.pending, budget, self._matrix_of[row.id], self.name)

    def observe(self, rows: Seq[Sequence], results: Seq[StepResult]) -> None:
        for row, result in zip(rows, results, strict=True):
            top_ids = result.features.top_ids
            assert top_ids is not None
            order = last_of_all(len(result.tree), result.path)
            tokens = [result.tree.tokens[node] for node in order]
            self._matrix_of[row.id].update(tokens, top_ids.cpu().numpy()[order])

    def forget(self, rows: Seq[Sequence]) -> None:
        for row in rows:
            self._matrix_of.pop(row.id, None)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write what a shared drafter has learned, for ``state_file`` of another one.

        Raises: ConfigError for a drafter that is not shared; CheckpointError where writing is not possible.
        """
        if not self._shared:
            raise ConfigError("only shared=True learns beyond a request; there is nothing to save")
        self._start.save(path)

    def _matrix(self) -> AdjacencyMatrix:
        """The one that a new request works with."""
        if self._shared:
            return self._start
        if self._is_empty:  # a new one costs nothing, a copy touches all of its memory
            return AdjacencyMatrix(self._start.vocab_size, self._start.num_candidates)
        return self._start.copy()


def last_of_all(num_nodes: int, path: Seq[int]) -> list[int]:
    """All nodes, those of the path behind the others: 4 nodes and the path 0 2 make 1 3 0 2."""
    accepted = set(path)
    return [*(node for node in range(num_nodes) if node not in accepted), *path]


@dataclass(frozen=True)
class TreeShape:
    """A tree without tokens, level by level: node i is the ``ranks[i]``-th best successor of ``parents[i]``.

    Args:
      parents: as in `DraftTree`; nodes are sorted by depth.
      ranks: N ranks, from 0; that of the root means nothing.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """How many nodes are as deep as 0, 1, 2 ... or less."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return (*(depths.index(depth) for depth in range(1, depths[-1] + 1)), len(depths))

    @cached_property
    def _parents(self) -> np.ndarray:
        return np.array(self.parents)

    @cached_property
    def _ranks(self) -> np.ndarray:
        return np.array(self.ranks)

    def filled(self, pending: int, max_depth: int, matrix: AdjacencyMatrix, source: str = "") -> DraftTree:
        """The tree below a token with what the matrix knows, as deep as allowed; nothing follows the unknown."""
        tokens = np.full(len(self.parents), -1)
        tokens[0] = pending
        ends = self.ends[: max_depth + 1]
        for start, end in pairwise(ends):
            above = tokens[self._parents[start:end]]
            found = matrix.successors(above, self._ranks[start:end])
            tokens[start:end] = np.where(above < 0, -1, found)
        tokens = tokens[: ends[-1]]
        known = tokens >= 0
        if known.all():
            return DraftTree(tuple(tokens.tolist()), self.parents[: len(tokens)], source=source)
        index = known.cumsum() - 1
        parents = index[self._parents[: len(tokens)][known]]
        parents[0] = -1
        return DraftTree(tuple(tokens[known].tolist()), tuple(parents.tolist()), source=source)


def best_shape(num_nodes: int, max_depth: int, num_candidates: int, shares: Seq[float] = RANK_SHARES) -> TreeShape:
    """The tree that accepts most when the candidate of rank r is right with probability ``shares[r]`` everywhere.

    A node is worth the product of the shares along its path, and the expected acceptance is the sum of these, so the
    best tree holds the nodes that are worth most (Chen et al. 2024, Sequoia, arXiv:2402.12374, for shares that do not
    grow). Levels are the breadth-first ones that `TreeShape` wants.

    Args:
      num_nodes: root included.
    """
    shares = [*shares, *(shares[-1] * 0.5**i for i in range(1, num_candidates + 1))][:num_candidates]
    chosen: list[tuple[int, ...]] = []  # ranks from below the root to a node
    open_ends: list[tuple[float, tuple[int, ...]]] = [(-shares[0], (0,))]
    while open_ends and len(chosen) < num_nodes - 1:
        negative, path = heappop(open_ends)
        chosen.append(path)
        rank = path[-1]
        if rank + 1 < num_candidates:
            heappush(open_ends, (negative / shares[rank] * shares[rank + 1], (*path[:-1], rank + 1)))
        if len(path) < max_depth:
            heappush(open_ends, (negative * shares[0], (*path, 0)))
    chosen.sort(key=lambda path: (len(path), path))
    index = {path: node for node, path in enumerate([(), *chosen])}
    return TreeShape((-1, *(index[path[:-1]] for path in chosen)), (0, *(path[-1] for path in chosen)))

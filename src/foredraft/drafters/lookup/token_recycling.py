"""Token recycling: the target's top tokens after each token become the draft when the token occurs again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from weakref import WeakSet

from foredraft.drafters.context import DrafterContext
from foredraft.drafters.parts.adjacency import AdjacencyMatrix
from foredraft.drafters.parts.growth import GrowingDraft
from foredraft.drafters.parts.state_file import check_writable, warned
from foredraft.engine.drafter import ContextDrafter, DrafterFacts, DraftSize, Needs, PromptChunk, StepResult
from foredraft.engine.features import top_ids_of
from foredraft.engine.row import Row, RowState
from foredraft.methods.lookup import TokenRecyclingOptions
from foredraft.methods.rank_tree import RankTree
from foredraft.model.cache.ragged import KVCache
from foredraft.model.lm import CausalLM
from foredraft.tree import DraftTree

RANK_SHARES = (0.45, 0.13, 0.07, 0.05, 0.035, 0.025, 0.02, 0.015)
"""Probability that the target's token is the candidate of each rank. The share of each rank is half that of the rank
before."""

DEFAULT_NODES, DEFAULT_NODES_ON_CPU = 80, 16
"""Default number of nodes: the published number, and a smaller one for CPUs, where every node costs time."""


class TokenRecyclingDrafter(ContextDrafter):
    """Drafter with a static tree that is filled breadth-first from a matrix of the target's own top tokens.

    Source: token recycling (Luo et al. 2024, arXiv:2408.08696; Luowaterbi/TokenRecycling). Deviations: unknown
      successors are left out of the tree, where the published code drafts token 0. The text of the prompt fills the
      matrix before the first step. If a token is at several nodes, its matrix row comes from the accepted node. The
      matrix of a request is dropped with the request, unless it is shared. The published tree follows no rule;
      `best_tree` makes the tree
    used here.

    The target's top tokens along the prompt (initial_state="prompt") add 4 % tokens per step and make the prefill a
    quarter longer (dev/log, 2026-11-25). A state file keeps a matrix that was made from the vocabulary or that requests
    share. The file is read if it exists. The file is written after the pass over the vocabulary, or when the last
    shared row has ended.

    Args:
      vocab_size: number of tokens that the target can read.
      options: keys of the method; initial_state="auto" is treated as "text".
      matrix: learned matrix to start from.

    Raises: CheckpointError or ConfigError for a state file that is invalid or does not match the target.
    Exactness: lossless for any acceptance rule that takes deterministic trees. Randomness: none.
    Cost: in every step, array operations on the nodes of the tree, independent of the context length. At the start, one
      pass over the prompt, and for "prompt" and "vocabulary" also the logits of its tokens.
    """

    facts = DrafterFacts("token_recycling", is_free=True)

    def __init__(
        self, vocab_size: int, options: TokenRecyclingOptions | None = None, *, matrix: AdjacencyMatrix | None = None
    ) -> None:
        self.options = options = options or TokenRecyclingOptions()
        num_candidates = min(options.num_candidates, vocab_size)
        max_nodes = options.max_draft_nodes or DEFAULT_NODES
        self._shape = best_tree(max_nodes, options.num_speculative_tokens, num_candidates)
        self._learns_vocabulary = options.initial_state == "vocabulary"
        self._state_file = None if options.state_file is None else Path(options.state_file).expanduser()
        if matrix is None and self._state_file is not None:
            matrix = self._load(self._state_file, vocab_size, num_candidates)
        self._is_blank = matrix is None
        self._start = matrix or AdjacencyMatrix(vocab_size, num_candidates)
        self._is_unsaved = False
        self._running: WeakSet[_Learned] = WeakSet()
        self.facts = replace(self.facts, is_shared=options.shared)

    def needs(self, target: CausalLM, cache: KVCache) -> Needs:
        """Return the needs; logits of those prompt tokens that are computed are enough."""
        if self._is_blank and self._learns_vocabulary:
            self._start = AdjacencyMatrix.of_vocabulary(target, self._start.num_candidates)
            self._is_blank = False
            if self._state_file is not None:
                self._start.save(self._state_file)
        needs_logits = self.options.initial_state in ("vocabulary", "prompt")
        return Needs(prompt_logits=needs_logits, partial_prompts=True)

    def start(self, rows: Sequence[Row], chunks: Sequence[PromptChunk]) -> None:
        for row, chunk in zip(rows, chunks, strict=True):
            learned = row.state.get(self)
            if learned is None:
                learned = row.state[self] = _Learned(self, self._matrix())
            self._running.add(learned)
            if chunk.num_tokens:
                tokens = row.token_ids[chunk.start : chunk.start + chunk.num_tokens]
                top_ids = chunk.features.top_ids(self._start.num_candidates, range(chunk.num_tokens))
                learned.matrix.update(tokens, top_ids.cpu().numpy())
            if chunk.is_last and not learned.has_text and self.options.initial_state != "empty":
                learned.matrix.add_text(row.token_ids)
                learned.has_text = True

    def propose_row(self, row: Row, budget: DraftSize) -> DraftTree:
        return filled(row, self._shape, budget.depth, row.state[self].matrix).tree(self.name)

    def observe(self, rows: Sequence[Row], results: Sequence[StepResult]) -> None:
        if not rows:
            return
        orders = [last_of_all(len(result.tree), result.path) for result in results]
        ranked = top_ids_of([result.features for result in results], self._start.num_candidates, orders).cpu().numpy()
        start = 0
        for row, result, order in zip(rows, results, orders, strict=True):
            tokens = [result.tree.tokens[node] for node in order]
            row.state[self].matrix.update(tokens, ranked[start : start + len(order)])
            start += len(order)
        self._is_unsaved = True

    def end(self, learned: _Learned) -> None:
        """Record the end of a row; the state file is written when no other row is running."""
        self._running.discard(learned)
        if self.options.shared and self._state_file is not None and self._is_unsaved and not self._running:
            self._is_unsaved = False
            with warned():
                self._start.save(self._state_file)

    def _load(self, file: Path, vocab_size: int, num_candidates: int) -> AdjacencyMatrix | None:
        """Read the state file, or return None if it has yet to be written.

        Raises: CheckpointError, ConfigError.
        """
        if file.exists() or not (self.options.shared or self._learns_vocabulary):
            return AdjacencyMatrix.load(file, vocab_size, num_candidates)
        check_writable(file)
        return None

    def _matrix(self) -> AdjacencyMatrix:
        """Return the matrix for a new request."""
        if self.options.shared:
            return self._start
        if self._is_blank:  # a new matrix costs nothing, and a copy touches all of its memory
            return AdjacencyMatrix(self._start.vocab_size, self._start.num_candidates)
        return self._start.copy()


@dataclass(eq=False)
class _Learned(RowState):
    """Matrix of a row, and whether the prompt has been added to it."""

    drafter: TokenRecyclingDrafter
    matrix: AdjacencyMatrix
    has_text: bool = False

    def copied(self) -> _Learned:
        return replace(self, matrix=self.matrix if self.drafter.options.shared else self.matrix.copy())

    def ended(self, row: Row, *, is_kept: bool) -> None:
        self.drafter.end(self)


def best_tree(num_nodes: int, max_depth: int, num_candidates: int, shares: Sequence[float] = RANK_SHARES) -> RankTree:
    """Return the tree with the most expected tokens if the candidate of rank r is right with probability
    ``shares[r]``.

    Source: Sequoia (Chen et al. 2024, arXiv:2402.12374), for shares that do not increase; see `RankTree.grown`.

    Args:
      num_nodes: number of nodes, root included.
      max_depth: largest depth.
      num_candidates: number of ranks.
      shares: probability of each rank, the same at every node.
    """
    shares = [*shares, *(shares[-1] * 0.5**i for i in range(1, num_candidates + 1))][:num_candidates]
    return RankTree.grown([shares] * max_depth, num_nodes, num_candidates, "best tree")


def filled(row: Row, shape: RankTree, max_depth: int, matrix: AdjacencyMatrix) -> GrowingDraft:
    """Fill a tree below the pending token from the matrix, up to a depth; unknown successors are left out."""
    draft = GrowingDraft(row, max_depth, shape=shape)
    for _ in range(max_depth):
        for node in draft.take_frontier():
            draft.fill(node, matrix.after(draft.tokens[node]))
    return draft


def last_of_all(num_nodes: int, path: Sequence[int]) -> list[int]:
    """Return all nodes, with those of the path last: 4 nodes and the path 0 2 give 1 3 0 2."""
    accepted = set(path)
    return [*(node for node in range(num_nodes) if node not in accepted), *path]


def build(options: TokenRecyclingOptions, context: DrafterContext) -> TokenRecyclingDrafter:
    """Make the drafter; a zoo target's included matrix is the initial state."""
    context.check_trees(options.method)
    matrix, initial_state, vocab_size = None, options.initial_state, context.target.num_embeddings
    if initial_state == "auto":
        initial_state, candidates = "text", context.asset("candidates")
        if candidates is not None and options.state_file is None and options.num_candidates <= 8:
            matrix = AdjacencyMatrix.load(candidates, vocab_size, options.num_candidates)
    default_nodes = DEFAULT_NODES_ON_CPU if context.target.device.type == "cpu" else DEFAULT_NODES
    max_nodes = options.max_draft_nodes or default_nodes
    options = replace(options, initial_state=initial_state, max_draft_nodes=max_nodes)
    return TokenRecyclingDrafter(vocab_size, options, matrix=matrix)

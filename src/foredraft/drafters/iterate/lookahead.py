"""Lookahead decoding: parallel Jacobi iterations produce n-grams, a pool stores them, and one tree verifies both."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from foredraft.drafters.context import DrafterContext
from foredraft.drafters.iterate.jacobi import prompt_tokens
from foredraft.drafters.parts.growth import GrowingDraft
from foredraft.engine.drafter import ContextDrafter, DrafterFacts, DraftSize, Needs, PromptChunk, StepResult
from foredraft.engine.row import Row
from foredraft.methods.iterate import LookaheadOptions
from foredraft.model.cache.ragged import KVCache
from foredraft.model.lm import CausalLM
from foredraft.tree import DraftTree


class LookaheadDrafter(ContextDrafter):
    """Drafter of n-grams from a pool, which a two-dimensional window of guesses fills while decoding.

    Source: lookahead decoding (Fu et al. 2024, arXiv:2402.02057; hao-ai-lab/LookaheadDecoding). With the paper's N =
    ``num_speculative_tokens`` + 1, W = ``window_size`` and G = ``guess_set_size``, a full step has (W + G) (N - 1)
    nodes before equal siblings are merged.

    Deviations:
    - The window continues with the choices of the row's noise at its positions, not with the argmax, so that it
      guesses sampled text, too.
    - Guesses form a tree, in which common prefixes are verified once.
    - A guess that is right to its end is followed by a bonus token.
    - Window cells may be accepted like any other node.
    - Under a governor, drafting without the window is one more arm that measured time can choose.
    - Guesses are verified while the window fills, too.
    - N-grams of prompt and output enter the pool.

    Exactness: lossless for any acceptance rule that takes deterministic trees. Randomness: the first level of the
    window is drawn from the prompt with the row's seed.
    Cost: O(tree) per step, independent of the context length; one n-gram per prompt token at the start. If only chains
    can be verified, the best guess remains, and the window starts over in every step.
    """

    facts = DrafterFacts("lookahead", arms=("lookahead without window", "lookahead"), arm=1)

    def __init__(self, options: LookaheadOptions | None = None) -> None:
        self.options = options = options or LookaheadOptions()
        self._max_guess_nodes = sys.maxsize
        if options.max_draft_nodes is not None:
            self._max_guess_nodes = options.max_draft_nodes - options.num_cells + 1

    def needs(self, target: CausalLM, cache: KVCache) -> Needs:
        return Needs(choices=True)

    def start(self, rows: Sequence[Row], chunks: Sequence[PromptChunk]) -> None:
        for row in rows:
            pool = row.state[self] = NgramPool(self.options.num_speculative_tokens, self.options.guess_set_size)
            pool.window = self._new_window(row)
            self._learn(row, len(row.token_ids))

    def propose_row(self, row: Row, budget: DraftSize) -> DraftTree:
        draft, pool = GrowingDraft(row, budget.depth), row.state[self]
        for guess in pool.continuations(row.pending):
            draft.add_path(guess, self._max_guess_nodes)
        if budget.arm == 0:
            pool.window = None
            return draft.tree(self.name)
        pool.window = pool.window or self._new_window(row)
        pool.window.add_to(draft)
        return draft.tree(self.name, is_whole=True)

    def observe(self, rows: Sequence[Row], results: Sequence[StepResult]) -> None:
        for row, result in zip(rows, results, strict=True):
            pool: NgramPool = row.state[self]
            if pool.window is not None:
                for ngram in pool.window.advance(result.tree, result.features.choices):
                    pool.add(ngram[0], ngram[1:])
            self._learn(row, len(result.emitted))

    def _new_window(self, row: Row) -> GuessWindow:
        ends = frozenset((*row.sampler.eos_token_ids, *(row.params.stop_token_ids or ())))
        return GuessWindow(
            self.options.window_size, self.options.num_speculative_tokens, prompt_tokens(row).__next__, ends
        )

    def _learn(self, row: Row, num_new_tokens: int) -> None:
        if self.options.pool_from_prompt:
            row.state[self].add_text(row.token_ids, len(row.token_ids) - num_new_tokens)


class GuessWindow:
    """Levels of guesses for future positions; each level contains the target's choices after the level above it.

    Column j of level l contains a guess for the token l + j places after the pending token. The pending token itself is
    column 0 of level 0. A cell of level 0 follows the cells to its left. Every other cell follows the cell above it:

        level 0   pending - a1 - a2 - a3
                  |         |    |    |
        level 1   b0        b1   b2   b3
                  |         |    |    |
        level 2   c0        c1   c2   c3

    The window is a tree whose depths are positions. A column from top to bottom, followed by the target's choice after
    the last level, is an n-gram: a1 is the key, and b1, c1 and the new token are its continuation.

    Args:
      size: number of columns, W.
      num_levels: number of levels of a full window, N - 1. The window starts with the first level, N - 2 columns wider
        than a full window. Each of its first steps removes one column and adds one level.
      initial: function that makes tokens for the first level, and for cells without another guess.
      ends: tokens that end a row. Such tokens are never used as guesses, because nothing can follow them.
    """

    def __init__(self, size: int, num_levels: int, initial: Callable[[], int], ends: frozenset[int]) -> None:
        self._num_levels = num_levels
        self._initial = initial
        self._ends = ends
        self._first = [self._guess(initial()) for _ in range(size + num_levels - 2)]  # without the pending token
        self._levels: list[list[int]] = []

    @property
    def levels(self) -> list[list[int]]:
        """Tokens by level and column, the first level without the pending token."""
        return [self._first, *self._levels]

    def add_to(self, draft: GrowingDraft) -> None:
        """Add the window to a draft, below its root."""
        self._walk(draft.child)

    def advance(self, tree: DraftTree, choices: Sequence[int]) -> list[tuple[int, ...]]:
        """Advance the window by one step with the target's choices (N,) after the nodes of a tree that contains the
        window.

        Returns: the n-grams of all columns, key first, once the window is full. A column that the tree contains only
        in part (it was cut near the end of a row) gives none.
        """
        bottom = self._walk(lambda node, token: None if node is None else tree.child(node, token))
        keys = [tree.tokens[0], *self._first]
        ngrams = []
        if len(self.levels) == self._num_levels:
            ngrams = [
                (key, *(level[column] for level in self._levels), choices[node])
                for column, (key, node) in enumerate(zip(keys, bottom, strict=True))
                if node is not None and choices[node] >= 0
            ]
        self._shift([self._guess(-1 if node is None else choices[node]) for node in bottom])
        return ngrams

    def _walk(self, child: Callable[[int | None, int], int | None]) -> list[int | None]:
        """Return the nodes of the last level, given a function from (node, token) to the node's child."""
        node: int | None = 0
        nodes = [node]
        for token in self._first:
            node = child(node, token)
            nodes.append(node)
        for level in self._levels:
            nodes = [child(node, token) for node, token in zip(nodes, level, strict=True)]
        return nodes

    def _shift(self, newest: list[int]) -> None:
        """Move all cells one place closer to the pending token: by a column while the window fills, by a level
        afterwards.
        """
        if len(self.levels) < self._num_levels:
            self._first = self._first[1:]
            self._levels = [level[1:] for level in [*self._levels, newest]]
        else:
            first, *self._levels = [*self._levels, newest]
            self._first = first[1:]

    def _guess(self, token: int) -> int:
        """Return the token, or an initial guess in place of an end token or of -1 (no choice)."""
        return self._initial() if token < 0 or token in self._ends else token


class NgramPool:
    """Pool of the last ``limit`` different continuations of ``length`` tokens for each token.

    Source: the pool of lookahead decoding (Fu et al. 2024, arXiv:2402.02057). A continuation that is seen again
    becomes the most recent one, and the least recent one is removed first.

    Attributes:
      window: window that fills the pool; None while it is not used.
    """

    window: GuessWindow | None = None

    def __init__(self, length: int, limit: int) -> None:
        self._length = length
        self._limit = limit
        self._continuations_of: dict[int, dict[tuple[int, ...], None]] = {}  # in order of recency, the latest last

    def add(self, token: int, continuation: tuple[int, ...]) -> None:
        """Record a continuation of a token."""
        known = self._continuations_of.setdefault(token, {})
        known.pop(continuation, None)
        known[continuation] = None
        if len(known) > self._limit:
            del known[next(iter(known))]

    def add_text(self, tokens: Sequence[int], first: int) -> None:
        """Record the n-grams of a token sequence that end at index ``first`` or later.

        In the sequence 1 2 3 4 with first=3 and length=2, this records 2 -> 3 4.
        """
        for end in range(max(first, self._length), len(tokens)):
            start = end - self._length
            self.add(tokens[start], tuple(tokens[start + 1 : end + 1]))

    def continuations(self, token: int) -> list[tuple[int, ...]]:
        """Return the recorded continuations of a token, the most recent first."""
        return list(reversed(self._continuations_of.get(token, {})))


def build(options: LookaheadOptions, context: DrafterContext) -> LookaheadDrafter:
    """Make the drafter; window and pool start from the prompt of each row."""
    context.check_trees(options.method)
    return LookaheadDrafter(options)

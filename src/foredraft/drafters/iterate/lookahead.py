"""Lookahead decoding: parallel Jacobi iterations make n-grams, a pool keeps them, and one tree holds both."""

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
    """Verifies n-grams from a pool that a two-dimensional window of guesses fills on the way.

    Source: lookahead decoding (Fu et al. 2024, arXiv:2402.02057; hao-ai-lab/LookaheadDecoding). With the paper's N =
    ``num_speculative_tokens`` + 1, W = ``window_size`` and G = ``guess_set_size``, a full step has (W + G) (N - 1)
    nodes before equal siblings are merged. Deviations: the window goes on with the choices that the row's noise makes
    at its positions, not with the argmax, so that sampled text is guessed too; guesses form a tree, in which what they
    share is verified once; a guess that is right to its end is followed by a bonus token; window cells may be accepted
    like any other node; where steps are governed, drafting without the window is one more way that measured time
    chooses; guesses are verified while the window fills, too; n-grams of prompt and output enter the pool.

    Exactness: lossless for any acceptance rule that takes deterministic trees. Randomness: the first level of the
    window is drawn from the prompt by the row's seed.
    Cost: O(tree) per step, whatever the length of the text; one n-gram per prompt token at the start. Where only
    chains can be verified the best guess remains and the window starts over in every step.
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
    """Levels of guesses for future positions; each level is what the target made of the one above it.

    Column j of level l guesses the token l + j places after the pending one, which is itself column 0 of level 0.
    A cell of level 0 follows the cells to its left, every other one the cell above it:

        level 0   pending - a1 - a2 - a3
                  |         |    |    |
        level 1   b0        b1   b2   b3
                  |         |    |    |
        level 2   c0        c1   c2   c3

    So the window is a tree, and depths in it are the places. Read downwards with what the target says after the last
    level, a column is an n-gram: (a1, b1, c1 would follow its key a1): a1 -> b1 c1 and the new token.

    Args:
      size: columns, W.
      num_levels: levels when it is full, N - 1. It starts with the first one, N - 2 columns wider, and gains a level
        for a column in each of its first steps.
      initial: makes tokens for the first level, and for cells that have no other.
      ends: tokens that end a text; they are never guessed, for nothing could follow them.
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
        """Grow the window below the root."""
        self._walk(draft.child)

    def advance(self, tree: DraftTree, choices: Sequence[int]) -> list[tuple[int, ...]]:
        """Move one step on with the target's tokens (N,) after the nodes of a tree that held this window.

        Returns: the n-grams of all columns, key first, once the window is full. A column that the tree does not hold
          to its end (it was cut near the end of a row) gives none.
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
        """The nodes of the last level, by a function from (node, token) to the node below."""
        node: int | None = 0
        nodes = [node]
        for token in self._first:
            node = child(node, token)
            nodes.append(node)
        for level in self._levels:
            nodes = [child(node, token) for node, token in zip(nodes, level, strict=True)]
        return nodes

    def _shift(self, newest: list[int]) -> None:
        """All cells one place nearer: by a column while the window fills, by a level afterwards."""
        if len(self.levels) < self._num_levels:
            self._first = self._first[1:]
            self._levels = [level[1:] for level in [*self._levels, newest]]
        else:
            first, *self._levels = [*self._levels, newest]
            self._first = first[1:]

    def _guess(self, token: int) -> int:
        """The token, or an initial one in the place of an end or of nothing (-1)."""
        return self._initial() if token < 0 or token in self._ends else token


class NgramPool:
    """Token -> the last ``limit`` different continuations of ``length`` tokens seen after it.

    Source: the pool of lookahead decoding (Fu et al. 2024, arXiv:2402.02057): seen again means most recent, and the
    least recent leaves first.

    Attributes:
      window: fills the pool; None while it rests.
    """

    window: GuessWindow | None = None

    def __init__(self, length: int, limit: int) -> None:
        self._length = length
        self._limit = limit
        self._continuations_of: dict[int, dict[tuple[int, ...], None]] = {}  # the most recent last

    def add(self, token: int, continuation: tuple[int, ...]) -> None:
        """Record what was seen after a token."""
        known = self._continuations_of.setdefault(token, {})
        known.pop(continuation, None)
        known[continuation] = None
        if len(known) > self._limit:
            del known[next(iter(known))]

    def add_text(self, tokens: Sequence[int], first: int) -> None:
        """Record the n-grams of a text whose last token stands at ``first`` or later.

        Of 1 2 3 4 from 3 on, with two tokens after the first of each: 2 -> 3 4.
        """
        for end in range(max(first, self._length), len(tokens)):
            start = end - self._length
            self.add(tokens[start], tuple(tokens[start + 1 : end + 1]))

    def continuations(self, token: int) -> list[tuple[int, ...]]:
        """The continuations that were seen after a token, the most recent first."""
        return list(reversed(self._continuations_of.get(token, {})))


def build(options: LookaheadOptions, context: DrafterContext) -> LookaheadDrafter:
    """Window and pool begin with the prompt."""
    context.check_trees(options.method)
    return LookaheadDrafter(options)

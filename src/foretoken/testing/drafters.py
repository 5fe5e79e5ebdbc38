"""Drafters that test the engine: they know what plain decoding says."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from foretoken.engine.drafter import Budget, Drafter
from foretoken.engine.sequence import Sequence
from foretoken.tree import DraftTree


class PerfectDrafter(Drafter):
    """Knows what plain decoding says, so that every draft is accepted to its end.

    Args:
      texts: prompt and output of plain decoding, one per row that will be started, found by their beginning.
      num_speculative_tokens: depth of the draft.
      num_branches: with 2 or more, wrong siblings surround every right node, and come first.
    """

    name = "perfect"

    def __init__(
        self, texts: Iterable[Seq[int]], num_speculative_tokens: int, *, vocab_size: int, num_branches: int = 1
    ) -> None:
        self._texts = [tuple(text) for text in texts]
        self._num_tokens = num_speculative_tokens
        self._num_branches = num_branches
        self._vocab_size = vocab_size

    def propose(self, rows: Seq[Sequence], budgets: Seq[Budget]) -> list[DraftTree]:
        return [self._tree(row, min(budget, self._num_tokens)) for row, budget in zip(rows, budgets, strict=True)]

    def _tree(self, row: Sequence, depth: int) -> DraftTree:
        future = self._future(row)[:depth]
        wrong = ([token + shift for token in future] for shift in range(1, self._num_branches))
        decoys = [(*future[:i], tokens[i] % self._vocab_size) for tokens in wrong for i in range(len(future))]
        return DraftTree.from_paths(row.pending, [*decoys, future], source=self.name)

    def _future(self, row: Sequence) -> tuple[int, ...]:
        known = tuple(row.token_ids)
        matches = (text for text in self._texts if text[: len(known)] == known)
        return next(matches, known)[len(known) :]


class WrongDrafter(PerfectDrafter):
    """Knows what plain decoding says, and proposes something else at every node."""

    name = "wrong"

    def _future(self, row: Sequence) -> tuple[int, ...]:
        return tuple((token + 1) % self._vocab_size for token in super()._future(row))

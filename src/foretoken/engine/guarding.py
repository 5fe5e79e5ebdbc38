"""Faults of a drafter stay with the rows that it was working on: these go on without drafts, all others with theirs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, TypeVar

from foretoken.engine.budget import Budget
from foretoken.engine.drafter import Drafter, OwnCache, PromptChunk, StepResult
from foretoken.errors import ConfigError, TreeError
from foretoken.law.faults import described, is_fatal
from foretoken.tree import DraftTree

if TYPE_CHECKING:
    from foretoken.engine.sequence import Sequence
    from foretoken.model.cache.ragged import KVCache
    from foretoken.model.lm import CausalLM

logger = logging.getLogger("foretoken")

T = TypeVar("T")


class GuardedDrafter(Drafter):
    """A drafter whose exceptions end its drafting for the rows of the call, and nothing else.

    These rows are forgotten by the drafter, the lengths of the target's cache are put back, and the rows go on
    decoding plainly. A draft that does not fit its row counts as an exception. The first fault is told in a warning;
    `SequenceStats.drafter_error` has that of each row.

    A drafter that drafts in the target's cache must be shown its rows from the first one on, so the engine keeps rows
    without drafts behind the others (`Batch.put_last`).

    Args:
      drafter: to be contained. What it raises when it is bound is raised: that is a matter of set-up.

    Exactness: as of the drafter; a draft that never comes is the empty draft.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.name = drafter.name
        self.requires = drafter.requires
        self._drafter = drafter
        self._has_warned = False
        self._drafts_in_cache = type(drafter).bind is not Drafter.bind

    def bind(self, target: CausalLM, cache: KVCache) -> None:
        self._cache = cache
        self._vocab_size = target.vocab_size
        self._drafter.bind(target, cache)

    def own_caches(self) -> Seq[OwnCache]:
        return self._drafter.own_caches()

    def recall(self, row: Sequence, memory: object, num_tokens: int) -> int:
        if row.stats.drafter_error:
            return num_tokens
        return self._try([row], lambda: self._recalled(row, memory, num_tokens), num_tokens)

    def read(self, rows: Seq[Sequence], chunks: Seq[PromptChunk]) -> None:
        with_drafts = self._with_drafts(rows)
        if with_drafts:
            shown = [chunks[i] for i in with_drafts]
            of_rows = [rows[i] for i in with_drafts]
            self._try(of_rows, lambda: self._drafter.read(of_rows, shown), None)

    def start(self, rows: Seq[Sequence]) -> None:
        of_rows = [rows[i] for i in self._with_drafts(rows)]
        if of_rows:
            self._try(of_rows, lambda: self._drafter.start(of_rows), None)

    def fork(self, row: Sequence, copies: Seq[Sequence]) -> None:
        if row.stats.drafter_error:
            self._give_up(copies, row.stats.drafter_error)
        else:
            self._try([row, *copies], lambda: self._drafter.fork(row, copies), None)

    def propose(self, rows: Seq[Sequence], budgets: Seq[Budget]) -> list[DraftTree]:
        asked = self._with_drafts(rows)
        none: list[DraftTree] = []
        if len(asked) == len(rows):
            of_rows, of_budgets = rows, budgets
        else:
            of_rows, of_budgets = [rows[i] for i in asked], [budgets[i] for i in asked]
        trees = self._try(of_rows, lambda: self._checked(of_rows, of_budgets), none) if asked else none
        if len(trees) == len(rows):
            return trees
        if asked and not trees and self._drafts_in_cache:  # what it has written may not be finite
            for slot, length in enumerate(self._cache.lengths):
                self._cache.erase(slot, length)
        found = [DraftTree.root(row.pending) for row in rows]
        for i, tree in zip(asked, trees, strict=False):
            found[i] = tree
        return found

    def observe(self, rows: Seq[Sequence], results: Seq[StepResult]) -> None:
        with_drafts = self._with_drafts(rows)
        if with_drafts:
            of_rows, outcomes = rows, results
            if len(with_drafts) < len(rows):
                of_rows, outcomes = [rows[i] for i in with_drafts], [results[i] for i in with_drafts]
            self._try(of_rows, lambda: self._drafter.observe(of_rows, outcomes), None)

    def keep(self, row: Sequence) -> object:
        return None if row.stats.drafter_error else self._try([row], lambda: self._drafter.keep(row), None)

    def forget(self, rows: Seq[Sequence]) -> None:
        of_rows = [rows[i] for i in self._with_drafts(rows)]
        if of_rows:
            self._try(of_rows, lambda: self._drafter.forget(of_rows), None)

    # -- faults ------------------------------------------------------------------------------------------------

    def _with_drafts(self, rows: Seq[Sequence]) -> list[int]:
        """Places of the rows for which no fault has ended drafting, which it does for good."""
        return [i for i, row in enumerate(rows) if not row.stats.drafter_error]

    def _try(self, rows: Seq[Sequence], call: Callable[[], T], otherwise: T) -> T:
        lengths = list(self._cache.lengths)
        try:
            return call()
        except Exception as fault:
            if is_fatal(fault):
                raise
            self._cache.lengths[:] = lengths
            self._give_up(rows, described(fault))
            return otherwise

    def _give_up(self, rows: Seq[Sequence], reason: str) -> None:
        for row in rows:
            row.stats.drafter_error = row.stats.drafter_error or reason
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "drafter %r has failed (%s); the %d rows that it was drafting for go on without drafts, with the same "
                "tokens. Further faults are counted in metrics and not told.",
                self.name,
                reason,
                len(rows),
            )
        try:
            self._drafter.forget(rows)
        except Exception as fault:
            if is_fatal(fault):
                raise
            logger.debug("drafter %r could not forget rows after a fault: %s", self.name, described(fault))

    def _recalled(self, row: Sequence, memory: object, num_tokens: int) -> int:
        """How many tokens of a prompt need not be read, of those that there are."""
        known = self._drafter.recall(row, memory, num_tokens)
        if not isinstance(known, int) or not 0 <= known <= num_tokens:
            raise ConfigError(
                f"recall returned {known!r} of {num_tokens} tokens; give a number of tokens, 0..{num_tokens}"
            )
        return known

    def _checked(self, rows: Seq[Sequence], budgets: Seq[Budget]) -> list[DraftTree]:
        """Drafts that begin with the pending tokens and name tokens that there are, one for each row."""
        trees = self._drafter.propose(rows, budgets)
        if len(trees) != len(rows):
            raise TreeError(f"{len(trees)} drafts for {len(rows)} rows")
        for row, tree in zip(rows, trees, strict=True):
            check_draft(tree, row, self._vocab_size)
        return trees


def check_draft(tree: DraftTree, row: Sequence, vocab_size: int) -> None:
    """Refuse a draft that does not fit its row.

    Raises: TreeError for one that does not start with the pending token, or leaves the vocabulary.
    """
    if tree.tokens[0] != row.pending:
        raise TreeError(f"the draft starts with token {tree.tokens[0]}, but {row.pending} is pending")
    if min(tree.tokens) < 0 or max(tree.tokens) >= vocab_size:
        raise TreeError(f"the draft {tree.tokens} leaves the vocabulary, 0..{vocab_size - 1}")

"""N-gram storage learned online: which token has followed these tokens most often."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from weakref import WeakSet

from foredraft.config.drafting import depth_within
from foredraft.drafters.context import DrafterContext
from foredraft.drafters.iterate.jacobi import random_token
from foredraft.drafters.parts.ngram_storage import Guess, NGramStorage
from foredraft.drafters.parts.planned import PlannedDrafter
from foredraft.drafters.parts.state_file import check_writable, warned
from foredraft.engine.drafter import DrafterFacts, DraftSize, StepResult
from foredraft.engine.features import top_ids_of
from foredraft.engine.row import Row, RowState
from foredraft.errors import ConfigError
from foredraft.methods.lengths import LengthPolicy
from foredraft.methods.lookup import NasdOptions
from foredraft.tree import DraftTree


class NasdDrafter(PlannedDrafter["_Counted"]):
    """Drafts the most frequent successor of the last tokens, again and again, by counts of the row's text.

    Source: n-gram assisted speculative decoding (romsto/Speculative-Decoding; the text-only case is ANPD, Ou
    et al. 2024, arXiv:2404.08698). Deviations: dev/deviations.md.

    A tree has at most ``num_draft_branches`` * depth drafted nodes, the likeliest paths first. What requests share
    lives until `reset`; its file is read when it exists, and written when the last row has ended.

    Args:
      vocab_size: tokens that the target can read; for unknown="random" and a state file.
      learned: the shared storage to go on with; None begins anew, or with what is in the state file.
      length_policy: instead of the one that the options name.

    Raises: ConfigError where the vocabulary is missing; CheckpointError, ConfigError for a file that cannot be written
      or does not fit.
    Exactness: lossless for any acceptance rule that takes deterministic drafts. Randomness: of "random" the draft
    stream of the row's seed, keyed by position, apart from every number that decides what is emitted; else none.
    Cost: dictionary operations per new token and per drafted node; none depends on the length of the text.
    """

    facts = DrafterFacts("nasd", is_free=True)

    def __init__(
        self,
        options: NasdOptions | None = None,
        *,
        vocab_size: int | None = None,
        learned: NGramStorage | None = None,
        length_policy: LengthPolicy | None = None,
    ) -> None:
        self.options = options = options or NasdOptions()
        depth = depth_within(options.num_speculative_tokens, options.max_draft_nodes, options.num_draft_branches)
        super().__init__(length_policy or options.new_policy(depth))
        if (options.unknown == "random" or options.state_file is not None) and vocab_size is None:
            raise ConfigError('unknown="random" and state_file need the vocab_size of the target; give it')
        self._vocab_size = vocab_size or 0
        self._state_file = None if options.state_file is None else Path(options.state_file).expanduser()
        self._shared = (learned or self._opened()) if options.shared else None
        self._is_unsaved = False
        self._running: WeakSet[_Counted] = WeakSet()
        self.facts = replace(self.facts, is_shared=self._shared is not None)

    def _new_storage(self) -> NGramStorage:
        options = self.options
        return NGramStorage(
            options.ngram_size,
            options.num_draft_branches,
            storage=options.storage,
            filler_weight=options.filler_weight,
        )

    def _opened(self) -> NGramStorage:
        """A shared storage, as the file has it where there is one."""
        storage = self._new_storage()
        if self._state_file is not None and self._state_file.exists():
            storage.load(self._state_file, self._vocab_size)
        elif self._state_file is not None:
            check_writable(self._state_file)
        return storage

    @property
    def learned(self) -> NGramStorage | None:
        """The storage that all rows share; None where each has its own."""
        return self._shared

    def reset(self) -> None:
        """Forget what rows have shared. Rows that run go on learning from here."""
        if self._shared is not None:
            self._shared.reset()
            self._is_unsaved = True

    def new_state(self, row: Row) -> _Counted:
        self._is_unsaved = True
        storage, first = self._shared, 1
        if storage is None:
            storage = self._new_storage()
        elif self in row.state and row.state[self].epoch is storage.epoch:
            first = row.state[self].num_tokens  # another row has put them in
        storage.extend(row.token_ids, [], first=first)
        counted = _Counted(self, storage, storage.epoch, len(row.token_ids))
        self._running.add(counted)
        return counted

    def propose_row(self, row: Row, budget: DraftSize) -> DraftTree:
        storage: NGramStorage = row.state[self].storage
        tokens, guess = row.token_ids, self._guess(row)
        length = self.length(row, budget, storage.log_shares(tokens, guess))
        return storage.draft(tokens, length, self.name, guess)

    def _guess(self, row: Row) -> Guess | None:
        """Random tokens for unknown contexts, the same whenever this position is drafted from."""
        if self.options.unknown != "random":
            return None
        size, position = self._vocab_size, len(row.token_ids)
        return lambda node: (random_token(row.seed, size, position, node), 1.0 / size)

    def observe(self, rows: Sequence[Row], results: Sequence[StepResult]) -> None:
        super().observe(rows, results)
        ranked = self._runners_up(results)
        for row, result in zip(rows, results, strict=True):
            num_emitted = len(result.emitted)
            first = len(row.token_ids) - num_emitted
            counted = row.state[self]
            counted.storage.extend(row.token_ids, list(islice(ranked, num_emitted)), first)
            counted.num_tokens = len(row.token_ids)

    def _runners_up(self, results: Sequence[StepResult]) -> Iterator[list[int]]:
        """The target's best tokens in every place, row after row, best first; none where they are not learned."""
        if self.options.filler_top_k < 2 or not results:
            return iter(())
        nodes = [range(len(result.emitted)) for result in results]
        return iter(top_ids_of([result.committed for result in results], self.options.filler_top_k, nodes).tolist())

    def end(self, counted: _Counted, token_ids: Sequence[int]) -> None:
        """Count the last tokens of a text; the file is written when no other row runs."""
        has_begun = counted in self._running
        self._running.discard(counted)
        if self._shared is None:
            return
        if has_begun:  # nothing was said of the last step of a row
            self._shared.extend(token_ids, [], first=counted.num_tokens)
            counted.num_tokens = len(token_ids)
        if self._state_file is not None and self._is_unsaved and not self._running:
            self._is_unsaved = False
            with warned():
                self._shared.save(self._state_file, self._vocab_size)


@dataclass(eq=False)
class _Counted(RowState):
    """Number of tokens of a row that its storage holds, and since when that has last begun anew."""

    drafter: NasdDrafter
    storage: NGramStorage
    epoch: object
    num_tokens: int

    def copied(self) -> _Counted | None:
        return None if self.drafter.learned is None else replace(self)

    def cut(self, num_tokens: int) -> tuple[_Counted, int] | None:
        num_tokens = min(num_tokens, self.num_tokens)
        return None if self.drafter.learned is None else (replace(self, num_tokens=num_tokens), num_tokens)

    def ended(self, row: Row, *, is_kept: bool) -> None:
        self.drafter.end(self, row.token_ids)


def build(options: NasdOptions, context: DrafterContext) -> NasdDrafter:
    """An n-gram storage begins empty, unless requests share one."""
    vocab_size = context.target.num_embeddings
    if not options.shared:
        return NasdDrafter(options, vocab_size=vocab_size)
    sizes = (options.ngram_size, options.storage, options.filler_weight, options.num_draft_branches)
    learned = context.keep(
        ("nasd", options.state_file, *sizes), lambda: NasdDrafter(options, vocab_size=vocab_size).learned
    )
    return NasdDrafter(options, vocab_size=vocab_size, learned=learned)

"""N-gram storage learned online, which predicts the most frequent successor of the last tokens."""

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
    """Drafter that repeatedly appends the most frequent successor of the last tokens, as counted in the row.

    Source: n-gram assisted speculative decoding (romsto/Speculative-Decoding; the text-only case is ANPD, Ou et al.
    2024, arXiv:2404.08698). Deviations: dev/deviations.md.

    A tree has at most ``num_draft_branches`` * depth drafted nodes, the likeliest paths first. A shared storage lives
    until `reset`. The state file is read when it exists, and written when the last running row has ended.

    Args:
      options: keys of the method.
      vocab_size: number of tokens that the target can read, needed for unknown="random" and for a state file.
      learned: shared storage to continue with; None for an empty one, or for the content of the state file.
      length_policy: length policy that replaces the one in the options.

    Raises: ConfigError if ``vocab_size`` is missing; CheckpointError or ConfigError for a state file that cannot be
    written or does not match the options.
    Exactness: lossless for any acceptance rule that takes deterministic drafts. Randomness: none, except for
      unknown="random". Randomness of "random": the draft stream of the row's seed, keyed by position and independent of
      all numbers that decide emitted tokens.
    Cost: dictionary operations per new token and per drafted node, independent of the context length.
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
            raise ConfigError('unknown="random" and state_file need the vocabulary size of the target; pass vocab_size')
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
        """Return a shared storage, loaded from the state file if it exists."""
        storage = self._new_storage()
        if self._state_file is not None and self._state_file.exists():
            storage.load(self._state_file, self._vocab_size)
        elif self._state_file is not None:
            check_writable(self._state_file)
        return storage

    @property
    def learned(self) -> NGramStorage | None:
        """Storage that all rows share, or None if each row has its own."""
        return self._shared

    def reset(self) -> None:
        """Clear the shared storage. Running rows continue to learn from here."""
        if self._shared is not None:
            self._shared.reset()
            self._is_unsaved = True

    def new_state(self, row: Row) -> _Counted:
        self._is_unsaved = True
        storage, first = self._shared, 1
        if storage is None:
            storage = self._new_storage()
        elif self in row.state and row.state[self].epoch is storage.epoch:
            first = row.state[self].num_tokens  # another row has already counted these tokens
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
        """Return a function that makes random tokens for unknown contexts, the same tokens for every draft at this
        position.
        """
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
        """Yield the target's top tokens per position, best first, row after row; nothing if they are not learned."""
        if self.options.filler_top_k < 2 or not results:
            return iter(())
        nodes = [range(len(result.emitted)) for result in results]
        return iter(top_ids_of([result.committed for result in results], self.options.filler_top_k, nodes).tolist())

    def end(self, counted: _Counted, token_ids: Sequence[int]) -> None:
        """Count the last tokens of a row; the state file is written when no other row is running."""
        has_begun = counted in self._running
        self._running.discard(counted)
        if self._shared is None:
            return
        if has_begun:  # the last step of a row is not observed
            self._shared.extend(token_ids, [], first=counted.num_tokens)
            counted.num_tokens = len(token_ids)
        if self._state_file is not None and self._is_unsaved and not self._running:
            self._is_unsaved = False
            with warned():
                self._shared.save(self._state_file, self._vocab_size)


@dataclass(eq=False)
class _Counted(RowState):
    """Number of tokens of a row that its storage has counted, and the epoch of the storage at that time."""

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
    """Make the drafter, with an empty storage, or with the storage that requests share."""
    vocab_size = context.target.num_embeddings
    if not options.shared:
        return NasdDrafter(options, vocab_size=vocab_size)
    sizes = (options.ngram_size, options.storage, options.filler_weight, options.num_draft_branches)
    learned = context.keep(
        ("nasd", options.state_file, *sizes), lambda: NasdDrafter(options, vocab_size=vocab_size).learned
    )
    return NasdDrafter(options, vocab_size=vocab_size, learned=learned)

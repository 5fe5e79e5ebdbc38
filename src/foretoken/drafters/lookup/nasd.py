"""N-gram storage learned online: which token has followed these tokens most often."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from foretoken.config.drafting import BranchOptions, depth_within, draft_length, node_limit
from foretoken.config.method import Method
from foretoken.config.options import flag, number, one_of, option, path, whole
from foretoken.drafters.length_options import LengthOptions
from foretoken.drafters.lengths import CONFIDENCE, NOTHING, Fixed, LengthPolicy, policy_of
from foretoken.drafters.parts.guesses import RandomTokens
from foretoken.drafters.parts.ngram_storage import RUNNER_UP_WEIGHT, STORAGES, Guess, NGramStorage, Successors
from foretoken.drafters.parts.planned import PlannedDrafter
from foretoken.drafters.parts.state_file import check_writable
from foretoken.engine.drafter import Budget, Features, StepResult
from foretoken.engine.sequence import Sequence
from foretoken.errors import CheckpointError, ConfigError
from foretoken.tree import DraftTree

if TYPE_CHECKING:
    from foretoken.drafters.context import DrafterContext

__all__ = ["METHOD", "RUNNER_UP_WEIGHT", "NGramStorage", "NasdDrafter", "NasdOptions", "Successors", "build"]

UNKNOWN = ("stop", "random")


@dataclass(frozen=True, kw_only=True)
class NasdOptions(LengthOptions, BranchOptions):
    """Keys of drafting from an n-gram storage."""

    method: ClassVar[str] = "nasd"
    looks: ClassVar[frozenset[str]] = frozenset({NOTHING, CONFIDENCE})
    num_speculative_tokens: int = draft_length(5)
    max_draft_nodes: int | None = node_limit()
    ngram_size: int = option(whole(2), 4, "n of the longest n-gram, the predicted token included")
    storage: str = option(
        one_of(STORAGES, {"ngramstorage": "levels", "onelevelngramstorage": "single"}),
        "levels",
        "levels: contexts of n - 1 tokens down to one, the longest known one decides; single: of n - 1 tokens only",
    )
    filler_top_k: int = option(
        whole(1), 3, "tokens that the target ranked highest which enter the storage, per position; 1 for none"
    )
    filler_weight: float = option(
        number(0.0, 1.0, above=True), RUNNER_UP_WEIGHT, "of such a token beside one that was said, which weighs 1"
    )
    unknown: str = option(one_of(UNKNOWN), "stop", "at an unknown context: end the draft, or draft a random token")
    shared: bool = option(flag(), False, "whether requests learn from each other")
    state_file: str | None = option(path(), help="where what requests share is kept from run to run")

    def check(self) -> None:
        super().check()
        if self.state_file is not None and not self.shared:
            raise ConfigError("state_file is of a storage that requests share; add shared=true, or leave it out")


class NasdDrafter(PlannedDrafter):
    """Drafts the most frequent successor of the last tokens, again and again, by counts of the row's text.

    Source: n-gram assisted speculative decoding (romsto/Speculative-Decoding; the text-only case is ANPD, Ou
    et al. 2024, arXiv:2404.08698). Deviations: dev/deviations.md.

    Args:
      num_speculative_tokens: depth of the draft, unless ``length_policy`` says otherwise.
      ngram_size: tokens of the longest n-gram, the predicted one included; 2 or more.
      storage: "levels" or "single", see `NGramStorage`.
      filler_top_k: how many of the target's most likely tokens to learn per position beside the one that was said; 0
        and 1 for none.
      filler_weight: what each of them counts, more than 0 to 1.
      unknown: "stop" ends a draft at a context that is not known, "random" drafts a token of the vocabulary there.
      vocab_size: of the target; for "random" and ``state_file``.
      num_branches: most successors per node; 1 drafts a chain, more a tree of at most
        ``num_branches`` * depth drafted nodes, the likeliest paths first.
      shared: one storage for all rows, which lives until `reset`, instead of one for each.
      learned: the shared storage to go on with; None begins anew, or with what is in ``state_file``.
      state_file: read when it exists, written when the last row of a shared storage has ended.

    Raises: ConfigError when a number is out of range or a word unknown; CheckpointError, ConfigError for a file that
      cannot be written or does not fit.
    Exactness: lossless for any acceptance rule that takes deterministic drafts. Randomness: of "random" the draft
    stream of the row's seed, keyed by position, apart from every number that decides what is emitted; else none.
    Cost: dictionary operations per new token and per drafted node; none depends on the length of the text.
    """

    name = "nasd"

    def __init__(
        self,
        num_speculative_tokens: int = NasdOptions.num_speculative_tokens,
        *,
        ngram_size: int = NasdOptions.ngram_size,
        storage: str = NasdOptions.storage,
        filler_top_k: int = NasdOptions.filler_top_k,
        filler_weight: float = NasdOptions.filler_weight,
        unknown: str = NasdOptions.unknown,
        vocab_size: int | None = None,
        num_branches: int = NasdOptions.num_draft_branches,
        shared: bool = NasdOptions.shared,
        learned: NGramStorage | None = None,
        state_file: str | os.PathLike[str] | None = None,
        length_policy: LengthPolicy | None = None,
    ) -> None:
        for name, value, least in (("ngram_size", ngram_size, 2), ("filler_top_k", filler_top_k, 0)):
            if value < least:
                raise ConfigError(f"{name} is {value}; want {least} or more")
        if num_branches < 1:
            raise ConfigError(f"num_branches is {num_branches}; want 1 (a chain) or more")
        for name, word, words in (("storage", storage, STORAGES), ("unknown", unknown, UNKNOWN)):
            if word not in words:
                raise ConfigError(f"{name} is {word!r}; choose one of {', '.join(words)}")
        if (unknown == "random" or state_file is not None) and vocab_size is None:
            raise ConfigError('unknown="random" and state_file need the vocab_size of the target; give it')
        self.length_policy = length_policy or Fixed(num_speculative_tokens)
        self._filler_top_k = filler_top_k
        self._vocab_size = vocab_size or 0
        self._draws_unknown = unknown == "random"
        self._new_storage = partial(
            NGramStorage, ngram_size, num_branches, storage=storage, filler_weight=filler_weight
        )
        self._state_file = None if state_file is None else Path(state_file).expanduser()
        self._shared = (learned or self._opened()) if shared else None
        self._is_unsaved = False
        self._storage_of: dict[int, NGramStorage] = {}
        self._num_counted_of: dict[int, int] = {}

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

    def recall(self, row: Sequence, memory: object, num_tokens: int) -> int:
        if self._shared is not None and memory is self._shared.epoch:
            self._num_counted_of[row.id] = num_tokens  # the row before has put them in
        return super().recall(row, memory, num_tokens)

    def start(self, rows: Seq[Sequence]) -> None:
        self._is_unsaved = True
        for row in rows:
            storage = self._storage_of[row.id] = self._new_storage() if self._shared is None else self._shared
            storage.extend(row.token_ids, [], first=self._num_counted_of.get(row.id, 1))
            self._num_counted_of[row.id] = len(row.token_ids)

    def fork(self, row: Sequence, copies: Seq[Sequence]) -> None:
        if self._shared is not None:  # the prompt has been counted
            self._num_counted_of |= {copy.id: len(copy.token_ids) for copy in copies}
        self.start(copies)

    def propose_row(self, row: Sequence, budget: Budget) -> DraftTree:
        storage, tokens, guess = self._storage_of[row.id], row.token_ids, self._guess(row)
        length = self.length_policy.length(row, budget, storage.log_shares(tokens, guess))
        return storage.draft(tokens, length, self.name, guess)

    def _guess(self, row: Sequence) -> Guess | None:
        """Random tokens for unknown contexts, the same whenever this position is drafted from."""
        if not self._draws_unknown:
            return None
        tokens = RandomTokens(row.seed, self._vocab_size)
        return lambda node: (tokens.at(len(row.token_ids), node), 1.0 / self._vocab_size)

    def observe(self, rows: Seq[Sequence], results: Seq[StepResult]) -> None:
        super().observe(rows, results)
        for row, result in zip(rows, results, strict=True):
            num_emitted = len(result.emitted)
            first = len(row.token_ids) - num_emitted
            self._storage_of[row.id].extend(row.token_ids, self._runners_up(result.committed, num_emitted), first)
            self._num_counted_of[row.id] = len(row.token_ids)

    def _runners_up(self, features: Features, num_tokens: int) -> list[list[int]]:
        """The target's best tokens per place, best first; none where they are not learned."""
        if self._filler_top_k < 2:
            return []
        ranked: list[list[int]] = features.top_ids(self._filler_top_k, range(num_tokens)).tolist()
        return ranked

    def keep(self, row: Sequence) -> object:
        return None if self._shared is None else self._shared.epoch

    def forget(self, rows: Seq[Sequence]) -> None:
        super().forget(rows)
        for row in rows:
            storage, num_counted = self._storage_of.pop(row.id, None), self._num_counted_of.pop(row.id, 1)
            if storage is not None and storage is self._shared:  # nothing was said of the last step of a row
                storage.extend(row.token_ids, [], first=num_counted)
        if self._shared is not None and self._state_file is not None and self._is_unsaved and not self._storage_of:
            self._is_unsaved = False
            try:
                self._shared.save(self._state_file, self._vocab_size)
            except CheckpointError as error:  # what was generated is worth more than what was learned
                warnings.warn(str(error), RuntimeWarning, stacklevel=2)


def build(options: NasdOptions, context: DrafterContext) -> NasdDrafter:
    """An n-gram storage begins empty, unless requests share one."""
    depth = depth_within(options.num_speculative_tokens, options.max_draft_nodes, options.num_draft_branches)
    vocab_size = context.target.vocab_size

    def make(learned: NGramStorage | None = None) -> NasdDrafter:
        return NasdDrafter(
            ngram_size=options.ngram_size,
            storage=options.storage,
            filler_top_k=options.filler_top_k,
            filler_weight=options.filler_weight,
            unknown=options.unknown,
            vocab_size=vocab_size,
            num_branches=options.num_draft_branches,
            shared=options.shared,
            learned=learned,
            state_file=options.state_file,
            length_policy=policy_of(options, depth),
        )

    if not options.shared:
        return make()
    sizes = (options.ngram_size, options.storage, options.filler_weight, options.num_draft_branches)
    return make(context.keep(("nasd", options.state_file, *sizes), lambda: make().learned))


METHOD = Method(
    NasdOptions,
    build,
    summary="the most frequent successors of the last tokens in this text",
    aliases=("ngram_storage", "ngram_assisted"),
)
